"""What the kernel says of a process: stopped, running or asleep, and in which call."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "sleeping in the kernel, where no signal reaches it (a disk or a network folder that does not answer?)",
    "T": "stopped by a signal (SIGCONT lets it go on)",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
    "I": "idle",
}
#: The calls that programs get stuck in, by number; the rest is shown as a number.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 23: "select",
        35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg",
        61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 76: "truncate", 77: "ftruncate",
        82: "rename", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat",
        270: "pselect6", 271: "ppoll", 277: "sync_file_range", 281: "epoll_pwait", 288: "accept4", 306: "syncfs",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 46: "ftruncate", 56: "openat", 63: "read", 64: "write",
        65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll", 82: "fsync",
        83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept",
        203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 242: "accept4", 260: "wait4",
        267: "syncfs",
    },
}  # fmt: skip
#: Those whose first argument is a descriptor.
_ON_A_FILE = frozenset([
    "read", "write", "pread64", "pwrite64", "readv", "writev", "fsync", "fdatasync", "ftruncate", "flock", "fcntl",
    "connect", "accept", "accept4", "sendto", "recvfrom", "sendmsg", "recvmsg", "sync_file_range", "syncfs",
])  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """A process's main thread, as the kernel sees it at a moment."""

    #: One letter, as in /proc/<pid>/stat.
    state: str
    #: The processor time of all of its threads so far, in seconds.
    processor: float
    #: The system call it is in, its file included where it has one; empty: in none, or not to be known.
    call: str
    #: The kernel's function it sleeps in; empty: not known.
    function: str

    @property
    def sleeps(self) -> bool:
        """Whether it sleeps until something happens."""
        return self.state == "S"

    def describe(self) -> str:
        """``sleeping in read of /data/shard-7 (pipe_read)``"""
        where = f" in {self.call}" if self.call and self.state not in "tT" else ""
        function = f" ({self.function})" if self.function and self.state not in "RtT" else ""
        return f"{_STATES.get(self.state, f'in state {self.state}')}{where}{function}"


def facts(pid: int) -> Facts | None:
    """**Local.** What the kernel says of process ``pid``, or None if it is gone."""
    stat = _read(pid, "stat")
    if not stat:
        return None
    fields = stat.rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    function = _read(pid, "wchan").strip()
    return Facts(
        state=fields[0],
        processor=ticks / os.sysconf("SC_CLK_TCK"),
        call=_call(pid),
        function="" if function == "0" else function,
    )


def catches(pid: int, signum: int) -> bool:
    """**Local.** Whether process ``pid`` has a handler for a signal; one that has none would be ended by it."""
    for line in _read(pid, "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def _call(pid: int) -> str:
    words = _read(pid, "syscall").split()
    if not words or not words[0].lstrip("-").isdigit() or int(words[0]) < 0:
        return ""  # "running", or it can't be asked
    number = int(words[0])
    name = _CALLS.get(platform.machine(), {}).get(number, f"system call {number}")
    if name not in _ON_A_FILE or len(words) < 2:
        return name
    try:
        target = os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")
    except OSError:
        return name
    return f"{name} of {target}"


def _read(pid: int, name: str) -> str:
    """A file of /proc; empty if the process is gone or may not be asked."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""
