"""``lockstep port``: rewrite a script for lockstep, as a diff with a remark for each line that was left."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.options import AS_JSON, PASSES_ON, LocalPath
from lockstep.cli.terminal import errors, exit_on, print_json, say

if TYPE_CHECKING:  # these need libcst
    from lockstep.tools.port.port import Port
    from lockstep.tools.port.verification import Verified


@click.command(short_help="Rewrite a script for lockstep.", context_settings=PASSES_ON)
@click.option("--write", is_flag=True, help="Change SCRIPT, instead of only printing the diff.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="The number of ranks that SCRIPT ran on until now. Batch sizes per rank are multiplied by it, and the port "
    "trains the same on any number of ranks. By default they are multiplied by the number of ranks that the port runs "
    "on.",
)
@click.option("--every-line", is_flag=True, help="Also explain each changed line.")
@click.option(
    "--verify", "verifies", is_flag=True, help="Run lockstep verify on SCRIPT and on the port. ARGS are passed to both."
)
@click.option(
    "-n",
    "count",
    type=click.IntRange(min=2),
    default=2,
    show_default=True,
    metavar="N",
    help="Number of ranks that --verify compares with one.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="K",
    help="Number of optimizer steps that --verify compares.",
)
@click.option(
    "--timeout",
    type=float,
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of each run of --verify.",
)
@AS_JSON
@click.argument("script", type=LocalPath(dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def port(
    write: bool,
    ranks: int | None,
    every_line: bool,
    verifies: bool,
    count: int,
    steps: int,
    timeout: float,
    as_json: bool,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Rewrite SCRIPT, which trains with DistributedDataParallel, Accelerate, Fabric or Horovod, or in one process.

    Print a diff that keeps comments and layout, then which lines were left unchanged and why, and what differs by
    design. A script is refused, with the reasons, if the port would lose something. SCRIPT is not run unless --verify
    is given.

    The exit code is 0 if SCRIPT is ported, fully or in part, or uses lockstep already; 1 if it is refused, or if
    --verify finds the port different; 2 if it can't be read or verified.
    """
    exit_on(signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    with errors(ValueError):
        if args and not verifies:
            raise ValueError(f"{args[0]}: arguments of the script are only for --verify, which runs it")
        if find_spec("libcst") is None:
            raise ValueError("libcst, which reads the script, is not installed: pip install 'torch-lockstep[port]'")
        from lockstep.tools.port import report
        from lockstep.tools.port.port import port as port_script
        from lockstep.tools.port.remarks import PortVerdict
        from lockstep.tools.port.verification import VerifyRequest, verify_both
        from lockstep.tools.verify.putback import NotPutBack

        found = port_script(script, ranks=ranks)
        is_ported = found.verdict in (PortVerdict.FULLY, PortVerdict.PARTLY)
        verified = []
        if verifies and is_ported:
            say("verifying the script and its port")
            verified = verify_both(found, VerifyRequest(count, steps, timeout, args))
            if not verified[-1].has_put_back:
                raise NotPutBack(f"what {script} has changed could not be put back:\n{verified[-1].words}")
        writes = write and is_ported and (not verified or verified[-1].is_equal)
        if writes:
            _write(script, found)
        if as_json:
            print_json("port", report.as_json(found, verified))
        else:
            click.echo(report.describe(found, verified, every_line=every_line))
            if is_ported:
                _say_next(script, writes, verified)
    if write and is_ported and not writes:
        say(f"{script} is not changed, since the port is not known to train the same on any number of ranks")
    if found.verdict is PortVerdict.REFUSED:
        sys.exit(1)
    if verified and not verified[-1].is_equal:
        sys.exit(1 if verified[-1].code == "different" else 2)


def _write(script: Path, found: Port) -> None:
    """Put the port in the script's place, completely or not at all.

    Raises:
        ValueError: the script is not the one that was ported.
    """
    from lockstep import _files

    path = script.resolve()  # a link stays
    if path.read_bytes() != found.before.encode():
        raise ValueError(f"{script} was changed while it was ported, so it is left as it is: port it again")
    _files.write_whole(path, found.after, like=path.stat())


def _say_next(script: Path, written: bool, verified: Sequence[Verified]) -> None:
    if not verified:
        click.echo(
            f"\nnext: lockstep port --verify {script} [ARGS] runs both, the script and its port, on 1 and 2 ranks"
        )
    if written:
        say(f"{script} is changed")
    elif verified and verified[-1].is_equal:
        click.echo(f"\nnext: lockstep port --write {script} changes the file")
