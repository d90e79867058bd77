"""Start the user's script once, on one checkpoint, as a job of its own with a limit."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from lockstep import knobs
from lockstep.checkpoint.evaluation import EvaluationOrder, read_report
from lockstep.checkpoint.evaluations import PREFIX
from lockstep.codes import CodedEnum
from lockstep.launch import processes
from lockstep.launch.spec import Program
from lockstep.text import as_clock

#: The words that start lockstep's command; tests replace them by a faster command.
COMMAND: Sequence[str] = (sys.executable, "-m", "lockstep")
#: Seconds between two words about the progress.
_TICK = 1.0


class EvaluationEnd(CodedEnum):
    """What became of a checkpoint's evaluation."""

    DONE = "evaluated", "evaluation-done"
    FAILED = "failed", "evaluation-failed"
    LIMIT = "stopped at its limit", "evaluation-limit"
    GONE = "removed while it was evaluated", "evaluation-gone"
    LEFT_OUT = "removed before it could be evaluated", "evaluation-left-out"


@dataclass(frozen=True)
class EvaluationAttempt:
    """A run of the script that has ended."""

    end: EvaluationEnd
    #: What the script has reported, by name; None: it failed.
    numbers: Mapping[str, float] | None
    #: The reason why it failed; empty: it did not.
    why: str
    seconds: float
    #: The launcher's exit code; None: it was stopped at its limit.
    exit_code: int | None


def attempt(
    program: Program,
    checkpoint: PurePath,
    digest: str,
    *,
    ranks: int,
    limit: float,
    home: Path,
    tick: Callable[[float], None],
) -> EvaluationAttempt:
    """Run the script on a checkpoint, and wait for its end.

    Args:
        program: the script.
        checkpoint: its folder, or its address in a store.
        digest: its identity.
        ranks: the number of ranks.
        limit: the seconds that it may take.
        home: an empty folder (0700) for what it prints and reports.
        tick: called once a second, with the seconds so far.
    """
    order, report = home / "order.json", home / "report.json"
    given = EvaluationOrder(str(checkpoint), digest, str(report))
    given.write(order)
    begun = time.monotonic()
    code = _launch(program, order, ranks=ranks, limit=limit, home=home, tick=tick)
    seconds = time.monotonic() - begun
    if code is None:
        why = f"it was stopped after {as_clock(limit)}, the limit of an evaluation (--limit)"
        return EvaluationAttempt(EvaluationEnd.LIMIT, None, why, seconds, None)
    is_gone = os.path.exists(given.gone)
    if code != 0:
        if is_gone:
            return EvaluationAttempt(EvaluationEnd.GONE, None, EvaluationEnd.GONE.value, seconds, code)
        return EvaluationAttempt(EvaluationEnd.FAILED, None, _exit_words(code), seconds, code)
    try:
        numbers = read_report(report)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return EvaluationAttempt(EvaluationEnd.FAILED, None, f"its report can't be read: {error}", seconds, code)
    if not numbers and is_gone:  # the script has seen it, and ended in peace
        return EvaluationAttempt(EvaluationEnd.GONE, None, EvaluationEnd.GONE.value, seconds, code)
    if not numbers or not all(name.startswith(PREFIX) for name in numbers):
        why = "it ended without a report: the script has to call lockstep.Evaluation().report(…) on rank 0"
        return EvaluationAttempt(EvaluationEnd.FAILED, None, why, seconds, code)
    return EvaluationAttempt(EvaluationEnd.DONE, numbers, "", seconds, code)


def output_of(home: Path) -> Path:
    """Return the file with what an attempt has printed."""
    return home / "output.log"


def _exit_words(code: int) -> str:
    if code < 0:
        return f"its launcher was ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}"


def _launch(
    program: Program, order: Path, *, ranks: int, limit: float, home: Path, tick: Callable[[float], None]
) -> int | None:
    """Run the script, and return the launcher's exit code; None: it was stopped at the limit."""
    command = [*COMMAND, "run", "-n", str(ranks), "--standalone", "--quiet", f"--log-dir={home}", *program.words]
    env = {name: value for name, value in os.environ.items() if name != knobs.TRACE} | {knobs.EVALUATION: str(order)}
    with open(os.open(output_of(home), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as out:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=functools.partial(processes.die_with_parent, os.getpid()),
        )
        begun = time.monotonic()
        try:
            while (left := limit - (time.monotonic() - begun)) > 0:
                try:
                    return process.wait(min(_TICK, left))
                except subprocess.TimeoutExpired:
                    tick(time.monotonic() - begun)
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that runs, and wait for it: it takes its ranks with it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(knobs.times().evaluate_end)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
