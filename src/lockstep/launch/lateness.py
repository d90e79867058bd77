"""What the watcher says of a rank that holds up the others: pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.launch.kernel import Facts
from lockstep.launch.stacks import Stack
from lockstep.recorder.compare import Kind, Verdict, odd_ones
from lockstep.recorder.layout import NAMES, Look

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
    look: Look | None
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
    looks = {rank: known.look for rank, known in ranks.items() if known.look is not None}
    waits_in = {rank: _waits_in(known) for rank, known in ranks.items()}
    odd = odd_ones(looks, waits_in) if len(looks) == len(ranks) and len(ranks) == world_size else ()
    if len(ranks) < world_size:
        head = f"all ranks of this machine have waited for {seconds:.0f} s: the late one is on another machine"
    elif odd:
        head = (
            f"all ranks have waited for {seconds:.0f} s, {_names(odd)} elsewhere than the others: it has left out "
            "the collective that they are in, or they have one too many"
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
    if known.exit_code is not None:
        return [f"  rank {known.rank} has ended, with exit code {known.exit_code}{_step(known.look)}"]
    lines = []
    state = "" if known.facts is None else f" is {known.facts.describe()}"
    lines.append(f"  rank {known.rank} (process {known.pid}){state}")
    look = known.look
    if look is not None and look.waiting:
        lines.append(f"  it waits in {_waits_in(known)}{_step(look)}")
    elif look is not None:
        begun = "" if now is None else f" since {now - look.since:.0f} s"
        before = "entered" if look.entered is look.phase else f"behind {NAMES[look.entered]}"
        place = f", {before} at {look.place}" if look.place else ""
        lines.append(f"  in phase {NAMES[look.phase]}{begun}{place}{_step(look)}")
    elif known.pid is not None:
        lines.append("  it has told nothing of itself yet")
    if known.stack is not None and known.stack.frames:
        lines.append("  its Python stack, the innermost line first:")
        frames = known.stack.frames
        lines += [f"    {frame}" for frame in frames[:_FRAMES]]
        if len(frames) > _FRAMES:
            lines.append(f"    … and {len(frames) - _FRAMES} more")
    else:
        lines.append("  (it did not answer when asked for its Python stack)")
    return lines


def _others(ranks: Sequence[Known], now: float | None) -> list[str]:
    lines = []
    for known in ranks[:_RANKS]:
        look = known.look
        seconds = (
            ""
            if now is None or look is None or look.waiting_since is None
            else f", for {now - look.waiting_since:.0f} s"
        )
        lines.append(f"  rank {known.rank} waits in {_waits_in(known)}{seconds}")
    if len(ranks) > _RANKS:
        lines.append(f"  and so do {len(ranks) - _RANKS} more")
    return lines


def _waits_in(known: Known) -> str:
    if known.look is not None and known.look.waiting:
        return known.look.waits_in
    stack = known.stack
    if stack is None or not stack.frames:
        return "a place that is not known"
    at = stack.users
    where = f" at {at}" if at is not None else ""
    return f"{stack.frames[0].name}{where}"


def _step(look: Look | None) -> str:
    return "" if look is None else f", after {look.steps} step{'' if look.steps == 1 else 's'}"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS])) + (", …" if len(ranks) > _RANKS else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
