"""Tell how other ranks of this start have ended, for the errors of ranks that still wait for them."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep import knobs
from lockstep.job import flight
from lockstep.job.files import FailureRecord
from lockstep.job.page import Look, Phase
from lockstep.text import counted, sentence, which_ranks

#: The words of :func:`told` for a rank that has ended normally.
WITHOUT_ERROR = "without an error"
#: The phases of a rank within a step.
_WITHIN_STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER)


def told(ranks: Iterable[int] | None = None) -> str:
    """Return a sentence or several about those of ``ranks`` that have ended their program; empty if none is known to.

    Args:
        ranks: numbers in the world; None: all others.
    """
    folder, pages = knobs.job_dir(), flight.current.pages
    if folder is None or pages is None:
        return ""
    everyone = range(pages.count)
    here = pages.look(flight.current.rank)
    said: dict[str, list[int]] = {}
    for rank in everyone if ranks is None else ranks:
        if rank == flight.current.rank or rank not in everyone:
            continue
        record, look = FailureRecord.read(folder, rank), pages.look(rank)
        if record is not None:
            said.setdefault(f"failed: {record.summary}", []).append(rank)
        elif look.mark.phase is Phase.LEAVING:
            said.setdefault(_compared(look, here), []).append(rank)
    return " ".join(sentence(f"{which_ranks(of)} {what}") for what, of in said.items())


def _compared(there: Look, here: Look) -> str:
    ended = f"ended the program {WITHOUT_ERROR}"
    differ = "the ranks took different numbers of steps"
    if there.steps is None or here.steps is None or there.steps == here.steps == 0:
        return f"{ended}: {differ}, or the call in which this rank waits was left out there"
    after = f"{ended} after {counted(there.steps, 'step')}"
    if there.steps != here.steps:
        return f"{after}, and this rank has taken {here.steps}: {differ}"
    if here.mark.phase in _WITHIN_STEP:
        return f"{after}, and this rank is in its step {here.steps + 1}: {differ}"
    return f"{after}, as many as this rank has taken: the call in which this rank waits was left out there"


def advice(name: str) -> str:
    """Return the advice that all ranks must make a call."""
    return (
        f"{name} is for all ranks: every rank must call it, and in the same place. Take it out of "
        "`if world.is_main:`, if that is around it"
    )
