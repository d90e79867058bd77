"""Where two runs part, by the digests that real jobs have left in their records."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import knobs
from lockstep.identity import Identity
from lockstep.job import flight
from lockstep.job.notes import Notes
from lockstep.runs import history
from lockstep.runs.digests import digests_of
from lockstep.tools.again.bisect import Bisection, Parting, bisect
from tests.backends import ON_GPUS
from tests.harness import run_ranks
from tests.launching import run

_TRAINING = """
import sys
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

change, at, seed, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
world = lockstep.init()
torch.manual_seed(0)
model = lockstep.replicate(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(96, 3, generator=torch.Generator().manual_seed(1)))
loader = lockstep.shard(DataLoader(data, batch_size=8, shuffle=True), slices=2 if seed == 5 else 4, seed=seed)
saved = lockstep.Checkpointer(sys.argv[5], model=model, optimizer=optimizer, loader=loader)

def alter(*_):
    if saved.step == at and change == "state":
        optimizer.state[model[0].weight]["exp_avg"] *= 1.5

optimizer.register_step_post_hook(alter)  # after the Checkpointer's, which counts
for epoch in saved.epochs(3):
    for step in loader.steps():
        for (inputs,) in step:
            model(inputs).square().mean().backward()
        if saved.step + 1 == at and change == "parameters":
            model[0].weight.grad.view(-1)[0] += 1e-6
        optimizer.step()
        optimizer.zero_grad()
        if saved.step == stop:
            saved.save()
            sys.exit(0)
"""


def _train(
    tmp_path: Path, name: str, *, ranks: int, change: str = "nothing", at: int = 0, seed: int = 0, stop: int = 0
) -> history.Run:
    (tmp_path / "train.py").write_text(_TRAINING)
    command = ["lockstep", "run", "-n", str(ranks), "--log-dir", name, "train.py"]
    saved = name.removesuffix("-resumed")
    done = run([*command, change, str(at), str(seed), str(stop), f"saved-{saved}"], tmp_path, torch=True)
    assert done.code == 0, done
    return history.read(tmp_path / name)


def test_runs_in_slices_are_equal_on_any_number_of_ranks_and_after_a_resume(tmp_path: Path) -> None:
    alone = _train(tmp_path, "alone", ranks=1)
    several = _train(tmp_path, "several", ranks=3)
    begun = _train(tmp_path, "moved", ranks=2, stop=14)
    resumed = _train(tmp_path, "moved-resumed", ranks=3)
    assert {2, 4, 8, 16, 32} <= {*digests_of(alone.about["starts"])}
    assert min(digests_of(resumed.about["starts"])) == 16, "the first step of a process has none"
    for other in (several, begun, resumed):
        found = bisect(alone, other)
        assert (found.kind, found.differ_at) == (Parting.NOTHING, None)
        assert f"equal in all {found.compared}" in found.describe()
    assert bisect(alone, resumed).equal_at == 32
    assert all(held.parameters and held.state for held in digests_of(several.about["starts"]).values())


def _told(found: Bisection) -> tuple[Parting, int, int, list[str], int | None]:
    assert found.equal_at is not None
    assert found.differ_at is not None
    return found.kind, found.equal_at, found.differ_at, found.differing, found.other_samples


@pytest.mark.parametrize(
    ("change", "kind", "differing"),
    [
        ("parameters", Parting.PARAMETERS, ["parameters", "the optimizer's state"]),
        ("state", Parting.STATE, ["the optimizer's state"]),
    ],
)
def test_a_step_that_computes_something_else_is_found(
    tmp_path: Path, change: str, kind: Parting, differing: list[str]
) -> None:
    as_it_was = _train(tmp_path, "a", ranks=2)
    changed = _train(tmp_path, "b", ranks=1, change=change, at=16)
    found = bisect(as_it_was, changed)
    assert (found.kind, found.differ_at, found.differing) == (kind, 16, differing)
    assert found.equal_at is not None
    assert found.equal_at >= 8
    assert "samples of step" in found.describe()
    assert "different in the records: ranks: 2 in A, 1 in B" in found.describe()


def test_other_samples_are_found_and_are_the_reason(tmp_path: Path) -> None:
    one, other = _train(tmp_path, "a", ranks=2, stop=14), _train(tmp_path, "b", ranks=2, seed=5)
    found = bisect(one, other)
    assert (found.kind, found.equal_at, found.other_samples) == (Parting.DATA, None, 1)
    assert "step 1: other samples" in found.describe()
    assert "not equal from the first step on that both have digests of" in found.describe()
    assert "seeds of the loaders: 0 in A, 5 in B" in found.describe()
    assert "slices of the loaders: 4 in A, 2 in B" in found.describe()


def test_the_command_tells_of_equal_runs_and_of_such_that_part(tmp_path: Path) -> None:
    one, other = _train(tmp_path, "a", ranks=1), _train(tmp_path, "b", ranks=1, change="parameters", at=3)
    for second, code in ((one, 0), (other, 1)):
        done = run(["lockstep", "runs", "bisect", "./a", str(second.path.parent), "--json"], tmp_path, torch=True)
        assert done.code == code, done
        assert json.loads(done.out)["code"] == ("runs-equal", "runs-part-parameters")[code]


def _train_under(folder: str) -> list[dict[str, Any]]:
    os.environ[knobs.JOB_DIR] = folder
    identity = Identity.from_environment()
    flight.take(folder, rank=identity.rank, world_size=identity.world_size)  # as a launcher's rank does
    world = lockstep.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(world.device)
    lockstep.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        optimizer.zero_grad()
        model(torch.full((4, 3), float(step + world.rank), device=world.device)).square().mean().backward()
        optimizer.step()
    found = Notes(folder).take() if world.is_main else []
    return [{name: each[name] for name in ("step", "parameters", "state")} for each in found]


@ON_GPUS
def test_digests_on_each_kind_of_device_are_the_same_in_two_runs(each_backend: str, tmp_path: Path) -> None:
    del each_backend
    told = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        first, second = run_ranks(_train_under, 2, str(tmp_path / name))
        assert second == [], "one rank takes digests for all"
        told.append({each["step"]: (each["parameters"], each["state"]) for each in first})
    one, other = told
    common = one.keys() & other.keys()
    assert {2, 4, 8} <= common, "of an accelerator those of the last step are told at the next"
    assert all(one[step] == other[step] for step in common)
    assert len({*one.values()}) == len(one), "each step changes both"
    assert all(len(digest) == 8 for both in one.values() for digest in both)
