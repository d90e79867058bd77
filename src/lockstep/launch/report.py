"""What the launcher says of ranks that failed, and of ranks that hold up the others: pure text."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.job.files import FailureRecord
from lockstep.job.hang import Kind, Verdict, odd_ones
from lockstep.job.page import NAMES, Look, Phase
from lockstep.job.workers import Fetching
from lockstep.launch import evidence
from lockstep.launch.evidence import MemoryGroup, Stack, machine_memory
from lockstep.launch.policy import FAILURE_GRACE, RankState
from lockstep.launch.processes import name

# How a rank ended ----------------------------------------------------------------------------------------------------

#: A death without a record is noticed some time after it happened, a record carries the time of its exception.
_NOTICED_LATE = 0.1
#: How other ranks' exceptions read when a peer has gone: consequences, not causes.
_ECHOES = ("PeerLost", "CollectiveTimeout", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass(frozen=True)
class Ending:
    """How one rank ended."""

    state: RankState
    record: FailureRecord | None
    #: Its log, or None if its output went elsewhere.
    log: Path | None = None
    #: Whether what it wrote to standard error was seen by the user.
    shown: bool = False

    @property
    def rank(self) -> int:
        return self.state.rank

    @property
    def exit_code(self) -> int:
        """As a shell reports it; the record knows better than the signal by which we ended the rank afterwards."""
        if self.record is not None:
            return self.record.exit_code
        code = self.state.exit_code
        if code is None:
            return 1  # it could not even be killed
        return code if code >= 0 else 128 - code

    @property
    def failed_by_itself(self) -> bool:
        stopped = self.state.stopped_at
        if self.record is not None:
            return stopped is None or self.record.at < stopped
        return self.state.exit_code not in (None, 0) and (stopped is None or self._seen < stopped)

    @property
    def when(self) -> float:
        """When it failed; an echo of another's failure comes after everything within the same half second."""
        at = self.record.at if self.record is not None else self._seen - _NOTICED_LATE
        return at + FAILURE_GRACE if self.is_echo else at

    @property
    def cause(self) -> str:
        """One phrase: an exit code, a signal's name, or the exception."""
        if self.record is not None and self.record.type != "SystemExit":
            return self.record.summary
        return self.status

    @property
    def status(self) -> str:
        code = self.state.exit_code
        if self.record is not None or code is None or code >= 0:
            return f"exit code {self.exit_code}"
        return f"killed by signal {-code} ({name(-code)})"

    @property
    def _seen(self) -> float:
        return self.state.ended_at if self.state.ended_at is not None else float("inf")

    @property
    def is_echo(self) -> bool:
        """Whether its exception reads like the consequence of another rank's end."""
        return self.record is not None and any(
            echo in self.record.type or echo in self.record.message for echo in _ECHOES
        )


# What killed it ------------------------------------------------------------------------------------------------------

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
        """Look now.

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


# The report of a failure ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How one attempt has ended, gathered once."""

    endings: tuple[Ending, ...]
    facts: Facts
    #: Ranks of the job, those of other machines included.
    world_size: int
    #: What was said of ranks that hold up the others, if they still do.
    late: str = ""

    @property
    def first(self) -> Ending | None:
        """The rank that failed before the others, or None if none failed by itself."""
        return min((e for e in self.endings if e.failed_by_itself), key=lambda e: e.when, default=None)

    @property
    def out_of_memory(self) -> bool:
        """Whether the first failure was the kernel's killing for want of memory."""
        return self.first is not None and self.facts.out_of_memory(self.first)


def describe(outcome: Outcome) -> str:
    """The report of a failure: the first rank to fail in full, the others in a line each, and who was late."""
    first = outcome.first
    assert first is not None, "a rank failed"
    blamed = "" if first.record is None else _blamed(first.record.message)
    lines = [
        f"{blamed}rank {first.rank} of {outcome.world_size} failed: {first.status}",
        *explain(first, outcome.facts),
    ]
    record = first.record
    if record is not None and record.type == "SystemExit" and record.message:
        lines.append(f"  {record.message}")
    elif record is not None and record.traceback:
        lines.append(f"{record.summary} (its traceback is above)" if first.shown else record.traceback.rstrip())
    if first.log is not None:
        lines.append(f"rank {first.rank}'s log: {first.log}")
    lines += [_other(ending, first) for ending in outcome.endings if ending is not first and _concerned(ending, first)]
    if outcome.late and (record is None or outcome.late not in record.message):  # else the error says it already
        lines.append(outcome.late)
    return "\n".join(lines)


def _blamed(message: str) -> str:
    """The ranks that an error waited for in vain, by its own words, to begin the report with."""
    found = re.search(r"(ranks? [\d, ]+) did not come", message)
    return f"{found[0]}: " if found else ""


def _concerned(ending: Ending, first: Ending) -> bool:
    # A rank that left with exit code 0 is of interest if the failure is that of ranks which waited for it.
    return ending.failed_by_itself or ending.state.stopped_at is not None or first.is_echo


def _other(ending: Ending, first: Ending) -> str:
    if ending.state.exit_code is None:
        return f"rank {ending.rank}: still there (process {ending.state.pid}), stuck in the kernel even after SIGKILL"
    if ending.state.exit_code == 0:
        return f"rank {ending.rank} had ended by itself, with exit code 0"
    if ending.failed_by_itself:
        return f"rank {ending.rank} failed too: {ending.cause}"
    return f"rank {ending.rank}: stopped because rank {first.rank} failed"


# The report of a rank that is late -----------------------------------------------------------------------------------

#: What a rank has done last that is in its own code now.
_DONE = {
    Phase.DATA: "fetching data",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.REDUCE: "averaging gradients",
    Phase.OPTIMIZER: "optimizer.step()",
    Phase.SAVE: "saving",
    Phase.RESTORE: "restoring",
    Phase.COMPILE: "compiling",
    Phase.EVALUATE: "a forward in eval mode",
}
#: Lines of a stack that are shown, and ranks that are listed one by one.
_FRAMES = 12
_RANKS = 16


@dataclass(frozen=True)
class Known:
    """All that is known of one rank."""

    rank: int
    pid: int | None
    #: How it ended, or None while it lives.
    exit_code: int | None
    look: Look
    #: Since when its page is as it is, on the monotonic clock.
    since: float
    facts: evidence.Facts | None
    stack: Stack | None


def describe_late(verdict: Verdict, ranks: Mapping[int, Known], *, now: float, world_size: int) -> str:
    """The whole report."""
    late, seconds = verdict.late, now - verdict.since
    lines: list[str]
    if verdict.kind is Kind.APART:
        lines = _apart(ranks, seconds=seconds, world_size=world_size)
    else:
        lines = [f"{_names(late)} of {world_size} {_have(late)} held up the others for {seconds:.0f} s"]
        for rank in late[:_RANKS]:
            lines += _late(ranks[rank], now)
        lines += _waiting([ranks[rank] for rank in verdict.waiting], now)
    lines.append(
        "Nothing was stopped: the wait ends with an error after its time limit. If this is meant to take its time, "
        'put it into `with lockstep.expect_slow("…"):`'
    )
    return "\n".join(lines)


def over(verdict: Verdict, *, now: float) -> str:
    """The ranks have moved on."""
    who = "the ranks have" if not verdict.late else f"{_names(verdict.late)} {_have(verdict.late)}"
    return f"{who} gone on, after {now - verdict.since:.0f} s"


def _apart(ranks: Mapping[int, Known], *, seconds: float, world_size: int) -> list[str]:
    waits_in = {rank: _waits_in(known) for rank, known in ranks.items()}
    odd = odd_ones({rank: known.look for rank, known in ranks.items()}, waits_in) if len(ranks) == world_size else ()
    if len(ranks) < world_size:
        head = f"all ranks of this machine have waited for {seconds:.0f} s: the late one is on another machine"
    elif odd:
        head = (
            f"{_names(odd)} of {world_size} {_have(odd)} left out the collective that the others wait in, or they have "
            f"one too many: all ranks have waited for {seconds:.0f} s"
        )
    elif len(set(waits_in.values())) > 1:
        head = f"all ranks have waited for {seconds:.0f} s, in different collectives: one of them has left one out"
    else:
        head = f"all ranks have waited for {seconds:.0f} s in a collective that does not end: does the backend work?"
    lines = [head]
    for rank in odd[:_RANKS]:
        lines += _late(ranks[rank], None)
    rest = [known for rank, known in ranks.items() if rank not in odd]
    return lines + _waiting(rest, None)


def _late(known: Known, now: float | None) -> list[str]:
    """The late rank in full."""
    look, stack = known.look, known.stack
    if known.exit_code is not None:
        return [f"  rank {known.rank} has ended, with exit code {known.exit_code}{_steps(look)}"]
    state = "" if known.facts is None else f" is {known.facts.describe()}"
    lines = [f"  rank {known.rank} (process {known.pid}){state}"]
    if look.mark.waiting:
        lines.append(f"  it waits in {_waits_in(known)}{_steps(look)}")
    elif not look.mark.serial:
        lines.append("  it has not reported yet")
    else:
        lines.append(f"  in {_doing(known, now)}{_steps(look)}")
    if look.reason:
        lines.append(f"  inside lockstep.expect_slow({look.reason!r})")
    if stack is not None and stack.frames:
        lines.append("  its Python stack, the innermost line first:")
        lines += [f"    {frame}" for frame in stack.frames[:_FRAMES]]
        if len(stack.frames) > _FRAMES:
            lines.append(f"    … and {len(stack.frames) - _FRAMES} more")
    else:
        lines.append("  (it did not answer when asked for its Python stack)")
        if look.waits_in and not look.mark.waiting:
            lines.append(f"  it waited last in {look.waits_in}")
    return lines


def _doing(known: Known, now: float | None) -> str:
    """``your code for 6 s, after optimizer.step() at train.py:26 in <module>``"""
    look, mark = known.look, known.look.mark
    begun = "" if now is None else f" for {now - known.since:.0f} s"
    line = known.stack.users if known.stack is not None else None
    if mark.phase is not Phase.OWN:
        return f"{NAMES[mark.phase]}{begun}" + (f", at {line}" if line is not None else "")
    if mark.entered not in _DONE:
        return f"{NAMES[mark.phase]}{begun}"
    at = f" at {look.stepped_at}" if mark.entered is Phase.OPTIMIZER and look.stepped_at else ""
    return f"{NAMES[mark.phase]}{begun}, after {_DONE[mark.entered]}{at}"


def _waiting(ranks: Sequence[Known], now: float | None) -> list[str]:
    lines = []
    for known in ranks[:_RANKS]:
        seconds = "" if now is None or not known.look.mark.waiting else f", for {now - known.since:.0f} s"
        lines.append(f"  rank {known.rank} waits in {_waits_in(known)}{seconds}")
    if len(ranks) > _RANKS:
        lines.append(f"  and so do {len(ranks) - _RANKS} more")
    return lines


def _waits_in(known: Known) -> str:
    if known.look.mark.waiting:
        return known.look.waits_in
    stack = known.stack
    if stack is None or not stack.frames:
        return "a place that is not known"
    at = stack.users
    where = f" at {at}" if at is not None else ""
    return f"{stack.frames[0].name}{where}"


def _steps(look: Look) -> str:
    steps = look.steps or 0
    return f", {steps} step{'' if steps == 1 else 's'} taken"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS])) + (", …" if len(ranks) > _RANKS else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
