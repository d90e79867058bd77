"""Where each rank stands: a few numbers in a file of the job's folder that all ranks and the watcher have mapped.

Note [One writer a slot]
~~~~~~~~~~~~~~~~~~~~~~~~
A slot belongs to one rank, which alone writes to it: whole, aligned 8-byte numbers, stored in one instruction each
(``memoryview.cast("q")`` copies them at once). A reader sees the old number or the new one, never half of each, and no
lock is needed that a killed rank could leave locked.
"""

from __future__ import annotations

import enum
import mmap
import os
from pathlib import Path

#: Bytes of a rank's slot: a cache line, so that ranks do not slow each other down.
SLOT = 64
_FILE = "standing"


class Place(enum.IntEnum):
    """The numbers of a slot, by their place in it."""

    #: Optimizer steps that this process has taken, plus one; 0: nobody counts them.
    COUNTED = 0
    #: Optimizer steps of the whole run, those before a restart included, plus one; 0: not known.
    STEP = 1
    #: 1 while the rank saves and leaves by itself when it is asked to stop.
    LISTENS = 2
    #: What this rank proposes to do together, and when; see agreement/board.py. 0: nothing.
    PROPOSAL = 3


class Slots:
    """Every rank's slot, mapped. The file is made by whoever comes first; all agree on its size.

    See Note [One writer a slot].
    """

    def __init__(self, folder: str | Path, world_size: int) -> None:
        fd = os.open(Path(folder) / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, world_size * SLOT)  # a full disk is an error here, not a SIGBUS later
            self._memory = mmap.mmap(fd, world_size * SLOT)
        finally:
            os.close(fd)
        self._numbers = memoryview(self._memory).cast("q")
        self._starts = range(0, world_size * SLOT // 8, SLOT // 8)
        #: One number of all ranks: (place) -> int64 [world_size], a view.
        self._columns = [self._numbers[place :: SLOT // 8] for place in Place]

    def get(self, rank: int, place: Place) -> int:
        """**Local.** One number of a rank."""
        return self._numbers[self._starts[rank] + place]

    def set(self, rank: int, place: Place, value: int) -> None:
        """**Local.** Write one number; only a rank's own process may."""
        self._numbers[self._starts[rank] + place] = value

    def all(self, place: Place) -> list[int]:
        """**Local.** The same number of every rank."""
        return self._columns[place].tolist()

    def close(self) -> None:
        """**Local.** Let go of the memory."""
        for view in (*self._columns, self._numbers):
            view.release()
        self._memory.close()


class OwnStanding:
    """This process's slot, as its owner writes it."""

    def __init__(self, folder: str | Path, *, rank: int, world_size: int) -> None:
        self.slots = Slots(folder, world_size)
        self.rank = rank
        #: Whether the optimizer's steps are counted.
        self.counting = False
        self._taken = 0
        #: Whether a Checkpointer says which step of the whole run this is.
        self._told = False

    def count(self) -> None:
        """**Local.** From now on :meth:`took_step` is called behind every optimizer step of this process."""
        self.counting = True
        self.slots.set(self.rank, Place.COUNTED, self._taken + 1)

    def took_step(self, *_: object) -> None:
        """**Local.** An optimizer took a step; also as a hook of torch's."""
        self._taken += 1
        self.slots.set(self.rank, Place.COUNTED, self._taken + 1)
        if not self._told:
            self.slots.set(self.rank, Place.STEP, self._taken + 1)

    def at_step(self, step: int) -> None:
        """**Local.** The whole run is at ``step``, by the count of a Checkpointer."""
        self._told = True
        self.slots.set(self.rank, Place.STEP, step + 1)

    def listens(self, listening: bool) -> None:
        """**Local.** Whether this rank saves and leaves by itself when asked to stop."""
        self.slots.set(self.rank, Place.LISTENS, int(listening))


_own: OwnStanding | None = None


def take(folder: str | Path, *, rank: int, world_size: int) -> OwnStanding:
    """**Local.** Make this process the writer of ``rank``'s slot; :func:`own` finds it from now on."""
    global _own
    _own = OwnStanding(folder, rank=rank, world_size=world_size)
    return _own


def own() -> OwnStanding | None:
    """**Local.** This process's slot, or None if it is no rank of a job that lockstep started."""
    return _own
