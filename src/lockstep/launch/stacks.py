"""Ask the ranks of a run on this machine for their Python stacks, from any process of the same user."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from lockstep import _proc
from lockstep.errors import LockstepError
from lockstep.job.files import JobFiles
from lockstep.job.page import STACK_SIGNAL, Cell, Mark, Pages, Phase
from lockstep.launch.evidence import Answers
from lockstep.launch.processes import ask_for_stack
from lockstep.launch.thread_stacks import whole_stacks
from lockstep.runs.history import Run
from lockstep.text import which_ranks

#: Seconds for the threads besides the main ones to answer.
_OTHER_THREADS = 10.0


def stacks_of(run: Run, rank: int | None) -> Iterator[tuple[int, int | None, str]]:
    """Yield the ranks of a run that is going on, each with its process id and its stacks in Python's words, or why
    there are none.

    Args:
        run: the run.
        rank: the only one to ask; None: all of this machine.

    Raises:
        LockstepError: the run has ended, takes no steps yet, or has no such rank on this machine.
    """
    run.refuse_unless_alive()
    start = run.start
    ranks = {int(number): pid for number, pid in start["ranks"].items()}
    if rank is not None and rank not in ranks:
        raise LockstepError(f"{run.name} has no rank {rank} on this machine: it has {which_ranks(ranks)}")
    folder, chosen = Path(start["folder"]), ranks if rank is None else {rank: ranks[rank]}
    asked: dict[int, int] = {}
    answers = Answers(folder, chosen, asked=asked, now=time.monotonic())
    silent = {number: _ask(folder, number, pid, world_size=start["world_size"]) for number, pid in chosen.items()}
    asked |= {number: pid for number, pid in chosen.items() if pid is not None and not silent[number]}
    while not answers.are_in(time.monotonic()):
        time.sleep(0.02)
    found = whole_stacks(JobFiles(folder), answers.begins, asked, limit=_OTHER_THREADS)
    for number, pid in chosen.items():
        yield number, pid, silent[number] or found[number] or _unanswered(pid)


def _ask(folder: Path, rank: int, pid: int | None, *, world_size: int) -> str:
    """Ask a rank; return why that is not possible, or nothing."""
    if pid is None:
        return "it had no process when the others took their first step"
    if _proc.stat(pid) is None:
        return f"process {pid} has ended"
    if _is_leaving(folder, rank, world_size=world_size) or not _proc.catches(pid, STACK_SIGNAL):
        return f"process {pid} does not answer: it has not begun yet, or is leaving"
    ask_for_stack(pid)
    return ""


def _unanswered(pid: int | None) -> str:
    """Say of a rank that was asked why it may have written nothing."""
    if pid is None or _proc.stat(pid) is None:
        return f"process {pid} has ended"
    return f"process {pid} has not answered: it may be stopped (kill -CONT {pid})"


def _is_leaving(folder: Path, rank: int, *, world_size: int) -> bool:
    if not JobFiles(folder).pages.exists():
        return True
    pages = Pages(folder, world_size)
    try:
        return Mark.of(pages.get(rank, Cell.MARK)).phase is Phase.LEAVING
    finally:
        pages.close()
