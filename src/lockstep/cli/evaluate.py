"""``lockstep evaluate``: evaluate the checkpoints of a run beside training."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.options import PASSES_ON, TIME_LIMIT, LocalPath, RunPath, log_dir, takes_program
from lockstep.cli.terminal import errors, exit_on, print_json_line, say

if TYPE_CHECKING:
    from lockstep.tools.evaluate.follow import EvaluationOutcome


@click.command(
    short_help="Evaluate checkpoints beside training.",
    context_settings=PASSES_ON,
    options_metavar="[--follow] [OPTIONS]",
)
@click.option(
    "--follow", is_flag=True, help="Also evaluate the checkpoints that the run will make, until it has ended."
)
@click.option(
    "-n", "--nproc", "ranks", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
    help="Number of ranks of an evaluation.",
)  # fmt: skip
@click.option(
    "--cores", metavar="LIST", help="Cores for the evaluations, such as 14-15. [default: all that this process may use]"
)
@click.option(
    "--limit",
    type=TIME_LIMIT,
    default="1h",
    show_default=True,
    metavar="TIME",
    help="Time limit of one evaluation, such as 20m.",
)
@click.option(
    "--patience",
    type=float,
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="With --follow: count the run as ended when no job has trained in FOLDER for this long, at the beginning or "
    "later. A run that finishes its last epoch meanwhile counts as ended at once.",
)
@log_dir(
    "Folder for what PROGRAM prints. [default: evaluations/logs in FOLDER; for a run in a store a temporary folder]"
)
@click.option(
    "--metrics",
    type=LocalPath(dir_okay=False),
    metavar="FILE",
    help="The file of the run's lockstep.Log. [default: metrics.jsonl in FOLDER; for a run in a store none]",
)
@click.option("--retry-failed", is_flag=True, help="Evaluate again the checkpoints in FOLDER whose evaluations failed.")
@click.option("--json", "as_json", is_flag=True, help="Print each result as a line of JSON.")
@click.argument("folder", type=RunPath())
@takes_program
def evaluate(
    follow: bool,
    ranks: int,
    cores: str | None,
    limit: float,
    patience: float,
    log_dir: Path | None,
    metrics: Path | None,
    retry_failed: bool,
    as_json: bool,
    folder: PurePath,
    is_module: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run PROGRAM on each complete checkpoint in FOLDER that has no result yet, the newest first.

    FOLDER is the folder that a run gives to lockstep.Checkpointer, on a disk or in an object store. PROGRAM loads the
    checkpoint and reports its numbers through lockstep.Evaluation. They go into the run's metrics.jsonl, at the step of
    the checkpoint, and lockstep.Retention(best=…, by=…) keeps the best by them. Each evaluation is a job of its own,
    with low priority. A checkpoint that training removes before its evaluation is left out, and named. Arguments after
    PROGRAM are passed to it unchanged.

    A checkpoint is tried three times. The exit code is 0 if all evaluations succeeded, 1 if a checkpoint's failed, and
    2 if the arguments are invalid, another lockstep evaluate is at work in FOLDER, or it could not be read or written.
    """
    from lockstep.launch.spec import Program
    from lockstep.tools.evaluate import follow as following
    from lockstep.tools.evaluate import priority
    from lockstep.topology import parse_cpus

    exit_on(signal.SIGTERM, signal.SIGHUP)
    with errors(ValueError, in_lines=True):
        if program.startswith("-") and program != "-":
            raise ValueError(f"{program} stands after FOLDER: expected PROGRAM there; options come before FOLDER")
        asked = following.EvaluateOptions(
            Program.read(program, args, is_module),
            folder if not isinstance(folder, Path) else folder.absolute(),
            follows=follow,
            ranks=ranks,
            limit=limit,
            patience=patience,
            log_dir=log_dir,
            metrics=metrics,
            retries=retry_failed,
        )
        if cores is not None:
            priority.keep_to(_parse_cores(cores, parse_cpus))
        for refused in priority.lower():
            say(refused)
        line = _ProgressLine()
        tally = following.evaluate(asked, following.Telling(lambda outcome: _show(outcome, as_json), say, line.show))
        say(following.summary(tally, folder))
    sys.exit(1 if tally.failed else 0)


def _parse_cores(text: str, parse: Callable[[str], frozenset[int]]) -> frozenset[int]:
    cores = parse(text)
    if not cores:
        raise ValueError(f"--cores {text}: expected numbers and ranges of cores, such as 0-3,8")
    return cores


def _show(outcome: EvaluationOutcome, as_json: bool) -> None:
    """Show what became of a checkpoint: a number that was found on standard output, all else on standard error."""
    if as_json:
        print_json_line("evaluate", _as_json(outcome))
    elif outcome.numbers is not None:
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in outcome.numbers.items())
        click.echo(f"step {outcome.step}: {numbers} ({outcome.seconds:.1f} s)")
    if outcome.numbers is None:
        say(outcome.describe())


def _as_json(outcome: EvaluationOutcome) -> dict[str, Any]:
    return {
        "step": outcome.step,
        "checkpoint": outcome.checkpoint,
        "digest": outcome.digest,
        "code": outcome.end.code,
        "text": outcome.why or outcome.end.value,
        "numbers": outcome.numbers,
        "tries": outcome.tries,
        "again": outcome.again,
        "seconds": outcome.seconds,
        "exit_code": outcome.exit_code,
        "log": outcome.log,
    }


class _ProgressLine:
    """A line on a terminal that says which checkpoint is evaluated."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, step: int | None, seconds: float) -> None:
        """Show the step and the seconds so far; None: nothing is evaluated."""
        if not sys.stderr.isatty():
            return
        text = "" if step is None else f"evaluating step {step}, {seconds:.0f} s"
        click.echo(f"\r{text.ljust(self._width)}" + ("" if text else "\r"), err=True, nl=False)
        self._width = len(text)
