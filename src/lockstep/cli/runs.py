"""``lockstep runs``, ``stack`` and ``compare``: look at runs that were recorded."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

_RUN = click.argument("run", required=False)
#: Columns where there is no terminal to ask.
_WIDTH = 160


@click.command()
@click.option("-n", "count", default=20, show_default=True, metavar="N", help="How many.")
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
def runs(count: int, folders: tuple[Path, ...]) -> None:
    """List the runs of this user on this machine, newest first: those that took steps.

    FOLDERS: where to look instead of where logs are by default; those that --log-dir has named are below them.
    """
    from rich.console import Console
    from rich.table import Table

    from lockstep.runs import history

    table = Table("", "began", "took", "ended", "ranks", "steps", "step", "program", "name", box=None, pad_edge=False)
    for place in (0, 2, 4, 5, 6):
        table.columns[place].justify = "right"
    with _errors("runs"):
        for number, run in enumerate(history.runs(folders or _homes())[:count], start=1):
            began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began))
            median = (run.summary or {}).get("median") or 0.0
            step = f"{median * 1e3:.3g} ms" if median else "-"
            took, ranks, steps = _duration(run.seconds), str(run.world_size), f"{run.steps:,}"
            table.add_row(str(number), began, took, run.ending, ranks, steps, step, run.program, run.name)
    Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False).print(table, markup=False)


@click.command()
@_RUN
@click.argument("rank", required=False, type=int)
def stack(run: str | None, rank: int | None) -> None:
    """Show the Python stacks of a rank that runs on this machine, or of all of them, as they are now.

    RUN is a run's name, its number in the list of lockstep runs, or its folder; the newest if not given.
    """
    from lockstep.launch.stacks import stacks_of
    from lockstep.runs import history

    with _errors("stack"):
        found = history.find(run, _homes())
        for number, text in stacks_of(found, rank):
            click.echo(f"rank {number}:\n{text}\n")


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--fail-over", metavar="PERCENT", help="End with exit code 1 if a step of B takes so much longer.")
def compare(a: str, b: str, fail_over: str | None) -> None:
    """Show two runs side by side: what changed from A to B, by how much, and what of it may be chance.

    A and B are runs' names, their numbers in the list of lockstep runs, or their folders.
    """
    from lockstep.runs import comparison, history

    with _errors("compare"):
        limit = None if fail_over is None else comparison.parse_percent(fail_over)
        found = comparison.compare(history.find(a, _homes()), history.find(b, _homes()))
    click.echo(found.describe())
    if limit is not None and found.is_slower_by(limit):
        click.echo(f"lockstep compare: a step takes over {limit:.3g}% longer", err=True)
        sys.exit(1)


def _homes() -> list[Path]:
    from lockstep.launch.output import default_home, spare_home

    home = default_home()
    return [*([] if home is None else [home]), spare_home()]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def _errors(command: str) -> Iterator[None]:
    from lockstep.errors import LockstepError

    try:
        yield
    except (LockstepError, ValueError, OSError) as error:
        click.echo(f"lockstep {command}: {error}", err=True)
        sys.exit(2)
