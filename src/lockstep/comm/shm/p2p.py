"""Send and receive: messages between two ranks, matched by sender and tag, in any number in flight.

A message is cut into fragments of a stage's size, which go through the box of an ordered pair of ranks. The sender
takes a free slot, writes a fragment, and hands it over; the receiver copies it out and hands the slot back (Note
[Memory ordering] in semaphore.py). Fragments keep their order, so both sides know the slot of each by counting. A
message that comes before its receive is kept in this process's memory.

The thread that waits for a message moves the fragments of all; while something is in flight and no thread waits, a
thread of the group does. So a send of any size completes while its receiver computes, and a blocking receive costs no
hand-over between threads.

Note [One rule for messages]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A signal handler may raise between any two instructions of what moves a fragment, or call this group again there; and a
fragment may be lost to an error (no memory, a tensor that can't be written). Where the two ranks are then in their
count of fragments is not known any more, and whoever went on would move the wrong bytes. So whatever leaves
:meth:`Messages._move` ends the group, on all ranks, and nothing moves after it; a call in the middle is refused. A work
is taken out of its list only when it is finished, so that each one learns of the error.
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
from lockstep.comm.group.failures import again, in_words
from lockstep.comm.group.fingerprint import dtype_code, dtype_name, encoded, place
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
#: Number of the fragment, tag, bytes of the message, code of its dtype; then the line that sent it, as text.
_HEADER = struct.Struct("<qqqq")
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
        self._source, self._destination = source, destination
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
        header[: _HEADER.size] = _HEADER.pack(self._count, envelope.tag, envelope.size, envelope.dtype)
        header[_HEADER.size :] = encoded(envelope.place, _PLACE).ljust(_PLACE, b"\0")
        piece = content[sent : sent + body.numel()]
        body[: piece.numel()].copy_(piece)
        semaphore.post(self._full)
        semaphore.post(self._destination_wakeup)
        return sent + piece.numel()

    def take(self) -> tuple[Envelope, torch.Tensor] | None:
        """Return the next fragment, if one is there; it stays valid until :meth:`give_back`.

        Raises:
            LockstepError: it is another one: the two ranks count apart.
        """
        if semaphore.trywait(self._full) != 0:
            return None
        header, body = self._next()
        where = bytes(header[_HEADER.size :]).rstrip(b"\0").decode(errors="replace")
        number, tag, size, dtype = _HEADER.unpack_from(header)
        if number != self._count:
            raise LockstepError(
                f"rank {self._destination} expected fragment {self._count} of the messages from rank {self._source}, "
                f"and got fragment {number}, sent at {where}; this group can't be used any more"
            )
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
        if not self.shm_ready():  # (else an error came right after it was complete)
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


@dataclass(eq=False)
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


@dataclass(eq=False)
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
        self.is_over = False

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
        self.is_over = True
        for work in self.pending():
            work.shm_finish(again(error))
        for queue in self._sends:
            queue.clear()
        self._open.clear()
        self._arrivals.clear()
        self._arriving = [None for _ in self._arriving]

    def progress(self) -> None:
        """Move every fragment that can be moved."""
        if self.is_over:
            return
        for outbox, queue in zip(self._outboxes, self._sends, strict=True):
            while queue and self._push(outbox, queue[0]):
                queue[0].work.shm_finish(None)
                queue.popleft()
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
        if receiving is not None and receiving.accepts(envelope):
            content = receiving.content
        else:
            content = torch.empty(envelope.size, dtype=torch.uint8, device="cpu")
        arrival = Arrival(source, envelope, content, receiving=receiving)
        self._arrivals.append(arrival)
        if receiving is not None:
            self._open.remove(receiving)
        return arrival

    def _settle(self, arrival: Arrival) -> None:
        """Complete the receive of a message that has arrived, if there is one."""
        receiving = arrival.receiving
        if receiving is None or not arrival.complete:
            return
        if receiving.accepts(arrival.envelope):
            if arrival.content is not receiving.content:
                receiving.content.copy_(arrival.content)
            tensors.restore(receiving.tensor, receiving.flat)
            receiving.work.shm_arrived_from(arrival.source)
            receiving.work.shm_finish(None)
        else:
            receiving.work.shm_finish(self._health.end(self._unequal(arrival, receiving)))
        self._arrivals.remove(arrival)

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
        # Whoever has the lock, and is interrupted by a signal handler, has it there as well: see _is_interrupted.
        self._condition = threading.Condition(threading.RLock())
        #: Identifier of the thread that moves fragments and sleeps until the next wake-up.
        self._driver: int | None = None
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
        self._begin(Sending(work, to, envelope, content))
        return work

    def receive(self, tensor: torch.Tensor, *, source: int | None, tag: int, timeout: float) -> MessageWork:
        """Begin to receive into ``tensor``, from ``source`` or (None) the rank that sends first."""
        whom = "any rank" if source is None else f"rank {source}"
        work = MessageWork(self, f"recv from {whom} (tag {tag})", timeout, [tensor])
        with torch.inference_mode(False):  # any thread may write to them, in any mode
            flat = tensors.target(tensor)
            content = flat.view(torch.uint8)
        self._begin(Receiving(work, source, tag, tensor, flat, content))
        return work

    def poll(self) -> None:
        """Move what can be moved without waiting."""
        if self._is_interrupted:
            return
        with self._condition:
            if not self._matching.is_over:
                self._progress()
        self._flush()

    def drive(self, work: MessageWork, limit: float | None) -> None:
        """Work until ``work`` is complete (an error completes it too), or ``limit`` seconds have passed."""
        self._refuse_interrupted(work)
        until = None if limit is None else time.monotonic() + limit
        while not work.shm_ready() and (until is None or time.monotonic() < until):
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
        """Complete the sends in flight, in ``timeout`` seconds altogether, refuse the receives, and end the thread."""
        if self._is_interrupted:  # the frame that was interrupted does the rest
            self._closing = True
            self._condition.notify_all()
            return
        until = time.monotonic() + timeout
        with self._condition:
            sends = [each.work for each in self._matching.sends()]
        for work in sends:
            self.drive(work, until - time.monotonic())
        with self._condition:
            self._closing = True
            self._refuse_all()
            self._condition.notify_all()
            thread = self._thread
        self._flush()
        if thread is not None and thread is not threading.current_thread():
            thread.join(10 * NAP)

    @property
    def _is_interrupted(self) -> bool:
        """Whether a signal handler asks, while its thread is in the middle of something here."""
        lock: Any = self._condition
        return bool(lock._is_owned())

    def _refuse_interrupted(self, work: MessageWork) -> None:
        if self._is_interrupted:
            raise LockstepError(
                f"{work}: called while the same thread was moving messages of this process group, as a signal handler "
                "does; let the handler set a flag, and act on it between two messages"
            )

    def _refuse_all(self) -> None:
        self._matching.fail(LockstepError(f"rank {self._rank} destroyed the process group"))

    def _begin(self, message: Sending | Receiving) -> None:
        work = message.work
        self._refuse_interrupted(work)
        with self._condition:
            if self._thread is None:  # (before anything is queued: there may be no room for a thread)
                thread = threading.Thread(target=self._loop, name="shm-messages", daemon=True)
                thread.start()
                self._thread = thread
            self._progress(message)
            if not work.shm_ready():
                self._health.waits_in(str(work))
                self._condition.notify_all()
        self._flush()

    def _loop(self) -> None:
        """Run the group's thread: it moves fragments while something is in flight and no other thread waits for it."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closing or self._matching.pending())
                if self._closing:
                    return
                self._condition.wait(_GRACE)
                if self._driver is not None or not self._matching.pending():
                    continue
            try:
                self._drive(None, time.monotonic() + NAP)
            except Exception:
                if self._health.known() is None:
                    raise
                return  # all works have the error: Note [One rule for messages]

    def _drive(self, work: MessageWork | None, until: float | None) -> None:
        """Move fragments and sleep until the next wake-up, until ``work`` or any other is complete, or it is ``until``.

        Any other, because its callbacks run first: ``work`` may depend on what they do. While another thread does the
        work for all, wait until something is complete.
        """
        me, before = threading.get_ident(), None
        try:
            with self._condition:
                before = self._driver
                if before not in (None, me):
                    self._condition.wait(NAP)
                    return
                self._driver = me
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
            if self._driver == me:
                with self._condition:
                    self._driver = before  # (this thread, if a signal handler waits for a message meanwhile)
                    self._condition.notify_all()
                self._flush()

    def _step(self, work: MessageWork | None) -> bool:
        """Move what can be moved; return False if the thread that drives has something else to do now."""
        with self._condition:
            self._move()
            if self._finished or (work is not None and work.shm_ready()):
                return False
            return not self._closing and bool(self._matching.pending())

    def _progress(self, message: Sending | Receiving | None = None) -> None:
        self._move(message)
        if self._driver is not None:  # it may sleep, although its wake-up was taken here
            semaphore.post(self._wakeup)

    def _move(self, message: Sending | Receiving | None = None) -> None:
        """Queue ``message``, if there is one, and move what can be moved; see Note [One rule for messages]."""
        try:
            while semaphore.trywait(self._wakeup) == 0:  # what it was posted for is found below
                pass
            if isinstance(message, Sending):
                self._matching.send(message)
            elif message is not None:
                self._matching.receive(message)
            self._matching.progress()
            if self._closing:
                self._refuse_all()
        except BaseException as error:
            self._matching.is_over = True  # (at once, without a call: another signal may come)
            said = f"{self._health.name} failed while it moved messages: {in_words(error)}"
            self._matching.fail(self._health.end(LockstepError(said)))
            raise

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
        left = self._health.left()
        away = gone | left
        if not away:
            return None
        self._move()  # what they sent before they went is there by now
        works: list[tuple[MessageWork, int | None]] = [(s.work, s.destination) for s in self._matching.sends()]
        works += [(each.work, source) for each, source in self._matching.receives()]
        for work, peer in works:
            # (A rank that has left and then ended is no loss to who waits for anyone, while another may send.)
            if peer is None and (gone - left or len(away) == len(self._others)):
                peer = min(gone - left or away)
            if peer in away:
                return self._health.lost(str(work), [peer], ended=peer in gone)
        return None
