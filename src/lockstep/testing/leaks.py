"""Find the shared memory that a test leaves in /dev/shm, which outlives all processes.

Note [Whose memory it is]
~~~~~~~~~~~~~~~~~~~~~~~~~
The folder is the whole machine's, other tests run beside these (pytest-xdist), and a file that no process has mapped
does not show its owner: the first session to look would take another's file for its own test's, fail that test, and
remove the file that the other is about to find. So the segments that Python makes on ranks of tests carry the process
id of their session in their names. Segments of programs that a rank starts anew do not; of them, those that no other
process has mapped are taken for the test's.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

from lockstep import _proc

#: The names of the files in /dev/shm that torch, Python, OpenMP and MPI make, of which tests and jobs may leave some.
#: Those of other programs on the machine come and go as they like.
_MADE_HERE = re.compile(r"torch_|psm_|sem\.mp-|__KMP_REGISTERED_LIB_|mpich|lockstep")
#: What :func:`sign` makes of names.
_SIGNED = re.compile(r"psm_([0-9a-f]+)_")
_FOLDER = "/dev/shm"


def sign(session: int) -> None:
    """Have the segments that Python makes in this process and its forks say whose they are: Note [Whose memory it is].

    Args:
        session: the process id of the pytest that looks for what its tests leave.
    """
    prefix = f"/psm_{session:x}_"
    # Private, and the same from Python 3.8 to 3.14. The length is macOS's limit; Linux takes 255 characters.
    shared_memory._SHM_NAME_PREFIX = prefix  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + 8  # type: ignore[attr-defined]


def files() -> frozenset[str]:
    """Return the names of the files in /dev/shm that a test may have made: another user's are none of them."""
    with suppress(OSError):  # there is no such folder
        return frozenset(name for name in os.listdir(_FOLDER) if _MADE_HERE.match(name) and _is_own(name))
    return frozenset()


def left_since(before: frozenset[str], *, is_ours: Callable[[int], bool], patience: float) -> frozenset[str]:
    """Return the names of files that were left in /dev/shm, and that do not belong to another process.

    Other processes map or remove files that they have just made within a moment. See Note [Whose memory it is].

    Args:
        before: the files that existed before, as :func:`files` returned them.
        is_ours: returns whether a living process belongs to the caller.
        patience: seconds for others to map or remove their files.
    """
    deadline = time.monotonic() + patience
    while left := files() - before:
        left = (left - _signed_by_others(left, is_ours) - _mapped_by_others(is_ours)) & files()
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return frozenset()


def remove(left: frozenset[str]) -> None:
    """Remove files that were left in /dev/shm, and have this process's resource tracker forget them."""
    for name in left:
        with suppress(FileNotFoundError):
            os.unlink(f"{_FOLDER}/{name}")
        if name.startswith("psm_"):
            resource_tracker.unregister(f"/{name}", "shared_memory")


def _is_own(name: str) -> bool:
    with suppress(OSError):  # it is gone
        return os.stat(f"{_FOLDER}/{name}").st_uid == os.geteuid()
    return False


def is_below_this_process(pid: int) -> bool:
    """Return whether a process is this one, or one that it has started, or one of theirs."""
    return pid == os.getpid() or pid in _proc.descendants(os.getpid())


def _signed_by_others(names: frozenset[str], is_ours: Callable[[int], bool]) -> frozenset[str]:
    def is_others(session: int) -> bool:
        with suppress(OSError):  # it has ended, and is not the one that asks
            return not is_ours(session)
        return True

    signed = {name: int(found[1], 16) for name in names if (found := _SIGNED.match(name))}
    return frozenset(name for name, session in signed.items() if is_others(session))


def _mapped_by_others(is_ours: Callable[[int], bool]) -> frozenset[str]:
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            lines = (process / "maps").read_text().splitlines()
            mapped = {line.rpartition(f"{_FOLDER}/")[2] for line in lines if f"{_FOLDER}/" in line}
            if mapped and not is_ours(int(process.name)):
                found |= mapped
    return frozenset(found)
