"""Ask the ranks of a run on this machine for their Python stacks: another process than their launcher may, too."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep import _proc
from lockstep.errors import LockstepError
from lockstep.job.files import JobFiles
from lockstep.job.page import STACK_SIGNAL
from lockstep.launch.evidence import stack_size
from lockstep.runs.history import Run

#: Seconds for a rank to write its stacks: it does so in its signal handler, at once unless it stands still.
_PATIENCE = 2.0


def stacks_of(run: Run, rank: int | None) -> Iterator[tuple[int, str]]:
    """Yield the ranks of a run that is going on, with their stacks in Python's words, or why there are none.

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
        raise LockstepError(f"{run.name} has no rank {rank} on this machine: it has {', '.join(map(str, ranks))}")
    for number, pid in ranks.items() if rank is None else [(rank, ranks[rank])]:
        yield number, _ask(Path(start["folder"]), number, pid)


def _ask(folder: Path, rank: int, pid: int) -> str:
    try:
        if not _proc.catches(pid, STACK_SIGNAL):
            return f"process {pid} does not answer: it is not in lockstep.init() yet, or has left"
        before = stack_size(folder, rank)
        os.kill(pid, STACK_SIGNAL)
        deadline, size = time.monotonic() + _PATIENCE, before
        while time.monotonic() < deadline:
            time.sleep(0.02)
            now = stack_size(folder, rank)
            if now > before and now == size:  # all of it is there
                break
            size = now
        with JobFiles(folder).stack(rank).open("rb") as stacks:
            stacks.seek(before)
            text = stacks.read().decode(errors="replace").rstrip()
    except (FileNotFoundError, ProcessLookupError):
        return f"process {pid} has ended"
    return text or f"process {pid} has not answered within {_PATIENCE:g} s: it may be stopped (kill -CONT {pid})"
