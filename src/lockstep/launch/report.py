"""Say with which ranks a job begins, and how it ended."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lockstep.errors import PeerLost
from lockstep.job.files import EXIT_SAVED, StopNote
from lockstep.job.page import NAMES, Look, Phase
from lockstep.job.stop_signals import TIME_LIMIT
from lockstep.launch.causes import CRASHES, apart_in_a_crash, explain, out_of_memory, stack_of_crash
from lockstep.launch.evidence import MachineFacts
from lockstep.launch.policy import FAILURE_GRACE, Ending, Failure, KilledFor, Refusal, first_failure
from lockstep.launch.processes import name
from lockstep.rendezvous.messages import Round
from lockstep.text import counted, last_lines, which_ranks

#: Characters of an error's first line that a report repeats where its traceback was shown.
_BRIEF = 200
#: Lines and bytes of a rank's last output that are repeated if it was not shown and nothing else explains the end.
_LAST_LINES, _LAST_BYTES = 8, 2000
#: What Python writes below the stacks of a crash: often thousands of characters, which tell nothing of it.
_MODULES = re.compile(r"^Extension modules: .*$", re.MULTILINE)
#: Bytes of it in which a stack is looked for that Python has written because of a crash.
_STACK_BYTES = 32_000
#: Stands for the rank that an error begins with.
_ANY_RANK = "rank #"


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
    #: True if ranks were to save and leave by themselves when asked to stop.
    listened: bool = False
    #: Rank -> where its flight recorder's file is; see watchdog.py.
    flight_recorders: Mapping[int, Path] = field(default_factory=dict)
    #: The rank from whose debugger a user has ended the job, and its line; None: the job has not ended so.
    quit_by: tuple[int, str] | None = None

    @cached_property
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
        leaves is a failure any more. (They could not leave a note where there was no room for one.)"""
        left = self.listened and bool(self.endings)
        return self.note is not None or (left and all(one.state.exit_code == EXIT_SAVED for one in self.endings))

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


def asked(signum: signal.Signals, *, grace: float, option: str = "", has_saved: bool) -> str:
    """Say that ranks which were asked to stop take a moment for it.

    Args:
        signum: what asks them.
        grace: the seconds that they have.
        option: the option that says how many; empty: there is none.
        has_saved: whether they have saved, and are on their way out.
    """
    what = {
        signal.SIGINT: "Ctrl-C",
        signal.SIGHUP: "SIGHUP (the terminal was closed)",
        TIME_LIMIT: f"--max-time is over in {grace:g} s",
    }.get(signum, signum.name)
    does = "have saved, and leave" if has_saved else "finish a step, save and leave"
    again = "" if signum in (signal.SIGHUP, TIME_LIMIT) else "; a second one stops them at once"
    return f"{what}: the ranks {does} (within {option or f'{grace:g} s'}){again}"


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
    elif outcome.saved:
        words.append("all ranks have saved, and could not note where: the run resumes from its newest checkpoint")
    ways: dict[str, list[int]] = {}
    for ending in outcome.endings:
        way = _killed_by(ending, outcome, signum) if ending.was_killed else _own_way(ending, saved=outcome.saved)
        if way:
            ways.setdefault(way, []).append(ending.rank)
    words += [_of_ranks(way, ranks) for way, ranks in ways.items()]
    raised = [ending for ending in outcome.endings if _has_raised(ending)]
    if raised:
        what = min(raised, key=lambda ending: ending.order).cause
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
    if code < 0 and (saved or -code in CRASHES):
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
    """Say that the imports of the zygote failed, or that it could not fork the ranks.

    Args:
        error: the traceback, or the reason.
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
        *apart_in_a_crash(first, outcome.endings),
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
    concerned = [ending for ending in outcome.endings if ending is not first and _concerned(ending, first)]
    differing = _differing_echoes(concerned, first)
    others: dict[str, list[int]] = {}
    for ending in concerned:
        others.setdefault(_other(ending, first, differing), []).append(ending.rank)
    for what, ranks in others.items():
        # The words of an error begin with the rank that has it; where several have it, the line does.
        lines.append(
            f"{which_ranks(ranks)}{what.replace('itself', 'themselves') if len(ranks) > 1 else _own(what, ranks[0])}"
        )
    if outcome.late and (record is None or outcome.late not in record.message):  # else the error says it already
        lines.append(outcome.late)
    return "\n".join(lines)


def in_brief(outcome: Outcome) -> str:
    """Report a failure in one line, for machines that it concerns little."""
    first = _speaker(outcome)
    return f"rank {first.rank} of {outcome.world_size} failed: {first.cause}"


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


def spared(hosts: Sequence[str], count: int, *, closed: bool) -> str:
    """Say, after a failure, which machines leave a job that goes on without them.

    Args:
        hosts: the machines.
        count: how often this has happened, with this time.
        closed: whether the job lets in no machine any more as long as it has enough.
    """
    they, leave, them = ("it", "leaves", "it") if len(hosts) == 1 else ("they", "leave", "them")
    text = f"no step was taken with {', '.join(hosts)}: {they} {leave}, and the others start again without {them}"
    if not closed:
        return text
    times = counted(count, "time")
    return f"{text}\nno machine is let in any more while they are enough: this has happened {times} (--max-restarts)"


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
    lines = stack_of_crash(text) or last_lines(_MODULES.sub("", text)[-_LAST_BYTES:], _LAST_LINES)
    return [f"  {line}" for line in lines]


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


def _differing_echoes(others: Iterable[Ending], first: Ending) -> set[str]:
    """Return the types of errors that tell of another rank's end or absence in different words on different ranks: each
    names its own connection, how long it has waited, and which ends it knew of by then."""
    words: dict[str, set[str]] = {}
    for ending in others:
        if ending.record is not None and ending.failed_by_itself and ending.is_echo and not _alike(ending, first):
            _, _, message = ending.cause.partition(": ")
            words.setdefault(ending.record.type, set()).add(_anonymous(message, ending.rank))
    return {kind for kind, each in words.items() if len(each) > 1}


def _other(ending: Ending, first: Ending, differing: Collection[str]) -> str:
    """Say how another rank ended, without its number: those with equal words share a line.

    Args:
        ending: of the other rank.
        first: of the one whose failure is reported.
        differing: the types of errors that are told without their words, as :func:`_differing_echoes` has it.
    """
    if ending.state.exit_code is None:
        return f": still there (process {ending.state.pid}), stuck in the kernel even after SIGKILL"
    if ending.state.exit_code == 0:
        return " had ended by itself, with exit code 0"
    if _alike(ending, first):
        return " failed too, by the same error"
    if ending.record is not None and ending.record.type.endswith(PeerLost.__name__) and not first.is_echo:
        # Whether it finds out before it is stopped is chance.
        return f": stopped because rank {first.rank} failed"
    if ending.failed_by_itself and ending.record is not None and ending.record.type != "SystemExit":
        if ending.is_echo and ending.record.type in differing:
            return f" failed too: {ending.record.type}, each as it waited for others"
        kind, _, message = ending.cause.partition(": ")
        return f" failed too: {kind}: {_anonymous(message, ending.rank)}" if message else f" failed too: {kind}"
    if ending.exit_code == EXIT_SAVED:
        return f" left with exit code {EXIT_SAVED}"
    if ending.failed_by_itself:
        return f" failed too: {ending.cause}"
    return f": stopped because rank {first.rank} failed"
