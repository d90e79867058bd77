"""Where the ranks call each other to an attempt to save from the side."""

from __future__ import annotations

from typing import Protocol

from lockstep import _torch, knobs
from lockstep.comm.world import World
from lockstep.job import flight
from lockstep.job.page import Cell, Pages
from lockstep.job.stop import Action, KeyValueStore


class Calls(Protocol):
    """Where the ranks call each other to an attempt."""

    def latest(self) -> tuple[int, Action]:
        """Return the number of the latest attempt, 0 if there was none, and what it is to do."""

    def call(self, number: int, action: Action) -> None:
        """Call all ranks to an attempt."""


class _OnPages:
    """Calls on one host: a number in each rank's page."""

    def __init__(self, pages: Pages, rank: int) -> None:
        self._pages, self._rank = pages, rank

    def latest(self) -> tuple[int, Action]:
        number, action = divmod(max(self._pages.all(Cell.ASIDE)), len(Action))
        return number, Action(action)

    def call(self, number: int, action: Action) -> None:
        self._pages.set(self._rank, Cell.ASIDE, number * len(Action) + action)


class _InStore:
    """Calls on several hosts, or under another launcher: keys of the process group's store."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._latest, self._action = 0, Action.STOP

    def latest(self) -> tuple[int, Action]:
        while self._store.check([self._key(self._latest + 1)]):
            self._latest += 1
            self._action = Action(int(self._store.get(self._key(self._latest))))
        return self._latest, self._action

    def call(self, number: int, action: Action) -> None:
        self._store.compare_set(self._key(number), "", f"{action:d}")

    @staticmethod
    def _key(number: int) -> str:
        return f"lockstep/side/{number}"


def calls_of(world: World) -> Calls:
    """Return calls in shared memory if one launcher of lockstep started all ranks, else in the group's store."""
    pages = flight.current.pages
    if pages is not None and knobs.store() is not None:
        return _OnPages(pages, world.rank)
    return _InStore(_torch.default_store())
