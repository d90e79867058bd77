"""Low priority: processors and disks are training's first."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Set

from lockstep.topology import format_cpus

#: The least nice value of an evaluator. A nice of 10 has a tenth of the time of an equal process without.
NICE = 10
#: The number of the system call ioprio_set, which has no function in C's library; on other machines it is not called.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_OF_PROCESS, _IDLE = 1, 3 << 13  # IOPRIO_WHO_PROCESS; IOPRIO_CLASS_IDLE in the upper bits


def lower() -> list[str]:
    """Give this process, and all that it will start, low priority. Return a sentence for what the system refused."""
    refused = []
    try:
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    except OSError as error:
        refused.append(f"the evaluation has normal priority for processors: {error.strerror}")
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        refused.append(f"the evaluation is not scheduled as a batch job: {error.strerror}")
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(number, _OF_PROCESS, 0, _IDLE) != 0:
            reason = os.strerror(ctypes.get_errno())
            refused.append(f"the evaluation has normal priority for disks: {reason}")
    return refused


def keep_to(cores: frozenset[int]) -> None:
    """Bind this process, and all that it will start, to some cores.

    Raises:
        ValueError: it may not use them.
    """
    allowed = os.sched_getaffinity(0)
    if not cores or not cores <= allowed:
        raise ValueError(
            f"--cores: expected some of the cores that this process may use, {_words(allowed)}, not {_words(cores)}"
        )
    os.sched_setaffinity(0, cores)


def _words(cores: Set[int]) -> str:
    return format_cpus(cores) or "none"
