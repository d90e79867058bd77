"""``lockstep verify``: run a script on one rank and on several, and say whether they train the same."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from lockstep.cli.options import PASSES_ON, LocalPath, takes_program
from lockstep.cli.terminal import as_json, errors, exit_on, say


@click.command(
    short_help="Compare a script on one rank and on N.",
    context_settings=PASSES_ON,
    options_metavar="[-n N]... [OPTIONS]",
)
@click.option(
    "-n",
    "ranks",
    type=int,
    multiple=True,
    default=(2,),
    show_default=True,
    metavar="N",
    help="Number of ranks to compare with one rank; repeatable.",
)
@click.option(
    "--steps", type=int, default=20, show_default=True, metavar="K", help="Number of optimizer steps to compare."
)
@click.option(
    "--timeout", type=float, default=600, show_default=True, metavar="SECONDS", help="Time limit of each run."
)
@click.option(
    "--json",
    "json_file",
    type=LocalPath(),
    metavar="FILE",
    help="Also write the result as JSON to FILE; -: print it in place of the report.",
)
@click.option(
    "--keep",
    type=float,
    default=1024,
    show_default=True,
    metavar="MIB",
    help="Disk space in MiB for recorded values. For larger models every n-th value is compared, and digests of all "
    "values.",
)
@click.option("--show-output", is_flag=True, help="Show the output of PROGRAM.")
@takes_program
def verify(
    ranks: tuple[int, ...],
    steps: int,
    timeout: float,
    json_file: Path | None,
    keep: float,
    show_output: bool,
    is_module: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run PROGRAM on one rank and on N ranks, and compare loss, gradients and parameters after each optimizer step.

    The verdict is equal bits, equal within rounding, equal but for random numbers that each rank draws (dropout), or
    different: from which step on, in which parameter, by how much, and why. Each run ends after --steps. Its
    checkpoints and lockstep's logs go to a temporary folder; other files that it writes are restored. Arguments after
    PROGRAM are passed to it unchanged.

    The exit code is 0 if the runs are equal, within rounding or but for random numbers, 1 if they differ, and 2 if a
    run failed, PROGRAM trained nothing, or the arguments are invalid.
    """
    from lockstep import _files
    from lockstep.launch.spec import Program
    from lockstep.tools.verify import report, runs
    from lockstep.tools.verify.compare import FindingKind

    exit_on(signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    with errors(ValueError):
        if show_output and str(json_file) == "-":
            raise ValueError("--show-output with --json -: both print to standard output; name a file")
        asked = runs.VerifyOptions(
            Program(program, args, is_module),
            tuple(dict.fromkeys(ranks)),
            steps=steps,
            timeout=timeout,
            keep=int(keep * 2**20),
            shows=show_output,
        )
        with runs.own_folder(say) as folder:
            result = runs.verify(asked, folder, say)
            told = as_json("verify", report.as_json(result))
            click.echo(told if str(json_file) == "-" else report.describe(result))
            if json_file is not None and str(json_file) != "-":
                _files.write_whole(json_file, told + "\n")
    sys.exit(1 if result.kind is FindingKind.DIFFERENT else 0)
