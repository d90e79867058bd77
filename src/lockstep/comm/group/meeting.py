"""Let the ranks of a new group meet, through the rendezvous store: each tells where its process is, and other facts."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep import _proc
from lockstep.errors import RendezvousError

#: Seconds between two looks into the store: the first, and the longest.
PAUSES = 0.0002, 0.02


class ApartError(RendezvousError):
    """Some ranks can't share memory."""

    code = "ranks-apart"


@dataclass(frozen=True)
class Whereabouts:
    """The place of a process, in a form that another process can check."""

    pid: int
    #: Start of the process in clock ticks since boot: a process id is used again, the pair is not.
    started: int
    boot_id: str
    pid_namespace: int

    @classmethod
    def mine(cls) -> Whereabouts:
        """Return where this process is."""
        pid = os.getpid()
        return cls(pid, _proc.started(pid) or 0, _proc.boot_id(), os.stat("/proc/self/ns/pid").st_ino)

    def why_apart(self, other: Whereabouts) -> str | None:
        """Say why memory can't be shared with a process at ``other``, as far as that shows without trying; or None."""
        if self.boot_id != other.boot_id:
            return "they run on different hosts"
        if self.pid_namespace != other.pid_namespace:
            return "they run in containers that can't see each other's processes"
        return None

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, zombies included; where no descriptor is left, whether nobody has its id."""
        try:
            return _proc.started(self.pid) != self.started
        except OSError:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return True
            except PermissionError:  # it is there, and another user's
                return False
            return False


def say_and_hear(store: Store, key: str, word: Any, rank: int, size: int, timeout: float) -> list[Any]:
    """**Collective.** Return what every rank says under ``key``, in order of rank: JSON, through the store.

    Raises:
        RendezvousError: a rank did not come within ``timeout`` seconds.
    """
    return hear(store, key, word, rank, size, time.monotonic() + timeout)


def hear(store: Store, key: str, word: Any, rank: int, size: int, limit: float) -> list[Any]:
    """**Collective.** Do as :func:`say_and_hear`, until the time ``limit`` on the monotonic clock."""
    store.set(f"{key}/rank/{rank}", json.dumps(word))
    return [
        json.loads(get(store, f"{key}/rank/{peer}", limit, f"rank {rank}: rank {peer} did not come"))
        for peer in range(size)
    ]


def get(store: Store, key: str, limit: float, missing: str) -> bytes:
    """Return the value of ``key``, once it is there.

    It polls: a wait in torch's store has the store's own limit, whatever that is, and prints a warning when it ends.

    Args:
        store: where the ranks meet.
        key: the key.
        limit: the time to give up, in seconds on the monotonic clock.
        missing: the words about the rank that did not come, for the error.

    Raises:
        RendezvousError: the key was not there in time, or the store has failed.
    """
    begun, pause = time.monotonic(), PAUSES[0]
    try:
        while not store.check([key]):
            now = time.monotonic()
            if now >= limit:
                raise RendezvousError(f"{missing} within {now - begun:.1f} s")
            time.sleep(min(pause, limit - now))
            pause = min(2 * pause, PAUSES[1])
        return bytes(store.get(key))
    except RendezvousError:
        raise
    except RuntimeError as error:  # torch's stores have no type of their own for what goes wrong in them
        raise RendezvousError(f"{missing} within {time.monotonic() - begun:.1f} s. The store says: {error}") from error
