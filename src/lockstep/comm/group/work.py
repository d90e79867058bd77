"""Work: a collective that was issued, to be waited for. Works run in the order in which they were issued.

A collective that its caller waits for runs on the caller's own thread if nothing is before it: no hand-over to another
thread, which would cost more than a small all-reduce. Everything else goes through a queue, which a thread of the group
serves; it is started when first needed. Groups share nothing, so one that waits can't hold up another.

Note [Callbacks]
~~~~~~~~~~~~~~~~
The callbacks of a future may issue collectives of the same group, and wait for them (PowerSGD's do), while the thread
that added them issues others. When the callbacks run depends on the timing of each rank, so the order of issue
would differ from rank to rank. Therefore collectives that a callback issues come right after the work that the callback
follows, before everything else that was issued since: the group's thread keeps its turn while it runs the callbacks of
a work, and what they issue, on that thread, runs then and there. No thread that issues a collective waits for that. All
this holds for a callback that is added before the next collective is issued; one added later runs when it is added, at
another time on every rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep import _torch
from lockstep.comm.group.failures import again
from lockstep.errors import CollectiveTimeout, LockstepError
from lockstep.job import flight

#: Seconds to wait at the end for callers' callbacks, which may do anything.
_PARTING = 10.0
#: Guards the futures of all works: taken briefly, to ask for a future or to complete one. (A signal handler may do
#: either while its thread has the lock.)
_lock = threading.RLock()


def _after_fork() -> None:
    """Give a forked child a lock of its own: a thread that it does not have may have held its parent's."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


@_torch.untraced
class GroupWork(dist.Work):
    """One issued operation. It runs once, on whichever thread; any thread may wait for it.

    Our names begin with ``shm_``, after the first engine: torch gives its class more names from version to version.
    """

    _shm_error: BaseException | None = None
    _shm_future: torch.futures.Future[Any] | None = None
    #: True if the future exists and is not complete.
    _shm_owed = False
    _shm_source = -1
    _shm_run: Callable[[], None] | None = None
    #: An event that is set when the work is complete; None: it was complete from the start.
    _shm_done: threading.Event | None = None

    def __init__(self, name: str, result: list[Any], run: Callable[[], None] | None = None) -> None:
        """Make a work that ``run`` completes; without it the work is complete.

        Args:
            name: what it is, for messages.
            result: the output tensors.
        """
        super().__init__()
        self.shm_name = name
        self._shm_result = result
        if run is not None:
            self._shm_run = run
            self._shm_done = threading.Event()

    def shm_execute(self) -> None:
        """Run it and wake up the threads that wait for it, also if it failed. :meth:`shm_fulfil` must follow."""
        assert self._shm_run is not None  # (for the type checker)
        try:
            self._shm_run()
        except BaseException as error:  # noqa: BLE001  (wait() raises it)
            self.shm_finish(error)
        else:
            self.shm_finish(None)

    def shm_finish(self, error: BaseException | None) -> None:
        """Mark it as complete. Call :meth:`shm_fulfil` afterwards, without locks: it runs callers' code."""
        assert self._shm_done is not None  # (for the type checker)
        with _lock:
            self._shm_error = error
            self._shm_run = None  # releases the tensors
            self._shm_done.set()

    def shm_fulfil(self) -> None:
        """Complete the future, if one was asked for; its callbacks run here."""
        with _lock:
            future, self._shm_owed = self._shm_future if self._shm_owed else None, False
        if future is None:
            return
        if self._shm_error is None:
            future.set_result(self._shm_result)
        elif isinstance(self._shm_error, Exception):
            future.set_exception(self._shm_error)
        else:
            future.set_exception(RuntimeError(f"{self.shm_name}: {type(self._shm_error).__name__}"))

    # --- torch.distributed.Work ------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is complete.

        Raises:
            LockstepError: it failed; the message says on which rank and where.
            CollectiveTimeout: ``timeout`` passed first. The operation continues.
        """
        if self._shm_done is not None and not self._shm_done.is_set():
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            if not self._shm_sleep(seconds if seconds > 0 else None):
                raise CollectiveTimeout(
                    f"{self.shm_name} was not complete after {seconds:g} s; it continues in the background"
                )
        if self._shm_error is not None:
            if isinstance(self._shm_error, LockstepError):
                raise again(self._shm_error) from self._shm_error
            raise self._shm_error
        return True

    def _shm_sleep(self, seconds: float | None) -> bool:
        """Wait until the work is complete; return False if that took longer than ``seconds``."""
        assert self._shm_done is not None  # (for the type checker)
        with flight.waiting(self.shm_name):
            return self._shm_done.wait(seconds)

    def is_completed(self) -> bool:
        return self._shm_done is None or self._shm_done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._shm_error is None

    def exception(self) -> BaseException | None:
        return self._shm_error

    def result(self) -> list[Any]:
        return self._shm_result

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._shm_source

    def _source_rank(self) -> int:  # torch.distributed.recv calls it by this name
        return self._shm_source

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the output tensors as its value."""
        with _lock:
            if self._shm_future is None:
                self._shm_future = torch.futures.Future()
                self._shm_owed = True
            future = self._shm_future
            done = self._shm_done is None or self._shm_done.is_set()
        if done:
            self.shm_fulfil()
        return future


class Turns:
    """Decides who may use a group's engine: one collective at a time, in order of issue.

    A signal handler runs on the main thread, between any two instructions of the program, so it may come in the middle
    of a collective that this thread runs. What it issues then must not wait for its turn, which would never come:
    :meth:`put` refuses it, and :meth:`close` waits for nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        #: Held by the thread that runs a collective or its callbacks. A thread that issues one while the queue is empty
        #: tries to take it. It knows its owner, so that a signal handler can't wait for its own thread.
        self.lock: Any = threading.RLock()  # (Any: type stubs lack _is_owned, which threading.Condition asks as well)
        #: True while the owner of the lock uses it; set and taken back by the owner alone.
        self.in_use = False
        #: Works that wait; the group's thread takes one out when it has the lock.
        self.queue: deque[GroupWork] = deque()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        #: True while the group's thread has taken a work out and has not reached its callbacks.
        self._running = False
        #: Identifier of the group's thread while it runs callbacks; see Note [Callbacks].
        self._in_callbacks: int | None = None
        self._closing = False

    def put(self, work: GroupWork) -> None:
        """Run ``work`` after everything issued before; if a callback issues it, at once: see Note [Callbacks].

        Raises:
            LockstepError: the group is being destroyed, or this thread is in the middle of a collective.
            RuntimeError: the system has no room for the group's thread. Nothing was issued.
        """
        if self._in_callbacks == threading.get_ident():
            work.shm_execute()
            work.shm_fulfil()
            return
        if self.is_interrupted:
            raise LockstepError(
                f"{work.shm_name}: called in the middle of another collective of the same process group, on the same "
                "thread, as a signal handler does; let the handler set a flag, and act on it between two collectives"
            )
        with self._condition:
            if self._closing:
                raise LockstepError(f"{work.shm_name}: another thread of this rank is destroying this process group")
            if self._thread is None:
                thread = threading.Thread(target=self._loop, name=f"collectives-{self._name}", daemon=True)
                thread.start()
                self._thread = thread
            self.queue.append(work)
            self._condition.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether something that was issued waits or runs."""
        return bool(self.queue) or self._running or self.in_use

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal handler asks, in the middle of a collective that its thread runs."""
        return self._in_callbacks != threading.get_ident() and bool(self.lock._is_owned())

    def settle(self, seconds: float) -> bool:
        """Wait until all that was issued has run, for some seconds at most. Return whether it has.

        On the group's own thread, which runs a callback, that is so; a signal handler in the middle of a collective
        does not wait for it."""
        if self._thread is threading.current_thread():
            return True
        if self.is_interrupted:
            return False
        until = time.monotonic() + seconds
        with self._condition:
            if not self._condition.wait_for(self._is_served, seconds):
                return False
        # Another thread of the program may be in a collective, and the group's own in callbacks, which may issue some.
        if not self.lock.acquire(timeout=max(0.0, until - time.monotonic())):
            return False
        self.lock.release()
        return True

    def close(self, seconds: float | None = None) -> None:
        """Wait until all that was issued has run, and end the thread.

        Args:
            seconds: wait no longer than this; None: as long as it takes (each collective has its time limit).
        """
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        thread = self._thread
        if thread is threading.current_thread() or self.is_interrupted:  # a callback or a signal handler closes it
            return
        with self._condition:
            self._condition.wait_for(self._is_served, seconds)
        if thread is not None:
            thread.join(_PARTING)
        if thread is not None and thread.is_alive():
            return
        if self.lock.acquire(timeout=-1 if seconds is None else seconds):  # another thread may be in a collective
            self.lock.release()

    def _is_served(self) -> bool:
        return not self.queue and not self._running

    def _loop(self) -> None:
        flight.in_background()
        while self._wait():
            with self.lock:
                self.in_use = self._running = True
                work = self.queue.popleft()
                work.shm_execute()
                with self._condition:
                    self._running = False
                    self._condition.notify_all()
                self._in_callbacks = threading.get_ident()
                try:
                    work.shm_fulfil()
                finally:
                    self._in_callbacks = None
                    self.in_use = False
            del work

    def _wait(self) -> bool:
        """Wait for a work; return False if the group is closed and no work is left."""
        with self._condition:
            self._condition.wait_for(lambda: self.queue or self._closing)
            return bool(self.queue)
