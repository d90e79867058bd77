"""``lockstep plan``: reckon from a recorded run what more ranks would take."""

from __future__ import annotations

import click

from lockstep.cli.terminal import RUN, errors, homes
from lockstep.text import parse_bandwidth, parse_latency

#: Ranks that are planned for where none are named.
_UP_TO = 512


@click.command()
@RUN
@click.option("--ranks", metavar="N,N,…", help="How many ranks to plan for.")
@click.option("--up-to", type=int, metavar="N", help=f"The powers of two up to N instead. [default: {_UP_TO}]")
@click.option("--ranks-per-host", type=int, metavar="N", help="Ranks of a host. [default: as recorded]")
@click.option("--latency", metavar="TIME", help="Of a message between hosts: 20us. [default: 20us]")
@click.option("--bandwidth", metavar="RATE", help="Of a host's link, each way: 25Gbit, 3GB. [default: 25Gbit]")
@click.option("--intra-latency", metavar="TIME", help="Within a host. [default: as recorded, else 5us]")
@click.option("--intra-bandwidth", metavar="RATE", help="Within a host. [default: as recorded, else 5GB]")
@click.option(
    "--algorithm", type=click.Choice(["ring", "tree", "hierarchical", "best"]), default="best", show_default=True
)
@click.option(
    "--scaling",
    type=click.Choice(["strong", "weak"]),
    default="strong",
    show_default=True,
    help="strong: the global batch stays, as with more ranks of the same program; weak: it grows with them.",
)
@click.option("--cores", type=int, metavar="N", help="Cores of a host, if its ranks are to share them.")
@click.option("--overlap/--no-overlap", default=None, help="Send buckets during backward, or not. [default: as it was]")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
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
    as_json: bool,
) -> None:
    """Reckon from a recorded run what a step would take on more ranks and hosts, over a given network.

    RUN is as for lockstep stack. What the plan takes for granted stands below it.
    """
    import json

    from lockstep.runs import history
    from lockstep.tools.plan import plan as planning
    from lockstep.tools.plan.chart import describe
    from lockstep.tools.plan.network import Link, Network

    with errors("plan", ValueError):
        for name, value in (("--ranks-per-host", ranks_per_host), ("--cores", cores), ("--up-to", up_to)):
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: expected a number from 1 on")
        if ranks is not None and up_to is not None:
            raise ValueError("--ranks and --up-to: name one of them")
        counts = None if ranks is None else planning.parse_counts(ranks)
        recorded = planning.Recorded.of(history.find(run, homes()))
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
        setting = planning.Setting(network, algorithm, scaling, cores, overlap, guessed=tuple(given))
        found = planning.Plan(recorded, setting)
        points = [found.at(count) for count in counts or found.fitting(planning.powers(up_to or _UP_TO))]
    click.echo(json.dumps(planning.to_json(found, points), indent=1) if as_json else describe(found, points))
