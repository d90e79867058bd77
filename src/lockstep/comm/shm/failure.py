"""The one error that ends a group: the first rank to find it writes it down, and every rank raises the same."""

from __future__ import annotations

import struct

from lockstep.comm.shm import semaphore
from lockstep.comm.shm.layout import FAILURE_TEXT, Layout
from lockstep.comm.shm.segment import Segment
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, LockstepError, PeerLost

_RECORD = struct.Struct("<II")
_KINDS: tuple[type[LockstepError], ...] = (CollectiveMismatch, CollectiveTimeout, PeerLost, LockstepError)
#: Seconds to wait for the text of a rank that has claimed the record; it writes it at once, unless it was killed.
_GRACE = 0.1


class Failure:
    """The failure record of a group. See Note [Memory ordering] for how its text is handed over."""

    def __init__(self, segment: Segment, layout: Layout, *, rank: int, note: str = "") -> None:
        self._segment = segment
        #: A line that every error ends with.
        self._note = note
        self._claim = segment.address + layout.failure_claim
        self._notices = [segment.address + layout.failure_notice(peer) for peer in range(layout.world_size)]
        self._mine = self._notices[rank]
        self._record = layout.failure_record
        self._known: LockstepError | None = None

    def known(self) -> LockstepError | None:
        """**Local.** The group's error, if any rank has reported one. A few hundred nanoseconds."""
        if self._known is None and semaphore.trywait(self._mine) == 0:
            self._known = self._read()
        return self._known

    def report(self, error: LockstepError) -> LockstepError:
        """**Local.** End the group with ``error``; returns the error to raise here, the first one reported by any rank.

        The others see it within their next slice of waiting, or when they use the group again.
        """
        if self._known is not None:
            return self._known
        if self._note:
            error = type(error)(f"{error}\n{self._note}")
        if semaphore.trywait(self._claim) == 0:
            self._write(error)
            self._known = error
            for notice in self._notices:
                semaphore.post(notice)
        elif semaphore.wait(self._mine, _GRACE):
            self._known = self._read()
        else:
            self._known = error
        return self._known

    def _write(self, error: LockstepError) -> None:
        kind = next(code for code, each in enumerate(_KINDS) if isinstance(error, each))
        text = str(error).encode()[:FAILURE_TEXT]
        _RECORD.pack_into(self._segment.view, self._record, kind, len(text))
        start = self._record + _RECORD.size
        self._segment.view[start : start + len(text)] = text

    def _read(self) -> LockstepError:
        kind: int
        length: int
        kind, length = _RECORD.unpack_from(self._segment.view, self._record)
        start = self._record + _RECORD.size
        text = bytes(self._segment.view[start : start + length]).decode(errors="replace")
        return _KINDS[kind](text)


def again(error: LockstepError) -> LockstepError:
    """A new exception that says the same: one exception object must not be raised twice, its traceback would grow."""
    copy: LockstepError = type(error)(*error.args)
    return copy
