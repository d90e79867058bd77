"""Are the other ranks' processes alive? Asked only by a rank that has waited for a while."""

from __future__ import annotations

import os
import select
import threading
from dataclasses import dataclass, field

from lockstep.comm.shm.segment import Whereabouts, started


@dataclass
class _Watch:
    """A process others ask about: a descriptor that becomes readable when it ends, or None where there is none."""

    descriptor: int | None
    users: int = field(default=1)


# One descriptor per peer process, however many groups it shares with this one. Used by all of this process's threads.
_watches: dict[tuple[int, int], _Watch] = {}
_lock = threading.Lock()
_owner = os.getpid()


def _forget_after_fork() -> None:
    """A forked child has copies of the descriptors and no business with them."""
    global _lock
    _lock = threading.Lock()
    for watch in _watches.values():
        if watch.descriptor is not None:
            os.close(watch.descriptor)
    _watches.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


class Peers:
    """The processes of a group's other ranks."""

    def __init__(self, whereabouts: list[Whereabouts], *, rank: int) -> None:
        self._where = {peer: where for peer, where in enumerate(whereabouts) if peer != rank}
        with _lock:
            for where in self._where.values():
                key = where.pid, where.started
                if key in _watches:
                    _watches[key].users += 1
                else:
                    _watches[key] = _Watch(_open(where))

    def pid(self, rank: int) -> int:
        return self._where[rank].pid if rank in self._where else os.getpid()

    def gone(self) -> list[int]:
        """**Local.** The ranks whose processes have ended, zombies included."""
        return [rank for rank, where in self._where.items() if self._ended(where)]

    def _ended(self, where: Whereabouts) -> bool:
        watch = _watches.get((where.pid, where.started))
        if watch is None or watch.descriptor is None:
            return _gone(where)
        poll = select.poll()
        poll.register(watch.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """**Local.** Give the descriptors back. A second call does nothing."""
        with _lock:
            for where in self._where.values():
                watch = _watches.get((where.pid, where.started))
                if watch is None:
                    continue
                watch.users -= 1
                if watch.users == 0:
                    del _watches[where.pid, where.started]
                    if watch.descriptor is not None:
                        os.close(watch.descriptor)
        self._where = {}


def _open(where: Whereabouts) -> int | None:
    """A pidfd of the process; None if there can't be one (an old kernel, no descriptor left) or it is gone."""
    try:
        descriptor = os.pidfd_open(where.pid)
    except (OSError, AttributeError):
        return None
    if _gone(where):  # the number may have gone to another process before the descriptor was opened
        os.close(descriptor)
        return None
    return descriptor


def _gone(where: Whereabouts) -> bool:
    """Without a descriptor that is held. A process that has none left at the moment only asks whether it exists."""
    try:
        return started(where.pid) != where.started
    except OSError:
        try:
            os.kill(where.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False
