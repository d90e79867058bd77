"""Find the shared memory that a test leaves in /dev/shm, which outlives all processes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

from lockstep import _proc

#: How the files in /dev/shm are called that torch, Python, OpenMP and MPI make, of which tests and jobs may leave some.
#: Those of other programs on the machine come and go as they like.
_MADE_HERE = re.compile(r"torch_|psm_|sem\.mp-|__KMP_REGISTERED_LIB_|mpich|lockstep")
_FOLDER = "/dev/shm"


def shared_memory() -> frozenset[str]:
    """Return the names of the files in /dev/shm that a test may have made."""
    with suppress(OSError):  # there is no such folder
        return frozenset(name for name in os.listdir(_FOLDER) if _MADE_HERE.match(name))
    return frozenset()


def left_since(before: frozenset[str], *, is_ours: Callable[[int], bool], patience: float) -> frozenset[str]:
    """Return the names of files that have come into /dev/shm for good, and are nobody else's.

    The folder is the whole machine's, and other tests may run beside these. What others have just made they will have
    mapped, or removed, in a moment.

    Args:
        before: what was there, as :func:`shared_memory` returned it.
        is_ours: returns whether a living process belongs to who asks.
        patience: seconds for others to map or remove what is theirs.
    """
    deadline = time.monotonic() + patience
    while files := shared_memory() - before:
        files = (files - _mapped_by_others(is_ours)) & shared_memory()
        if not files or time.monotonic() > deadline:
            return files
        time.sleep(0.01)
    return frozenset()


def remove(files: frozenset[str]) -> None:
    """Remove files that were left in /dev/shm, and have this process's resource tracker forget them."""
    for name in files:
        with suppress(FileNotFoundError):
            os.unlink(f"{_FOLDER}/{name}")
        if name.startswith("psm_"):
            resource_tracker.unregister(f"/{name}", "shared_memory")


def is_below_this_process(pid: int) -> bool:
    """Return whether a process is this one, or one that it has started, or one of theirs."""
    return pid == os.getpid() or pid in _proc.descendants(os.getpid())


def _mapped_by_others(is_ours: Callable[[int], bool]) -> frozenset[str]:
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            lines = (process / "maps").read_text().splitlines()
            mapped = {line.rpartition(f"{_FOLDER}/")[2] for line in lines if f"{_FOLDER}/" in line}
            if mapped and not is_ours(int(process.name)):
                found |= mapped
    return frozenset(found)
