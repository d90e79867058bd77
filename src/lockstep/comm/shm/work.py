"""Work: a collective that was issued, to be waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.shm.failure import again
from lockstep.errors import CollectiveTimeout, LockstepError
from lockstep.recorder import writer

#: Guards the futures of all works: taken for moments, and only by who asks for a future or completes one.
_lock = threading.Lock()


class _Future(torch.futures.Future[Any]):
    """Tells its work when somebody adds a callback, see Note [Callbacks] in executor.py."""

    work: ShmWork | None = None

    def then(self, callback: Any) -> Any:
        self._follow()
        return super().then(callback)

    def add_done_callback(self, callback: Any) -> None:
        self._follow()
        super().add_done_callback(callback)

    def _follow(self) -> None:
        work = self.work
        if work is not None:
            work.follow()


class ShmWork(dist.Work):
    """One issued operation. It runs once, on whichever thread; any thread may wait for it."""

    #: Its future has callbacks that have not run.
    followed = False
    #: Whom to tell of the first callback.
    on_followed: Callable[[ShmWork], None] | None = None
    _error: BaseException | None = None
    _future: _Future | None = None
    #: The future exists and is not complete.
    _owed = False
    _source = -1

    def __init__(self, name: str, run: Callable[[], None] | None, result: list[Any]) -> None:
        super().__init__()
        #: What it is, for messages.
        self.name = name
        self._run = run
        self._result = result
        self._done: threading.Event | None = threading.Event() if run is not None else None

    # --- for the executor ------------------------------------------------------------------------------------------

    def execute(self) -> None:
        """**Local.** Run it and wake up whoever waits; an error is kept for them. Call :meth:`fulfil` afterwards."""
        assert self._run is not None  # (for the type checker)
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001  (whoever waits raises it)
            self.finish(error)
        else:
            self.finish(None)

    def finish(self, error: BaseException | None) -> None:
        """**Local.** Mark it as complete. Call :meth:`fulfil` afterwards, without locks: it runs callers' code."""
        assert self._done is not None  # (for the type checker)
        with _lock:
            self._error = error
            self._run = None  # lets go of the tensors
            self._done.set()

    def fulfil(self) -> None:
        """**Local.** Complete the future, if anybody asked for one; its callbacks run here."""
        with _lock:
            future, self._owed = self._future if self._owed else None, False
        if future is not None:
            self._fulfil(future)
            future.work = None

    def follow(self) -> None:
        """**Local.** Note that a callback is being added to the future."""
        if self.on_followed is not None:
            self.on_followed(self)

    # --- torch.distributed.Work ------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """**Local.** Block until the operation is complete.

        Raises:
            LockstepError: it failed; the message says on which rank and where.
            CollectiveTimeout: ``timeout`` passed first. The operation goes on.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if self._done is not None and not self._done.is_set() and not self._sleep(seconds if seconds > 0 else None):
            raise CollectiveTimeout(f"{self.name} was not complete after {seconds:g} s; it goes on in the background")
        if self._error is not None:
            if isinstance(self._error, LockstepError):
                raise again(self._error) from self._error
            raise self._error
        return True

    def _sleep(self, seconds: float | None) -> bool:
        assert self._done is not None  # (for the type checker)
        with writer.waiting(self.name):
            return self._done.wait(seconds)

    def is_completed(self) -> bool:
        return self._done is None or self._done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:  # the name torch.distributed.recv asks for
        return self._source

    def get_future(self) -> torch.futures.Future[Any]:
        """**Local.** A future with the output tensors as its value."""
        with _lock:
            if self._future is not None:
                return self._future
            future = self._future = _Future()
            future.work = self
            self._owed = True
            done = self._done is None or self._done.is_set()
        if done:
            self.fulfil()
        return future

    def _fulfil(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._result)
        elif isinstance(self._error, Exception):
            future.set_exception(self._error)
        else:
            future.set_exception(RuntimeError(f"{self.name}: {type(self._error).__name__}"))
