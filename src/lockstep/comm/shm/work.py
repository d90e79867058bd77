"""Work: a collective that was issued, to be waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep import _torch
from lockstep.comm.shm.failure import again
from lockstep.errors import CollectiveTimeout, LockstepError
from lockstep.job import flight

#: Guards the futures of all works: taken for moments, and only by who asks for a future or completes one.
_lock = threading.Lock()


@_torch.untraced
class _Future(torch.futures.Future[Any]):
    """Tells its work when somebody adds a callback, see Note [Callbacks] in executor.py."""

    shm_work: ShmWork | None = None

    def then(self, callback: Any) -> Any:
        self._shm_follow()
        return super().then(callback)

    def add_done_callback(self, callback: Any) -> None:
        self._shm_follow()
        super().add_done_callback(callback)

    def _shm_follow(self) -> None:
        work = self.shm_work
        if work is not None:
            work.shm_follow()


@_torch.untraced
class ShmWork(dist.Work):
    """One issued operation. It runs once, on whichever thread; any thread may wait for it.

    Names of ours begin with ``shm_``: torch gives its class more names from version to version.
    """

    #: Its future has callbacks that have not run.
    shm_followed = False
    #: Whom to tell of the first callback.
    shm_on_followed: Callable[[ShmWork], None] | None = None
    _shm_error: BaseException | None = None
    _shm_future: _Future | None = None
    #: The future exists and is not complete.
    _shm_owed = False
    _shm_source = -1

    def __init__(self, name: str, run: Callable[[], None] | None, result: list[Any]) -> None:
        super().__init__()
        #: What it is, for messages.
        self.shm_name = name
        self._shm_run = run
        self._shm_result = result
        self._shm_done: threading.Event | None = threading.Event() if run is not None else None

    # --- for the executor ------------------------------------------------------------------------------------------

    def shm_execute(self) -> None:
        """**Local.** Run it and wake up whoever waits, who gets its error too. Call :meth:`shm_fulfil` afterwards."""
        assert self._shm_run is not None  # (for the type checker)
        try:
            self._shm_run()
        except BaseException as error:  # noqa: BLE001  (whoever waits raises it)
            self.shm_finish(error)
        else:
            self.shm_finish(None)

    def shm_finish(self, error: BaseException | None) -> None:
        """**Local.** Mark it as complete. Call :meth:`shm_fulfil` afterwards, without locks: it runs callers' code."""
        assert self._shm_done is not None  # (for the type checker)
        with _lock:
            self._shm_error = error
            self._shm_run = None  # lets go of the tensors
            self._shm_done.set()

    def shm_fulfil(self) -> None:
        """**Local.** Complete the future, if anybody asked for one; its callbacks run here."""
        with _lock:
            future, self._shm_owed = self._shm_future if self._shm_owed else None, False
        if future is not None:
            self._shm_fulfil(future)
            future.shm_work = None

    def shm_follow(self) -> None:
        """**Local.** Note that a callback is being added to the future."""
        if self.shm_on_followed is not None:
            self.shm_on_followed(self)

    # --- torch.distributed.Work ------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """**Local.** Block until the operation is complete.

        Raises:
            LockstepError: it failed; the message says on which rank and where.
            CollectiveTimeout: ``timeout`` passed first. The operation goes on.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if (
            self._shm_done is not None
            and not self._shm_done.is_set()
            and not self._shm_sleep(seconds if seconds > 0 else None)
        ):
            raise CollectiveTimeout(
                f"{self.shm_name} was not complete after {seconds:g} s; it goes on in the background"
            )
        if self._shm_error is not None:
            if isinstance(self._shm_error, LockstepError):
                raise again(self._shm_error) from self._shm_error
            raise self._shm_error
        return True

    def _shm_sleep(self, seconds: float | None) -> bool:
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

    def _source_rank(self) -> int:  # the name torch.distributed.recv asks for
        return self._shm_source

    def get_future(self) -> torch.futures.Future[Any]:
        """**Local.** A future with the output tensors as its value."""
        with _lock:
            if self._shm_future is not None:
                return self._shm_future
            future = self._shm_future = _Future()
            future.shm_work = self
            self._shm_owed = True
            done = self._shm_done is None or self._shm_done.is_set()
        if done:
            self.shm_fulfil()
        return future

    def _shm_fulfil(self, future: torch.futures.Future[Any]) -> None:
        if self._shm_error is None:
            future.set_result(self._shm_result)
        elif isinstance(self._shm_error, Exception):
            future.set_exception(self._shm_error)
        else:
            future.set_exception(RuntimeError(f"{self.shm_name}: {type(self._shm_error).__name__}"))
