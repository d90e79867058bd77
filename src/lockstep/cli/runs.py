"""``lockstep runs``: look at runs that were recorded, and plan others from them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.options import AS_JSON, Commands, LocalPath, price, takes_run, takes_run_going_on
from lockstep.cli.terminal import errors, open_console, print_json, say
from lockstep.runs.homes import homes
from lockstep.text import as_clock, as_duration, as_size

if TYPE_CHECKING:
    from rich.table import Table

    from lockstep.job.throughput import Throughput
    from lockstep.runs.history import Run
    from lockstep.runs.live import Live, Row

#: The largest world size that is planned for where the user names none.
_UP_TO = 512


@click.group(cls=Commands, invoke_without_command=True)
@click.pass_context
def runs(ctx: click.Context) -> None:
    """Look at recorded runs.

    Without a command, the runs are listed, as by lockstep runs ls.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(ls)


@runs.command(short_help="List runs, newest first.")
@click.option("-n", "count", default=20, show_default=True, metavar="N", help="Maximum number of runs to list.")
@AS_JSON
@click.argument("folders", nargs=-1, type=LocalPath())
def ls(count: int, as_json: bool, folders: tuple[Path, ...]) -> None:
    """List your runs on this machine that took at least one step, newest first.

    FOLDERS are searched instead of the default folder for logs, for example for runs started with --log-dir.
    """
    from lockstep.runs import history

    with errors():
        there = history.records(folders or homes())
        for why in there.damaged.values():
            say(why)
        found = there.runs[:count]
        # A number means the same to every command: the place in the list of the default folders.
        numbered = there.runs if not folders else history.runs(homes())
        numbers = {run.path.resolve(): number for number, run in enumerate(numbered, start=1)}
        told = [_about(run, numbers.get(run.path.resolve())) for run in found]
    if as_json:
        print_json("runs.ls", {"runs": told})
        return
    from rich.table import Table

    table = Table("", "began", "took", "ended", "ranks", "steps", "step", "program", "name", box=None, pad_edge=False)
    for place in (0, 2, 4, 5, 6):
        table.columns[place].justify = "right"
    for run, about in zip(found, told, strict=True):
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began))
        took = "-" if about["seconds"] is None else as_clock(about["seconds"])
        steps = "-" if about["steps"] is None else f"{about['steps']:,}"
        step = as_duration(about["step_seconds"]) if about["step_seconds"] else "-"
        ranks = str(run.world_size)
        name = run.name if about["number"] else str(run.path.parent)  # what the other commands take for it
        table.add_row(str(about["number"] or "-"), began, took, run.ending, ranks, steps, step, run.program, name)
        for line in run.remarks:
            table.add_row(*[""] * 7, line, "")
    open_console(markup=False).print(table)


def _chosen(name: str | None, *, going_on: bool = False) -> Run:
    """Return the run that a command's argument names (:func:`lockstep.runs.history.find`); where it is one by its place
    in the list, say which records are not in that."""
    from lockstep.runs import history

    if name is None or name.isdecimal():
        for why in history.records(homes()).damaged.values():
            say(why)
    return history.find(name, homes(), going_on=going_on)


def _about(run: Run, number: int | None) -> dict[str, Any]:
    """Return what the list of runs says of one, in JSON's types; None and a message for what its files don't tell."""
    from lockstep.runs import history, reckoning

    seconds: float | None
    steps: int | None
    try:
        seconds, steps, summary = run.seconds, run.steps, reckoning.summary_of(run)
    except (history.UnknownRun, KeyError, TypeError, ValueError) as error:  # the others are listed nevertheless
        say(f"{run.name}: its steps are not known: {error}")
        seconds = steps = summary = None
    return {
        "number": number,
        "name": run.name,
        "folder": run.path.parent,
        "program": run.about["program"],
        "began": run.began,
        "seconds": seconds,
        "end": {"code": run.end.code, "exit_code": run.about.get("exit_code")},
        "ranks": run.world_size,
        "steps": steps,
        "step_seconds": None if summary is None else summary["step"] or None,
        "verdict": None if summary is None else reckoning.code_of(summary),
        "remarks": run.remarks,
    }


@runs.command(short_help="Explain how a run went.")
@takes_run
@AS_JSON
def explain(run: str | None, as_json: bool) -> None:
    """Explain how a run ended, where its time went, which ranks were late or failed, and what to try next.

    It also says what the record does not tell.
    """
    from lockstep.tools.explanation import Explanation

    with errors():
        found = Explanation.of(_chosen(run))
    if as_json:
        print_json("runs.explain", found.to_json())
    else:
        click.echo(found.describe())


@runs.command(short_help="Watch a run live.")
@takes_run_going_on
@click.option("--once", is_flag=True, help="Watch for three seconds, print one table and exit.")
@click.option("--json", "as_json", is_flag=True, help="Like --once, but print the result as JSON.")
def top(run: str | None, once: bool, as_json: bool) -> None:
    """Show live what the ranks of a run are doing, until the run ends or Ctrl-C.

    The run must be running on this node. Ranks on other nodes are shown too if the job was started with --rdzv or
    --hosts. Rates and shares are those of the last ten seconds.
    """
    from rich.live import Live as Screen

    from lockstep.runs.live import Live

    once = once or as_json
    console = open_console(markup=False)
    with errors():
        found = _chosen(run, going_on=True)
        live = Live(found)
        try:
            time.sleep(3.0 if once else 0.5)
            live.look()
            if as_json:
                print_json("runs.top", _looked(found, live))
                return
            if once:
                console.print(_screen(found, live))
                return
            with Screen(_screen(found, live), console=console, auto_refresh=False) as screen:
                while live.goes_on:
                    time.sleep(0.5)
                    live.look()
                    screen.update(_screen(found, live), refresh=True)
        except KeyboardInterrupt:
            pass
        finally:
            live.close()


def _looked(run: Run, live: Live) -> dict[str, Any]:
    """Return what one look shows, in JSON's types."""
    return {
        "name": run.name,
        "folder": run.path.parent,
        "program": run.about["program"],
        "seconds": time.time() - run.began,
        **live.throughput().to_json(),
        "ranks": [
            {
                "rank": row.rank,
                "pid": row.pid,
                "step": row.steps,
                "steps_per_second": row.rate,
                "waiting": row.waiting,
                "data": row.data,
                "memory_bytes": row.memory or None,
                "doing": row.doing,
            }
            for row in live.rows()
        ],
        "logged": live.last_line(),
    }


def _screen(run: Run, live: Live) -> Table:
    return _now(run, live.rows(), live.logged(), live.throughput())


def _now(run: Run, rows: list[Row], logged: str, done: Throughput) -> Table:
    from rich.table import Table

    told = ", ".join(each for each in (*done.rates, done.describe_flops()) if each)
    title = f"{run.name}: {run.program}, {as_clock(time.time() - run.began)}{told and f'; {told}'}"
    table = Table(
        "rank",
        "pid",
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
    for column in table.columns[:7]:
        column.justify, column.no_wrap = "right", True
    # The text of what a rank waits in may be longer than any screen, so it gets the room that the numbers leave.
    table.columns[7].ratio, table.columns[7].no_wrap, table.columns[7].overflow = 1, True, "ellipsis"
    for row in rows:
        parts = [f"{row.waiting:.0%}", f"{row.data:.0%}", f"{as_size(row.memory)}"]
        table.add_row(str(row.rank), str(row.pid or "-"), f"{row.steps:,}", f"{row.rate:.1f}", *parts, row.doing)
    return table


@runs.command(short_help="Print Python stacks of ranks.")
@takes_run_going_on
@click.argument("rank", required=False, type=int)
@AS_JSON
def stack(run: str | None, rank: int | None, as_json: bool) -> None:
    """Print the current Python stacks of one rank, RANK, or of all ranks on this node."""
    from lockstep.launch.stacks import stacks_of

    with errors():
        found = _chosen(run, going_on=True)
        if as_json:
            stacks = [{"rank": number, "pid": pid, "stack": text} for number, pid, text in stacks_of(found, rank)]
            print_json("runs.stack", {"name": found.name, "folder": found.path.parent, "ranks": stacks})
            return
        for number, pid, text in stacks_of(found, rank):
            who = f"rank {number}" if pid is None else f"rank {number} (process {pid})"
            click.echo(f"{who}:\n{text}\n")


@runs.command(short_help="Compare two runs.")
@click.argument("a")
@click.argument("b")
@click.option(
    "--fail-over",
    metavar="PERCENT",
    help="Exit with code 1 if a step of B takes more than PERCENT longer than one of A.",
)
@AS_JSON
def compare(a: str, b: str, fail_over: str | None, as_json: bool) -> None:
    """Compare two runs: what changed from A to B, by how much, and whether it may be chance.

    A and B are names of runs, their numbers in the list that lockstep runs prints, or their folders.
    """
    from lockstep.tools import comparison

    with errors(ValueError):
        limit = None if fail_over is None else comparison.parse_percent(fail_over)
        found = comparison.compare(*map(_chosen, (a, b)))
    is_slower = limit is not None and found.is_slower_by(limit)
    if as_json:
        print_json("runs.compare", {**found.to_json(), "fails": is_slower})
    else:
        click.echo(found.describe())
    if is_slower:
        say(f"a step takes over {limit:.3g}% longer")
        sys.exit(1)


@runs.command(short_help="Find where two runs part.")
@click.argument("a")
@click.argument("b")
@AS_JSON
def bisect(a: str, b: str, as_json: bool) -> None:
    """Find the first step after which two runs differ, and whether their samples differed before it.

    Runs record digests of their parameters and their optimizers' state after some steps, the same steps in all runs. A
    and B are names of runs, their numbers in the list that lockstep runs prints, or their folders.

    The exit code is 0 if the runs are equal in all steps that both have digests of, and 1 if they part.
    """
    from lockstep.tools.again import bisect as bisecting

    with errors():
        found = bisecting.bisect(*map(_chosen, (a, b)))
    if as_json:
        print_json("runs.bisect", found.to_json())
    else:
        click.echo(found.describe())
    sys.exit(0 if found.kind is bisecting.Parting.NOTHING else 1)


@runs.command(short_help="Show the samples of a step.")
@takes_run
@click.option("--step", type=int, metavar="N", help="Number of the step, from 1, as in logs and names of checkpoints.")
@click.option("--epoch", type=int, metavar="N", help="With --batch, in place of --step: number of the epoch, from 0.")
@click.option("--batch", type=int, metavar="N", help="With --epoch: number of the global batch in its epoch, from 0.")
@click.option(
    "--loader",
    type=int,
    metavar="N",
    help="With --batch: number of the loader, from 0, in the order in which the program shards them.",
)
@click.option("--rank", type=int, metavar="N", help="Show only the part of this rank.")
@click.option(
    "--show", is_flag=True, help="Run the program up to its loader, and show what its dataset returns for each sample."
)
@AS_JSON
def batch(
    run: str | None,
    step: int | None,
    epoch: int | None,
    batch: int | None,
    loader: int | None,
    rank: int | None,
    show: bool,
    as_json: bool,
) -> None:
    """Show which samples a step of a run had: their indices, by rank and slice.

    The samples follow from the seed, the epoch and the position of the batch; steps are not recorded. If they also
    depend on the program (a sampler, a batch sampler, costs), use --show: it runs the program again, in one process and
    in the folder in which it was started, and ends it as soon as its loader is made.
    """
    from lockstep.tools.again import program, samples

    with errors(ValueError):
        if (step is None) == (batch is None) or (epoch is None) != (batch is None):
            raise ValueError("name a step (--step 340), or a batch of an epoch (--epoch 2 --batch 17)")
        if loader is not None and batch is None:
            raise ValueError("--loader goes with --epoch and --batch: a step's loaders are in the record")
        found = _chosen(run)
        if step is not None:
            asked = samples.ask_step(found, step, rank=rank)
        else:
            asked = samples.ask_batch(found, epoch or 0, batch or 0, loader=loader, rank=rank)
        told = (
            [samples.RecordedBatch.from_json(each) for each in program.ask(found, asked.request())["batches"]]
            if show
            else [each for wanted in asked.wanted for each in samples.compute(wanted)]
        )
        answer = asked.answered(told)
    if as_json:
        print_json("runs.batch", answer.to_json())
    else:
        click.echo(answer.describe())


@runs.command(short_help="Write an HTML report of a run.")
@takes_run
@click.option(
    "-o",
    "out",
    type=LocalPath(),
    default=Path("report.html"),
    show_default=True,
    metavar="FILE",
    help="File to write; replaced if it exists.",
)
def report(run: str | None, out: Path) -> None:
    """Write a report of a run as one HTML file that a browser shows without a network.

    Only you can read the file (mode 0600).
    """
    from lockstep import _files
    from lockstep.errors import LockstepError
    from lockstep.tools.report import numbers, page

    with errors():
        account = numbers.collect(_chosen(run))
        words = page.build(account)
        try:
            _files.write_whole(out, words)
        except OSError as error:
            error.filename = str(out)
            raise LockstepError(f"the report can't be written: {_files.describe(error)}") from error
    soon = ", so far" if account.run.is_alive else ""
    click.echo(f"{out}: {account.run.name}{soon}, {as_size(len(words.encode()))}")


@runs.command(short_help="Estimate step times on more ranks.")
@takes_run
@click.option("--ranks", metavar="N,N,…", help="World sizes to plan for.")
@click.option("--up-to", type=int, metavar="N", help=f"Plan for the powers of two up to N. [default: {_UP_TO}]")
@click.option("--ranks-per-host", type=int, metavar="N", help="Ranks per host. [default: as recorded]")
@click.option("--latency", metavar="TIME", help="Latency between hosts, such as 20us. [default: 20us]")
@click.option(
    "--bandwidth",
    metavar="RATE",
    help="Link bandwidth between hosts in each direction, such as 25Gbit or 3GB (per second). [default: 25Gbit]",
)
@click.option("--intra-latency", metavar="TIME", help="Latency within a host. [default: as recorded, otherwise 5us]")
@click.option(
    "--intra-bandwidth", metavar="RATE", help="Bandwidth within a host. [default: as recorded, otherwise 5GB]"
)
@click.option(
    "--algorithm",
    type=click.Choice(["ring", "tree", "hierarchical", "best"]),
    default="best",
    show_default=True,
    help="All-reduce algorithm; best: the fastest for each bucket.",
)
@click.option(
    "--scaling",
    type=click.Choice(["strong", "weak"]),
    default="strong",
    show_default=True,
    help="strong: the global batch size stays the same; weak: it grows with the number of ranks.",
)
@click.option(
    "--cores",
    type=int,
    metavar="N",
    help="CPU cores per host, shared by its ranks. [default: as many per rank as recorded]",
)
@click.option(
    "--overlap/--no-overlap",
    default=None,
    help="Reduce gradients during backward, or only after it. [default: as recorded]",
)
@price("Price of one node per hour, such as 3.2/h: the plan says what a thousand steps would cost.")
@AS_JSON
def plan(
    run: str | None,
    ranks: str | None,
    up_to: int | None,
    ranks_per_host: int | None,
    latency: str | None,
    bandwidth: str | None,
    intra_latency: str | None,
    intra_bandwidth: str | None,
    algorithm: str,
    scaling: str,
    cores: int | None,
    overlap: bool | None,
    price: float | None,
    as_json: bool,
) -> None:
    """Estimate from a recorded run how long a step would take on more ranks and hosts over a given network.

    The assumptions are printed below the plan.
    """
    from lockstep.text import parse_bandwidth, parse_latency
    from lockstep.tools.plan import plan as planning
    from lockstep.tools.plan.chart import describe
    from lockstep.tools.plan.network import Link, Network

    with errors(ValueError):
        for name, value in (("--ranks-per-host", ranks_per_host), ("--cores", cores), ("--up-to", up_to)):
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: expected a number from 1 on")
        if ranks is not None and up_to is not None:
            raise ValueError("--ranks and --up-to: name one of them")
        counts = None if ranks is None else planning.parse_counts(ranks)
        recorded = planning.Recorded.of(_chosen(run))
        if cores is not None and recorded.first.device != "cpu":
            raise ValueError(f"--cores {cores}: the ranks of {recorded.name} computed on GPUs, each on its own")
        inside = recorded.measured_inside() or planning.INSIDE
        network = Network(
            between=Link(parse_latency(latency or "20us"), parse_bandwidth(bandwidth or "25Gbit")),
            inside=Link(
                parse_latency(intra_latency) if intra_latency else inside.latency,
                parse_bandwidth(intra_bandwidth) if intra_bandwidth else inside.bandwidth,
            ),
            ranks_per_host=ranks_per_host or len(recorded.tables),
        )
        given = [name for name, text in (("latency", latency), ("bandwidth", bandwidth)) if text is None]
        setting = planning.Setting(network, algorithm, scaling, cores, overlap, guessed=tuple(given), price=price)
        found = planning.Plan(recorded, setting)
        points = [found.at(count) for count in counts or found.fitting(planning.powers(up_to or _UP_TO))]
    if as_json:
        print_json("runs.plan", planning.to_json(found, points))
    else:
        click.echo(describe(found, points))


@runs.command(short_help="Merge or split traces.")
@click.argument("files", nargs=-1, required=True, type=LocalPath())
@click.option(
    "-o",
    "--output",
    type=LocalPath(),
    metavar="FILE",
    help="File for the merged trace. [default: trace.json.gz]",
)
@click.option(
    "--split",
    type=LocalPath(file_okay=False),
    metavar="FOLDER",
    help="Write one file per rank into FOLDER, as Holistic Trace Analysis reads them.",
)
def trace(files: tuple[Path, ...], output: Path | None, split: Path | None) -> None:
    """Merge the traces of the nodes of a job into one, or split a trace into one file per rank.

    FILES are one trace, or one per node (trace-node0.json.gz and so on).
    """
    from lockstep.runs import trace as traces

    with errors():
        read = [traces.read(path) for path in files]
        if len(read) == 1 and (split is None or output is not None):
            raise traces.BadTrace(
                "one trace can't be merged: name those of the other machines too, or give only --split"
            )
        whole = traces.merge(read) if len(read) > 1 else read[0]
        if len(read) > 1 and (output is not None or split is None):
            path = output or Path("trace.json.gz")
            whole.write(path)
            click.echo(f"{path}: {len(whole.ranks)} ranks of {len(read)} machines")
            for node, clock in whole.about["clocks"].items():
                error = "with an unknown error" if clock["error_us"] is None else f"to {clock['error_us']:,.0f} µs"
                click.echo(f"the clock of machine {node}: {clock['ahead_us']:,.0f} µs ahead, {error}, by {clock['by']}")
        if split is not None:
            for path in traces.split(whole, split):
                click.echo(path)
