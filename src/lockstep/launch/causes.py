"""What killed a rank, in words, and what to do about it: from its last words, its signal and what the machine says."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.job.workers import Fetching
from lockstep.launch.evidence import MemoryGroup, machine_memory
from lockstep.launch.report import Ending

_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pid>\d+)[^)]*\) "
    r"(?:is killed by signal: (?P<signal>[\w ]+)|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)
#: What a process brings upon itself, mostly in compiled code.
_CRASHES = {
    signal.SIGSEGV: "it reached for memory that is not its own",
    signal.SIGABRT: "compiled code gave up, after a message of its own perhaps",
    signal.SIGILL: "it came to an instruction that this processor does not have: a library built for another one",
    signal.SIGFPE: "compiled code divided a whole number by zero",
    signal.SIGSYS: "it asked the kernel for something that this container forbids",
}
_TOO_MANY_FILES = ("Too many open files", "received 0 items of ancdata", "unable to open shared memory object")


@dataclass(frozen=True)
class Facts:
    """What the machine says about the time of a failure."""

    #: Processes that the kernel killed for want of memory since the ranks were started; None: it does not say.
    memory_kills: int | None
    #: Bytes that the job may use; None: all that the machine has.
    memory_limit: int | None
    machine: int | None
    #: Bytes of /dev/shm, and of them free; None: there is none.
    shared: tuple[int, int] | None
    #: Descriptors that a process may have open.
    files: int
    #: What a worker with this process id was doing.
    worker: Callable[[int], Fetching | None]

    @classmethod
    def collect(
        cls, group: MemoryGroup | None, *, kills_before: int | None, worker: Callable[[int], Fetching | None]
    ) -> Facts:
        """**Local.** Look now.

        Args:
            group: the ranks' memory cgroup.
            kills_before: its count when they were started.
            worker: asked for what a worker was doing.
        """
        kills = group.kills() if group is not None else None
        try:
            fs = os.statvfs("/dev/shm")
            shared = fs.f_blocks * fs.f_frsize, fs.f_bavail * fs.f_frsize
        except OSError:
            shared = None
        return cls(
            memory_kills=None if kills is None or kills_before is None else kills - kills_before,
            memory_limit=group.limit() if group is not None else None,
            machine=machine_memory(),
            shared=shared,
            files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            worker=worker,
        )

    def out_of_memory(self, ending: Ending) -> bool:
        """Whether the kernel killed this rank, or a worker of it, because memory was out."""
        return bool(self.memory_kills) and (_killed(ending) or _killed_worker(ending))


def explain(ending: Ending, facts: Facts) -> list[str]:
    """Lines that say what killed a rank, as far as its exit code and traceback do not."""
    return [*_memory(ending, facts), *_worker(ending, facts), *_shared(ending, facts), *_rest(ending, facts)]


def _memory(ending: Ending, facts: Facts) -> Iterator[str]:
    if facts.out_of_memory(ending):
        whom = f"rank {ending.rank}" if _killed(ending) else f"a DataLoader worker of rank {ending.rank}"
        limit = facts.memory_limit or facts.machine
        bounds = [f"{'limit' if facts.memory_limit else 'the machine has'} {_size(limit)}"] if limit else []
        if _killed(ending) and ending.state.peak is not None:
            bounds.append(f"its peak {_size(ending.state.peak)}")
        yield f"out of memory: the kernel killed {whom} ({', '.join(bounds)})"
        yield "  take a smaller batch, fewer DataLoader workers or fewer ranks, or give the job more memory"
    elif _killed(ending) and facts.memory_kills is None:
        yield "  (unless somebody sent it, the kernel's out-of-memory killer did: see dmesg)"
    elif _killed(ending):
        yield "  (somebody sent it: the kernel's out-of-memory killer has killed nobody here since the start)"


def _worker(ending: Ending, facts: Facts) -> Iterator[str]:
    found = _found_worker(ending)
    if found is None:
        return
    doing = facts.worker(int(found["pid"]))
    if doing is None:
        where = ", which left no word of the sample it had"
    elif doing.index is None:
        where = " before its first sample"
    else:
        where = f" while it fetched sample {doing.index}"
    how = f"of {found['signal'].strip()}" if found["signal"] else "without a word"
    yield f"a DataLoader worker of rank {ending.rank} (process {found['pid']}) died {how}{where}"


def _shared(ending: Ending, facts: Facts) -> Iterator[str]:
    text = _text(ending)
    full = "No space left on device" in text and ("/torch_" in text or "shm" in text)
    found = _found_worker(ending)
    bus = ending.state.exit_code == -signal.SIGBUS or (found is not None and "Bus" in (found["signal"] or ""))
    if not (full or bus):
        return
    size = (
        "" if facts.shared is None else f" ({_size(facts.shared[0])}, of which {_size(facts.shared[1])} are free now)"
    )
    if full:
        yield f"/dev/shm{size} was full, through which DataLoader workers hand over their batches"
    else:
        yield f"memory behind a mapped file was gone: most often /dev/shm{size} is full,"
        yield "  through which DataLoader workers hand over their batches"
    yield "  enlarge it (docker run --shm-size=8g; mount -o remount,size=8g /dev/shm), or use fewer workers"


def _rest(ending: Ending, facts: Facts) -> Iterator[str]:
    if any(words in _text(ending) for words in _TOO_MANY_FILES):
        yield f"a process may have {facts.files} files open, and rank {ending.rank} wanted more"
        yield "  raise the limit (ulimit -n), or use fewer DataLoader workers; tensors kept from a worker hold one each"
    code = ending.state.exit_code
    if ending.record is None and code is not None and -code in _CRASHES:
        yield f"  {_CRASHES[signal.Signals(-code)]}; PYTHONFAULTHANDLER=1 shows the line of Python that it came from"


def _killed(ending: Ending) -> bool:
    return ending.record is None and ending.state.exit_code == -signal.SIGKILL


def _killed_worker(ending: Ending) -> bool:
    found = _found_worker(ending)
    return found is not None and (found["signal"] or "").strip() == "Killed"


def _found_worker(ending: Ending) -> re.Match[str] | None:
    found = list(_WORKER.finditer(_text(ending)))
    return next((one for one in found if one["signal"]), found[0] if found else None)  # torch tells it twice


def _text(ending: Ending) -> str:
    return "" if ending.record is None else f"{ending.record.message}\n{ending.record.traceback}"


def _size(size: int) -> str:
    """``4.0 GiB``, ``64 MiB``."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
