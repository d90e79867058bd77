"""Send and receive: messages between two ranks, matched by sender and tag, in any number in flight.

Whoever waits for a message does the work for all (copies fragments in and out); when nobody waits and something is in
flight, a thread of the group does it. So a send of any size completes while its receiver computes, and a blocking
receive costs no hand-over between threads. Messages that come before anybody asked for them are kept in this process's
memory; a fragment costs its sender nothing but a copy until the mailbox is full.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from lockstep.comm.shm import semaphore
from lockstep.comm.shm.failure import Failure, again
from lockstep.comm.shm.fingerprint import dtype_code, dtype_name, place
from lockstep.comm.shm.layout import Layout
from lockstep.comm.shm.mailbox import Envelope, Inbox, Outbox
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.rounds import SLICE
from lockstep.comm.shm.segment import Segment
from lockstep.comm.shm.work import ShmWork
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, LockstepError, PeerLost

#: Seconds the group's thread leaves to a caller who may be about to wait.
_GRACE = 2e-3
#: Polls of the bell before a waiting rank sleeps.
_POLLS = 100


class MailWork(ShmWork):
    """A send or a receive in flight."""

    def __init__(self, mail: Mail, name: str, result: list[Any]) -> None:
        super().__init__(name, lambda: None, result)
        self._mail = mail

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = timeout.total_seconds() if timeout is not None else 0.0
        self._mail.drive(self, limit if limit > 0 else None)
        return super().wait(timeout)

    def is_completed(self) -> bool:
        self._mail.poll()
        return super().is_completed()

    def finish(self, error: BaseException | None) -> None:
        super().finish(error)
        self._mail.finished.append(self)

    def ready(self) -> bool:
        """As is_completed, without doing any work."""
        return super().is_completed()

    def arrived_from(self, rank: int) -> None:
        self._source = rank


@dataclass
class _Outgoing:
    work: MailWork
    destination: int
    envelope: Envelope
    content: torch.Tensor
    deadline: float
    sent: int = 0
    begun: bool = False


@dataclass
class _Expected:
    """A receive that was posted."""

    work: MailWork
    source: int | None
    tag: int
    #: The memory to fill, as bytes, and what brings it into the caller's tensor.
    content: torch.Tensor
    finish: Any
    dtype: torch.dtype
    place: str
    deadline: float

    def fits(self, source: int, tag: int) -> bool:
        return self.tag == tag and self.source in (None, source)

    def accepts(self, envelope: Envelope) -> bool:
        return (self.content.numel(), dtype_code(self.dtype)) == (envelope.size, envelope.dtype)


@dataclass
class _Message:
    """A message that is arriving, or has arrived."""

    source: int
    envelope: Envelope
    content: torch.Tensor
    received: int = 0
    claimed: _Expected | None = None

    @property
    def complete(self) -> bool:
        return self.received >= self.envelope.size


class Mail:
    """One group's messages, on one rank."""

    def __init__(self, segment: Segment, layout: Layout, *, rank: int, peers: Peers, failure: Failure) -> None:
        everyone = range(layout.world_size)
        self._rank = rank
        self._segment = segment
        self._layout = layout
        self._peers = peers
        self._failure = failure
        self._bell = segment.address + layout.bell(rank)
        self._outboxes = [Outbox(segment, layout, source=rank, destination=peer) for peer in everyone]
        self._inboxes = [Inbox(segment, layout, source=peer, destination=rank) for peer in everyone]
        self._condition = threading.Condition(threading.RLock())
        self._outgoing: list[deque[_Outgoing]] = [deque() for _ in everyone]
        self._expected: list[_Expected] = []
        self._arriving: list[_Message | None] = [None for _ in everyone]
        self._kept: list[_Message] = []
        self._driven = False
        #: Complete, with futures whose callbacks are still to run; see _flush.
        self.finished: deque[MailWork] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False

    # --- what callers do -------------------------------------------------------------------------------------------

    def send(self, flat: torch.Tensor, *, to: int, tag: int, timeout: float, result: list[Any]) -> MailWork:
        """**Local.** Begin to send the elements of ``flat``, which must not change until the work is complete."""
        work = MailWork(self, f"send to rank {to} (tag {tag})", result)
        content = flat.view(torch.uint8)
        envelope = Envelope(tag, content.numel(), dtype_code(flat.dtype), place())
        with self._condition:
            self._outgoing[to].append(_Outgoing(work, to, envelope, content, time.monotonic() + timeout))
            self._begin(work)
        self._flush()
        return work

    def receive(
        self, flat: torch.Tensor, *, source: int | None, tag: int, timeout: float, finish: Any, result: list[Any]
    ) -> MailWork:
        """**Local.** Begin to receive into ``flat``, from ``source`` or (None) whoever sends first."""
        whom = "any rank" if source is None else f"rank {source}"
        work = MailWork(self, f"recv from {whom} (tag {tag})", result)
        expected = _Expected(
            work, source, tag, flat.view(torch.uint8), finish, flat.dtype, place(), time.monotonic() + timeout
        )
        with self._condition:
            for message in self._kept:
                if message.claimed is None and expected.fits(message.source, message.envelope.tag):
                    message.claimed = expected
                    self._settle(message)
                    break
            else:
                self._expected.append(expected)
            self._begin(work)
        self._flush()
        return work

    def poll(self) -> None:
        """**Local.** Move what can be moved without waiting."""
        with self._condition:
            self._progress()
            if self._driven:  # it may sleep, for a bell that was heard here
                semaphore.post(self._bell)
        self._flush()

    def drive(self, work: MailWork, limit: float | None) -> None:
        """**Local.** Work until ``work`` is complete (an error completes it too), or ``limit`` seconds have passed."""
        until = None if limit is None else time.monotonic() + limit
        while not work.ready() and (until is None or time.monotonic() < until):
            with self._condition:
                if self._driven:  # another thread does the work for all: wait until something is complete
                    self._condition.wait(SLICE)
                    continue
                self._driven = True
            try:
                self._drive(work, until)
            finally:
                with self._condition:
                    self._driven = False
                    self._condition.notify_all()
                self._flush()

    def close(self, timeout: float) -> None:
        """**Local.** Complete the sends in flight, refuse the receives, and end the thread."""
        for queue in self._outgoing:
            for each in list(queue):
                self.drive(each.work, timeout)
        with self._condition:
            self._closing = True
            error = LockstepError(f"rank {self._rank} destroyed the process group")
            self._fail_all(error)
            self._condition.notify_all()
            thread = self._thread
        self._flush()
        if thread is not None and thread is not threading.current_thread():
            thread.join(10 * SLICE)

    # --- doing the work --------------------------------------------------------------------------------------------

    def _begin(self, work: MailWork) -> None:
        self._progress()
        if self._driven:  # it may sleep, for a bell that was heard here
            semaphore.post(self._bell)
        if work.ready():
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="shm-mail", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _loop(self) -> None:
        """The group's thread: works while something is in flight and nobody waits for it."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closing or self._pending())
                if self._closing:
                    return
                self._condition.wait(_GRACE)
                if self._driven or not self._pending():
                    continue
                self._driven = True
            try:
                self._drive(None, time.monotonic() + SLICE)
            finally:
                with self._condition:
                    self._driven = False
                    self._condition.notify_all()
                self._flush()

    def _flush(self) -> None:
        """Run the callbacks of what is complete, without holding the lock: they are callers' code."""
        while self.finished:
            try:
                work = self.finished.popleft()
            except IndexError:  # another thread was faster
                return
            work.fulfil()

    def _pending(self) -> list[MailWork]:
        return [each.work for queue in self._outgoing for each in queue] + [each.work for each in self._receives()]

    def _receives(self) -> list[_Expected]:
        """Receives that are not complete: posted, or claimed by a message of which a part has come."""
        return self._expected + [message.claimed for message in self._kept if message.claimed is not None]

    def _drive(self, work: MailWork | None, until: float | None) -> None:
        """Move fragments and sleep on the bell between, until ``work`` is complete or the time has come."""
        looked = time.monotonic()
        while True:
            with self._condition:
                self._progress()
                if (work is not None and work.ready()) or self._closing or not self._pending():
                    return
            for _ in range(_POLLS):
                if semaphore.trywait(self._bell) == 0:
                    break
            else:
                semaphore.wait(self._bell, SLICE)
            now = time.monotonic()
            if now - looked >= SLICE:
                looked = now
                with self._condition:
                    self._look(now)
            if until is not None and now >= until:
                return

    def _progress(self) -> None:
        """Move every fragment that can be moved."""
        while semaphore.trywait(self._bell) == 0:  # what the bell rang for is seen below
            pass
        for outbox, queue in zip(self._outboxes, self._outgoing, strict=True):
            while queue and self._push(outbox, queue[0]):
                queue.popleft().work.finish(None)
        for source, inbox in enumerate(self._inboxes):
            while (fragment := inbox.take()) is not None:
                self._accept(source, *fragment)
                inbox.give_back()

    def _push(self, outbox: Outbox, outgoing: _Outgoing) -> bool:
        """Hand over fragments while there are slots; True when the whole message is."""
        while not outgoing.begun or outgoing.sent < outgoing.envelope.size:
            sent = outbox.put(outgoing.envelope, outgoing.content, outgoing.sent)
            if sent is None:
                return False
            outgoing.begun = True
            outgoing.sent = sent
        return True

    def _accept(self, source: int, envelope: Envelope, body: torch.Tensor) -> None:
        message = self._arriving[source]
        if message is None:
            message = self._arriving[source] = self._open(source, envelope)
        count = min(body.numel(), envelope.size - message.received)
        message.content[message.received : message.received + count].copy_(body[:count])
        message.received += count
        if message.complete:
            self._arriving[source] = None
            self._settle(message)

    def _open(self, source: int, envelope: Envelope) -> _Message:
        """Find the receive that a message is for, the one posted first; else keep it for one to come."""
        for expected in self._expected:
            if expected.fits(source, envelope.tag):
                self._expected.remove(expected)
                direct = expected.accepts(envelope)
                content = expected.content if direct else torch.empty(envelope.size, dtype=torch.uint8)
                message = _Message(source, envelope, content, claimed=expected)
                break
        else:
            message = _Message(source, envelope, torch.empty(envelope.size, dtype=torch.uint8))
        self._kept.append(message)
        return message

    def _settle(self, message: _Message) -> None:
        """Complete the receive of a message that has arrived, if there is one."""
        expected = message.claimed
        if expected is None or not message.complete:
            return
        self._kept.remove(message)
        envelope = message.envelope
        if not expected.accepts(envelope):
            itemsize = max(1, expected.dtype.itemsize)
            error = CollectiveMismatch(
                f"rank {message.source} sent {envelope.size} bytes of {dtype_name(envelope.dtype)} with tag "
                f"{envelope.tag} at {envelope.place}; rank {self._rank} receives {expected.content.numel()} bytes "
                f"({expected.content.numel() // itemsize} elements of {expected.dtype}) at {expected.place}"
            )
            expected.work.finish(again(self._failure.report(error)))
            return
        if message.content is not expected.content:
            expected.content.copy_(message.content)
        expected.finish()
        expected.work.arrived_from(message.source)
        expected.work.finish(None)

    # --- errors ----------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """A slice has passed: has the group failed, a rank gone, a time limit passed?"""
        if not self._pending():
            return
        error = self._failure.known() or self._lost()
        if error is None:
            late = [each.work.name for queue in self._outgoing for each in queue if now >= each.deadline]
            late += [each.work.name for each in self._receives() if now >= each.deadline]
            if late:
                error = self._failure.report(
                    CollectiveTimeout(f"rank {self._rank}: no partner within the time limit for {', '.join(late)}")
                )
        if error is not None:
            self._fail_all(error)

    def _lost(self) -> LockstepError | None:
        gone = set(self._peers.gone())
        everyone = range(self._layout.world_size)
        left = {peer for peer in everyone if self._segment.view[self._layout.presence(peer)]} - {self._rank}
        if not gone and not left:
            return None
        self._progress()  # what they sent before they went is there by now
        away = gone | left
        for outgoing in (each for queue in self._outgoing for each in queue):
            if outgoing.destination in away:
                return self._report_lost(outgoing.work.name, outgoing.destination, outgoing.destination in gone)
        for expected in self._expected:
            if expected.source is None and (gone or len(away) >= self._layout.world_size - 1):
                return self._report_lost(expected.work.name, min(gone or away), bool(gone))
            if expected.source in away:
                return self._report_lost(expected.work.name, expected.source, expected.source in gone)
        for source in away:
            message = self._arriving[source]
            if message is not None and message.claimed is not None:
                return self._report_lost(message.claimed.work.name, source, source in gone)
        return None

    def _report_lost(self, name: str, peer: int, ended: bool) -> LockstepError:
        how = "ended" if ended else "destroyed the group"
        pid = self._peers.pid(peer)
        return self._failure.report(
            PeerLost(f"rank {self._rank} waits in {name}, but rank {peer} (process {pid}) {how}")
        )

    def _fail_all(self, error: LockstepError) -> None:
        for work in self._pending():
            work.finish(again(error))
        for queue in self._outgoing:
            queue.clear()
        self._expected.clear()
        self._kept = [message for message in self._kept if message.claimed is None]
        self._condition.notify_all()
