"""The order of a group's collectives: that of their issue, whichever threads issue them.

A collective that its caller waits for runs on the caller's own thread if nothing is before it: no hand-over to another
thread, which would cost more than a small all-reduce. Everything else goes through a queue that one thread per group
works off; it is started when first needed. Groups share nothing, so one that waits can't hold up another.

Note [Callbacks]
~~~~~~~~~~~~~~~~
The callbacks of a future may issue collectives of the same group, and wait for them (PowerSGD's do), while the thread
that added them goes on issuing others. When the callbacks run depends on the timing of each rank, so the order of issue
would differ from rank to rank. Therefore what a callback issues comes right after the work that the callback follows,
before everything else that was issued since: while the callbacks of a work are to run, the queue is held, and only
works issued by callbacks run. Nobody who issues a collective waits for that. It takes a callback that is added before
the next collective is issued; one added later runs when it comes, on every rank at another time.
"""

from __future__ import annotations

import threading
from collections import deque

from lockstep.comm.shm.work import ShmWork
from lockstep.job import flight

#: Seconds an idle thread waits for more work before it ends; the next asynchronous collective starts another.
_IDLE = 10.0
#: Seconds to wait at the end for callers' callbacks, which may do anything.
_PARTING = 10.0


class Executor:
    """Runs a group's works one at a time, in order of issue.

    What follows a work (a future's callbacks) runs on the thread that ran the work, but after its turn: a callback may
    issue a collective and wait for it, as PowerSGD does. So there may be several threads, of which one at a time has
    the turn; a new one is started only if all others are in callbacks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._queue: deque[ShmWork] = deque()
        self._busy = False
        # Of Note [Callbacks]: what callbacks have issued, the works taken from the queue whose callbacks may not have
        # run yet, and those of them that have callbacks.
        self._inner: deque[ShmWork] = deque()
        self._taken: set[ShmWork] = set()
        self._held: set[ShmWork] = set()
        self._thread = threading.local()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closing = False

    def enter(self) -> bool:
        """**Local.** True if the caller may run its collective right now, on its own thread; it then calls leave()."""
        with self._lock:  # (the condition's own lock, taken the fast way)
            if self._busy or self._inner:
                return False
            if (self._queue or self._held) and not self._in_callback():
                return False
            self._busy = True
            return True

    def leave(self) -> None:
        """**Local.** The end of what :meth:`enter` allowed."""
        with self._lock:
            self._busy = False
            if self._queue or self._inner or self._closing:
                self._wake()

    def put(self, work: ShmWork) -> None:
        """**Local.** Queue ``work`` behind everything issued before."""
        work.shm_on_followed = self._follow
        with self._condition:
            (self._inner if self._in_callback() else self._queue).append(work)
            self._wake()

    def close(self) -> None:
        """**Local.** Wait until all that was issued has run (each has its time limit), and end the threads."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._queue and not self._inner and not self._busy)
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(_PARTING)

    def _wake(self) -> None:
        if (self._queue or self._inner) and self._idle == 0:
            thread = threading.Thread(target=self._loop, name=f"shm-{self._name}", daemon=True)
            self._threads.add(thread)
            self._idle += 1  # it is about to wait for its turn
            thread.start()
        self._condition.notify_all()

    def _follow(self, work: ShmWork) -> None:
        with self._condition:
            work.shm_followed = True
            if work in self._taken:
                self._held.add(work)

    def _in_callback(self) -> bool:
        return getattr(self._thread, "in_callback", False)

    def _loop(self) -> None:
        flight.in_background()
        while (work := self._next()) is not None:
            try:
                work.shm_execute()
            finally:
                self.leave()
            self._thread.in_callback = True
            try:
                work.shm_fulfil()
            finally:
                self._thread.in_callback = False
                with self._condition:
                    self._idle += 1
                    self._taken.discard(work)
                    self._held.discard(work)
                    self._condition.notify_all()
            del work

    def _next(self) -> ShmWork | None:
        """The next work, with the turn to run it; None if the thread may end: nothing has come for a while."""
        with self._condition:
            while True:
                self._condition.wait_for(self._may_go_on, _IDLE)
                work = self._take()
                if work is not None:
                    self._idle -= 1
                    self._busy = True
                    return work
                if not self._queue and not self._inner:
                    self._idle -= 1
                    self._threads.discard(threading.current_thread())
                    return None

    def _may_go_on(self) -> bool:
        if self._busy:
            return False
        waiting = self._queue or self._inner
        return bool(self._inner or (self._queue and not self._held)) or (self._closing and not waiting)

    def _take(self) -> ShmWork | None:
        """The work that is next, if it may run now."""
        if self._busy or not (self._inner or (self._queue and not self._held)):
            return None
        work = (self._inner or self._queue).popleft()
        self._taken.add(work)
        if work.shm_followed:
            self._held.add(work)
        return work
