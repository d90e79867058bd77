"""``lockstep verify``: run a script on one rank and on several, and say whether they train the same."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

import click

from lockstep.cli.terminal import LocalPath


@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    options_metavar="-n N [-n N]... [OPTIONS]",
)
@click.option(
    "-n", "ranks", type=int, multiple=True, default=(2,), show_default=True, help="Ranks to compare with one."
)
@click.option("--steps", type=int, default=20, show_default=True, help="Optimizer steps to compare.")
@click.option("--timeout", default=600.0, show_default=True, metavar="SECONDS", help="Time limit of each run.")
@click.option("--json", "json_file", type=LocalPath(), metavar="FILE", help="Write all of it as JSON.")
@click.option(
    "--keep",
    default=1024.0,
    show_default=True,
    metavar="MIB",
    help="Disk for numbers while it runs; of larger models every n-th number is compared, and digests of all.",
)
@click.option("--show-output", is_flag=True, help="Show what the script prints.")
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
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
    """Run PROGRAM on one rank and on N, and compare loss, gradients and parameters after each optimizer step.

    The verdict is equal bits, equal within rounding, or different; then it says since which step, in which parameter,
    by how much, and why. Each run ends by itself after --steps; checkpoints and logs of lockstep go to a folder that is
    removed, and other files that it writes are put back as they were. What follows PROGRAM is passed to it unchanged.

    The exit code is 0 if bits are equal or equal within rounding, 1 if they differ, and 2 if a run failed, the
    script trains nothing, or the command makes no sense.
    """
    from lockstep import _files
    from lockstep.errors import LockstepError
    from lockstep.launch.spec import Program
    from lockstep.tools.verify import report, runs
    from lockstep.tools.verify.compare import FindingKind

    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup
            signal.signal(signum, _leave)
    try:
        asked = runs.VerifyOptions(
            Program(program, args, is_module),
            tuple(dict.fromkeys(ranks)),
            steps=steps,
            timeout=timeout,
            keep=int(keep * 2**20),
            shows=show_output,
        )
        with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
            result = runs.verify(asked, Path(folder), lambda text: click.echo(f"lockstep verify: {text}", err=True))
            click.echo(report.describe(result))
            if json_file is not None:
                _files.write_whole(json_file, json.dumps(report.as_json(result), indent=2) + "\n")
    except (ValueError, LockstepError, OSError) as error:
        text = _files.describe(error) if isinstance(error, OSError) and not isinstance(error, LockstepError) else error
        click.echo(f"lockstep verify: {text}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(1 if result.kind is FindingKind.DIFFERENT else 0)


def _leave(signum: int, _frame: FrameType | None) -> None:
    """End as a signal asks for; what runs is ended on the way out."""
    sys.exit(128 + signum)
