"""Say what killed a rank, as far as its exit code and its traceback do not."""

from __future__ import annotations

import re
import resource
import signal
from collections.abc import Iterator, Sequence

from lockstep.callsite import is_library
from lockstep.launch.evidence import CRASH, MachineFacts
from lockstep.launch.policy import Ending
from lockstep.text import as_size, which_ranks

#: The most lines that are shown of a stack that Python has written because of a crash.
_STACK_LINES = 8
#: A library's frame in such a stack.
_IN_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pid>\d+)[^)]*\) "
    r"(?:is killed by signal: (?P<signal>[\w ]+)|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)
#: Signals that a process causes itself, mostly in compiled code -> their meaning.
CRASHES = {
    signal.SIGSEGV: "it accessed memory that is not mapped, or not its own, or wrote to what it may only read (such as "
    "a tensor of lockstep.once_per_machine)",
    signal.SIGABRT: "compiled code called abort(), perhaps after printing why",
    signal.SIGILL: "it met an instruction that this processor does not have: a library was built for another one",
    signal.SIGFPE: "compiled code divided an integer by zero",
    signal.SIGSYS: "it made a system call that this container forbids",
}
#: The path for which there was no room, as Python writes it; compiled code and multiprocessing name none.
_NAMED = re.compile(r"No space left on device: '")
#: Free bytes below which nothing can be made in /dev/shm.
_SMALLEST = 65536
_TOO_MANY_FILES = ("Too many open files", "received 0 items of ancdata", "unable to open shared memory object")


def explain(ending: Ending, facts: MachineFacts) -> list[str]:
    """Return lines that say what killed a rank, as far as its exit code and traceback do not."""
    return [*_memory(ending, facts), *_worker(ending, facts), *_shared(ending, facts), *_rest(ending, facts)]


def out_of_memory(ending: Ending, facts: MachineFacts) -> bool:
    """Return whether the kernel killed this rank, or a worker of it, because memory ran out."""
    return bool(facts.memory_kills) and (_killed(ending) or _killed_worker(ending))


def _memory(ending: Ending, facts: MachineFacts) -> Iterator[str]:
    if out_of_memory(ending, facts):
        killed = f"rank {ending.rank}" if _killed(ending) else f"a DataLoader worker of rank {ending.rank}"
        limit = facts.memory_limit or facts.machine
        bounds = [f"{'limit' if facts.memory_limit else 'the machine has'} {as_size(limit)}"] if limit else []
        if _killed(ending) and ending.state.peak is not None:
            bounds.append(f"its peak {as_size(ending.state.peak)}")
        yield f"out of memory: the kernel killed {killed} ({', '.join(bounds)})"
        yield "  take a smaller batch, fewer DataLoader workers or fewer ranks, or give the job more memory"
    elif _killed(ending) and facts.memory_kills is None:
        yield "  (sent by another process, or by the kernel's out-of-memory killer: see dmesg)"
    elif _killed(ending):
        yield "  (sent by another process: the kernel's out-of-memory killer has killed nothing since the job began)"


def _worker(ending: Ending, facts: MachineFacts) -> Iterator[str]:
    found = _found_worker(ending)
    if found is None:
        return
    doing = facts.worker(int(found["pid"]))
    if doing is None:
        where = "; which sample it was fetching is not known"
    elif doing.index is None:
        where = " before its first sample"
    else:
        where = f" while fetching sample {doing.index}"
    how = f"of {found['signal'].strip()}" if found["signal"] else "without an error message"
    yield f"a DataLoader worker of rank {ending.rank} (process {found['pid']}) died {how}{where}"


def _shared(ending: Ending, facts: MachineFacts) -> Iterator[str]:
    text = _text(ending)
    no_space = "No space left on device" in text
    # The error of a multiprocessing semaphore (in a queue, a loader with workers) does not say where room was lacking.
    then = None if ending.record is None else ending.record.shared_memory
    shared = then or facts.shared
    no_room = shared is not None and shared[1] < _SMALLEST
    full = no_space and ("/torch_" in text or "shm" in text or (no_room and not _NAMED.search(text)))
    found = _found_worker(ending)
    bus = ending.state.exit_code == -signal.SIGBUS or (found is not None and "Bus" in (found["signal"] or ""))
    if not (full or bus):
        return
    size = ""
    if shared is not None:
        size = f" ({as_size(shared[0])}, of which {as_size(shared[1])} {'were free then' if then else 'are free now'})"
    if full:
        yield f"/dev/shm{size} was full; it holds the batches of DataLoader workers, and semaphores"
    else:
        yield f"a mapped file lost its memory: most often /dev/shm{size} is full,"
        yield "  through which DataLoader workers pass their batches"
    yield "  enlarge it (docker run --shm-size=8g; mount -o remount,size=8g /dev/shm), or use fewer workers"


def _rest(ending: Ending, facts: MachineFacts) -> Iterator[str]:
    if any(words in _text(ending) for words in _TOO_MANY_FILES):
        yield f"rank {ending.rank} has too many files open: the limit is {facts.files} per process"
        yield "  raise the limit (ulimit -n), or use fewer DataLoader workers; tensors kept from a worker hold one each"
    code = ending.state.exit_code
    if "[Errno 27]" in _text(ending) or code == -signal.SIGXFSZ:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit == resource.RLIM_INFINITY:
            yield "a file is larger than its file system allows"
        else:
            yield f"a file would be larger than this user's limit, {as_size(limit)} (ulimit -f): a log, a file"
            yield "  raise the limit before the job starts: ulimit -f unlimited"
    if ending.record is None and code is not None and -code in CRASHES:
        yield f"  {CRASHES[signal.Signals(-code)]}"
        yield from (f"  {line}" for line in stack_of_crash(ending.crash))


def apart_in_a_crash(first: Ending, endings: Sequence[Ending]) -> Iterator[str]:
    """Name the collectives of ranks that waited in different ones when one of them crashed, as gloo does then."""
    if first.record is not None or first.state.exit_code != -signal.SIGABRT or not first.waited_in:
        return
    ranks: dict[str, list[int]] = {}
    for ending in endings:
        if ending.waited_in:
            ranks.setdefault(ending.waited_in, []).append(ending.rank)
    if len({each.partition(" at ")[0] for each in ranks}) > 1:
        yield "the ranks were in different collectives, which gloo answers with abort():"
        yield from (f"  {which_ranks(each)} waited in {what}" for what, each in ranks.items())
        yield "  every rank must issue the same collectives in the same order, with tensors of equal size and dtype"


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


def stack_of_crash(text: str) -> list[str]:
    """Return the last stack that Python's faulthandler has written because of a crash, innermost call first, without
    the frames of libraries; empty if there is none. If the thread that crashed runs no Python, it is the main
    thread's."""
    _, crash, stacks = text.rpartition(CRASH)
    if not crash:
        return []
    first = f"{crash}{stacks.splitlines()[0]}"
    _, current, frames = stacks.partition("Current thread ")
    if not current:
        _, main, frames = stacks.rpartition("\nThread ")  # the main thread comes last
        if not main:
            return []
        first = f"{first}, in a thread that runs no Python; the main thread was here:"
    here = [line for line in frames.partition("\n\n")[0].splitlines() if line.startswith('  File "')]
    users = [line for line in here if not (_IN_LIBRARY.search(line) or is_library(line.split('"')[1]))]
    return [first, *(users or here)][:_STACK_LINES]
