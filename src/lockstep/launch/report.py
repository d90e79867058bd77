"""Say how a job ended, what killed the rank that failed first, and which rank holds up the others."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lockstep.callsite import is_library
from lockstep.job.fates import advice
from lockstep.job.files import EXIT_SAVED, StopNote
from lockstep.job.hang import HangKind, HangVerdict, odd_ones
from lockstep.job.page import NAMES, Look, Phase
from lockstep.launch.evidence import CRASH, MachineFacts, ProcessFacts, Stack
from lockstep.launch.policy import FAILURE_GRACE, TIME_LIMIT, Ending, Failure, KilledFor, Refusal, first_failure
from lockstep.launch.processes import name
from lockstep.rendezvous.messages import Round
from lockstep.text import NEXT, as_size, counted, last_lines, which_ranks

#: The most ranks that are listed one by one.
_RANKS = 16
#: Characters of an error's first line that a report repeats where its traceback was shown.
_BRIEF = 200
#: Lines and bytes of a rank's last output that are repeated if it was not shown and nothing else explains the end.
_LAST_LINES, _LAST_BYTES = 8, 2000
#: Bytes of it in which a stack is looked for that Python has written because of a crash.
_STACK_BYTES = 32_000
#: A library's frame in such a stack.
_IN_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
#: Stands for the rank that an error begins with.
_ANY_RANK = "rank #"


class Screen(Protocol):
    """Shows messages where ranks write as well."""

    def show(self, text: str) -> None:
        """Show a message on lines of its own."""
        ...


#: The message that only says that the launchers have found each other.
MET = b'{"met": true}'
#: The descriptor to which messages are written as JSON lines, to be shown elsewhere; None: standard error is used.
_reader: int | None = None
#: The screen that shows messages while ranks write; None: there are no ranks.
_screen: Screen | None = None


def say_on(screen: Screen | None) -> None:
    """Have ``screen`` show messages from now on; None: show them as if nothing else wrote there."""
    global _screen
    _screen = screen


def say_to(fd: int) -> None:
    """Write messages to ``fd`` as JSON lines from now on, for the process that shows several launchers' (hosts.py)."""
    global _reader
    _reader = fd


def say(text: str, *, once: str = "", later: bool = False) -> None:
    """Print one of lockstep's own messages, after everything the ranks wrote.

    Args:
        text: the message.
        once: a name under which the launchers of other machines print this message, too; it is shown once if the
            messages of all are shown in one place. Empty: it is about this machine.
        later: if another machine's launcher sends this message, which knows more, that one is shown instead.
    """
    if _reader is None:
        (show if _screen is None else _screen.show)(f"lockstep: {text}")
    else:
        os.write(_reader, json.dumps({"text": text, "once": once, "later": later}).encode() + b"\n")


def show(text: str) -> None:
    """Print a line on standard error; where that is closed, or its reader has gone, print nothing from then on.

    How a job ends must not depend on whether its messages are read.
    """
    if sys.stderr is None:  # closed when Python started; print would take standard output instead
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        # Python flushes what is left once more at its end, and would leave with an exit code of its own.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        os.close(nothing)


def met() -> None:
    """Tell the process that shows the messages of several launchers that the launchers have found each other."""
    if _reader is not None:
        os.write(_reader, MET + b"\n")


def ranks_by_default(count: int, *, cores: int, gpus: int) -> str:
    """Say how many ranks are started if the user has not said it, and why.

    Args:
        count: the ranks of this machine.
        cores: its cores.
        gpus: its GPUs.
    """
    if gpus:
        return f"{counted(count, 'rank')}, one for each GPU (-n says how many)"
    more = f"; -n {cores} for more" if cores > count else ""
    return f"{counted(count, 'rank')} ({counted(cores, 'core')}, no GPU{more})"


def machines(round_: Round) -> str:
    """Say which machines have met, and which ranks each of them has."""
    first, each = 0, []
    for node, count in enumerate(round_.ranks):
        ranks = which_ranks(range(first, first + count))
        each.append(f"{ranks} on {round_.hosts[node]}")
        first += count
    count = len(round_.ranks)
    return f"{counted(count, 'machine')}, {counted(first, 'rank')}: {'; '.join(each)}"


# How a job ended -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How one attempt has ended, gathered once."""

    endings: tuple[Ending, ...]
    facts: MachineFacts
    #: The number of ranks of the job, including those of other machines.
    world_size: int
    #: The report of ranks that hold up the others, if they still do.
    late: str = ""
    #: The checkpoint from which the run continues, if its ranks were asked to stop and have saved.
    note: StopNote | None = None
    #: Rank -> where its flight recorder's file is; see watchdog.py.
    flight_recorders: Mapping[int, Path] = field(default_factory=dict)
    #: The rank from whose debugger a user has ended the job, and its line; None: the job has not ended so.
    quit_by: tuple[int, str] | None = None

    @property
    def first(self) -> Ending | None:
        """The rank that failed before the others, or None if none failed by itself."""
        return first_failure(self.endings)

    @property
    def out_of_memory(self) -> bool:
        """Whether the first failure was a kill by the kernel because memory ran out."""
        return self.first is not None and out_of_memory(self.first, self.facts)

    @property
    def saved(self) -> bool:
        """Whether the ranks have saved because they were asked to stop. Once all have saved, no way in which a rank
        leaves is a failure any more."""
        return self.note is not None

    @property
    def quit(self) -> str:
        """Where a user has ended the job by a debugger's ``q``, in words; empty: the job has not ended so."""
        return "" if self.quit_by is None else "ended at a breakpoint, on rank {} ({})".format(*self.quit_by)

    @property
    def completed(self) -> bool:
        """Whether every rank left with exit code 0."""
        return all(ending.state.exit_code == 0 for ending in self.endings)


def cause(signum: signal.Signals) -> str:
    """Say what ends a job: a signal, by its name, or its time limit."""
    return "the end of --max-time" if signum == TIME_LIMIT else signum.name


def stopped(outcome: Outcome, signum: signal.Signals | None) -> str:
    """Say how a job ended that was asked to stop: where it continues, if it has saved, and which ranks left in another
    way.

    Args:
        outcome: how the attempt has ended.
        signum: the first signal that the launcher passed on; None: the ranks got one themselves.
    """
    if outcome.quit:
        return outcome.quit
    words = [f"stopped by {'a signal to the ranks' if signum is None else cause(signum)}"]
    if outcome.note is not None:
        words.append(outcome.note.describe())
    ways: dict[str, list[int]] = {}
    for ending in outcome.endings:
        way = _killed_by(ending, outcome, signum) if ending.was_killed else _own_way(ending, saved=outcome.saved)
        if way:
            ways.setdefault(way, []).append(ending.rank)
    words += [_of_ranks(way, ranks) for way, ranks in ways.items()]
    raised = [ending for ending in outcome.endings if _has_raised(ending)]
    if raised:
        what = min(raised, key=lambda ending: ending.when).cause
        alike = [ending.rank for ending in raised if ending.cause == what]
        words.append(f"{_of_ranks('{ranks} failed on {their} way out', alike)}: {what}")
    return "; ".join(words)


def _of_ranks(way: str, ranks: Sequence[int]) -> str:
    one = len(ranks) == 1
    return way.format(ranks=which_ranks(ranks), were="was" if one else "were", their="its" if one else "their")


def _has_raised(ending: Ending) -> bool:
    return ending.record is not None and ending.record.type not in ("KeyboardInterrupt", "SystemExit")


def _killed_by(ending: Ending, outcome: Outcome, signum: signal.Signals | None) -> str:
    """Say what sent the SIGKILL that ended a rank."""
    match ending.state.killed_for:
        case KilledFor.AT_ONCE:
            return f"{'it' if signum == signal.SIGQUIT else 'a second signal'} killed {{ranks}} at once"
        case KilledFor.GRACE:
            return "{ranks} did not leave in time (--grace) and {were} killed"
        case KilledFor.FAILURE:
            return f"{{ranks}} did not leave within {FAILURE_GRACE:g} s of another rank's failure and {{were}} killed"
    if out_of_memory(ending, outcome.facts):
        return "the kernel killed {ranks} because memory ran out"
    return "{ranks} {were} killed by signal 9 (SIGKILL), which lockstep did not send"


def _own_way(ending: Ending, *, saved: bool) -> str:
    """Say how a rank that was asked to stop ended instead; empty if it stopped as asked, or its exception says how.

    One that has not saved may well die of the signal, or choose an exit code.
    """
    code = ending.state.exit_code or 0
    if code < 0 and (saved or -code in _CRASHES):
        return f"{{ranks}} died on {{their}} way out: signal {-code} ({name(-code)})"
    if saved and code not in (0, EXIT_SAVED) and not _has_raised(ending):
        return f"{{ranks}} left with exit code {code}"
    return ""


#: Phases in which a rank that was asked to save may stay for long without coming to a step.
_OUTSIDE = (Phase.EVALUATE, Phase.OWN, Phase.COMPILE, Phase.RESTORE)


def is_outside_a_step(look: Look) -> bool:
    """Return whether a rank, by its page, does something outside of a training step."""
    return look.mark.phase in _OUTSIDE and not look.mark.waiting


def outside_a_step(looks: Mapping[int, Look], signum: signal.Signals, *, left: float) -> str:
    """Say what will happen to ranks that a signal asks to save where they can't.

    Args:
        looks: their pages.
        signum: the signal.
        left: seconds until they are killed.
    """
    rank, look = next(iter(looks.items()))
    others = f" ({len(looks) - 1} more outside of a step, too)" if len(looks) > 1 else ""
    where = f"at a breakpoint ({look.debugged_at})" if look.debugging else f"in {NAMES[look.mark.phase]}"
    return (
        f"{cause(signum)} came outside of a training step: rank {rank} is {where}{others}. The "
        f"ranks save once they come to a step, or from the side; those that have not saved in {left:.0f} s are killed, "
        "and the run resumes from its newest checkpoint. If they only need more time, give a longer --grace"
    )


def came_late(signum: signal.Signals) -> str:
    """Say that a signal asked ranks to save that had nothing left to do."""
    return f"{cause(signum)} came when training was over: all ranks ended by themselves"


def not_started(error: str) -> str:
    """Say that the imports of the zygote failed.

    Args:
        error: the traceback.
    """
    return f"the ranks could not be started:\n{error.rstrip()}"


def lost(pid: int, code: int | None) -> str:
    """Say that the zygote is gone, and its ranks with it.

    Args:
        pid: its process.
        code: its exit code; negative for a signal; None: not known.
    """
    if code is not None and code < 0:
        how = f"was killed by signal {-code} ({name(-code)})"
    else:
        how = f"ended with exit code {code or 0}"
    return f"the process that forks the ranks (process {pid}) {how}; all ranks were stopped"


def lost_when_done(why: str) -> str:
    """Say that a machine was cut off from the others when it had nothing left to do.

    Args:
        why: the reason, in the words of the part that noticed it.
    """
    return f"{why}; all ranks of this machine had succeeded by then, and those of other machines may have, too"


def describe(outcome: Outcome, *, elsewhere: bool = False) -> str:
    """Report a failure: the first rank to fail in full, the others in a line each, and who was late.

    Args:
        outcome: how the attempt has ended.
        elsewhere: the reader is at another machine, and has not seen the ranks' output.
    """
    first = _speaker(outcome)
    blamed = "" if first.record is None else _blamed(first.record.message)
    lines = [
        f"{blamed}rank {first.rank} of {outcome.world_size} failed: {first.status}",
        *explain(first, outcome.facts),
        *_apart_in_a_crash(first, outcome.endings),
    ]
    record = first.record
    if record is not None and record.type == "SystemExit" and record.message:
        lines.append(f"  {record.message}")
    elif record is not None and record.traceback:
        told = record.summary if len(record.summary) <= _BRIEF else record.type
        lines.append(f"{told} (its traceback is above)" if first.shown and not elsewhere else record.traceback.rstrip())
    elif record is not None and first.was_aborted:
        lines.append(f"{record.type}: {record.message}")
    elif first.log is not None and not first.shown:  # it may have said why before it left, as argparse does
        lines += _last_lines(first.log)
    if first.log is not None:
        lines.append(f"rank {first.rank}'s log: {first.log}")
    lines += _flight_recorders(outcome.flight_recorders)
    others: dict[str, list[int]] = {}
    for ending in outcome.endings:
        if ending is not first and _concerned(ending, first):
            others.setdefault(_other(ending, first), []).append(ending.rank)
    for what, ranks in others.items():
        # The words of an error begin with the rank that has it; where several have it, the line does.
        lines.append(
            f"{which_ranks(ranks)}{what.replace('itself', 'themselves') if len(ranks) > 1 else _own(what, ranks[0])}"
        )
    if outcome.late and (record is None or outcome.late not in record.message):  # else the error says it already
        lines.append(outcome.late)
    return "\n".join(lines)


def stopped_for_hang(outcome: Outcome, text: str, seconds: float) -> str:
    """Report that all ranks were stopped because of a hang; ``text`` is the report on it, printed ``seconds`` ago."""
    lines = [f"the ranks still waited {seconds:.0f} s after the report, so all were stopped (--on-hang restart):"]
    lines += [f"  {line}" for line in text.partition("\nNothing was stopped")[0].splitlines()]
    return "\n".join([*lines, *_flight_recorders(outcome.flight_recorders)])


def _flight_recorders(kept: Mapping[int, Path]) -> Iterator[str]:
    """Say where the files of flight recorders are, and which tool reads them."""
    if kept:
        file = next(iter(kept.values()))
        prefix = file.name.rstrip("0123456789")
        yield (
            f"the latest collectives of {which_ranks(kept)}, by torch's flight recorder: {file.parent}/{prefix}…; "
            f"torchfrtrace {file.parent} --prefix {prefix} compares them"
        )


def log_named_by(outcome: Outcome) -> int | None:
    """Return the rank whose log :func:`describe` names; None: it names none."""
    speaker = _speaker(outcome)
    return None if speaker.log is None else speaker.rank


def restarted(used: int, limit: int) -> str:
    """Say, after a failure, that the job starts again."""
    return f"restart {used} of {limit}: all ranks start again"


def not_restarted(why: Refusal, failure: Failure, *, limit: int) -> str:
    """Say, after a failure, why the job does not start again; empty if restarts were not asked for."""
    if why is Refusal.NOT_ASKED:
        return ""
    if why is Refusal.BEFORE_FIRST_STEP:
        return "not restarted: it failed before its first step, and would fail again"
    if why is Refusal.SAME_AGAIN:
        at = "" if failure.step is None else f" at step {failure.step}"
        return f"not restarted: the same failure happened twice, on rank {failure.rank}{at}, and would happen again"
    times = "the one restart is" if limit == 1 else f"all {limit} restarts are"
    return f"not restarted: {times} used up (--max-restarts)"


def unseen(ranks: Sequence[int], folder: Path | None) -> str:
    """Say which folder has the output that was not shown."""
    return f"what {which_ranks(ranks)} wrote is in {folder}"


def _last_lines(log: Path) -> list[str]:
    """Return the end of a rank's log, indented."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _STACK_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []  # the log is named all the same
    lines = stack_of_crash(text) or last_lines(text[-_LAST_BYTES:], _LAST_LINES)
    return [f"  {line}" for line in lines]


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
    return [first, *(users or here)][:_LAST_LINES]


def _blamed(message: str) -> str:
    """Return the ranks for which a failed rank waited in vain, by the words of its error; the report begins with
    them."""
    found = re.search(r"(ranks? [\d, ]+) did not come", message)
    return f"{found[0]}: " if found else ""


def _concerned(ending: Ending, first: Ending) -> bool:
    # A rank that left with exit code 0 is of interest if the failure is that of ranks which waited for it.
    return ending.failed_by_itself or ending.state.stopped_at is not None or first.is_echo


def _speaker(outcome: Outcome) -> Ending:
    """Return the rank whose failure is reported in full: the first one, or one with the same failure whose output was
    seen."""
    first = outcome.first
    assert first is not None, "a rank failed"
    if first.shown:
        return first
    return next((each for each in outcome.endings if each.shown and _alike(each, first)), first)


def _alike(one: Ending, other: Ending) -> bool:
    """Return whether two ranks failed by the same error, apart from the rank with which it begins.

    A rank that was told to stop before it recorded such an error failed by itself: a stop raises no such error.
    """
    if one.record is None or other.record is None:
        return False
    if one.record.type != other.record.type:
        return False
    # What they have found out together begins with the rank that is to blame, and is the same on all of them.
    mine, theirs = (_anonymous(each.record.message, each.rank) for each in (one, other) if each.record is not None)
    return one.record.message == other.record.message or mine == theirs


def _anonymous(message: str, rank: int) -> str:
    return re.sub(rf"^rank {rank}\b", _ANY_RANK, message)


def _own(text: str, rank: int) -> str:
    return text.replace(_ANY_RANK, f"rank {rank}", 1)


def _other(ending: Ending, first: Ending) -> str:
    """Say how another rank ended, without its number: those with equal words share a line."""
    if ending.state.exit_code is None:
        return f": still there (process {ending.state.pid}), stuck in the kernel even after SIGKILL"
    if ending.state.exit_code == 0:
        return " had ended by itself, with exit code 0"
    if _alike(ending, first):
        return " failed too, by the same error"
    if ending.failed_by_itself and ending.record is not None and ending.record.type != "SystemExit":
        kind, _, message = ending.cause.partition(": ")
        return f" failed too: {kind}: {_anonymous(message, ending.rank)}" if message else f" failed too: {kind}"
    if ending.exit_code == EXIT_SAVED:
        return f" left with exit code {EXIT_SAVED}"
    if ending.failed_by_itself:
        return f" failed too: {ending.cause}"
    return f": stopped because rank {first.rank} failed"


# What killed it ------------------------------------------------------------------------------------------------------

_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pid>\d+)[^)]*\) "
    r"(?:is killed by signal: (?P<signal>[\w ]+)|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)
#: Signals that a process causes itself, mostly in compiled code -> their meaning.
_CRASHES = {
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
    no_room = facts.shared is not None and facts.shared[1] < _SMALLEST
    full = no_space and ("/torch_" in text or "shm" in text or (no_room and not _NAMED.search(text)))
    found = _found_worker(ending)
    bus = ending.state.exit_code == -signal.SIGBUS or (found is not None and "Bus" in (found["signal"] or ""))
    if not (full or bus):
        return
    size = ""
    if facts.shared is not None:
        size = f" ({as_size(facts.shared[0])}, of which {as_size(facts.shared[1])} are free now)"
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
    if ending.record is None and code is not None and -code in _CRASHES:
        yield f"  {_CRASHES[signal.Signals(-code)]}"
        yield from (f"  {line}" for line in stack_of_crash(ending.crash))


def _apart_in_a_crash(first: Ending, endings: Sequence[Ending]) -> Iterator[str]:
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


# The report of a rank that is late -----------------------------------------------------------------------------------

#: The last phase of a rank that is in its own code now -> words for it.
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
#: The waits that begin with a call which all ranks must make.
_CALL = re.compile(r"((?:World|Checkpointer|Log|ShardedLoader|lockstep)\.\w+\(\)|a line of lockstep\.Log)")
#: Lines of a stack that are shown.
_FRAMES = 12


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
    facts: ProcessFacts | None
    stack: Stack | None


def describe_late(verdict: HangVerdict, ranks: Mapping[int, Known], *, now: float, world_size: int) -> str:
    """Report which ranks are late, what they are doing, and where the others wait, while all of them run on."""
    lines = _hang(verdict, ranks, now=now, world_size=world_size)
    lines.append("Nothing was stopped: the wait ends with an error after its time limit.")
    lines += [f"{NEXT} {text}" for text in _calls_for_all(verdict, ranks) or [_what_to_do(verdict, ranks)]]
    return "\n".join(lines)


def describe_hang(verdict: HangVerdict, ranks: Mapping[int, Known], *, now: float, world_size: int) -> str:
    """Report the same of ranks that are ended because of it."""
    lines = _hang(verdict, ranks, now=now, world_size=world_size)
    return "\n".join([*lines, *(f"{NEXT} {text}" for text in _calls_for_all(verdict, ranks))])


def _hang(verdict: HangVerdict, ranks: Mapping[int, Known], *, now: float, world_size: int) -> list[str]:
    late, seconds = verdict.late, now - verdict.since
    lines: list[str]
    if verdict.kind is HangKind.APART:
        lines = _apart(ranks, seconds=seconds, world_size=world_size)
    else:
        what = "held up the others" if verdict.waiting else "stood still"
        lines = [f"{which_ranks(late)} of {world_size} {_have(late)} {what} for {seconds:.0f} s"]
        for rank in late[:_RANKS]:
            lines += describe_rank(ranks[rank], now)
        lines += _waiting([ranks[rank] for rank in verdict.waiting], now)
    return lines


def _what_to_do(verdict: HangVerdict, ranks: Mapping[int, Known]) -> str:
    """Return the advice about late ranks."""
    for known in (ranks[rank] for rank in verdict.late):
        if known.facts is not None and known.facts.state == "T":
            return f"kill -CONT {known.pid} resumes rank {known.rank}"
        if known.stack is not None and known.stack.collects:
            return "call gc.freeze() once the model and the data are loaded, or gc.disable() if there are no cycles"
    return (
        "lockstep runs stack prints where every rank is now; put work that may take long into "
        '`with lockstep.expect_slow("…"):`'
    )


def _calls_for_all(verdict: HangVerdict, ranks: Mapping[int, Known]) -> list[str]:
    """Say that all ranks must make the call in which some wait, if others wait elsewhere or have ended."""
    apart = verdict.kind is HangKind.APART or any(ranks[rank].exit_code is not None for rank in verdict.late)
    if not apart:
        return []
    found = [_CALL.match(known.look.waits_in) for known in ranks.values() if known.look.mark.waiting]
    calls = [each and each[1] for each in found]
    odd = {call for call in calls if call and (calls.count(call) < len(calls) or len(calls) < len(ranks))}
    return [advice(call) for call in sorted(odd)]


def over(verdict: HangVerdict, *, now: float) -> str:
    """Say that the late ranks have moved on."""
    who = "the ranks have" if not verdict.late else f"{which_ranks(verdict.late)} {_have(verdict.late)}"
    return f"{who} moved on after {now - verdict.since:.0f} s"


def _apart(ranks: Mapping[int, Known], *, seconds: float, world_size: int) -> list[str]:
    waits_in = {rank: _waits_in(known) for rank, known in ranks.items()}
    odd = odd_ones({rank: known.look for rank, known in ranks.items()}, waits_in) if len(ranks) == world_size else ()
    if len(ranks) < world_size:
        head = f"all ranks of this machine have waited for {seconds:.0f} s: the late one is on another machine"
    elif odd:
        head = (
            f"{which_ranks(odd)} of {world_size} {_have(odd)} left out the collective that the others wait in, or they "
            f"have one too many: all ranks have waited for {seconds:.0f} s"
        )
    elif len(set(waits_in.values())) > 1:
        head = f"all ranks have waited for {seconds:.0f} s, in different collectives: one of them has left one out"
    else:
        head = f"all ranks have waited for {seconds:.0f} s in a collective that does not end: does the backend work?"
    lines = [head]
    for rank in odd[:_RANKS]:
        lines += describe_rank(ranks[rank], None)
    rest = [known for rank, known in ranks.items() if rank not in odd]
    return lines + _waiting(rest, None)


def describe_rank(known: Known, now: float | None) -> list[str]:
    """Say in full where a rank is for which the others wait, or which will be ended.

    Args:
        known: the facts about it.
        now: this moment, on the monotonic clock; None: the page's times can't be used.
    """
    look, stack = known.look, known.stack
    if known.exit_code is not None:
        return [f"  rank {known.rank} has ended, with exit code {known.exit_code}{_steps(look)}"]
    state = "" if known.facts is None else f" is {known.facts.describe()}"
    where = "on another machine, whose launcher tells more" if known.pid is None else f"process {known.pid}"
    lines = [f"  rank {known.rank} ({where}){state}"]
    if look.mark.waiting:
        verb = "waits" if now is None else "was"  # it is late, so it would not notice that the others have come
        lines.append(f"  it {verb} in {_waits_in(known)}{_steps(look)}")
    elif not look.mark.serial:
        lines.append("  it has not reported yet")
    else:
        lines.append(f"  in {_doing(known, now)}{_steps(look)}")
    if look.reason:
        lines.append(f"  inside lockstep.expect_slow({look.reason!r})")
    if stack is not None and stack.collects:
        lines.append("  Python's garbage collector is running")
    if stack is not None and stack.frames:
        lines.append("  its Python stack, the innermost line first:")
        lines += [f"    {frame}" for frame in stack.frames[:_FRAMES]]
        if len(stack.frames) > _FRAMES:
            lines.append(f"    … and {len(stack.frames) - _FRAMES} more")
    elif known.pid is not None:
        lines.append("  (it did not answer when asked for its Python stack)")
        if look.waits_in and not look.mark.waiting:
            lines.append(f"  it waited last in {look.waits_in}")
    return lines


def _doing(known: Known, now: float | None) -> str:
    """Return what a rank does, in words: ``your code for 6 s, after optimizer.step() at train.py:26 in <module>``."""
    look, mark = known.look, known.look.mark
    if look.debugging:
        return f"a debugger, at {look.debugged_at}"
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
        seconds = "" if now is None or not known.look.waits else f", for {now - known.since:.0f} s"
        lines.append(f"  rank {known.rank} waits in {_waits_in(known)}{seconds}")
    if len(ranks) > _RANKS:
        lines.append(f"  and so do {len(ranks) - _RANKS} more")
    return lines


def _waits_in(known: Known) -> str:
    if known.look.mark.waiting:
        return known.look.waits_in
    stack = known.stack
    at = None if stack is None else stack.users
    where = f" at {at}" if at is not None else ""
    if known.look.on_device:
        return f"its device, which has not finished averaging the gradients of the latest backward{where}"
    if stack is None or not stack.frames:
        return "an unknown place"
    return f"{stack.frames[0].name}{where}"


def _steps(look: Look) -> str:
    return f", {counted(look.steps or 0, 'step')} taken"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
