"""``lockstep run``: start a script on N ranks of this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click


@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    options_metavar="[-n N] [OPTIONS]",
)
@click.option(
    "-n",
    "--nproc-per-node",
    "--nproc_per_node",
    "ranks",
    metavar="N|auto|gpu|cpu",
    help="Ranks; auto: one per GPU, else per two cores; gpu, cpu: one for each.",
)
@click.option("--standalone", is_flag=True, hidden=True, help="Accepted as by torchrun: one machine.")
@click.option(
    "--nnodes", metavar="N|MIN:MAX", help="Machines of the job: start this on each. Slurm and others say it, too."
)
@click.option(
    "--rdzv", metavar="HOST[:PORT]|file:FOLDER", help="Where they find each other; the same on each, in any order."
)
@click.option("--rdzv-id", metavar="NAME", help="Tells this job from others that meet there.")
@click.option("--local-addr", metavar="ADDR", help="This machine's address for the others, if not that of the route.")
@click.option("--join-timeout", default=600.0, show_default=True, metavar="SECONDS", help="Time to wait for machines.")
@click.option(
    "--regroup-after",
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Let machines that come later join not before the others have run this long.",
)
@click.option(
    "--hosts", metavar="HOST[:N],…", help="Start it on these machines from here, by ssh; N: ranks on that one."
)
@click.option("--hosted", is_flag=True, hidden=True, help="This is one of --hosts; orders come over standard input.")
@click.option("--node-rank", "--node_rank", type=int, metavar="N", help="Which of them this is, from 0.")
@click.option("--master-addr", "--master_addr", metavar="HOST", help="Machine 0; 127.0.0.1 unless given.")
@click.option("--master-port", "--master_port", type=int, help="Its port: 29500 with several machines, else any.")
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.option(
    "--log-dir", "--log_dir", type=click.Path(path_type=Path), help="Folder for every rank's log (rank1.log …)."
)
@click.option("--all-output", is_flag=True, help="Show every rank's lines, not only rank 0's.")
@click.option("--quiet", is_flag=True, help="No summary at the end (LOCKSTEP_QUIET=1).")
@click.option(
    "--trace",
    metavar="STEPS[:FROM]",
    help="Record what all ranks do in so many steps, after FROM steps (10), in a file for ui.perfetto.dev.",
)
@click.option(
    "--grace",
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time to save and stop before being killed; a loop that evaluates for longer saves nothing by itself.",
)
@click.option(
    "--max-restarts",
    "--max_restarts",
    type=int,
    metavar="K",
    help="Start again after a failure, up to K times; 0 if not given.",
)
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: str | None,
    standalone: bool,
    nnodes: str | None,
    rdzv: str | None,
    rdzv_id: str | None,
    local_addr: str | None,
    join_timeout: float,
    regroup_after: float,
    hosts: str | None,
    hosted: bool,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    is_module: bool,
    log_dir: Path | None,
    all_output: bool,
    quiet: bool,
    trace: str | None,
    grace: float,
    max_restarts: int | None,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run PROGRAM on N ranks of this machine, or of each of several machines.

    What follows PROGRAM is passed to it unchanged. Rank 0 has the terminal; each other rank writes to a log. If a rank
    fails, it is named and the others are stopped; the exit code is that rank's. With --max-restarts all ranks start
    again, and a Checkpointer resumes from its newest complete checkpoint.

    SIGTERM, Ctrl-C or the end of the terminal: a training with a Checkpointer finishes its step, saves, and ends with
    exit code 75; run the same command again to resume. A second signal stops at once. SIGUSR1: save and continue.
    """
    from lockstep import knobs, machine
    from lockstep.errors import LockstepError

    given = click.get_current_context().params
    try:
        if hosts is not None:
            sys.exit(_run_on_hosts(hosts, given))
        from lockstep.launch.run import run as run_job  # refuses other systems than Linux
        from lockstep.launch.spec import JobSpec, NodeOptions, Output, Program, node_place, parse_ranks

        env = dict(os.environ)
        if hosted:
            from lockstep.launch.hosted import obey

            order = obey()  # returns in a process of its own
            nnodes, rdzv, rdzv_id = str(order.nnodes), order.endpoint, order.job
            env[knobs.KEY] = order.key
        asked = NodeOptions(
            nnodes, node_rank, master_addr, master_port, standalone, rdzv, rdzv_id, local_addr, join_timeout
        )
        place = node_place(asked, env)
        nproc = parse_ranks(ranks or place.ranks or "auto", cores=machine.cores(), gpus=machine.gpus())
        spec = JobSpec(
            Program.read(program, args, is_module),
            nproc=nproc,
            nnodes=place.nnodes,
            node_rank=place.node_rank,
            master_addr=place.master_addr,
            master_port=place.master_port,
            log_dir=log_dir,
            output=Output.ALL if all_output else Output.FIRST,
            quiet=quiet or knobs.quiet(),
            trace=knobs.trace() if trace is None else _parse_trace(trace),
            grace=grace,
            max_restarts=(place.restarts or 0) if max_restarts is None else max_restarts,
            rendezvous=None if place.rendezvous is None else replace(place.rendezvous, ranks=nproc),
            regroup_after=regroup_after,
            one_terminal=hosted,
        )
        sys.exit(run_job(spec))
    except (ValueError, LockstepError) as error:
        if hosted:
            from lockstep.launch.report import say

            say(str(error), once=str(error))  # shown where the user is
        else:
            click.echo(f"lockstep run: {error}", err=True)
        sys.exit(2)


#: Options that say where the machines are, as --hosts does.
_ELSEWHERE = ("nnodes", "rdzv", "rdzv_id", "node_rank", "master_addr", "master_port", "local_addr", "standalone")
#: Options that each host's launcher is given as they are.
_EVERYWHERE = ("join_timeout", "regroup_after", "log_dir", "trace", "grace", "max_restarts")


def _run_on_hosts(hosts: str, given: dict[str, Any]) -> int:
    """Start this command on ``hosts``, and return its exit code.

    Args:
        hosts: what the user has named.
        given: all options and arguments of the command.
    """
    from lockstep.launch.hosts import Line, refuse_with_hosts, run_on_hosts
    from lockstep.launch.spec import is_read_once
    from lockstep.remote.ssh import parse_hosts

    if given["trace"] is not None:
        _parse_trace(given["trace"])
    refuse_with_hosts(hosts, {_option(name): given[name] for name in _ELSEWHERE})
    words = [f"{_option(name)}={given[name]}" for name in _EVERYWHERE if given[name] is not None]
    if not given["is_module"] and is_read_once(given["program"]):
        raise ValueError(
            f"{given['program']} with --hosts={hosts}: a program from a pipe is on this machine alone; save it to a "
            "file that all hosts have"
        )
    words += ["--all-output"] if given["all_output"] else []
    words += ["--quiet"] if given["quiet"] else []
    words += ["-m"] if given["is_module"] else []
    rest = (*words, "--", given["program"], *given["args"])
    return run_on_hosts(parse_hosts(hosts), Line(given["ranks"], rest, grace=given["grace"]))


def _parse_trace(text: str) -> tuple[int, int]:
    from lockstep import knobs

    try:
        return knobs.parse_trace(text)
    except ValueError as error:
        raise ValueError(f"--trace {text}: {error}") from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
