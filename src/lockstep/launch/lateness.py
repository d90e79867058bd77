"""Say which ranks hold up the others, what they are doing, and where the others wait."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.job.fates import advice
from lockstep.job.hang import HangKind, HangVerdict, odd_ones
from lockstep.job.page import NAMES, Look, Phase
from lockstep.launch.evidence import ProcessFacts, Stack
from lockstep.text import NEXT, counted, which_ranks

#: The most ranks that are listed one by one.
_RANKS = 16
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
    #: The exit code with which it ended; None: it lives.
    exit_code: int | None
    look: Look
    #: The time since which its page is as it is, on the monotonic clock.
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
        if known.look.collects and known.exit_code is None:
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
    if look.collects:
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
