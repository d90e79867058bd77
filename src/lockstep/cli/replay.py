"""``lockstep replay``: compute a step of a recorded run once more, in one process."""

from __future__ import annotations

import click

from lockstep.cli.options import AS_JSON, takes_run
from lockstep.cli.terminal import errors, print_json


@click.command(short_help="Compute a step of a run again.")
@takes_run
@click.option("--step", type=int, required=True, metavar="N", help="Number of the step, from 1, as in logs.")
@click.option("--rank", type=int, metavar="N", help="Compute only this rank's part of the batch in that step.")
@click.option("--pdb", "debug", is_flag=True, help="Open Python's debugger in the step.")
@AS_JSON
def replay(run: str | None, step: int, rank: int | None, debug: bool, as_json: bool) -> None:
    """Continue a run from its newest checkpoint before a step, in one process, and stop in that step.

    Print the losses, the norms of the gradients, and which values are NaN or infinite, with the samples that they come
    from. The run's program is run again in the folder in which it was started; the run's checkpoints and logs stay as
    they are. With slices the values have the bits of all ranks; without slices they are equal up to rounding.
    """
    from lockstep.runs import history
    from lockstep.runs.homes import homes
    from lockstep.tools.again import replay as replaying

    with errors(ValueError):
        if debug and as_json:
            raise ValueError("--pdb with --json: both print to standard output; give one of them")
        found = replaying.replay(history.find(run, homes()), step, rank=rank, debug=debug)
    if as_json:
        print_json("replay", found.to_json())
    else:
        click.echo(found.exactness if debug else found.describe())  # the rest was printed where the debugger opened
