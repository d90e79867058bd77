"""Each part of lockstep tells the recorder when its phase begins and ends, and from which line of the program."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.job import flight
from lockstep.job.page import PAGE, Cell, Mark, Text
from tests.harness import run_ranks

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


class _Spy(flight.Flight):
    """A writer that keeps what its page has told, event by event."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(PAGE))
        self.marks: list[Mark] = []
        super().__init__(self.memory)

    def enter(self, phase: int) -> None:
        super().enter(phase)
        self._keep()

    def leave(self, phase: int) -> None:
        super().leave(phase)
        self._keep()

    def resume(self, phase: int, *, after: int) -> None:
        super().resume(phase, after=after)
        self._keep()

    def took_step(self) -> None:
        super().took_step()
        self._keep()

    def begin_wait(self, what: str) -> None:
        super().begin_wait(what)
        self._keep()

    def _keep(self) -> None:
        self.marks.append(Mark.of(self.number(Cell.MARK)))

    def number(self, cell: Cell) -> int:
        return self.memory.cast("q")[cell]

    def take(self) -> list[str]:
        """The phases since the last call, each once in a row."""
        names = [mark.phase.name for mark in self.marks]
        self.marks.clear()
        return [name for name, _ in groupby(names)]


def _spied() -> _Spy:
    spy = _Spy()
    flight.use(spy)
    flight.watch_optimizers(optimizers)
    return spy


def _train() -> dict[str, Any]:
    spy = _spied()
    lockstep.init()
    model = lockstep.replicate(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = lockstep.shard(DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4))
    found: dict[str, Any] = {}
    spy.take()
    for (batch,) in loader:
        loss = model(batch).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found["steps"] = spy.number(Cell.STEPS) - 1
    start, size = Text.STEPPED_AT.value
    found["file"] = bytes(spy.memory[start : start + size]).decode().partition(":")[0].lstrip("…")
    found["two steps"] = spy.take()
    model.eval()
    with torch.no_grad():
        model(torch.ones(1, 4))
    found["evaluation"] = spy.take()
    return found


def test_the_phases_of_a_step_come_in_order() -> None:
    step = ["DATA", "OWN", "FORWARD", "BACKWARD", "REDUCE", "OWN", "OPTIMIZER", "OWN"]
    for found in run_ranks(_train, 2):
        assert found["two steps"] == [*step, *step, "DATA", "OWN"]
        assert found["steps"] == 2
        assert __file__.endswith(found["file"]), "a line of the program, not of torch or lockstep"
        assert found["evaluation"] == ["EVALUATE"]


def _save(folder: str) -> list[list[str]]:
    spy = _spied()
    lockstep.init()
    saved = lockstep.Checkpointer(folder, model=nn.Linear(4, 2))
    phases = []
    spy.take()
    saved.save()
    phases.append(spy.take())
    saved.restore()
    phases.append(spy.take())
    return phases


def test_saving_and_restoring_are_phases(tmp_path: Path) -> None:
    for save, restore in run_ranks(_save, 2, str(tmp_path / "run")):
        # Both wait for a save in the background first; behind them comes what the program was at before.
        assert [name for name, _ in groupby(save)] == ["SAVE", "START"]
        assert [name for name, _ in groupby(restore)] == ["RESTORE", "SAVE", "RESTORE", "START"]


def _compile() -> list[str]:
    spy = _spied()
    lockstep.init()
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    spy.take()
    compiled(torch.ones(3))
    phases = spy.take()
    compiled(torch.ones(3))
    return [*phases, *spy.take()]


def test_compiling_is_a_phase() -> None:
    assert run_ranks(_compile, 1) == [["COMPILE", "OWN"]]
