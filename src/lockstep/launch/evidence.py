"""Find out about a rank from outside: its process as the kernel shows it, its Python stack, its memory."""

from __future__ import annotations

import enum
import os
import platform
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep import _proc
from lockstep.callsite import inside, is_installed, is_standard
from lockstep.job.files import JobFiles
from lockstep.job.hang import Standstill
from lockstep.job.page import STACK_SIGNAL
from lockstep.job.workers import Fetching
from lockstep.machine import shared_memory

# What the kernel says of a process -----------------------------------------------------------------------------------

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "sleeping in the kernel, where no signal reaches it (a disk or a network folder that does not answer?)",
    "T": "stopped by a signal (SIGCONT resumes it)",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
    "I": "idle",
}
#: Architecture -> number -> name of the system calls that programs get stuck in; others are shown as a number.
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
#: The system calls whose first argument is a descriptor.
_ON_A_FILE = frozenset([
    "read", "write", "pread64", "pwrite64", "readv", "writev", "fsync", "fdatasync", "ftruncate", "flock", "fcntl",
    "connect", "accept", "accept4", "sendto", "recvfrom", "sendmsg", "recvmsg", "sync_file_range", "syncfs",
])  # fmt: skip


@dataclass(frozen=True)
class ProcessFacts:
    """The kernel's facts about a process and its main thread at one moment."""

    #: The state's letter in /proc/<pid>/stat.
    state: str
    #: Processor seconds of all its threads so far.
    processor: float
    #: The system call that the main thread is in, with the file that it is on if any; empty: none, or unknown.
    call: str
    #: The kernel function that the main thread sleeps in; empty: unknown.
    function: str
    #: The lasting reason why the process can't continue; None: none is known.
    standstill: Standstill | None = None

    @property
    def sleeps(self) -> bool:
        """Whether it sleeps until something happens."""
        return self.state == "S"

    def describe(self) -> str:
        """Return the state in words: ``sleeping in read of /data/shard-7 (pipe_read)``."""
        where = f" in {self.call}" if self.call and self.state not in "tT" else ""
        function = f" ({self.function})" if self.function and self.state not in "RtT" else ""
        if self.standstill is Standstill.STARVED:
            return (
                "ready to run, but other processes have the processor (is the machine overloaded, or its priority low?)"
            )
        if self.standstill is Standstill.FROZEN:
            return "frozen, with its cgroup (by a container's pause, or by whatever writes to the cgroup's freezer)"
        return f"{_STATES.get(self.state, f'in state {self.state}')}{where}{function}"


def facts(pid: int) -> ProcessFacts | None:
    """Return the kernel's facts about process ``pid``, or None if it is gone."""
    stat = _proc.stat(pid)
    if stat is None:
        return None
    function = _proc.read(pid, "wchan").strip()
    return ProcessFacts(stat.state, stat.processor, _call(pid), "" if function == "0" else function)


def _call(pid: int) -> str:
    words = _proc.read(pid, "syscall").split()
    if not words or not words[0].lstrip("-").isdigit() or int(words[0]) < 0:
        return ""  # the kernel says "running", or does not let this process know
    number = int(words[0])
    name = _CALLS.get(platform.machine(), {}).get(number, f"system call {number}")
    if name not in _ON_A_FILE or len(words) < 2:
        return name
    try:
        target = os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")
    except OSError:
        return name
    return f"{name} of {target}"


# Whether a process can continue ---------------------------------------------------------------------------------------

#: Seconds for which a standstill of each kind must last before it counts.
_SECONDS = {
    Standstill.STOPPED: 0.0,
    Standstill.DEAD: 0.0,
    Standstill.FROZEN: 0.0,
    Standstill.TRACED: 3.0,
    Standstill.UNREACHABLE: 6.5,
    Standstill.LOCKED: 3.0,
    Standstill.STARVED: 3.0,
}
#: Processor seconds per second up to which a process does not count as working. (Beside a busy process, one of the
#: lowest priority still gets three thousandths of a processor.)
_IDLE = {kind: 0.005 if kind is Standstill.STARVED else 0.02 for kind in Standstill}
#: The operations and the flag in the second argument of a futex call (linux/futex.h).
_FUTEX_WAIT, _FUTEX_WAIT_BITSET, _FUTEX_PRIVATE, _FUTEX_COMMAND = 0, 9, 128, 127


class _Sleep(enum.Enum):
    """The call in which one thread sleeps."""

    #: A lock of the process's own, without a limit: only another of its threads can wake it.
    LOCK = "lock"
    #: A lock with a time limit, or one that is shared with other processes.
    TIMED = "timed"
    #: An event loop, with nothing to do (gloo's, for one).
    EVENTS = "events"
    #: Anything else, from which the thread may continue by itself.
    OTHER = "other"


class Stillness:
    """Watches one process that gives no sign of life: can it continue by itself?

    See Note [Late or slow] in job/hang.py.
    """

    def __init__(self) -> None:
        self._why: Standstill | None = None
        self._since = self._processor = 0.0

    def look(self, pid: int, now: float, *, announced: bool, waits: bool) -> Standstill | None:
        """Return why the process can't continue, or None if it may. To be called about once a second.

        Args:
            pid: the process.
            now: on the monotonic clock.
            announced: the program has announced slow work; then only causes beyond doubt count.
            waits: its page says that it waits for other ranks. All of its threads may sleep then.
        """
        stat = _proc.stat(pid)
        why = None if stat is None else _standstill(pid, stat.state, announced=announced, waits=waits)
        if stat is None or why is None:
            self._why = None
            return None
        worked = stat.processor - self._processor > _IDLE[why] * (1.0 + now - self._since)
        if why is not self._why or worked:
            self._why, self._since, self._processor = why, now, stat.processor
        return why if now - self._since >= _SECONDS[why] else None


_BY_STATE = {
    "T": Standstill.STOPPED,
    "t": Standstill.TRACED,
    "Z": Standstill.DEAD,
    "X": Standstill.DEAD,
    "D": Standstill.UNREACHABLE,
    "R": Standstill.STARVED,
}


def _standstill(pid: int, state: str, *, announced: bool, waits: bool) -> Standstill | None:
    """Return the kind of standstill that a process's state at this moment may mean, or None if it means none."""
    if state in "DS" and _proc.is_frozen(pid):
        return Standstill.FROZEN
    if state != "S" or waits:
        return _BY_STATE.get(state)
    main, others = _sleep(pid, pid), {_sleep(pid, thread) for thread in _proc.threads(pid) if thread != pid}
    harmless = {_Sleep.LOCK} if announced else {_Sleep.LOCK, _Sleep.TIMED, _Sleep.EVENTS}
    return Standstill.LOCKED if main is _Sleep.LOCK and others <= harmless else None


def _sleep(pid: int, thread: int) -> _Sleep:
    words = _proc.read(pid, f"task/{thread}/syscall").split()
    if not words or not words[0].isdecimal():
        return _Sleep.OTHER
    name = _CALLS.get(platform.machine(), {}).get(int(words[0]))
    if name in ("epoll_wait", "epoll_pwait"):
        return _Sleep.EVENTS
    if name != "futex" or len(words) < 5:
        return _Sleep.OTHER
    operation, limit = int(words[2], 16), int(words[4], 16)
    waits = operation & _FUTEX_COMMAND in (_FUTEX_WAIT, _FUTEX_WAIT_BITSET)
    if not waits:
        return _Sleep.OTHER
    return _Sleep.LOCK if operation & _FUTEX_PRIVATE and limit == 0 else _Sleep.TIMED


# Its Python stack, as faulthandler writes it into the job's folder when asked by a signal ----------------------------

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
#: What faulthandler begins with when a process crashes.
CRASH = "Fatal Python error: "
#: What faulthandler writes above the frames of the thread that got the signal.
STACK = "Stack (most recent call first):"
#: lockstep's files of the launcher's frames below every rank's program, and of the zygote's start.
_RUNNERS = ("launch/rank.py", "launch/zygote.py")
#: Files of pytest's frames below a test or a fixture.
_PYTEST = tuple(f"/_pytest/{name}.py" for name in ("python", "fixtures"))
#: A package's folder of code in which a rank waits for others, if its stack ends there. (autograd's engine runs a
#: backward, which is mostly work; a rank that sleeps in it waits for what its hooks have asked of other ranks.)
_COLLECTIVES = {"torch": "distributed/", "lockstep": "comm/"}
_ENGINE = "autograd/"
#: Seconds for ranks to answer: they do so in a signal handler, at once if they and the zygote get a processor.
_ANSWER = 2.0
#: Seconds without another byte after which what a rank has written is all of its answer.
_WHOLE = 0.1


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


@dataclass(frozen=True)
class Stack:
    """The main thread's frames, the innermost first, without the launcher's own."""

    frames: tuple[Frame, ...]

    @property
    def in_collective(self) -> bool:
        """Whether the innermost frame is one that waits for other ranks."""
        return any(self._innermost_in(package).startswith(folder) for package, folder in _COLLECTIVES.items())

    @property
    def in_engine(self) -> bool:
        """Whether the innermost frame runs a backward."""
        return self._innermost_in("torch").startswith(_ENGINE)

    @property
    def in_model(self) -> bool:
        """Whether the innermost frame is torch's own, called from a module."""
        is_torch = bool(self._innermost_in("torch"))
        return is_torch and any(inside(frame.file, "torch").startswith("nn/modules/") for frame in self.frames)

    @property
    def in_debugger(self) -> bool:
        """Whether the program is in Python's debugger, or in one that is built on it."""
        return any(frame.file.endswith(("/pdb.py", "/bdb.py")) for frame in self.frames)

    @property
    def users(self) -> Frame | None:
        """The innermost line outside torch, lockstep and Python's own files."""
        return next((frame for frame in self.frames if _is_users(frame.file)), None)

    def _innermost_in(self, package: str) -> str:
        """Return where in a package the innermost frame is; empty: elsewhere."""
        return inside(self.frames[0].file, package) if self.frames else ""


def _is_users(file: str) -> bool:
    if is_standard(file) or is_installed(file) or file == "<string>":
        return False
    return not any(inside(file, package) for package in ("torch", "lockstep"))  # (they may be in a checkout)


def stack_size(folder: Path, rank: int) -> int:
    """Return the size in bytes of the file of a rank's stacks, where a stack that is asked for now will begin."""
    try:
        return JobFiles(folder).stack(rank).stat().st_size
    except FileNotFoundError:
        return 0


class Answers:
    """The stacks that ranks are asked for: where each begins in its file, and whether all of them are there.

    To be made before the ranks are asked, and looked at every few hundredths of a second.

    Args:
        folder: the private folder of their start.
        ranks: whose files are remembered.
        asked: rank -> its process, of those that are asked; it may be filled as they are.
        now: on the monotonic clock.
    """

    def __init__(self, folder: Path, ranks: Iterable[int], *, asked: Mapping[int, int], now: float) -> None:
        self._folder, self._asked = folder, asked
        #: Rank -> the offset of its answer in its file.
        self.begins = {rank: stack_size(folder, rank) for rank in ranks}
        self._sizes, self._grown, self._end = dict(self.begins), now, now + _ANSWER

    def look(self, now: float) -> None:
        """Look whether more has been written."""
        sizes = {rank: stack_size(self._folder, rank) for rank in self.begins}
        if sizes != self._sizes:
            self._sizes, self._grown = sizes, now

    def are_in(self, now: float) -> bool:
        """Return whether there is nothing more to wait for, or no more time."""
        self.look(now)
        return now >= self._end or (now - self._grown >= _WHOLE and not self.missing())

    def missing(self) -> list[int]:
        """Return the ranks that have not answered, and may still do so."""
        return [
            rank for rank, pid in self._asked.items() if self._sizes[rank] <= self.begins[rank] and _can_answer(pid)
        ]


def _can_answer(pid: int) -> bool:
    """Return whether a process may still write its stack: not one that a signal or a debugger has stopped, that is
    frozen or dead, or that has no handler."""
    stat = _proc.stat(pid)
    halted = stat is None or stat.is_dead or stat.state in "Tt" or _proc.is_frozen(pid)
    return not halted and _proc.catches(pid, STACK_SIGNAL)


def read_stack(folder: Path, rank: int, *, start: int) -> Stack | None:
    """Return the stack that a rank has written after byte ``start``; None: it has written none, or it can't be read."""
    try:
        with JobFiles(folder).stack(rank).open(errors="replace") as file:
            file.seek(start)
            text = file.read()
    except OSError:
        return None
    return parse_stack(text)


def read_crash(folder: Path, rank: int) -> str:
    """Return the stacks that a rank has left because of a crash in native code, in Python's words; empty if there are
    none."""
    try:
        text = JobFiles(folder).stack(rank).read_text(errors="replace")
    except OSError:
        return ""
    _, crash, stacks = text.rpartition(CRASH)
    return crash + stacks


def parse_stack(text: str) -> Stack | None:
    """Return the first stack of the main thread in what a rank has written; None: there is none.

    Somebody else may be asking for those of other threads, which begin in Python's ``threading``."""
    stacks = ([*_frames(part)] for part in text.split(STACK)[1:])
    frames = next((found for found in stacks if not _is_other_thread(found)), None)
    if frames is None:
        return None
    below = [
        i
        for i, frame in enumerate(frames)
        if inside(frame.file, "lockstep") in _RUNNERS or (i and frame.file.endswith(_PYTEST))
    ]
    return Stack(tuple(frames[: below[0]] if below else frames))


def _frames(text: str) -> Iterator[Frame]:
    for line in text.splitlines()[1:]:
        match = _FRAME.match(line)
        if match is None:
            break
        yield Frame(match["file"], match["line"], match["name"])


def _is_other_thread(frames: Sequence[Frame]) -> bool:
    return bool(frames) and frames[-1].name == "_bootstrap" and frames[-1].file.endswith("threading.py")


# How often the kernel killed because memory ran out, by the counters of a memory cgroup (version 1 or 2) -------------

_PROC = Path("/proc")
#: Version 1 reports "no limit" as a number a little below this.
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class MemoryGroup:
    """The memory cgroup of a process."""

    folder: Path
    #: The mount point of its hierarchy; an ancestor's limit holds as well.
    mount: Path
    version: int

    def kills(self) -> int | None:
        """Return how many processes of the group the kernel has killed because memory ran out; None: it does not
        count them."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return _proc.counter(self.folder / name, "oom_kill")

    def limit(self) -> int | None:
        """Return the bytes that the group may use, its ancestors' limits included; None: there is no limit."""
        if self.version == 1:
            limit = _proc.counter(self.folder / "memory.stat", "hierarchical_memory_limit")
            return limit if limit is not None and limit < _UNLIMITED else None
        found: list[int] = []
        folder = self.folder
        while folder.is_relative_to(self.mount):
            text = _proc.text(folder / "memory.max").strip()
            found += [int(text)] if text.isdecimal() else []
            folder = folder.parent
        return min(found, default=None)


def memory_group(proc: Path = _PROC / "self") -> MemoryGroup | None:
    """Return the memory cgroup of a process, or None if it can't be seen.

    Args:
        proc: the process's folder in /proc.
    """
    paths = {}
    for line in _proc.text(proc / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path  # version 2's has no name
    mounts = [_mount(line) for line in _proc.text(proc / "mountinfo").splitlines()]
    for version, controller in ((1, "memory"), (2, "")):
        for kind, options, root, mount in mounts:
            if controller not in paths or kind != ("cgroup" if version == 1 else "cgroup2"):
                continue
            if version == 1 and "memory" not in options:
                continue
            # A container may see its own group as the root of the mount, and the path as the host sees it.
            inside = paths[controller].removeprefix(root) if root != "/" else paths[controller]
            for folder in (mount / inside.lstrip("/"), mount):
                group = MemoryGroup(folder, mount, version)
                if group.kills() is not None:
                    return group
    return None


def machine_memory() -> int | None:
    """Return the machine's memory in bytes."""
    return _proc.counter(_PROC / "meminfo", "MemTotal")


def _mount(line: str) -> tuple[str, list[str], str, Path]:
    """Return the kind, options, root and mount point in a line of mountinfo."""
    before, _, after = line.partition(" - ")
    root, point = before.split()[3:5]
    kind, _, options = after.split(" ", 2)
    return kind, options.split(","), root, Path(point.encode().decode("unicode_escape"))


# What the machine says about the time of a failure --------------------------------------------------------------------


@dataclass(frozen=True)
class MachineFacts:
    """The machine's facts at the time of a failure."""

    #: Processes that the kernel killed for lack of memory since the ranks were started; None: the kernel does not tell.
    memory_kills: int | None
    #: The job's memory limit in bytes; None: all of the machine's memory.
    memory_limit: int | None
    #: The machine's memory in bytes; None: unknown.
    machine: int | None
    #: Size and free bytes of /dev/shm once the ranks have ended; None: this machine has none.
    shared: tuple[int, int] | None
    #: The limit on a process's open descriptors.
    files: int
    #: Returns the last activity of the DataLoader worker with a process id; None: unknown.
    worker: Callable[[int], Fetching | None]

    @classmethod
    def collect(
        cls, group: MemoryGroup | None, *, kills_before: int | None, worker: Callable[[int], Fetching | None]
    ) -> MachineFacts:
        """Collect the facts as they are now.

        Args:
            group: the ranks' memory cgroup.
            kills_before: the group's count of kills when the ranks were started; None: unknown.
            worker: returns what the DataLoader worker with a process id did last; None: unknown.
        """
        kills = group.kills() if group is not None else None
        return cls(
            memory_kills=None if kills is None or kills_before is None else kills - kills_before,
            memory_limit=group.limit() if group is not None else None,
            machine=machine_memory(),
            shared=shared_memory(),
            files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            worker=worker,
        )
