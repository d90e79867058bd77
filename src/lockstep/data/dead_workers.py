"""The death of a worker process of a DataLoader: which errors tell of it, and which worker it was.

torch raises such an error from a handler for SIGCHLD, wherever the main thread is: in a user's dataset, sampler or
collate_fn as well, which have nothing to do with it, and which may be another loader's. Code that has something of its
own to say of whatever these raise lets it pass.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import TypeVar

from lockstep import _torch
from lockstep.errors import PeerLost

Item = TypeVar("Item")

#: Hundredths of a second for the death of a worker whose connection is lost: on a busy machine the kernel is slow to
#: end a process.
_DYING = 2000
#: How torch's errors begin.
_DEATH = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal|exited unexpectedly)")
#: torch's error where the connection was lost in the thread that copies batches into page-locked memory.
_THREAD_LOST = "Pin memory thread exited unexpectedly"


def tells_of_a_death(error: BaseException) -> bool:
    """Return whether ``error`` is torch's, that a worker has died: not the failure of the code that it comes out of."""
    return isinstance(error, RuntimeError) and _DEATH.match(str(error)) is not None


def naming_dead_workers(batches: Iterable[Item]) -> Iterator[Item]:
    """Yield ``batches``, of a DataLoader's iterator, as they come.

    The death of a worker that hands over a batch first appears as a lost connection. A moment later torch's handler
    for SIGCHLD raises an error that says which worker it was and what killed it. That error is lost where the handler
    interrupts a ``__del__``, of a temporary file of torch's, say; so the processes are looked at as well. An error of
    such a kind that a worker has met itself, and that torch passes on with the worker's traceback, is not waited for.

    Raises:
        RuntimeError: a worker has died.
    """
    try:
        yield from batches
    except PeerLost:  # another rank
        raise
    except (ConnectionError, EOFError, RuntimeError) as error:
        text = str(error)
        if text.startswith("Caught ") or (isinstance(error, RuntimeError) and text != _THREAD_LOST):
            raise
        workers = _torch.workers_of(batches)
        for _ in range(_DYING):
            time.sleep(0.01)  # the handler raises in here
            died = death_among(workers)
            if died is not None:
                raise died from error
        raise


def death_among(workers: Iterable[BaseProcess]) -> RuntimeError | None:
    """Return the error, in torch's words, of the first of these processes that has died; None: none has."""
    for worker in workers:
        code = worker.exitcode
        if not code:  # it lives, or is done with its part of a stream
            continue
        how = f"exited unexpectedly with exit code {code}"
        if code < 0:
            how = f"is killed by signal: {signal.strsignal(-code)}"
        return RuntimeError(f"DataLoader worker (pid {worker.pid}) {how}.")
    return None
