"""``lockstep trace``: what is left to do with the files that ``lockstep run --trace`` writes."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.terminal import LocalPath, errors


@click.command()
@click.argument("files", nargs=-1, required=True, type=LocalPath())
@click.option(
    "-o",
    "--output",
    type=LocalPath(),
    metavar="FILE",
    help="Where the merged trace goes: trace.json.gz.",
)
@click.option(
    "--split",
    type=LocalPath(file_okay=False),
    metavar="FOLDER",
    help="Write a file for each rank there, as Holistic Trace Analysis reads them.",
)
def trace(files: tuple[Path, ...], output: Path | None, split: Path | None) -> None:
    """Merge the traces that the machines of a job have written, or split one into files of single ranks.

    FILES: trace-node0.json.gz and so on, one of each machine, or one trace.
    """
    from lockstep.runs import trace as traces

    with errors("trace"):
        read = [traces.read(path) for path in files]
        if len(read) == 1 and (split is None or output is not None):
            raise traces.BadTrace(
                "one file has nothing to be merged with: name those of the other machines, or --split alone"
            )
        whole = traces.merge(read) if len(read) > 1 else read[0]
        if len(read) > 1 and (output is not None or split is None):
            path = output or Path("trace.json.gz")
            whole.write(path)
            click.echo(f"{path}: {len(whole.ranks)} ranks of {len(read)} machines")
            for node, clock in whole.about["clocks"].items():
                error = "nobody knows how exactly" if clock["error_us"] is None else f"to {clock['error_us']:,.0f} µs"
                click.echo(f"the clock of machine {node}: {clock['ahead_us']:,.0f} µs ahead, {error}, by {clock['by']}")
        if split is not None:
            for path in traces.split(whole, split):
                click.echo(path)
