"""Ranks that meet in an evaluation, or don't: one decision for all, and no wait without an end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import FileStore  # type: ignore[attr-defined]

from lockstep.checkpoint import meeting
from lockstep.checkpoint.meeting import Meeting


@pytest.fixture
def meet(tmp_path: Path) -> Callable[[int, int, Iterable[int]], Meeting]:
    """A rank's view, over a store of its own on the ranks' file."""

    def make(rank: int, world_size: int, waiting: Iterable[int]) -> Meeting:
        store = FileStore(str(tmp_path / "store"), world_size)
        return Meeting(store, rank=rank, world_size=world_size, waiting=lambda: waiting)

    return make


_Meet = Callable[[int, int, Iterable[int]], Meeting]


def test_ranks_that_are_all_here_go(meet: _Meet) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda rank: meet(rank, 3, ()).attend(), range(3))) == [True] * 3
    assert meet(0, 1, ()).attend(), "a rank alone"


def test_who_waits_for_this_rank_is_not_waited_for_and_may_come_to_the_next_attempt(meet: _Meet) -> None:
    waiting = {1}
    first, second = meet(0, 2, waiting), meet(1, 2, ())
    assert not first.attend()
    waiting.clear()
    assert not second.attend(), "it learns that the first attempt is off"
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(_until, [first.attend, second.attend])) == [True, True]


def test_who_does_not_come_is_given_up(meet: _Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_PATIENCE", 0.05)
    assert not meet(0, 2, ()).attend()


def _until(attend: Callable[[], bool]) -> bool:
    event = threading.Event()
    for _ in range(200):
        if attend():
            return True
        event.wait(0.005)
    return False
