"""``lockstep slurm``: print a batch script."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from lockstep.cli.terminal import LocalPath


@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    options_metavar="--time TIME [OPTIONS]",
)
@click.option("--nodes", "--nnodes", type=click.IntRange(min=1), default=1, show_default=True, help="Machines.")
@click.option(
    "-n",
    "--nproc-per-node",
    "--nproc_per_node",
    "ranks",
    type=click.IntRange(min=1),
    required=True,
    help="Ranks on each machine.",
)
@click.option("--time", required=True, metavar="TIME", help="Time limit, as for sbatch: [DAYS-]HOURS:MINUTES:SECONDS …")
@click.option("--cpus-per-rank", type=click.IntRange(min=1), default=1, show_default=True, help="Cores for each rank.")
@click.option("--gpus-per-rank", type=click.IntRange(min=0), default=0, show_default=True, help="GPUs for each rank.")
@click.option("--mem", "memory", metavar="SIZE", help="Memory of each machine, such as 64G.")
@click.option("--partition", metavar="NAME", help="The partition; the site's default if not given.")
@click.option("--account", metavar="NAME", help="Whose time it is.")
@click.option("--name", metavar="NAME", help="The job's name; the program's if not given.")
@click.option(
    "--grace",
    type=float,
    metavar="SECONDS",
    help="Time to finish a step and save; 240 or, if that is less, a quarter of the limit.",
)
@click.option(
    "--signal-before",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    help="How long before the limit the ranks are asked to stop; --grace and 60 if not given.",
)
@click.option(
    "--requeue",
    type=click.Choice(["script", "slurm", "never"]),
    default="script",
    show_default=True,
    help="Who queues the job again when it has saved: the script, or Slurm, by RequeueExit=75 in slurm.conf.",
)
@click.option(
    "--log-dir",
    "logs",
    type=LocalPath(),
    default="logs",
    show_default=True,
    metavar="FOLDER",
    help="For the ranks' logs.",
)
@click.option("--sbatch", "more", multiple=True, metavar="OPTION", help="One more option of sbatch; repeatable.")
@click.option("--setup", multiple=True, metavar="LINE", help="A line of shell before srun; repeatable.")
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def slurm(
    nodes: int,
    ranks: int,
    time: str,
    cpus_per_rank: int,
    gpus_per_rank: int,
    memory: str | None,
    partition: str | None,
    account: str | None,
    name: str | None,
    grace: float | None,
    signal_before: int | None,
    requeue: str,
    logs: Path,
    more: tuple[str, ...],
    setup: tuple[str, ...],
    is_module: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Print a batch script for Slurm that runs PROGRAM on N ranks of each of some machines.

    What follows PROGRAM is passed to it unchanged. Before the time limit the ranks are asked to stop: a training with a
    Checkpointer finishes its step and saves, the job is queued again, and it resumes there.

    \b
    lockstep slurm --nodes 2 -n 4 --time 04:00:00 train.py > train.sh
    sbatch train.sh
    """
    from lockstep.launch.spec import Program
    from lockstep.schedulers.sbatch import BatchJob, Requeue, default_grace
    from lockstep.schedulers.start import StartCommand

    try:
        grace = default_grace(time) if grace is None else grace
        batch = BatchJob(
            StartCommand(program, args, is_module, machines=nodes, ranks=ranks, grace=grace),
            time=time,
            name=name or Program(program, is_module=is_module).name,
            cpus_per_rank=cpus_per_rank,
            gpus_per_rank=gpus_per_rank,
            memory=memory,
            partition=partition,
            account=account,
            signal_before=signal_before,
            requeue=Requeue(requeue),
            logs=str(logs),
            more=more,
            setup=setup,
        )
        click.echo(batch.text(), nl=False)
    except ValueError as error:
        click.echo(f"lockstep slurm: {error}", err=True)
        sys.exit(2)
