"""What the watcher says of a rank that holds up the others: pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.job.hang import Kind, Verdict, odd_ones
from lockstep.job.page import NAMES, Look, Phase
from lockstep.launch.evidence import Facts, Stack

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
    facts: Facts | None
    stack: Stack | None


def describe(verdict: Verdict, ranks: Mapping[int, Known], *, now: float, world_size: int) -> str:
    """The whole report."""
    late, seconds = verdict.late, now - verdict.since
    lines: list[str]
    if verdict.kind is Kind.APART:
        lines = _apart(ranks, seconds=seconds, world_size=world_size)
    else:
        lines = [f"{_names(late)} of {world_size} {_have(late)} held up the others for {seconds:.0f} s"]
        for rank in late[:_RANKS]:
            lines += _late(ranks[rank], now)
        lines += _others([ranks[rank] for rank in verdict.waiting], now)
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
    return lines + _others(rest, None)


def _late(known: Known, now: float | None) -> list[str]:
    """The late rank in full."""
    look, stack = known.look, known.stack
    if known.exit_code is not None:
        return [f"  rank {known.rank} has ended, with exit code {known.exit_code}{_steps(look)}"]
    state = "" if known.facts is None else f" is {known.facts.describe()}"
    lines = [f"  rank {known.rank} (process {known.pid}){state}"]
    if look.mark.waiting:
        lines.append(f"  it waits in {_waits_in(known)}{_steps(look)}")
    elif not look.mark.events:
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


def _others(ranks: Sequence[Known], now: float | None) -> list[str]:
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
