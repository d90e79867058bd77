"""What has to be done at the end of a process while its threads still can.

Note [The end of a process]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
When the main thread is done, Python first forbids new work to its pools of threads, then waits for the threads that
are no daemons, and only then calls what ``atexit`` has. A save that is under way in a thread would find no pool to
send a store's requests with, nor asyncio one to look names up with. So what needs them is done before: Python has a
list for it, with which its own pools are ended, last come first served, and no public name for that list."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

#: What is registered, with the process that did it.
_registered: set[tuple[int, Callable[[], None]]] = set()


def before_threads_end(act: Callable[[], None]) -> None:
    """Call ``act`` once when this process's main thread is done, before its pools of threads are ended."""
    import concurrent.futures.thread  # noqa: F401  (which registers the end of the pools: it must come before)

    key = os.getpid(), act
    if key not in _registered:
        _registered.add(key)
        threading._register_atexit(lambda: act() if os.getpid() == key[0] else None)  # type: ignore[attr-defined]
