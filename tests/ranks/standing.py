"""Where the other ranks of a group over shared memory stand: a short limit begins when those that are to come have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from lockstep.comm.shm import semaphore
from tests.launching import wait_for


def _memory() -> Any:
    """The engine that this rank shares with the ranks of its host."""
    group: Any = dist.group.WORLD
    engine = group._shm_group.engine
    return getattr(engine, "_local", engine)


def wait_until_they_wait(ranks: Iterable[int]) -> None:
    """Return once these ranks (by their numbers on this host) wait in the collective that this rank begins next."""
    waits = _memory()._rounds._waits
    for token in [token for peer, token in waits if peer in ranks]:
        wait_for(lambda: semaphore.trywait(token) == 0, "a rank's coming")  # noqa: B023  (called before the next one)
        semaphore.post(token)


def wait_until_seen(rank: int, words: str) -> None:
    """Return once an error would say this of a rank."""
    wait_for(lambda: words in _memory()._health._line(rank), words)


def wait_until_it_is_over() -> None:
    """Return once a rank has ended the group, without having come to any collective."""
    wait_for(lambda: _memory().known() is not None, "an error of another rank")
