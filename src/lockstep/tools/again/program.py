"""Start the program of a recorded run once more, in one process, for answers that only it has.

Note [The program again]
~~~~~~~~~~~~~~~~~~~~~~~~
The record has the program's words and the folder in which it was started. It is run there by plain Python, without a
launcher: a world of one rank. ``within.py`` is that process's main module, which becomes the program after it has set
hooks; what they do is said by a request, a file of JSON in a private folder. No other code knows of such a process, and
no part of a training asks whether it is in one.

The run's own files stay as they are: lockstep's checkpoints and logs of this process go to the private folder. Files
that the program itself writes up to the place where it is stopped are really written.

The program is run from its current files. If these, its data or its surroundings have changed since the run, the answer
may differ; the settings of the loader are compared with the record's, and others are refused.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep import knobs
from lockstep.errors import LockstepError
from lockstep.launch import processes
from lockstep.runs.history import Run

#: The words that start the process.
_COMMAND = (sys.executable, "-m", "lockstep.tools.again.within")
#: The variables by which a process would take itself for a rank of some job.
_OF_A_RANK = (
    *knobs.OF_A_RANK,
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


class CannotRepeat(LockstepError):
    """The program of a run could not be run again, or has ended before the point that was asked for."""

    code = "cannot-repeat"


def ask(
    run: Run, request: Mapping[str, Any], *, interactive: bool = False, threads: int | None = None
) -> dict[str, Any]:
    """Run the program of a run up to what a request asks, and return its answer.

    What the program prints goes to standard error.

    Args:
        run: the record.
        request: what within.py is asked, in JSON's types.
        interactive: let the program have standard input and output, for a debugger.
        threads: the number that it computes with, unless the environment sets one; None: that of a single process.

    Raises:
        CannotRepeat: the program is not there, failed, or has ended without an answer.
    """
    words, directory = _program(run), _directory(run)
    with tempfile.TemporaryDirectory(prefix="lockstep-again-") as home:
        asked, answer = Path(home, "request.json"), Path(home, "answer.json")
        asked.write_text(json.dumps({**request, "folder": home}))
        done = subprocess.run(
            [*_COMMAND, str(asked), *words],
            cwd=directory,
            env=_environment(run, threads),
            stdin=None if interactive else subprocess.DEVNULL,
            stdout=None if interactive else sys.stderr.fileno(),
            preexec_fn=functools.partial(processes.die_with_parent, os.getpid()),
            check=False,
        )
        if not answer.exists():
            raise CannotRepeat(_why_no_answer(run, words, done.returncode))
        told: dict[str, Any] = json.loads(answer.read_text())
    if told.get("error"):
        raise CannotRepeat(f"{run.name}: {told['error']}")
    return told


def _program(run: Run) -> list[str]:
    """Return the words that name the program and its arguments, if it can be run again."""
    words = list(run.about["program"])
    target = words[0] if words else ""
    if target != "-m" and not Path(_directory(run), target).is_file():
        raise CannotRepeat(
            f"{run.name}: its program {target} is not (or no longer) a file in {_directory(run)}, so it can't be run "
            "again"
        )
    return words


def _directory(run: Run) -> Path:
    directory = Path(run.about.get("directory") or ".")
    if not directory.is_dir():
        raise CannotRepeat(
            f"{run.name} was started in {directory}, which is not (or no longer) a folder: it can't be run again"
        )
    return directory


def _environment(run: Run, threads: int | None) -> dict[str, str]:
    """Return the environment of a process that is not a rank, with the run's variables of lockstep."""
    recorded = (run.about.get("environment") or {}).get("variables") or {}
    had = {name: value for name, value in recorded.items() if name in (knobs.BACKEND, knobs.TRACEBACK)}
    if threads is not None:
        had["OMP_NUM_THREADS"] = str(threads)
    return {**had, **{name: value for name, value in os.environ.items() if name not in _OF_A_RANK}}


def _why_no_answer(run: Run, words: list[str], code: int) -> str:
    program = " ".join(words)
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}; its error is above"
        return f"{run.name}: its program ({program}), run again in one process, {how}"
    return (
        f"{run.name}: its program ({program}), run again in one process, has ended before the point that was asked "
        "for: does it do the same with these arguments as before?"
    )
