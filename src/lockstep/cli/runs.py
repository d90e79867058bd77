"""``lockstep runs``, ``top``, ``stack``, ``compare`` and ``report``: look at runs that were recorded."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.terminal import RUN, LocalPath, errors, homes, open_console
from lockstep.text import as_clock, as_duration, as_size

if TYPE_CHECKING:
    from rich.table import Table

    from lockstep.runs.history import Run
    from lockstep.runs.live import Row


@click.command()
@click.option("-n", "count", default=20, show_default=True, metavar="N", help="How many.")
@click.argument("folders", nargs=-1, type=LocalPath())
def runs(count: int, folders: tuple[Path, ...]) -> None:
    """List the runs of this user on this machine, newest first: those that took steps.

    FOLDERS: where to look instead of where logs are by default; those that --log-dir has named are below them.
    """
    from rich.table import Table

    from lockstep.runs import history, reckoning

    table = Table("", "began", "took", "ended", "ranks", "steps", "step", "program", "name", box=None, pad_edge=False)
    for place in (0, 2, 4, 5, 6):
        table.columns[place].justify = "right"
    with errors("runs"):
        for number, run in enumerate(history.runs(folders or homes())[:count], start=1):
            began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began))
            try:
                took, steps = as_clock(run.seconds), f"{run.steps:,}"
                told = reckoning.summary_of(run)
            except (history.UnknownRun, KeyError, TypeError, ValueError) as error:  # the others are listed nevertheless
                click.echo(f"lockstep runs: {run.name}: its steps are not known: {error}", err=True)
                took, steps, told = "-", "-", None
            step = as_duration(told["step"]) if told is not None and told["step"] else "-"
            ranks = str(run.world_size)
            table.add_row(str(number), began, took, run.ending, ranks, steps, step, run.program, run.name)
            for line in run.remarks:
                table.add_row(*[""] * 7, line, "")
    open_console(markup=False).print(table)


@click.command()
@RUN
@click.option("--once", is_flag=True, help="Look for three seconds, print one table, and end.")
def top(run: str | None, once: bool) -> None:
    """Show what the ranks of a run do, live, until it ends or Ctrl-C.

    RUN is as for lockstep stack, and runs on this machine. The job's ranks on other machines are shown as well where
    the machines found each other (--rdzv, --hosts). Rates and shares are those of the last ten seconds.
    """
    from rich.live import Live as Screen

    from lockstep.runs import history
    from lockstep.runs.live import Live

    console = open_console(markup=False)
    with errors("top"):
        found = history.find(run, homes())
        live = Live(found)
        try:
            time.sleep(3.0 if once else 0.5)
            live.look()
            if once:
                console.print(_now(found, live.rows(), live.logged()))
                return
            with Screen(_now(found, live.rows(), live.logged()), console=console, auto_refresh=False) as screen:
                while live.goes_on:
                    time.sleep(0.5)
                    live.look()
                    screen.update(_now(found, live.rows(), live.logged()), refresh=True)
        except KeyboardInterrupt:
            pass
        finally:
            live.close()


def _now(run: Run, rows: list[Row], logged: str) -> Table:
    from rich.table import Table

    title = f"{run.name}: {run.program}, {as_clock(time.time() - run.began)}"
    table = Table(
        "rank",
        "step",
        "steps/s",
        "waits",
        "data",
        "memory",
        "now",
        title=title,
        title_justify="left",
        caption=logged or None,
        caption_justify="left",
        box=None,
        expand=True,
    )
    for column in table.columns[:6]:
        column.justify, column.no_wrap = "right", True
    # What a rank waits in may be longer than any screen: it has the room that the numbers leave.
    table.columns[6].ratio, table.columns[6].no_wrap, table.columns[6].overflow = 1, True, "ellipsis"
    for row in rows:
        parts = [f"{row.waiting:.0%}", f"{row.data:.0%}", f"{as_size(row.memory)}"]
        table.add_row(str(row.rank), f"{row.steps:,}", f"{row.rate:.1f}", *parts, row.doing)
    return table


@click.command()
@RUN
@click.argument("rank", required=False, type=int)
def stack(run: str | None, rank: int | None) -> None:
    """Show the Python stacks of a rank that runs on this machine, or of all of them, as they are now.

    RUN is a run's name, its number in the list of lockstep runs, or its folder; the newest if not given.
    """
    from lockstep.launch.stacks import stacks_of
    from lockstep.runs import history

    with errors("stack"):
        found = history.find(run, homes())
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
    from lockstep.runs import history
    from lockstep.tools import comparison

    with errors("compare", ValueError):
        limit = None if fail_over is None else comparison.parse_percent(fail_over)
        found = comparison.compare(history.find(a, homes()), history.find(b, homes()))
    click.echo(found.describe())
    if limit is not None and found.is_slower_by(limit):
        click.echo(f"lockstep compare: a step takes over {limit:.3g}% longer", err=True)
        sys.exit(1)


# A report of a run ---------------------------------------------------------------------------------------------------


@click.command()
@RUN
@click.option(
    "-o",
    "out",
    type=LocalPath(),
    default=Path("report.html"),
    show_default=True,
    help="The file to write.",
)
def report(run: str | None, out: Path) -> None:
    """Write what is known of a run into one HTML file, which any browser shows without a network.

    RUN is as for lockstep stack. The file is yours alone (0600) and replaces what is there.
    """
    from lockstep import _files
    from lockstep.errors import LockstepError
    from lockstep.runs import history
    from lockstep.tools.report import numbers, page

    with errors("report"):
        account = numbers.collect(history.find(run, homes()))
        words = page.build(account)
        try:
            _files.write_whole(out, words)
        except OSError as error:
            error.filename = str(out)
            raise LockstepError(f"the report can't be written: {_files.describe(error)}") from error
    soon = ", so far" if account.run.is_alive else ""
    click.echo(f"{out}: {account.run.name}{soon}, {as_size(len(words.encode()))}")
