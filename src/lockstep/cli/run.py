"""``lockstep run``: start a script on N ranks of this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from lockstep.cli import terminal
from lockstep.cli.options import (
    PASSES_ON,
    PEAK_FLOPS,
    TIME_LIMIT,
    grace,
    local_ranks,
    log_dir,
    max_restarts,
    price,
    takes_program,
)
from lockstep.text import NEXT


@click.command(
    short_help="Run a program on N ranks of each node.",
    context_settings=PASSES_ON,
    options_metavar="[-n N] [OPTIONS]",
)
@local_ranks(
    "Number of ranks per node. auto: one per GPU, or one per two CPU cores without GPUs; gpu, cpu: one per GPU or "
    "CPU core. [default: as the scheduler says, otherwise auto]"
)
@click.option(
    "--standalone", is_flag=True, hidden=True, help="Run on one node. Accepted for compatibility with torchrun."
)
@click.option(
    "--nnodes",
    metavar="N|MIN:MAX",
    help="Number of nodes; start this command on each of them. [default: as the scheduler says, otherwise 1]",
)
@click.option(
    "--rdzv",
    metavar="HOST[:PORT]|file:FOLDER",
    help="Where the nodes find each other: at one of them, or in a shared folder. Must be the same on all nodes.",
)
@click.option("--rdzv-id", metavar="NAME", help="Name of the job, if several jobs use the same --rdzv.")
@click.option(
    "--local-addr",
    metavar="ADDR",
    help="Address of this node for the other nodes. [default: that of its route to --rdzv]",
)
@click.option(
    "--join-timeout",
    type=float,
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for enough nodes to join.",
)
@click.option(
    "--regroup-after",
    type=float,
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Minimum time the ranks run before nodes that arrive later may join.",
)
@click.option(
    "--hosts",
    metavar="HOST[:N],…",
    help="Start the job on these hosts by ssh, all from this command. N is the number of ranks on a host. "
    "[default of N: -n]",
)
@click.option("--hosted", is_flag=True, hidden=True, help="Run as one of --hosts, with orders from standard input.")
@click.option("--node-rank", type=int, metavar="N", help="Rank of this node, from 0.")
@click.option("--master-addr", metavar="HOST", help="Host name or address of node 0. [default: 127.0.0.1]")
@click.option(
    "--master-port",
    type=int,
    metavar="PORT",
    help="Port of node 0. [default: 29500 with several nodes, otherwise any free port]",
)
@log_dir(
    "Folder for the logs of the ranks (rank1.log and so on) and the record of the run. [default: a new one below "
    "~/.local/state/lockstep/logs]"
)
@click.option("--all-output", is_flag=True, help="Show the output of all ranks, not only that of rank 0.")
@click.option(
    "--bind",
    type=click.Choice(["auto", "none", "numa", "cores"]),
    help="Cores to bind each rank to. numa: those of the NUMA node of its GPU, or of the nodes in turn; cores: cores "
    "that no other rank has; auto: those of a node or, without GPUs, an L3 cache, if that divides all cores evenly and "
    "nothing else has set an affinity. [default: auto]",
)
@price("Price of one node per hour, such as 3.2/h: the summary says what the run and its waits cost.")
@click.option("--quiet", is_flag=True, help="Print no summary at the end, like LOCKSTEP_QUIET=1.")
@click.option(
    "--trace",
    metavar="STEPS[:FROM]",
    help="Record a trace of STEPS steps after the first FROM (default 10), to open in ui.perfetto.dev.",
)
@click.option(
    "--pdb", is_flag=True, help="Open Python's debugger on the first rank that fails, in the frame of its error."
)
@click.option("--flops", is_flag=True, help="Count the FLOPs of one step, and print FLOPs per second.")
@click.option(
    "--peak-flops",
    type=PEAK_FLOPS,
    metavar="FLOPS",
    help="FLOPs per second of one rank's device at its peak, such as 989T, for MFU. Implies --flops. [default: as "
    "published for some GPUs]",
)
@grace(10)
@click.option(
    "--max-time",
    type=TIME_LIMIT,
    metavar="TIME",
    help="Time limit of the job, such as 11h30m. The ranks are asked to save and stop --grace seconds before it, as by "
    "SIGTERM, and the exit code is 75. [default: none]",
)
@click.option(
    "--on-hang",
    metavar="report|dump|restart[:SECONDS]",
    help="What to do about a rank that holds up the others. report: report it; dump: also keep the report and all "
    "stacks with the run's logs; restart: also restart all ranks, as --max-restarts allows, if they still wait SECONDS "
    "(default 60) after the report. [default: report]",
)
@click.option(
    "--notify",
    metavar="COMMAND",
    help="Shell command to run when ranks hang or move on, when all ranks restart, and when the job fails or ends. It "
    "reads what happened from standard input, as JSON.",
)
@max_restarts("0")
@takes_program
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
    log_dir: Path | None,
    all_output: bool,
    bind: str | None,
    price: float | None,
    quiet: bool,
    trace: str | None,
    pdb: bool,
    flops: bool,
    peak_flops: float | None,
    grace: float,
    max_time: float | None,
    on_hang: str | None,
    notify: str | None,
    max_restarts: int | None,
    is_module: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run PROGRAM on N ranks of this node, or on N of each of several nodes.

    Arguments after PROGRAM are passed to it unchanged. Rank 0 has the terminal; every other rank writes to a log. If a
    rank fails, it is named, the others are stopped, and its exit code is returned. With --max-restarts all ranks are
    restarted, and a Checkpointer resumes from its newest complete checkpoint.

    breakpoint() opens a debugger on any rank, in the terminal; the others wait.

    On SIGTERM, Ctrl-C or when the terminal closes, a script with a Checkpointer finishes its step, saves and exits
    with code 75; run the same command again to resume. A second signal stops it at once. On SIGUSR1 it saves and
    continues.
    """
    from lockstep import _files, installation, knobs, machine
    from lockstep.errors import LockstepError

    if installation.is_replaced():
        found = installation.strangers()
        terminal.say(f"import lockstep finds the package of {installation.named(found)} instead of torch-lockstep")
        terminal.say(f"{NEXT} {installation.advice(found)}")
        sys.exit(2)
    given = click.get_current_context().params
    try:
        if _files.is_nowhere():
            raise ValueError(_files.NOWHERE)
        if hosts is not None:
            sys.exit(_run_on_hosts(hosts, given))
        from lockstep.debugger.lender import find_terminal
        from lockstep.launch import console, report
        from lockstep.launch.binding import Bind
        from lockstep.launch.on_hang import OnHang
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
        cores, gpus = machine.cores(), machine.gpus()
        nproc = parse_ranks(ranks or place.ranks or "auto", cores=cores, gpus=gpus)
        spec = JobSpec(
            Program.read(program, args, is_module),
            nproc=nproc,
            nnodes=place.nnodes,
            node_rank=place.node_rank,
            master_addr=place.master_addr,
            master_port=place.master_port,
            world=place.world,
            log_dir=log_dir,
            output=Output.ALL if all_output else Output.FIRST,
            quiet=quiet or knobs.quiet(),
            price=price,
            trace=knobs.trace() if trace is None else _parse_trace(trace),
            bind=Bind(bind or knobs.bind()),
            flops=flops or peak_flops is not None or knobs.flops(),
            peak_flops=knobs.peak_flops() if peak_flops is None else peak_flops,
            grace=grace,
            max_time=max_time,
            notify=notify,
            on_hang=OnHang() if on_hang is None else OnHang.parse(on_hang),
            max_restarts=(place.restarts or 0) if max_restarts is None else max_restarts,
            rendezvous=None if place.rendezvous is None else replace(place.rendezvous, ranks=nproc),
            regroup_after=regroup_after,
            one_terminal=hosted,
            hold=pdb,
        )
        if pdb and find_terminal() is None:
            raise ValueError(
                "--pdb: standard input is not a terminal, so nobody could use the debugger (ssh -t has one)"
            )
        if not (ranks or place.ranks or hosted or spec.quiet):
            console.say(report.ranks_by_default(nproc, cores=cores, gpus=gpus))
        sys.exit(run_job(spec))
    except (ValueError, LockstepError) as error:
        if hosted:
            from lockstep.launch.console import say

            say(str(error), once=str(error))  # shown where the user is
        else:
            terminal.say(error)
        sys.exit(2)


#: Options that say where the machines are, as --hosts does.
_ELSEWHERE = ("nnodes", "rdzv", "rdzv_id", "node_rank", "master_addr", "master_port", "local_addr", "standalone")
#: Options that each host's launcher is given as they are.
_EVERYWHERE = (
    "join_timeout",
    "regroup_after",
    "log_dir",
    "bind",
    "price",
    "trace",
    "peak_flops",
    "grace",
    "max_time",
    "on_hang",
    "notify",
    "max_restarts",
)


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
    if given["pdb"]:
        raise ValueError(f"--pdb with --hosts={hosts}: the hosts have no terminal; start the job on one of them")
    words = [f"{_option(name)}={given[name]}" for name in _EVERYWHERE if given[name] is not None]
    if not given["is_module"] and is_read_once(given["program"]):
        raise ValueError(
            f"{given['program']} with --hosts={hosts}: a program from a pipe is on this machine alone; save it to a "
            "file that all hosts have"
        )
    words += ["--all-output"] if given["all_output"] else []
    words += ["--flops"] if given["flops"] else []
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
