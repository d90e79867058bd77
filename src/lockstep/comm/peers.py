"""Hand small records from rank to rank: by the world's process group, or beside training by its store.

Note [Records in the background]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Collectives of one process group must be issued in the same order on all ranks. A thread that writes a checkpoint
during training can't keep that order, so it must not use the training's group: it hands its records over
through the store that the group was opened with. Nothing there blocks: a rank looks, and looks again a little later,
for a store may answer one question at a time and training may want to ask it something as well.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any, Protocol

from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep.comm.exchange import all_gather_records
from lockstep.errors import CollectiveTimeout
from lockstep.text import which_ranks

#: Seconds between two looks: at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
#: Seconds that a process which ends with an error waits for ranks that may have ended before it.
_LAST_WAIT = 5.0


class Peers(Protocol):
    """Ranks that tell each other something."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, record: Any) -> list[Any]:
        """**Collective.** Return every rank's record, in order of rank."""
        ...


class Members(Protocol):
    """The part of a World that an exchange over a process group needs."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def group(self) -> ProcessGroup: ...


class OverGroup:
    """Records by the world's process group: for the thread that trains."""

    def __init__(self, world: Members) -> None:
        self._world = world

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def world_size(self) -> int:
        return self._world.world_size

    def gather(self, record: Any) -> list[Any]:
        """**Collective.** Return every rank's record, in order of rank."""
        return all_gather_records(record, self._world.group)


class OverStore:
    """Records by a store: for a thread beside training; see Note [Records in the background].

    Args:
        store: one that all ranks share.
        rank: this rank.
        world_size: all ranks.
        key: the name of this conversation, the same on all ranks and used once.
        timeout: seconds to wait for the other ranks' records.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, key: str, timeout: float) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self._key = key
        self._timeout = timeout
        self._round = 0

    def gather(self, record: Any) -> list[Any]:
        """**Collective.** Return every rank's record, in order of rank.

        Raises:
            CollectiveTimeout: a rank's record did not come in time; the message names the ranks.
        """
        self._round += 1
        self._store.set(self._name(self._round, self.rank), json.dumps(record))
        if self._round > 2:  # this rank has read all records of the last round, so all have read those before
            self._store.delete_key(self._name(self._round - 2, self.rank))
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        names = [self._name(self._round, rank) for rank in range(self.world_size)]
        while not self._store.check(names):
            if _leaving_after_an_error():
                deadline = min(deadline, time.monotonic() + _LAST_WAIT)  # only ever moves nearer
            if time.monotonic() > deadline:
                late = [rank for rank, name in enumerate(names) if not self._store.check([name])]
                raise CollectiveTimeout(
                    f"rank {self.rank} of {self.world_size}: {which_ranks(late)} did not hand over their part of a "
                    f"checkpoint within {self._timeout:g} s: stuck, gone, or writing to a slow disk"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return [json.loads(self._store.get(name)) for name in names]

    def read(self, number: int) -> list[Any]:
        """Return every rank's record of the gather of this number, from 1, which all have handed over by now."""
        return [json.loads(self._store.get(self._name(number, rank))) for rank in range(self.world_size)]

    def leave(self) -> None:
        """**Collective.** End the conversation. Rank 0, which may have the store, leaves last, or after a while."""
        if self.rank:
            self._store.set(self._parting(self.rank), "")
            return
        deadline = time.monotonic() + _LAST_WAIT
        others = [self._parting(rank) for rank in range(1, self.world_size)]
        while others and not self._store.check(others) and time.monotonic() < deadline:
            time.sleep(_FIRST_PAUSE)

    def forget(self) -> None:
        """Remove what is left of this rank's records, once all ranks have ended the conversation."""
        for number in range(max(1, self._round - 1), self._round + 1):
            self._store.delete_key(self._name(number, self.rank))
        if self.rank:
            self._store.delete_key(self._parting(self.rank))

    def _parting(self, rank: int) -> str:
        return f"{self._key}/parted/{rank}"

    def _name(self, number: int, rank: int) -> str:
        return f"{self._key}/{number}/{rank}"


def _leaving_after_an_error() -> bool:
    return not threading.main_thread().is_alive() and getattr(sys, "last_value", None) is not None
