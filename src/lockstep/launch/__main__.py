"""``python -m lockstep.launch``: the command line of ``torch.distributed.launch``, over lockstep's launcher.

Each machine starts its own part with its ``--node_rank``; rank = nproc_per_node * node_rank + local_rank. As with
torch's, every rank's output goes to the terminal and the local rank is the script's first argument: ``--local-rank=K``,
or ``--local_rank=K`` for a script that knows only that.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # As in lockstep/__main__.py: until the launcher reads signals itself there is nothing to undo or to show.
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from lockstep import machine
from lockstep.errors import LockstepError
from lockstep.launch.run import run
from lockstep.launch.spec import (
    DEFAULT_GRACE,
    JobSpec,
    NodeOptions,
    Output,
    Program,
    check_program,
    local_rank_option,
    node_place,
    parse_ranks,
    sources_of,
)


@dataclass(frozen=True)
class _Options:
    """The command line, as click hands it over."""

    nproc_per_node: str | None
    nnodes: str | None
    node_rank: int | None
    master_addr: str | None
    master_port: int | None
    standalone: bool
    use_env: bool
    local_rank_style: str | None
    module: bool
    no_python: bool
    log_dir: Path | None
    all_output: bool
    grace: float
    max_restarts: int | None
    program: str
    args: tuple[str, ...]

    def to_spec(self) -> JobSpec:
        if self.no_python:
            raise ValueError(
                "--no_python: the ranks are forked from a Python process and run Python; to start another program, "
                "call it from a script (subprocess.run)"
            )
        cores, gpus = machine.cores(), machine.gpus()
        program = Program.read(self.program, self.args, self.module)
        place = node_place(
            NodeOptions(self.nnodes, self.node_rank, self.master_addr, self.master_port, self.standalone)
        )
        ranks = self.nproc_per_node or place.ranks or "1"
        nproc = parse_ranks(ranks, cores=cores, gpus=gpus, option="--nproc_per_node", auto=cores)
        return JobSpec(
            program,
            nproc=nproc,
            nnodes=place.nnodes,
            node_rank=place.node_rank,
            master_addr=place.master_addr,
            master_port=place.master_port,
            world=place.world,
            local_rank_option=None if self.use_env else self._local_rank_option(program),
            log_dir=self.log_dir,
            output=Output.ALL if self.all_output else Output.SHARED,
            grace=self.grace,
            max_restarts=(place.restarts or 0) if self.max_restarts is None else self.max_restarts,
            rendezvous=None if place.rendezvous is None else replace(place.rendezvous, ranks=nproc),
        )

    def _local_rank_option(self, program: Program) -> str:
        if self.local_rank_style is not None:
            return "--local_rank" if self.local_rank_style == "underscore" else "--local-rank"
        check_program(program)  # a missing program has no text to look into
        return local_rank_option(sources_of(program))


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option(
    "--nproc_per_node",
    "--nproc-per-node",
    metavar="N|gpu|cpu|auto",
    help="Number of ranks per node. auto: gpu if there are GPUs, otherwise cpu; gpu, cpu: one per GPU or CPU core. "
    "[default: 1]",
)
@click.option("--nnodes", metavar="N", help="Number of nodes. [default: as the scheduler says, otherwise 1]")
@click.option("--node_rank", "--node-rank", type=int, metavar="N", help="Rank of this node, from 0.")
@click.option(
    "--master_addr", "--master-addr", metavar="HOST", help="Host name or address of node 0. [default: 127.0.0.1]"
)
@click.option(
    "--master_port",
    "--master-port",
    type=int,
    metavar="PORT",
    help="Port of node 0. [default: 29500 with several nodes, otherwise any free port]",
)
@click.option("--standalone", is_flag=True, help="Run on one node, with any free port; this is the default.")
@click.option(
    "--use_env", "--use-env", is_flag=True, help="Do not pass --local-rank to PROGRAM. LOCAL_RANK is always set."
)
@click.option(
    "--local_rank_style",
    "--local-rank-style",
    type=click.Choice(["dash", "underscore"]),
    help="Pass --local-rank or --local_rank to PROGRAM. [default: the one that its text contains, otherwise dash]",
)
@click.option("-m", "--module", is_flag=True, help="Run PROGRAM as a module, like python -m.")
@click.option("--no_python", "--no-python", is_flag=True, hidden=True)
@click.option(
    "--log_dir",
    "--log-dir",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder for the logs of the ranks (rank1.log and so on) and the record of the run. [default: a new one below "
    "~/.local/state/lockstep/logs]",
)
@click.option("--all_output", "--all-output", is_flag=True, help="Prefix each line of output with its rank.")
@click.option(
    "--grace",
    type=float,
    default=int(DEFAULT_GRACE),
    show_default=True,
    metavar="SECONDS",
    help="Time the ranks have to finish their step and save before they are killed.",
)
@click.option(
    "--max_restarts",
    "--max-restarts",
    type=int,
    metavar="K",
    help="Maximum number of times that all ranks are restarted after a failure. [default: 0]",
)
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def main(**options: Any) -> None:
    """Run PROGRAM on every rank of this machine, as torch.distributed.launch does."""
    try:
        sys.exit(run(_Options(**options).to_spec()))
    except (ValueError, LockstepError) as error:
        click.echo(f"lockstep.launch: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main(prog_name="python -m lockstep.launch")
