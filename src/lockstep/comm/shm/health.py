"""Tell whether a group still works: what ended it, which ranks are gone, and where each rank was last seen.

The first rank that finds an error writes it down for the group, and every rank raises the same. Whether the other
ranks' processes live is asked only by a rank that has waited for a while.

Where a rank was last seen is a hint for messages: no semaphore has handed over what is read there, so it may be old or
torn. No decision rests on it.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lockstep.comm.group.failures import KINDS, again
from lockstep.comm.group.fingerprint import HEADER, describe, encoded
from lockstep.comm.group.meeting import Whereabouts
from lockstep.comm.shm import semaphore
from lockstep.comm.shm.layout import BUFFERS, FAILURE_TEXT, Layout
from lockstep.comm.shm.segment import Segment
from lockstep.errors import CollectiveTimeout, LockstepError, PeerLost
from lockstep.job import fates, files
from lockstep.text import listed, which_ranks

_RECORD = struct.Struct("<II")
#: Seconds to wait for the text of a rank that has claimed the record, and between two looks whether any other rank is
#: left to write it: it does so at once, unless it gets no processor or was killed.
_GRACE, _SLICE = 5.0, 0.1
#: Ranks that a message lists one by one; the failure record holds some more than that.
_LINES = 24


class Health:
    """The health of a group, as one rank sees it. Note [Memory ordering] says how an error's text is handed over."""

    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        whereabouts: list[Whereabouts],
        *,
        rank: int,
        members: Sequence[int] = (),
        numbers: Sequence[int] = (),
    ) -> None:
        """Watch the processes of the other ranks.

        Args:
            segment: the group's memory.
            layout: what lies where in it.
            whereabouts: where each rank's process is.
            rank: this rank.
            members: the ranks' numbers in the world, where they are known.
            numbers: the ranks' numbers in errors, if they are a part of a larger group.
        """
        self._segment = segment
        self._layout = layout
        self._rank = rank
        self._numbers = numbers or range(layout.world_size)
        #: The ranks' numbers in the world, as far as they are known.
        self._world = members or self._numbers
        #: This rank's name in errors.
        self.name = f"rank {self._numbers[rank]}"
        #: A line that every error ends with.
        self._note = _numbering(members)
        self._claim = segment.address + layout.failure_claim
        self._notices = [segment.address + layout.failure_notice(peer) for peer in range(layout.world_size)]
        self._mine = self._notices[rank]
        self._known: LockstepError | None = None
        self._where = {peer: where for peer, where in enumerate(whereabouts) if peer != rank}
        for where in self._where.values():
            _watch(where)

    def close(self) -> None:
        """Tell the others not to wait for this rank, and stop watching them. To be called once."""
        self._segment.view[self._layout.presence(self._rank)] = 1
        for where in self._where.values():
            _unwatch(where)
        self._where = {}

    # --- the error that ends the group -----------------------------------------------------------------------------

    def known(self) -> LockstepError | None:
        """Return the group's error, if any rank has reported one. Takes a few hundred nanoseconds."""
        if self._known is None and semaphore.trywait(self._mine) == 0:
            self._known = self._read()
        return self._known

    def check(self) -> None:
        """Raise the group's error, if any rank has reported one."""
        error = self.known()
        if error is not None:
            raise again(error)

    def end(self, error: LockstepError) -> LockstepError:
        """End the group with ``error``; returns the error to raise here, the first one that any rank reported.

        The others see it after the nap in which they wait, or when they use the group again.
        """
        if self._known is None:
            if self._note:
                error = type(error)(f"{error}\n{self._note}")
            if semaphore.trywait(self._claim) == 0:
                self._write(error)
                self._known = error
                for notice in self._notices:
                    semaphore.post(notice)
            else:
                found = self._read() if self._is_told() else error
                self._known = self._known or found
        return again(self._known)

    def _is_told(self) -> bool:
        """Return whether the rank that has claimed the record has handed over its text, to this thread or to another of
        this rank's; False: it was killed before."""
        limit = time.monotonic() + _GRACE
        while True:
            is_last = time.monotonic() > limit or len(self.gone()) == len(self._where)
            if semaphore.wait(self._mine, _SLICE) or self._known is not None:
                return True
            if is_last:
                return False

    def renew(self) -> None:
        """Forget the error that has ended the group; see :meth:`Engine.renew`."""
        semaphore.drain(self._mine)
        self._known = None
        if self._rank == 0:
            semaphore.drain(self._claim)
            semaphore.post(self._claim)

    def _write(self, error: LockstepError) -> None:
        kind = next(code for code, each in enumerate(KINDS) if isinstance(error, each))
        text = encoded(str(error), FAILURE_TEXT)
        record = self._layout.failure_record
        _RECORD.pack_into(self._segment.view, record, kind, len(text))
        start = record + _RECORD.size
        self._segment.view[start : start + len(text)] = text

    def _read(self) -> LockstepError:
        kind: int
        length: int
        record = self._layout.failure_record
        kind, length = _RECORD.unpack_from(self._segment.view, record)
        start = record + _RECORD.size
        text = bytes(self._segment.view[start : start + length]).decode(errors="replace")
        return KINDS[kind](text)

    # --- ranks that are gone, or late ------------------------------------------------------------------------------

    def gone(self) -> set[int]:
        """Return the ranks whose processes have ended, zombies included."""
        return {rank for rank, where in self._where.items() if _ended(where)}

    def left(self) -> set[int]:
        """Return the other ranks that have destroyed the group."""
        return {peer for peer in self._where if self._segment.view[self._layout.presence(peer)]}

    def lost(self, what: str, ranks: Sequence[int], *, ended: bool) -> LockstepError:
        """End the group: this rank waits in ``what`` for ``ranks``, which ended, or else destroyed the group."""
        known = fates.told(self._world[rank] for rank in ranks)
        look_for = "" if known else "The error to look for is that rank's own; "
        return self.end(
            PeerLost(
                (f"{known} " if known else "")
                + f"{self.name} waits in {what} for {self.names(ranks)}, which "
                + ("ended:\n" if ended else "destroyed the group:\n")
                + self._lines(ranks)
                + f"\n{look_for}this group can't be used any more."
            )
        )

    def late(self, what: str, seconds: float, missing: Sequence[int]) -> LockstepError:
        """End the group: the ranks ``missing`` did not come in time. The message says where all others stand, too."""
        others = [peer for peer in self._where if peer not in missing]
        return self.end(
            CollectiveTimeout(
                f"{self.names(missing)} did not come: {self.name} timed out after {seconds:g} s in {what}:\n"
                + self._lines([*missing, *others])
                + "\nFind out what keeps the late rank, or allow more time "
                "(timeout=… of init_process_group or lockstep.init)." + files.told()
            )
        )

    def names(self, ranks: Iterable[int]) -> str:
        """Return ``ranks`` in the words of errors."""
        return which_ranks([self._numbers[rank] for rank in ranks])

    def asked(self) -> bool:
        """Return whether a rank of another host, whose time is up, asks which rank of this host did not come."""
        return False

    # --- where ranks were last seen --------------------------------------------------------------------------------

    def waits_in(self, text: str) -> None:
        """Tell the others that this rank waits in ``text``, a send or a receive."""
        offset = self._layout.last_wait(self._rank)
        self._segment.view[offset : offset + HEADER] = encoded(text, HEADER).ljust(HEADER, b"\0")

    def _lines(self, ranks: Iterable[int]) -> str:
        lines = [self._line(rank) for rank in ranks]
        more = [f"  and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
        return "\n".join([*lines[:_LINES], *more])

    def _line(self, rank: int) -> str:
        """Return a line with the rank's newest header, and the last message it waited for."""
        pid = self._where[rank].pid if rank in self._where else os.getpid()
        headers = [self._text(self._layout.header(rank, buffer)) for buffer in range(BUFFERS)]
        newest = max(headers, key=lambda header: int.from_bytes(header[:8], "little"))
        last_wait = self._text(self._layout.last_wait(rank)).rstrip(b"\0").decode(errors="replace")
        waited = f"; last waited in {last_wait}" if last_wait else ""
        return f"  rank {self._numbers[rank]} (process {pid}): last seen at {describe(newest)}{waited}"

    def _text(self, offset: int) -> bytes:
        return bytes(self._segment.view[offset : offset + HEADER])


def _numbering(members: Sequence[int]) -> str:
    """Return the line that a group of some ranks adds to its errors; empty where its numbers are the world's."""
    if list(members) == list(range(len(members))):
        return ""
    shown = listed([*map(str, members)], most=_LINES)  # in the order of the group
    return f"These are the numbers of a group; in the world its ranks 0 to {len(members) - 1} are the ranks {shown}."


# --- processes -------------------------------------------------------------------------------------------------------


@dataclass
class _Watch:
    """A process that is watched: a descriptor that becomes readable when it ends, or None where it has none."""

    descriptor: int | None
    users: int = field(default=1)


# One descriptor per peer process, however many groups it shares with this one. Used by all of this process's threads,
# and by signal handlers that destroy a group.
_watches: dict[tuple[int, int], _Watch] = {}
_lock = threading.RLock()


def _forget_after_fork() -> None:
    """Close a forked child's copies of the descriptors, which it has no use for."""
    global _lock
    _lock = threading.RLock()
    for watch in _watches.values():
        if watch.descriptor is not None:
            os.close(watch.descriptor)
    _watches.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def _watch(where: Whereabouts) -> None:
    with _lock:
        watch = _watches.get((where.pid, where.started))
        if watch is None:
            _watches[where.pid, where.started] = _Watch(_open(where))
        else:
            watch.users += 1


def _unwatch(where: Whereabouts) -> None:
    with _lock:
        watch = _watches.get((where.pid, where.started))
        if watch is None:
            return
        watch.users -= 1
        if watch.users == 0:
            del _watches[where.pid, where.started]
            if watch.descriptor is not None:
                os.close(watch.descriptor)


def _ended(where: Whereabouts) -> bool:
    watch = _watches.get((where.pid, where.started))
    if watch is None or watch.descriptor is None:
        return where.is_gone
    poll = select.poll()
    poll.register(watch.descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _open(where: Whereabouts) -> int | None:
    """Return a pidfd of the process; None if that is not possible (an old kernel, no descriptor left) or it is gone."""
    try:
        descriptor = os.pidfd_open(where.pid)
    except (OSError, AttributeError):
        return None
    if where.is_gone:  # the number may have gone to another process before the descriptor was opened
        os.close(descriptor)
        return None
    return descriptor
