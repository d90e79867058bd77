"""Let gloo's threads finish before the interpreter ends.

Note [Gloo's threads at the end]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A thread of gloo lets go of a collective's tensors a moment after the collective has ended, and needs the interpreter's
lock for it. Once the interpreter has begun to end, Python ends a thread that asks for its lock, here in the midst of a
destructor, and C++ then ends the process: "terminate called without an active exception", SIGABRT, after the program
has done all of its work (pytorch#190489). torch waits for the threads when the last reference to their group goes, but
replicas, subgroups and a script's own variables live until the interpreter is taken apart.

So the last that a process does before is to look whether these threads work. One that waits for the lock gets it while
this one pauses; one that waits for other ranks sleeps, and is left alone.
"""

from __future__ import annotations

import os
import time

from lockstep import _proc

#: The kernel's name of such a thread, as torch gives it.
_NAME = "(pt_gloo_runloop)"
#: Seconds between two looks, and how many in a row must find all threads asleep; in all, more than the time after which
#: Python takes its lock from a thread that others wait for (``sys.getswitchinterval()``).
_PAUSE, _LOOKS = 0.002, 3
#: Seconds after which the process ends with threads that still work.
_LIMIT = 10.0


def await_rest() -> None:
    """Wait until all of gloo's threads in this process sleep; at once if there are none."""
    until, asleep, states = time.monotonic() + _LIMIT, 0, _states()
    while states and asleep < _LOOKS and time.monotonic() < until:
        time.sleep(_PAUSE)  # before the look: a thread that waits for the interpreter's lock sleeps as well
        states = _states()
        asleep = asleep + 1 if states == {"S"} else 0


def _states() -> set[str]:
    me = os.getpid()
    told = [_proc.read(me, f"task/{thread}/stat") for thread in _proc.threads(me)]
    return {each.rpartition(")")[2].split()[0] for each in told if _NAME in each}
