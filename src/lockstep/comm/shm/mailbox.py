"""Mailboxes: one per ordered pair of ranks, with room for a few fragments of a message.

A message is cut into fragments of a stage's size. The sender takes a free slot, writes a fragment, and hands it over;
the receiver copies it out and hands the slot back (Note [Memory ordering] in semaphore.py). Fragments keep their order,
so both sides know the slot of each by counting.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from lockstep.comm.shm import semaphore
from lockstep.comm.shm.layout import MAIL_HEADER, MAIL_SLOTS, Layout
from lockstep.comm.shm.segment import Segment

#: Tag, bytes of the message, code of its dtype; then where it was sent from, as text.
_HEADER = struct.Struct("<qqq")
_PLACE = MAIL_HEADER - _HEADER.size


@dataclass(frozen=True)
class Envelope:
    """What is known of a message before its content."""

    tag: int
    size: int
    dtype: int
    place: str


class Outbox:
    """From this rank to another."""

    def __init__(self, segment: Segment, layout: Layout, *, source: int, destination: int) -> None:
        self._slots = _Slots(segment, layout, source, destination)
        self._free = segment.address + layout.mail_free(source, destination)
        self._full = segment.address + layout.mail_full(source, destination)
        self._bell = segment.address + layout.bell(destination)

    def put(self, envelope: Envelope, content: torch.Tensor, sent: int) -> int | None:
        """**Local.** Hand over the next fragment of ``content`` (bytes); the bytes sent by then; None: no slot."""
        if semaphore.trywait(self._free) != 0:
            return None
        header, body = self._slots.next()
        header[: _HEADER.size] = _HEADER.pack(envelope.tag, envelope.size, envelope.dtype)
        header[_HEADER.size :] = envelope.place.encode()[:_PLACE].ljust(_PLACE, b"\0")
        piece = content[sent : sent + body.numel()]
        body[: piece.numel()].copy_(piece)
        semaphore.post(self._full)
        semaphore.post(self._bell)
        return sent + piece.numel()


class Inbox:
    """From another rank to this one."""

    def __init__(self, segment: Segment, layout: Layout, *, source: int, destination: int) -> None:
        self._slots = _Slots(segment, layout, source, destination)
        self._free = segment.address + layout.mail_free(source, destination)
        self._full = segment.address + layout.mail_full(source, destination)
        self._bell = segment.address + layout.bell(source)

    def take(self) -> tuple[Envelope, torch.Tensor] | None:
        """**Local.** The next fragment, if one is there; it stays valid until :meth:`give_back`."""
        if semaphore.trywait(self._full) != 0:
            return None
        header, body = self._slots.next()
        place = bytes(header[_HEADER.size :]).rstrip(b"\0").decode(errors="replace")
        tag, size, dtype = _HEADER.unpack_from(header)
        return Envelope(tag, size, dtype, place), body

    def give_back(self) -> None:
        """**Local.** The fragment is copied: its slot may be written again."""
        semaphore.post(self._free)
        semaphore.post(self._bell)


class _Slots:
    """The slots of one mailbox, in turn."""

    def __init__(self, segment: Segment, layout: Layout, source: int, destination: int) -> None:
        offsets = [layout.box(source, destination, slot) for slot in range(MAIL_SLOTS)]
        self._slots = [
            (
                segment.view[offset : offset + MAIL_HEADER],
                segment.bytes[offset + MAIL_HEADER : offset + MAIL_HEADER + layout.chunk],
            )
            for offset in offsets
        ]
        self._count = 0

    def next(self) -> tuple[memoryview, torch.Tensor]:
        slot = self._slots[self._count % MAIL_SLOTS]
        self._count += 1
        return slot
