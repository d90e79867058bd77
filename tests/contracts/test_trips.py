"""How far a step travels: the functions, files and changes of file of each of its parts, with a budget for each.

A trip is every Python call into the package between two lines of a script. Whatever grows here is paid for by each
step and by each reader, so a trip that exceeds its budget fails, and one that needs clearly less lowers the budget.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.comm.shm.rounds import Rounds
from tests.harness import run_ranks

T = TypeVar("T")

_PACKAGE = str(Path(lockstep.__file__).parent)
_STEPS = 40  # (Some things are kept from the second of each sixteen steps on.)
#: A budget is lowered when a trip takes less than this part of it.
_SLACK = 0.9
#: What the backend "shm" calls where another rank is not there yet.
_WAITING = {Rounds._poll.__name__, Rounds._sleep.__name__}


@dataclass(frozen=True, order=True)
class Trip:
    """Distinct functions and files that a trip goes through, and how often two successive calls lie in two files."""

    functions: int
    files: int
    switches: int

    def exceeds(self, budget: Trip) -> bool:
        return self.functions > budget.functions or self.files > budget.files or self.switches > budget.switches

    def times(self, factor: float) -> Trip:
        return Trip(int(self.functions * factor), int(self.files * factor), int(self.switches * factor))


#: By backend and part of a step. Each was measured when it was last lowered. Eighteen functions and eight files of
#: "next(loader)" and five functions of "optimizer.step()" note what a run can be saved with until the next step: Note
#: [Points of rest] in checkpoint/rest.py.
BUDGETS = {
    "shm": {
        "next(loader)": Trip(39, 18, 30),
        "forward": Trip(18, 10, 14),
        "backward": Trip(77, 24, 58),
        "optimizer.step()": Trip(11, 6, 8),
    },
    "gloo": {
        "next(loader)": Trip(39, 18, 30),
        "forward": Trip(18, 10, 14),
        "backward": Trip(77, 24, 58),
        "optimizer.step()": Trip(11, 6, 8),
    },
}


class _Counter:
    """Counts the Python calls into the package, by ``sys.setprofile``."""

    def __init__(self) -> None:
        self._calls: list[CodeType] = []

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE) and not _waits(frame):
            self._calls.append(frame.f_code)

    def count(self, part: Callable[[], T]) -> tuple[T, Trip]:
        """Call ``part``; return what it returned and its trip."""
        self._calls.clear()
        sys.setprofile(self._note)
        try:
            returned = part()
        finally:
            sys.setprofile(None)
        files = [code.co_filename for code in self._calls]
        switches = sum(before != after for before, after in pairwise(files))
        return returned, Trip(len(set(self._calls)), len(set(files)), switches)


def _waits(frame: FrameType | None) -> bool:
    """Return whether a call is for nothing but to wait for another rank: on a busy machine there are more of these."""
    while frame is not None:
        if frame.f_code.co_name in _WAITING:
            return True
        frame = frame.f_back
    return False


def _measure(folder: str) -> dict[str, Trip]:
    """Return the shortest trip of each part over some steps: in some of them the replicas are compared as well."""
    world = lockstep.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    lockstep.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.randn(16 * _STEPS, 5), torch.randint(0, 3, (16 * _STEPS,)))
    loader = lockstep.shard(DataLoader(samples, batch_size=16))
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader)
    batches = (batch for _ in saved.epochs(1) for batch in loader)
    counter = _Counter()
    trips: dict[str, list[Trip]] = {part: [] for part in BUDGETS["shm"]}
    for _ in range(_STEPS):
        (inputs, targets), loading = counter.count(lambda: next(batches))
        outputs, forward = counter.count(partial(model, inputs))
        loss = nn.functional.cross_entropy(outputs, targets)
        optimizer.zero_grad()
        _, backward = counter.count(loss.backward)
        _, stepping = counter.count(optimizer.step)
        for part, trip in zip(trips, (loading, forward, backward, stepping), strict=True):
            trips[part].append(trip)
    assert world.world_size == 2
    return {part: min(found) for part, found in trips.items()}


@pytest.mark.parametrize("each_backend", ["gloo", "shm"], indirect=True)
def test_no_trip_is_longer_than_its_budget(each_backend: str, tmp_path: Path) -> None:
    first, second = run_ranks(_measure, 2, str(tmp_path / "run"))
    for part, budget in BUDGETS[each_backend].items():
        trip = min(first[part], second[part])  # (of the rank that came last in some step, and so did not wait)
        assert not trip.exceeds(budget), f"{part} over {each_backend} takes {trip}, and may take {budget}"
        assert trip.exceeds(budget.times(_SLACK)), f"{part} over {each_backend} takes {trip} only: lower its {budget}"
