"""A checkpoint that an earlier lockstep wrote is restored, value for value, and its run goes on to its end.

``tests/fixtures/run-0.1.0`` was written by :func:`_train` on two ranks, at its fourth step, and ``values.json`` by the
same run, which went on to its end. Neither is ever written anew: a change that needs them to be can't resume the runs
of those who have such files. The next format gets a fixture of its own beside this one.

What the model draws behind the save is not compared: 0.1.0 drew its dropout masks from each rank's one generator, since
then they follow from the ranks' common one (Note [Random numbers of a rank] in ``comm/streams.py``).
"""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.harness import run_ranks

_WRITTEN = Path(__file__).parents[1] / "fixtures" / "run-0.1.0"


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


def test_files_of_0_1_0_are_restored_and_their_run_goes_on(tmp_path: Path) -> None:
    expected = json.loads((_WRITTEN / "values.json").read_text())
    folder = tmp_path / "step-00000004"
    shutil.copytree(_WRITTEN / folder.name, folder)
    tmp_path.chmod(0o700)  # version control keeps no permissions
    folder.chmod(0o700)
    for file in folder.iterdir():
        file.chmod(0o600)
    main, other = run_ranks(_train, 2, str(tmp_path))
    for found in main, other:
        assert found.pop("skipped") == []
        assert found["at the save"] == expected["at the save"], "bit by bit, on each rank"
        assert all(map(math.isfinite, found["losses"]))
    assert main["losses"] == other["losses"]
    assert len(main["losses"]) == len(expected["losses"])
    for name in ("step", "seen", "lr", "epochs of the schedule"):
        assert main["at the end"][name] == expected["at the end"][name]
