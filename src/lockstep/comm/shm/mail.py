"""Send and receive: messages between two ranks, matched by sender and tag, in any number in flight.

Whoever waits for a message does the work for all (copies fragments in and out); when nobody waits and something is in
flight, a thread of the group does it. So a send of any size completes while its receiver computes, and a blocking
receive costs no hand-over between threads. Messages that come before anybody asked for them are kept in this process's
memory; a fragment costs its sender nothing but a copy until the mailbox is full.

This file says who works when; what is moved, mail_matching.py; and whether it can still complete, mail_health.py.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lockstep.comm.shm import semaphore
from lockstep.comm.shm.failure import Failure
from lockstep.comm.shm.fingerprint import dtype_code, place
from lockstep.comm.shm.layout import Layout
from lockstep.comm.shm.mail_health import Health
from lockstep.comm.shm.mail_matching import Matching
from lockstep.comm.shm.mail_records import Expected, MailWork, Outgoing
from lockstep.comm.shm.mailbox import Envelope
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.rounds import SLICE
from lockstep.comm.shm.segment import Segment
from lockstep.comm.shm.standing import Standing
from lockstep.errors import LockstepError

#: Seconds the group's thread leaves to a caller who may be about to wait.
_GRACE = 2e-3
#: Polls of the bell before a waiting rank sleeps.
_POLLS = 100


class Mail:
    """One group's messages, on one rank."""

    def __init__(self, segment: Segment, layout: Layout, *, rank: int, peers: Peers, failure: Failure) -> None:
        self._rank = rank
        self._bell = segment.address + layout.bell(rank)
        self._matching = Matching(segment, layout, rank=rank, failure=failure)
        self._standing = Standing(segment, layout, rank=rank, peers=peers)
        self._health = Health(
            segment, layout, self._matching, rank=rank, peers=peers, standing=self._standing, failure=failure
        )
        self._condition = threading.Condition(threading.RLock())
        self._driven = False
        #: Complete, with futures whose callbacks are still to run; see _flush.
        self._finished: deque[MailWork] = deque()
        #: When it was last asked whether what is in flight can still complete.
        self._looked = 0.0
        self._thread: threading.Thread | None = None
        self._closing = False

    # --- what callers do -------------------------------------------------------------------------------------------

    def send(self, flat: torch.Tensor, *, to: int, tag: int, timeout: float, result: list[Any]) -> MailWork:
        """**Local.** Begin to send the elements of ``flat``, which must not change until the work is complete."""
        work = MailWork(self, f"send to rank {to} (tag {tag})", place=place(), timeout=timeout, result=result)
        content = flat.view(torch.uint8)
        envelope = Envelope(tag, content.numel(), dtype_code(flat.dtype), work.shm_place)
        with self._condition:
            self._matching.send(Outgoing(work, to, envelope, content))
            self._begin(work)
        self._flush()
        return work

    def receive(
        self,
        flat: torch.Tensor,
        *,
        source: int | None,
        tag: int,
        timeout: float,
        finish: Callable[[], None],
        result: list[Any],
    ) -> MailWork:
        """**Local.** Begin to receive into ``flat``, from ``source`` or (None) whoever sends first."""
        whom = "any rank" if source is None else f"rank {source}"
        work = MailWork(self, f"recv from {whom} (tag {tag})", place=place(), timeout=timeout, result=result)
        with self._condition:
            self._matching.expect(Expected(work, source, tag, flat.view(torch.uint8), finish, flat.dtype))
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
        while not work.shm_ready() and (until is None or time.monotonic() < until):
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

    def completed(self, work: MailWork) -> None:
        """**Local.** ``work`` is complete: whoever waits for it while another thread drives may go on."""
        self._finished.append(work)
        self._condition.notify_all()

    def close(self, timeout: float) -> None:
        """**Local.** Complete the sends in flight, refuse the receives, and end the thread."""
        with self._condition:
            sends = [each.work for queue in self._matching.outgoing for each in queue]
        for work in sends:
            self.drive(work, timeout)
        with self._condition:
            self._closing = True
            self._matching.fail(LockstepError(f"rank {self._rank} destroyed the process group"))
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
        if work.shm_ready():
            return
        self._standing.waits_in(str(work))
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="shm-mail", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _loop(self) -> None:
        """The group's thread: works while something is in flight and nobody waits for it."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closing or self._matching.pending())
                if self._closing:
                    return
                self._condition.wait(_GRACE)
                if self._driven or not self._matching.pending():
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
        while self._finished:
            try:
                work = self._finished.popleft()
            except IndexError:  # another thread was faster
                return
            work.shm_fulfil()

    def _drive(self, work: MailWork | None, until: float | None) -> None:
        """Move fragments and sleep on the bell between, until ``work`` or any other is complete, or it is ``until``.

        Any other: its callbacks run before the work goes on, for ``work`` may depend on what they do.
        """
        while True:
            with self._condition:
                self._progress()
                if self._finished or (work is not None and work.shm_ready()):
                    return
                if self._closing or not self._matching.pending():
                    return
            for _ in range(_POLLS):
                if semaphore.trywait(self._bell) == 0:
                    break
            else:
                semaphore.wait(self._bell, SLICE)
            now = time.monotonic()
            if now - self._looked >= SLICE:
                self._looked = now
                with self._condition:
                    self._look(now)
            if until is not None and now >= until:
                return

    def _progress(self) -> None:
        while semaphore.trywait(self._bell) == 0:  # what the bell rang for is seen below
            pass
        self._matching.progress()

    def _look(self, now: float) -> None:
        """A slice has passed: end what can't complete any more."""
        error = self._health.error(now) if self._matching.pending() else None
        if error is not None:
            self._matching.fail(error)
