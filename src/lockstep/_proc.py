"""What the kernel says of a process, its threads and its children, from /proc."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Stat:
    """One moment of a process, from ``/proc/<pid>/stat``."""

    #: One letter: R running, S asleep, D asleep where no signal reaches it, T stopped, t traced, Z and X dead.
    state: str
    #: Processor time of all of its threads so far, in seconds.
    processor: float
    #: When it started, in clock ticks since boot.
    started: int
    #: The process that it is a child of.
    parent: int

    @property
    def is_dead(self) -> bool:
        """Whether only its exit code is left."""
        return self.state in ("Z", "X")


def text(path: str | Path) -> str:
    """Return what a small file of the kernel's says; empty if it can't be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def read(pid: int, name: str) -> str:
    """Read a file of ``/proc/<pid>``; empty if the process is gone or may not be asked."""
    return text(f"/proc/{pid}/{name}")


def counter(path: str | Path, name: str) -> int | None:
    """Return the number behind ``name`` in a file with a line for each; None: there is no such line. Sizes with a unit
    of kB, as in ``/proc/meminfo``, are returned in bytes."""
    found = re.search(rf"^{name}:?\s+(\d+)( kB)?$", text(path), re.MULTILINE)
    return int(found[1]) * (1024 if found[2] else 1) if found else None


def stat(pid: int) -> Stat | None:
    """Return what a process is doing, or None if there is none of this number."""
    return _parse(read(pid, "stat"))


def started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it is gone or a zombie.

    A process id is used again; the pair of it and this number is not.

    Raises:
        OSError: it can't be told, for want of a descriptor.
    """
    try:
        found = _parse(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if found is None or found.is_dead else found.started


def boot_id() -> str:
    """Return what tells one start of this machine from another; empty if the kernel does not say."""
    return text("/proc/sys/kernel/random/boot_id").strip()


def pid_namespace() -> str:
    """Return which set of process ids this process sees, as ``pid:[4026531836]``; empty if the kernel does not say."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def threads(pid: int) -> list[int]:
    """Return the threads of a process; none if it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """Return every process below ``pid`` that is not a zombie, parents before children."""
    found: list[int] = []
    level = children(pid)
    while level:
        found += level
        level = [grandchild for child in level for grandchild in children(child)]
    return [one for one in found if (now := stat(one)) is not None and not now.is_dead]


def children(pid: int) -> list[int]:
    """Return the processes that the threads of a process have started and not reaped."""
    return [int(word) for thread in threads(pid) for word in read(pid, f"task/{thread}/children").split()]


def catches(pid: int, signum: int) -> bool:
    """Return whether a process has its own handler for a signal; one that has none may be ended by it."""
    for line in read(pid, "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


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


def resident(pid: int | None) -> int:
    """Return a process's resident bytes; 0: it has ended, or there is none."""
    fields = read(pid, "statm").split() if pid is not None else []
    return int(fields[1]) * _PAGE if len(fields) > 1 else 0


def _parse(text: str) -> Stat | None:
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    if len(fields) < 20:
        return None
    return Stat(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[19]), int(fields[1]))
