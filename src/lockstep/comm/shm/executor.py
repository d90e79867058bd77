"""The order of a group's collectives: that of their issue, whichever threads issue them.

A collective that its caller waits for runs on the caller's own thread if nothing is before it: no hand-over to another
thread, which would cost more than a small all-reduce. Everything else goes through a queue that one thread per group
works off; it is started when first needed. Groups share nothing, so one that waits can't hold up another.
"""

from __future__ import annotations

import threading
from collections import deque

from lockstep.comm.shm.work import ShmWork

#: Seconds an idle thread waits for more work before it ends; the next asynchronous collective starts another.
_IDLE = 10.0


class Executor:
    """Runs a group's works one at a time, in order of issue."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition(threading.Lock())
        self._queue: deque[ShmWork] = deque()
        self._busy = False
        self._thread: threading.Thread | None = None
        self._closing = False

    def enter(self) -> bool:
        """**Local.** True if the caller may run its collective right now, on its own thread; it then calls leave()."""
        with self._condition:
            if self._busy or self._queue:
                return False
            self._busy = True
            return True

    def leave(self) -> None:
        """**Local.** The end of what :meth:`enter` allowed."""
        with self._condition:
            self._busy = False
            if self._queue or self._closing:
                self._condition.notify_all()

    def put(self, work: ShmWork) -> None:
        """**Local.** Queue ``work`` behind everything issued before."""
        with self._condition:
            self._queue.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=f"shm-{self._name}", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def close(self) -> None:
        """**Local.** Wait until all that was issued has run (each has its time limit), and end the thread."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._queue and not self._busy)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _loop(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: not self._busy and (self._queue or self._closing), _IDLE)
                if self._busy:
                    continue
                if not self._queue:
                    self._thread = None
                    return
                work = self._queue.popleft()
                self._busy = True
            try:
                work.execute()
            finally:
                del work
                self.leave()
