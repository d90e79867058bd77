"""The state of a process, its threads and its children, as the kernel reports it in /proc."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Stat:
    """A snapshot of a process, from ``/proc/<pid>/stat``."""

    #: One letter: R running, S sleeping, D in uninterruptible sleep, T stopped, t traced, Z and X dead.
    state: str
    #: Processor time of all its threads so far, in seconds.
    processor: float
    #: The time at which the process started, in clock ticks since boot.
    started: int
    #: The process id of its parent.
    parent: int

    @property
    def is_dead(self) -> bool:
        """True if the process has ended, and only its exit code is left."""
        return self.state in ("Z", "X")


def text(path: str | Path) -> str:
    """Return the content of a small kernel file; empty if it can't be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def read(pid: int, name: str) -> str:
    """Return the content of a file of ``/proc/<pid>``; empty if the process is gone or access is denied."""
    return text(f"/proc/{pid}/{name}")


def counter(path: str | Path, name: str) -> int | None:
    """Return the number after ``name`` in a file with one name per line, or None if there is no such line.

    Sizes in kB, as in ``/proc/meminfo``, are returned in bytes."""
    found = re.search(rf"^{name}:?\s+(\d+)( kB)?$", text(path), re.MULTILINE)
    return int(found[1]) * (1024 if found[2] else 1) if found else None


def stat(pid: int) -> Stat | None:
    """Return a snapshot of a process, or None if there is no process with this id."""
    return _parse(read(pid, "stat"))


def started(pid: int) -> int | None:
    """Return the time at which a process started, in clock ticks since boot; None if it is gone or a zombie.

    The kernel reuses process ids, but not the pair of a process id and this number.

    Raises:
        OSError: the file can't be opened, because this process is out of descriptors.
    """
    try:
        found = _parse(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if found is None or found.is_dead else found.started


def lives(pid: int, started: int) -> bool:
    """Return whether the process with this id that started then lives; a zombie does not. False if access is denied."""
    now = stat(pid)
    return now is not None and not now.is_dead and now.started == started


def age(started: int) -> float:
    """Return for how many seconds a process has run that started at this time, as :func:`started` returns it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / _TICKS


def boot_id() -> str:
    """Return an id that is unique to this boot of the machine; empty if the kernel does not tell."""
    return text("/proc/sys/kernel/random/boot_id").strip()


def pid_namespace() -> str:
    """Return this process's pid namespace, as ``pid:[4026531836]``; empty if the kernel does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def threads(pid: int) -> list[int]:
    """Return the thread ids of a process; empty if it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def open_files(pid: int) -> Iterator[str]:
    """Yield what a process's descriptors refer to: paths, ``socket:[…]``, ``pipe:[…]``; nothing if it has ended.

    Raises:
        OSError: this process may not look at that one's.
    """
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return
    for fd in descriptors:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just been closed
            yield os.readlink(f"/proc/{pid}/fd/{fd}")


def descendants(pid: int) -> list[int]:
    """Return every process below ``pid`` that is not a zombie, parents before children."""
    found: list[int] = []
    level = children(pid)
    while level:
        found += level
        level = [grandchild for child in level for grandchild in children(child)]
    return [one for one in found if (now := stat(one)) is not None and not now.is_dead]


def children(pid: int) -> list[int]:
    """Return the processes that the threads of a process have started and not reaped, those of a thread in order."""
    return [int(word) for thread in threads(pid) for word in read(pid, f"task/{thread}/children").split()]


#: What :func:`signal_sets` returns.
_SIGNAL_SETS = {"SigCgt", "SigIgn", "SigBlk", "SigPnd", "ShdPnd"}


def catches(pid: int, signum: int) -> bool:
    """Return whether a process has its own handler for a signal; without a handler, the signal may end it."""
    return "SigCgt" in signal_sets(pid, signum)


def ignores(pid: int, signum: int) -> bool:
    """Return whether a process ignores a signal."""
    return "SigIgn" in signal_sets(pid, signum)


def signal_sets(pid: int, signum: int, *, thread: int | None = None) -> set[str]:
    """Return the names of the kernel's sets of signals that hold ``signum``.

    Args:
        pid: the process.
        signum: the signal.
        thread: the thread whose sets are meant; None: the main one.

    Returns:
        ``SigCgt``: the process has a handler for it; ``SigIgn``: it ignores it; ``SigBlk``: the thread blocks it;
        ``SigPnd``: it waits for the thread; ``ShdPnd``: it waits for the process. Empty if there is no such thread.
    """
    lines = read(pid, f"task/{pid if thread is None else thread}/status").splitlines()
    masks = (line.partition(":") for line in lines)
    return {name for name, _, mask in masks if name in _SIGNAL_SETS and int(mask, 16) >> (signum - 1) & 1}


def is_frozen(pid: int) -> bool:
    """Return whether a process's cgroup is frozen, as far as this process sees the groups (version 1 or 2)."""
    for line in read(pid, "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if "freezer" in controllers.split(","):
            if text(_CGROUPS / "freezer" / inside / "freezer.state").strip() in ("FROZEN", "FREEZING"):
                return True
        elif not controllers:
            for mount in (_CGROUPS, _CGROUPS / "unified"):
                if "frozen 1" in text(mount / inside / "cgroup.events").splitlines():
                    return True
    return False


def resident(pid: int | None) -> tuple[int, int]:
    """Return a process's resident memory in bytes, and that part of it which is neither a file's nor shared; 0 and 0 if
    it has ended, or ``pid`` is None."""
    fields = read(pid, "statm").split() if pid is not None else []
    if len(fields) < 3:
        return 0, 0
    whole, of_files = (int(field) * _PAGE for field in fields[1:3])
    return whole, max(0, whole - of_files)


def shared(pid: int | None) -> int:
    """Return the bytes of a process's resident memory that is shared and no file's; 0 if it has ended, or ``pid`` is
    None."""
    return 0 if pid is None else counter(f"/proc/{pid}/status", "RssShmem") or 0


def _parse(text: str) -> Stat | None:
    fields = text.rpartition(")")[2].split()  # the process name before it may contain anything
    if len(fields) < 20:
        return None
    return Stat(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[19]), int(fields[1]))


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's cgroup and of those above it, from its own on, that ``controller`` may limit:
    each with whether it is of version 1. None where the kernel does not say.

    In a container the path may be one of the host's, and what is mounted is the container's own group: the last folder.
    """
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            mount, inside = root / "sys/fs/cgroup" / (controller if controllers else ""), Path(path.lstrip("/"))
            for group in (inside, *inside.parents):
                yield mount / group, bool(controllers)
