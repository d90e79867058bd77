"""What a run says when it resumes: from where, that it was finished, and what its Checkpointer was not given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import Finished, run

_SCRIPT = """
import hashlib
import sys
import torch
import lockstep

world = lockstep.init()
torch.manual_seed(0)
model = lockstep.replicate(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 10)], [3]
)
data = torch.utils.data.TensorDataset(torch.randn(32, 4))
loader = lockstep.shard(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
saved = lockstep.Checkpointer("run", model=model, keep=None, GIVEN)
epoch = None
for epoch in saved.epochs(int(sys.argv[1])):
    for number, (inputs,) in enumerate(loader, 1):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if len(sys.argv) > 2 and number == 2:
            saved.save()
            raise SystemExit(0)
    saved.save()
bits = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
world.print("the last epoch was", epoch, hashlib.sha256(bits).hexdigest())
"""
_ALL = "optimizer=optimizer, scheduler=scheduler, loader=loader"


def _train(folder: Path, *words: str, given: str = _ALL, ranks: int = 2) -> Finished:
    (folder / "train.py").write_text(_SCRIPT.replace("GIVEN", given))
    done = run(["lockstep", "run", "-n", str(ranks), "--quiet", "train.py", *words], folder, torch=True)
    assert done.code == 0, done
    return done


def _said(done: Finished) -> list[str]:
    return [line for line in done.err.splitlines() if line.startswith("lockstep: ")]


def test_a_run_says_once_from_where_it_resumes_and_that_it_was_finished(tmp_path: Path) -> None:
    assert _said(_train(tmp_path, "1")) == [], "it begins"
    assert _said(_train(tmp_path, "3", "leave")) == [
        f"lockstep: resumed from step 4 in {tmp_path}/run/step-00000004 (epoch 1)"
    ]
    middle = f"lockstep: resumed from step 6 in {tmp_path}/run/step-00000006 (epoch 1, some of it done)"
    whole = _train(tmp_path, "3")
    assert _said(whole) == [middle]
    again = _train(tmp_path, "3")
    assert _said(again) == [
        f"lockstep: resumed from step 12 in {tmp_path}/run/step-00000012 (epoch 3)",
        "lockstep: nothing is left to train: this run was finished, 3 epochs at step 12; epochs(4) or more trains on, "
        "and another folder begins anew",
    ]
    assert "the last epoch was None" in again.out
    assert again.out.split()[-1] == whole.out.split()[-1], "the same model"


def test_an_error_in_a_backward_names_the_step_of_the_whole_run(tmp_path: Path) -> None:
    changed = {
        "torch.nn.Linear(4, 2))": 'torch.nn.Linear(4, 2), check_finite="raise")',
        "loss = model(inputs).square().mean()": 'loss = model(inputs).mean() * float("nan" if saved.step == 5 else 1)',
        "GIVEN": _ALL,
    }
    script = _SCRIPT
    for old, new in changed.items():
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "train.py").write_text(script)
    command = ["lockstep", "run", "-n", "2", "--quiet", "train.py"]
    assert run([*command, "1"], tmp_path, torch=True).code == 0
    done = run([*command, "2"], tmp_path, torch=True)
    assert done.code == 1, done
    assert "NonFiniteGradient: rank 0 of 2, step 6: " in done.err, done


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "",
            "AdamW of its parameters, SequentialLR and 1 sharded loader. So a run that resumes begins with a fresh "
            "optimizer, with the first learning rate of the schedule and at the first batch of an epoch: pass "
            "optimizer=…, scheduler=… and loader=…. (",
        ),
        (
            "optimizer=optimizer, loader=loader",
            "not given: SequentialLR. So a run that resumes begins with the first learning rate",
        ),
        ("optimizer=optimizer, scheduler=scheduler", "not given: 1 sharded loader. So"),
        (_ALL, None),
        ("extra={'optimizer': optimizer, 'scheduler': scheduler, 'loader': loader}", None),
    ],
    ids=["none", "no scheduler", "no loader", "all", "extra"],
)
def test_what_the_checkpointer_was_not_given_is_warned_of_once(tmp_path: Path, given: str, words: str | None) -> None:
    for epochs in ("1", "2"):  # when it begins, and when it resumes
        done = _train(tmp_path, epochs, given=given)
        told = " ".join(done.err.split())
        assert told.count("was not given: ") == (words is not None), done
        assert words is None or words in told


_EVALUATES = """
import torch
import lockstep

world = lockstep.init()
other = torch.nn.Linear(1, 1)
unrelated = torch.optim.SGD(other.parameters(), lr=0.1)
model = torch.nn.Linear(4, 2)
loader = lockstep.shard(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4))
saved = lockstep.Checkpointer("run", model=model)
assert saved.restore() is not None
for (inputs,) in loader:
    model(inputs)
"""


def test_a_script_that_only_evaluates_is_not_told_of_what_it_lacks(tmp_path: Path) -> None:
    _train(tmp_path, "1", given="")
    (tmp_path / "evaluate.py").write_text(_EVALUATES)
    done = run(["lockstep", "run", "-n", "2", "--quiet", "evaluate.py"], tmp_path, torch=True)
    assert done.code == 0, done
    assert done.err.splitlines() == [f"lockstep: resumed from step 0 in {tmp_path}/run/step-00000000 (epoch 1)"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_rewound_repeats_itself(tmp_path: Path, ranks: int) -> None:
    whole = _train(tmp_path, "3", ranks=ranks)
    command = ["lockstep", "checkpoint", "rewind", "run", "--to", "4"]
    done = run([*command, "--json"], tmp_path, torch=True)
    assert json.loads(done.out)["moved"] == ["step-00000012", "step-00000008"], done
    again = _train(tmp_path, "3", ranks=ranks)
    assert f"lockstep: resumed from step 4 in {tmp_path}/run/step-00000004 (epoch 1)" in _said(again)
    assert again.out == whole.out, "the same bits"
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == [
        "set-aside-1",
        "step-00000004",
        "step-00000008",
        "step-00000012",
    ]
