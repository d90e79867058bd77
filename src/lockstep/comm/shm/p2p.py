"""Send and receive: messages between two ranks, matched by sender and tag, in any number in flight.

A message is cut into fragments of a stage's size, which go through the box of an ordered pair of ranks. The sender
takes a free slot, writes a fragment, and hands it over; the receiver copies it out and hands the slot back (Note
[Memory ordering] in semaphore.py). Fragments keep their order, so both sides know the slot of each by counting. A
message that comes before its receive is kept in this process's memory.

The thread that waits for a message moves the fragments of all; while something is in flight and no thread waits, a
thread of the group does. So a send of any size completes while its receiver computes, and a blocking receive costs no
hand-over between threads.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from lockstep import _torch
from lockstep.comm.group import tensors
from lockstep.comm.group.failures import again
from lockstep.comm.group.fingerprint import dtype_code, dtype_name, place
from lockstep.comm.group.work import GroupWork
from lockstep.comm.shm import semaphore
from lockstep.comm.shm.health import Health
from lockstep.comm.shm.layout import MAIL_HEADER, MAIL_SLOTS, Layout
from lockstep.comm.shm.rounds import NAP
from lockstep.comm.shm.segment import Segment
from lockstep.errors import CollectiveMismatch, LockstepError
from lockstep.job import flight
from lockstep.job.patience import Patience

#: Seconds the group's thread leaves to a caller who may be about to wait.
_GRACE = 2e-3
#: Polls of the wake-up before a waiting rank sleeps.
_POLLS = 100
#: Tag, bytes of the message, code of its dtype; then the line that sent it, as text.
_HEADER = struct.Struct("<qqq")
_PLACE = MAIL_HEADER - _HEADER.size


# --- boxes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Envelope:
    """The facts about a message before its content."""

    tag: int
    size: int
    dtype: int
    place: str


class Box:
    """The box of an ordered pair of ranks, as one of them sees it: the source puts, the destination takes."""

    def __init__(self, segment: Segment, layout: Layout, *, source: int, destination: int) -> None:
        offsets = [layout.box(source, destination, slot) for slot in range(MAIL_SLOTS)]
        self._headers = [segment.view[offset : offset + MAIL_HEADER] for offset in offsets]
        self._bodies = [segment.bytes[offset + MAIL_HEADER :][: layout.chunk] for offset in offsets]
        self._free = segment.address + layout.mail_free(source, destination)
        self._full = segment.address + layout.mail_full(source, destination)
        self._source_wakeup = segment.address + layout.wakeup(source)
        self._destination_wakeup = segment.address + layout.wakeup(destination)
        #: The number of fragments put, or taken, so far.
        self._count = 0

    def put(self, envelope: Envelope, content: torch.Tensor, sent: int) -> int | None:
        """Hand over the next fragment of ``content`` (bytes); returns the bytes sent by then, or None: no slot."""
        if semaphore.trywait(self._free) != 0:
            return None
        header, body = self._next()
        header[: _HEADER.size] = _HEADER.pack(envelope.tag, envelope.size, envelope.dtype)
        header[_HEADER.size :] = envelope.place.encode()[:_PLACE].ljust(_PLACE, b"\0")
        piece = content[sent : sent + body.numel()]
        body[: piece.numel()].copy_(piece)
        semaphore.post(self._full)
        semaphore.post(self._destination_wakeup)
        return sent + piece.numel()

    def take(self) -> tuple[Envelope, torch.Tensor] | None:
        """Return the next fragment, if one is there; it stays valid until :meth:`give_back`."""
        if semaphore.trywait(self._full) != 0:
            return None
        header, body = self._next()
        where = bytes(header[_HEADER.size :]).rstrip(b"\0").decode(errors="replace")
        tag, size, dtype = _HEADER.unpack_from(header)
        return Envelope(tag, size, dtype, where), body

    def give_back(self) -> None:
        """Let the slot be written again: the fragment is copied."""
        semaphore.post(self._free)
        semaphore.post(self._source_wakeup)

    def _next(self) -> tuple[memoryview, torch.Tensor]:
        slot = self._count % MAIL_SLOTS
        self._count += 1
        return self._headers[slot], self._bodies[slot]


def empty_boxes(segment: Segment, layout: Layout, *, rank: int) -> None:
    """Forget all fragments to and from a rank, on that rank, while none sends; see :meth:`Engine.renew`."""
    semaphore.drain(segment.address + layout.wakeup(rank))
    for peer in range(layout.world_size):
        semaphore.drain(segment.address + layout.mail_full(peer, rank))
        free = segment.address + layout.mail_free(rank, peer)
        semaphore.drain(free)
        for _ in range(MAIL_SLOTS):
            semaphore.post(free)


# --- what is in flight -----------------------------------------------------------------------------------------------


@_torch.untraced
class MessageWork(GroupWork):
    """A send or a receive in flight."""

    def __init__(self, messages: Messages, name: str, timeout: float, result: list[Any]) -> None:
        super().__init__(name, result, lambda: None)
        self._shm_messages = messages
        #: The line of the program that issued it.
        self.shm_place = place()
        #: Seconds that a thread may wait for the message.
        self.shm_limit = timeout
        #: The time at which they are over; None: no thread waits yet, as for a message that may come much later.
        self.shm_deadline: float | None = None

    def __str__(self) -> str:
        return f"{self.shm_name} at {self.shm_place}"

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._shm_awaited()
        return super().wait(timeout)

    def _shm_sleep(self, seconds: float | None) -> bool:
        with flight.waiting(str(self)):
            self._shm_messages.drive(self, seconds)
        return self.shm_ready()

    def is_completed(self) -> bool:
        self._shm_messages.poll()
        return self.shm_ready()

    def get_future(self) -> torch.futures.Future[Any]:
        self._shm_awaited()
        return super().get_future()

    def shm_finish(self, error: BaseException | None) -> None:
        super().shm_finish(error)
        self._shm_messages.completed(self)

    def shm_ready(self) -> bool:
        """Return what is_completed does, without moving any fragment."""
        return super().is_completed()

    def shm_arrived_from(self, rank: int) -> None:
        self._shm_source = rank

    def _shm_awaited(self) -> None:
        if self.shm_deadline is None:
            self.shm_deadline = time.monotonic() + self.shm_limit


@dataclass
class Sending:
    """A send that is not complete."""

    work: MessageWork
    destination: int
    envelope: Envelope
    content: torch.Tensor
    sent: int = 0
    begun: bool = False


@dataclass
class Receiving:
    """A receive that is not complete."""

    work: MessageWork
    #: The sending rank; None: any.
    source: int | None
    tag: int
    tensor: torch.Tensor
    #: The tensor's elements (``tensors.target``), and the same memory as bytes.
    flat: torch.Tensor
    content: torch.Tensor

    def fits(self, source: int, tag: int) -> bool:
        return self.tag == tag and self.source in (None, source)

    def accepts(self, envelope: Envelope) -> bool:
        return (self.content.numel(), dtype_code(self.flat.dtype)) == (envelope.size, envelope.dtype)


@dataclass
class Arrival:
    """A message of which a part has come, or all of it before its receive."""

    source: int
    envelope: Envelope
    content: torch.Tensor
    received: int = 0
    receiving: Receiving | None = None

    @property
    def complete(self) -> bool:
        return self.received >= self.envelope.size


class Matching:
    """Matches messages to receives, and moves the fragments of both. It has no thread, and never waits."""

    def __init__(self, segment: Segment, layout: Layout, *, rank: int, health: Health) -> None:
        everyone = range(layout.world_size)
        self._rank = rank
        self._health = health
        self._outboxes = [Box(segment, layout, source=rank, destination=peer) for peer in everyone]
        self._inboxes = [Box(segment, layout, source=peer, destination=rank) for peer in everyone]
        #: Destination -> its sends in order of issue.
        self._sends: list[deque[Sending]] = [deque() for _ in everyone]
        #: Receives without a message so far, in order of issue.
        self._open: list[Receiving] = []
        #: Source -> the message of which a part has come.
        self._arriving: list[Arrival | None] = [None for _ in everyone]
        #: Messages that are arriving, or that no receive has asked for yet.
        self._arrivals: list[Arrival] = []
        #: True if the group has failed or was destroyed.
        self._over = False

    def send(self, sending: Sending) -> None:
        """Queue a send behind the earlier ones to the same rank."""
        self._sends[sending.destination].append(sending)

    def receive(self, receiving: Receiving) -> None:
        """Give a receive the first message that fits: one that is here already, or the next to come."""
        for arrival in self._arrivals:
            if arrival.receiving is None and receiving.fits(arrival.source, arrival.envelope.tag):
                arrival.receiving = receiving
                self._settle(arrival)
                return
        self._open.append(receiving)

    def excuse(self, seconds: float) -> None:
        """Give what is in flight so many seconds more."""
        works = [*(each.work for each in self.sends()), *(each.work for each, _ in self.receives())]
        for work in works:
            if work.shm_deadline is not None:
                work.shm_deadline += seconds

    def sends(self) -> Iterator[Sending]:
        """Yield the sends that are not complete."""
        for queue in self._sends:
            yield from queue

    def receives(self) -> Iterator[tuple[Receiving, int | None]]:
        """Yield the receives that are not complete, and the rank that the rest of each must come from; None: any."""
        for receiving in self._open:
            yield receiving, receiving.source
        for arrival in self._arrivals:
            if arrival.receiving is not None:
                yield arrival.receiving, arrival.source

    def pending(self) -> list[MessageWork]:
        """Return the works of all sends and receives that are not complete."""
        return [each.work for each in self.sends()] + [each.work for each, _ in self.receives()]

    def fail(self, error: LockstepError) -> None:
        """Complete everything with ``error``. The tensors are the callers' again: nothing writes to them."""
        self._over = True
        for work in self.pending():
            work.shm_finish(again(error))
        for queue in self._sends:
            queue.clear()
        self._open.clear()
        self._arrivals.clear()
        self._arriving = [None for _ in self._arriving]

    def progress(self) -> None:
        """Move every fragment that can be moved."""
        if self._over:
            return
        for outbox, queue in zip(self._outboxes, self._sends, strict=True):
            while queue and self._push(outbox, queue[0]):
                queue.popleft().work.shm_finish(None)
        for source, inbox in enumerate(self._inboxes):
            while (fragment := inbox.take()) is not None:
                self._accept(source, *fragment)
                inbox.give_back()

    def _push(self, outbox: Box, sending: Sending) -> bool:
        """Hand over fragments while slots are free; return True once the whole message is handed over."""
        while not sending.begun or sending.sent < sending.envelope.size:
            sent = outbox.put(sending.envelope, sending.content, sending.sent)
            if sent is None:
                return False
            sending.begun = True
            sending.sent = sent
        return True

    def _accept(self, source: int, envelope: Envelope, body: torch.Tensor) -> None:
        arrival = self._arriving[source]
        if arrival is None:
            arrival = self._arriving[source] = self._begin(source, envelope)
        count = min(body.numel(), envelope.size - arrival.received)
        arrival.content[arrival.received : arrival.received + count].copy_(body[:count])
        arrival.received += count
        if arrival.complete:
            self._arriving[source] = None
            self._settle(arrival)

    def _begin(self, source: int, envelope: Envelope) -> Arrival:
        """Find the receive that a message is for, the first one issued that fits; else keep it for one to come."""
        receiving = next((each for each in self._open if each.fits(source, envelope.tag)), None)
        if receiving is not None:
            self._open.remove(receiving)
        if receiving is not None and receiving.accepts(envelope):
            content = receiving.content
        else:
            content = torch.empty(envelope.size, dtype=torch.uint8)
        arrival = Arrival(source, envelope, content, receiving=receiving)
        self._arrivals.append(arrival)
        return arrival

    def _settle(self, arrival: Arrival) -> None:
        """Complete the receive of a message that has arrived, if there is one."""
        receiving = arrival.receiving
        if receiving is None or not arrival.complete:
            return
        self._arrivals.remove(arrival)
        if not receiving.accepts(arrival.envelope):
            receiving.work.shm_finish(self._health.end(self._unequal(arrival, receiving)))
            return
        if arrival.content is not receiving.content:
            receiving.content.copy_(arrival.content)
        tensors.restore(receiving.tensor, receiving.flat)
        receiving.work.shm_arrived_from(arrival.source)
        receiving.work.shm_finish(None)

    def _unequal(self, arrival: Arrival, receiving: Receiving) -> CollectiveMismatch:
        envelope, flat = arrival.envelope, receiving.flat
        return CollectiveMismatch(
            f"rank {arrival.source} sent {envelope.size} bytes of {dtype_name(envelope.dtype)} with tag "
            f"{envelope.tag} at {envelope.place}; rank {self._rank} receives {receiving.content.numel()} bytes "
            f"({flat.numel()} elements of {flat.dtype}) at {receiving.work.shm_place}"
        )


# --- which thread moves the fragments --------------------------------------------------------------------------------


class Messages:
    """One group's messages, on one rank."""

    def __init__(self, segment: Segment, layout: Layout, *, rank: int, health: Health) -> None:
        self._rank = rank
        self._others = [peer for peer in range(layout.world_size) if peer != rank]
        self._wakeup = segment.address + layout.wakeup(rank)
        self._health = health
        self._matching = Matching(segment, layout, rank=rank, health=health)
        self._condition = threading.Condition(threading.RLock())
        #: True while a thread moves fragments and sleeps until the next wake-up.
        self._driven = False
        #: Complete works whose futures' callbacks are still to run; see _flush.
        self._finished: deque[MessageWork] = deque()
        #: The time of the last check whether the messages in flight can still complete.
        self._looked = 0.0
        self._patience = Patience()
        self._thread: threading.Thread | None = None
        self._closing = False

    def send(self, tensor: torch.Tensor, *, to: int, tag: int, timeout: float) -> MessageWork:
        """Begin to send ``tensor``, which must not change until the work is complete."""
        work = MessageWork(self, f"send to rank {to} (tag {tag})", timeout, [tensor])
        flat = tensors.source(tensor)
        content = flat.view(torch.uint8)
        envelope = Envelope(tag, content.numel(), dtype_code(flat.dtype), work.shm_place)
        with self._condition:
            self._matching.send(Sending(work, to, envelope, content))
            self._begin(work)
        self._flush()
        return work

    def receive(self, tensor: torch.Tensor, *, source: int | None, tag: int, timeout: float) -> MessageWork:
        """Begin to receive into ``tensor``, from ``source`` or (None) the rank that sends first."""
        whom = "any rank" if source is None else f"rank {source}"
        work = MessageWork(self, f"recv from {whom} (tag {tag})", timeout, [tensor])
        flat = tensors.target(tensor)
        with self._condition:
            self._matching.receive(Receiving(work, source, tag, tensor, flat, flat.view(torch.uint8)))
            self._begin(work)
        self._flush()
        return work

    def poll(self) -> None:
        """Move what can be moved without waiting."""
        with self._condition:
            self._progress()
        self._flush()

    def drive(self, work: MessageWork, limit: float | None) -> None:
        """Work until ``work`` is complete (an error completes it too), or ``limit`` seconds have passed."""
        until = None if limit is None else time.monotonic() + limit
        while not work.shm_ready() and (until is None or time.monotonic() < until):
            with self._condition:
                if self._driven:  # another thread does the work for all: wait until something is complete
                    self._condition.wait(NAP)
                    continue
                self._driven = True
            self._drive(work, until)

    def in_flight(self) -> bool:
        """Return whether a message that this rank sends or receives is not complete."""
        with self._condition:
            return bool(self._matching.pending())

    def completed(self, work: MessageWork) -> None:
        """Wake up the thread that waits for ``work`` while another one drives: it is complete."""
        self._finished.append(work)
        self._condition.notify_all()

    def close(self, timeout: float) -> None:
        """Complete the sends in flight, refuse the receives, and end the thread."""
        with self._condition:
            sends = [each.work for each in self._matching.sends()]
        for work in sends:
            self.drive(work, timeout)
        with self._condition:
            self._closing = True
            self._matching.fail(LockstepError(f"rank {self._rank} destroyed the process group"))
            self._condition.notify_all()
            thread = self._thread
        self._flush()
        if thread is not None and thread is not threading.current_thread():
            thread.join(10 * NAP)

    def _begin(self, work: MessageWork) -> None:
        self._progress()
        if work.shm_ready():
            return
        self._health.waits_in(str(work))
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="shm-messages", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _loop(self) -> None:
        """Run the group's thread: it moves fragments while something is in flight and no other thread waits for it."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closing or self._matching.pending())
                if self._closing:
                    return
                self._condition.wait(_GRACE)
                if self._driven or not self._matching.pending():
                    continue
                self._driven = True
            self._drive(None, time.monotonic() + NAP)

    def _drive(self, work: MessageWork | None, until: float | None) -> None:
        """Move fragments and sleep until the next wake-up, until ``work`` or any other is complete, or it is ``until``.

        Any other, because its callbacks run first: ``work`` may depend on what they do. The caller has
        set ``_driven``.
        """
        try:
            while self._step(work):
                for _ in range(_POLLS):
                    if semaphore.trywait(self._wakeup) == 0:
                        break
                else:
                    semaphore.wait(self._wakeup, NAP)
                now = time.monotonic()
                if now - self._looked >= NAP:
                    self._looked = now
                    self._look(now)
                if until is not None and now >= until:
                    return
        finally:
            with self._condition:
                self._driven = False
                self._condition.notify_all()
            self._flush()

    def _step(self, work: MessageWork | None) -> bool:
        """Move what can be moved; return False if the thread that drives has something else to do now."""
        with self._condition:
            self._move()
            if self._finished or (work is not None and work.shm_ready()):
                return False
            return not self._closing and bool(self._matching.pending())

    def _progress(self) -> None:
        self._move()
        if self._driven:  # it may sleep, although its wake-up was taken here
            semaphore.post(self._wakeup)

    def _move(self) -> None:
        while semaphore.trywait(self._wakeup) == 0:  # what it was posted for is found below
            pass
        self._matching.progress()

    def _flush(self) -> None:
        """Run the callbacks of what is complete, without holding the lock: they are callers' code."""
        while self._finished:
            try:
                work = self._finished.popleft()
            except IndexError:  # another thread was faster
                return
            work.shm_fulfil()

    # --- can what is in flight still complete? ---------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """End what can't complete any more. Called after each nap."""
        with self._condition:
            if excused := self._patience.excused(now):
                self._matching.excuse(excused)
            if self._matching.pending():
                error = self._health.known() or self._lost() or self._late(now)
                if error is not None:
                    self._matching.fail(error)

    def _late(self, now: float) -> LockstepError | None:
        works = [(each.work, [each.destination]) for each in self._matching.sends()]
        works += [
            (each.work, self._others if each.source is None else [each.source]) for each, _ in self._matching.receives()
        ]
        late = [pair for pair in works if pair[0].shm_deadline is not None and now >= pair[0].shm_deadline]
        if not late:
            return None
        missing = sorted({peer for _, partners in late for peer in partners})
        what = ", ".join(str(work) for work, _ in late)
        return self._health.late(what, max(work.shm_limit for work, _ in late), missing)

    def _lost(self) -> LockstepError | None:
        gone = self._health.gone()
        away = gone | self._health.left()
        if not away:
            return None
        self._matching.progress()  # what they sent before they went is there by now
        works: list[tuple[MessageWork, int | None]] = [(s.work, s.destination) for s in self._matching.sends()]
        works += [(each.work, source) for each, source in self._matching.receives()]
        for work, peer in works:
            if peer is None and (gone or len(away) == len(self._others)):
                peer = min(gone or away)
            if peer in away:
                return self._health.lost(str(work), [peer], ended=peer in gone)
        return None
