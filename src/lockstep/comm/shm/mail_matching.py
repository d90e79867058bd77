"""Which message belongs to which receive, and the fragments of both on their way. No thread, no waiting."""

from __future__ import annotations

from collections import deque

import torch

from lockstep.comm.shm.failure import Failure, again
from lockstep.comm.shm.fingerprint import dtype_name
from lockstep.comm.shm.layout import Layout
from lockstep.comm.shm.mail_records import Expected, MailWork, Message, Outgoing
from lockstep.comm.shm.mailbox import Envelope, Inbox, Outbox
from lockstep.comm.shm.segment import Segment
from lockstep.errors import CollectiveMismatch, LockstepError


class Matching:
    """One rank's sends and receives. Whoever calls holds the lock of its :class:`Mail`."""

    def __init__(self, segment: Segment, layout: Layout, *, rank: int, failure: Failure) -> None:
        everyone = range(layout.world_size)
        self._rank = rank
        self._failure = failure
        self._outboxes = [Outbox(segment, layout, source=rank, destination=peer) for peer in everyone]
        self._inboxes = [Inbox(segment, layout, source=peer, destination=rank) for peer in everyone]
        #: By destination, in order of issue.
        self.outgoing: list[deque[Outgoing]] = [deque() for _ in everyone]
        #: Receives no message has come for, in order of issue.
        self.expected: list[Expected] = []
        #: By source: the message of which a part has come.
        self.arriving: list[Message | None] = [None for _ in everyone]
        #: Messages that are arriving, or that nobody has asked for yet.
        self._kept: list[Message] = []
        #: The group has failed, or was destroyed.
        self._over = False

    def send(self, outgoing: Outgoing) -> None:
        """**Local.** Send it when what was sent to that rank before is sent."""
        self.outgoing[outgoing.destination].append(outgoing)

    def expect(self, expected: Expected) -> None:
        """**Local.** Give it the first message that fits: one that is here already, or the next to come."""
        for message in self._kept:
            if message.claimed is None and expected.fits(message.source, message.envelope.tag):
                message.claimed = expected
                self._settle(message)
                return
        self.expected.append(expected)

    def pending(self) -> list[MailWork]:
        """**Local.** What is not complete."""
        return [each.work for queue in self.outgoing for each in queue] + [each.work for each in self.receives()]

    def receives(self) -> list[Expected]:
        """**Local.** Receives that are not complete: posted, or claimed by a message of which a part has come."""
        return self.expected + [message.claimed for message in self._kept if message.claimed is not None]

    def fail(self, error: LockstepError) -> None:
        """**Local.** Complete everything with ``error``. The tensors are the callers' again: nothing writes to them."""
        self._over = True
        for work in self.pending():
            work.shm_finish(again(error))
        for queue in self.outgoing:
            queue.clear()
        self.expected.clear()
        self._kept.clear()
        self.arriving = [None for _ in self.arriving]

    # --- fragments -------------------------------------------------------------------------------------------------

    def progress(self) -> None:
        """**Local.** Move every fragment that can be moved."""
        if self._over:
            return
        for outbox, queue in zip(self._outboxes, self.outgoing, strict=True):
            while queue and self._push(outbox, queue[0]):
                queue.popleft().work.shm_finish(None)
        for source, inbox in enumerate(self._inboxes):
            while (fragment := inbox.take()) is not None:
                self._accept(source, *fragment)
                inbox.give_back()

    def _push(self, outbox: Outbox, outgoing: Outgoing) -> bool:
        """Hand over fragments while there are slots; True when the whole message is."""
        while not outgoing.begun or outgoing.sent < outgoing.envelope.size:
            sent = outbox.put(outgoing.envelope, outgoing.content, outgoing.sent)
            if sent is None:
                return False
            outgoing.begun = True
            outgoing.sent = sent
        return True

    def _accept(self, source: int, envelope: Envelope, body: torch.Tensor) -> None:
        message = self.arriving[source]
        if message is None:
            message = self.arriving[source] = self._open(source, envelope)
        count = min(body.numel(), envelope.size - message.received)
        message.content[message.received : message.received + count].copy_(body[:count])
        message.received += count
        if message.complete:
            self.arriving[source] = None
            self._settle(message)

    def _open(self, source: int, envelope: Envelope) -> Message:
        """Find the receive that a message is for, the one posted first; else keep it for one to come."""
        for expected in self.expected:
            if expected.fits(source, envelope.tag):
                self.expected.remove(expected)
                direct = expected.accepts(envelope)
                content = expected.content if direct else torch.empty(envelope.size, dtype=torch.uint8)
                message = Message(source, envelope, content, claimed=expected)
                break
        else:
            message = Message(source, envelope, torch.empty(envelope.size, dtype=torch.uint8))
        self._kept.append(message)
        return message

    def _settle(self, message: Message) -> None:
        """Complete the receive of a message that has arrived, if there is one."""
        expected = message.claimed
        if expected is None or not message.complete:
            return
        self._kept.remove(message)
        if not expected.accepts(message.envelope):
            expected.work.shm_finish(again(self._failure.report(self._unequal(message, expected))))
            return
        if message.content is not expected.content:
            expected.content.copy_(message.content)
        expected.finish()
        expected.work.shm_arrived_from(message.source)
        expected.work.shm_finish(None)

    def _unequal(self, message: Message, expected: Expected) -> CollectiveMismatch:
        envelope = message.envelope
        itemsize = max(1, expected.dtype.itemsize)
        return CollectiveMismatch(
            f"rank {message.source} sent {envelope.size} bytes of {dtype_name(envelope.dtype)} with tag "
            f"{envelope.tag} at {envelope.place}; rank {self._rank} receives {expected.content.numel()} bytes "
            f"({expected.content.numel() // itemsize} elements of {expected.dtype}) at {expected.work.shm_place}"
        )
