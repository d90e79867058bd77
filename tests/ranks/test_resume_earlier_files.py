"""A checkpoint that an earlier lockstep wrote is restored, value for value, and its run goes on to its end.

``tests/fixtures/run-0.1.0`` was written by :func:`_train` on two ranks, at its fourth step, and ``values.json`` by the
same run, which went on to its end; ``run-adamw`` by :func:`_train_with_adamw`, when the ranks had a common stream of
random numbers. Neither is ever written anew: a change that needs them to be can't resume the runs of those who have
such files. The next format gets a fixture of its own beside these.

What the model of ``run-0.1.0`` draws after the save is not compared: 0.1.0 drew its dropout masks from each rank's one
generator, since then they follow from the ranks' common one (Note [Random numbers of a rank] in ``step/streams.py``).
With ``run-adamw`` it is.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.harness import run_ranks

_FIXTURES = Path(__file__).parents[1] / "fixtures"
_WRITTEN = _FIXTURES / "run-0.1.0"
_WITH_ADAMW = _FIXTURES / "run-adamw"


class Net(nn.Module):
    """All that a model's state can be: tied, complex, integer and empty tensors, and a value that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.square = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.square.weight
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2).to(torch.bfloat16)
        self.register_buffer("turn", torch.tensor([1 + 2j, -3j]))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.seen = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": (self.seen, float("inf"))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"][0]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += len(inputs)
        noise = 0.1 * random.random() + 0.1 * float(np.random.rand())  # every generator that a rank has
        hidden = self.drop(self.tied(self.square(self.norm(inputs)).relu())) + noise
        return cast(torch.Tensor, self.head(hidden.to(torch.bfloat16)).float())


def _train(folder: str) -> dict[str, Any]:
    """Two epochs of three steps, the last one uneven, saved at step 4, in the middle of the second epoch."""
    world = lockstep.init(seed=11)
    model = lockstep.replicate(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    inputs = torch.linspace(-2, 2, 80).reshape(20, 4).sin()
    loader = lockstep.shard(DataLoader(TensorDataset(inputs, inputs[:, :2]), batch_size=8, shuffle=True))
    average = torch.optim.swa_utils.AveragedModel(model)
    saved = lockstep.Checkpointer(
        folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, extra={"average": average}
    )

    def values() -> dict[str, Any]:
        return {
            "step": saved.step,
            "seen": model.seen,
            "model": _plain(model.state_dict()),
            "momentum": _plain({str(n): s["momentum_buffer"] for n, s in optimizer.state_dict()["state"].items()}),
            "average": _plain(average.state_dict()),
            "lr": optimizer.param_groups[0]["lr"],
            "epochs of the schedule": scheduler.last_epoch,
        }

    restored = saved.restore()
    found: dict[str, Any] = {"at the save": values(), "losses": []}
    for _ in saved.epochs(2):
        for batch, targets in loader:
            loss = nn.functional.mse_loss(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
            if saved.step == 4:
                saved.save()
                found = {"at the save": values(), "losses": []}
            elif saved.step > 4:
                found["losses"].append(world.mean(loss))
    return {**found, "at the end": values(), "skipped": None if restored is None else list(restored.skipped)}


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {
        name: (torch.view_as_real(value) if value.is_complex() else value).double().tolist()
        for name, value in tensors.items()
    }


def _lay_down(fixture: Path, root: Path) -> Path:
    """The fixture's checkpoint in a run's folder of its own."""
    folder = root / "step-00000004"
    shutil.copytree(fixture / folder.name, folder)
    root.chmod(0o700)  # version control keeps no permissions
    folder.chmod(0o700)
    for file in folder.iterdir():
        file.chmod(0o600)
    return folder


def test_files_of_0_1_0_are_restored_and_their_run_goes_on(tmp_path: Path) -> None:
    expected = json.loads((_WRITTEN / "values.json").read_text())
    _lay_down(_WRITTEN, tmp_path)
    main, other = run_ranks(_train, 2, str(tmp_path))
    for found in main, other:
        assert found.pop("skipped") == []
        assert found["at the save"] == expected["at the save"], "bit by bit, on each rank"
        assert all(map(math.isfinite, found["losses"]))
    assert main["losses"] == other["losses"]
    assert len(main["losses"]) == len(expected["losses"])
    for name in ("step", "seen", "lr", "epochs of the schedule"):
        assert main["at the end"][name] == expected["at the end"][name]


def _bench_with_adamw(folder: str) -> tuple[lockstep.Checkpointer, nn.Module, Any, Any, Any]:
    model = lockstep.replicate(nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.25), nn.Linear(16, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    inputs = torch.linspace(-2, 2, 80).reshape(20, 4).sin()
    loader = lockstep.shard(DataLoader(TensorDataset(inputs, inputs[:, :2]), batch_size=8, shuffle=True))
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    return saved, model, optimizer, scheduler, loader


def _train_with_adamw(folder: str) -> dict[str, Any]:
    """Two epochs of three steps, the last one uneven, saved at step 4, in the middle of the second epoch."""
    world = lockstep.init(seed=23)
    saved, model, optimizer, scheduler, loader = _bench_with_adamw(folder)
    losses = []
    for _ in saved.epochs(2):
        for batch, targets in loader:
            noise = 0.1 * random.random() + 0.1 * float(np.random.rand())
            loss = nn.functional.mse_loss(model(batch) + noise, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if saved.step == 4:
                saved.save(metric=0.5)
            elif saved.step > 4:
                losses.append(world.mean(loss))
    moments = optimizer.state_dict()["state"]
    return {
        "losses": losses,
        "model": _plain(model.state_dict()),
        "moments": {str(number): _plain(state) for number, state in moments.items()},
        "lr": optimizer.param_groups[0]["lr"],
        "step": saved.step,
        "draws": [random.random(), float(np.random.rand()), float(torch.rand(()))],
    }


def test_a_run_with_adamw_goes_on_with_the_values_that_it_had(tmp_path: Path) -> None:
    expected = json.loads((_WITH_ADAMW / "values.json").read_text())
    _lay_down(_WITH_ADAMW, tmp_path)
    for rank, found in enumerate(run_ranks(_train_with_adamw, 2, str(tmp_path))):
        assert found["draws"] == expected[rank]["draws"], "every generator that a rank has"
        assert found["step"] == 6
        there = expected[rank]
        # A bias before a batch norm has no gradient but rounding, of which AdamW makes steps as large as any; the batch
        # norm's mean follows it, and nothing else does.
        for name in ("0.bias", "1.running_mean"):
            assert found["model"].pop(name) == pytest.approx(there["model"].pop(name), abs=2 * 0.02), name
        for name in ("losses", "model", "moments", "lr"):  # other processors round in other ways
            assert _numbers(found[name]) == pytest.approx(_numbers(there[name]), rel=1e-4, abs=1e-6), name


def _numbers(value: Any) -> list[float]:
    """All numbers of a tree, in order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in _numbers(value[key])]
    return [number for item in value for number in _numbers(item)] if isinstance(value, list) else [value]


def _save_again(folder: str) -> str:
    lockstep.init(seed=23)
    saved = _bench_with_adamw(folder)[0]
    assert saved.restore() is not None
    return saved.save(metric=0.5).name


def test_what_is_restored_is_saved_again_byte_for_byte(tmp_path: Path) -> None:
    """So files of today and of then are the same, names, order, digests and all."""
    then = _lay_down(_WITH_ADAMW, tmp_path)
    shutil.copytree(then, tmp_path / "then")
    assert run_ranks(_save_again, 2, str(tmp_path)) == ["step-00000004-r2"] * 2
    manifests = []
    for folder in (tmp_path / "then", tmp_path / "step-00000004-r2"):
        manifests.append(json.loads((folder / "manifest.json").read_bytes()))
        for what_tells_them_apart in ("written", "versions", "digest"):
            del manifests[-1][what_tells_them_apart]
    assert manifests[0] == manifests[1]
    for file in (tmp_path / "then").iterdir():
        if file.name != "manifest.json":
            assert file.read_bytes() == (tmp_path / "step-00000004-r2" / file.name).read_bytes(), file.name
