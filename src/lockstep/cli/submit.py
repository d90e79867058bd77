"""``lockstep submit``: print a script or manifest that starts a job under a scheduler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.options import PASSES_ON, Commands, fixed_local_ranks, grace, log_dir, max_restarts, takes_program
from lockstep.cli.terminal import errors

if TYPE_CHECKING:
    from lockstep.launch.spec import Program
    from lockstep.schedulers.start import StartCommand

#: Seconds that ranks in pods have to save, unless the user says otherwise.
_PODS_GRACE = 60


@click.group(cls=Commands)
def submit() -> None:
    """Print a job for Slurm or Kubernetes."""


@dataclass(frozen=True)
class _Asked:
    """The options that every scheduler has."""

    nodes: int
    ranks: int
    cpus_per_rank: int
    gpus_per_rank: int
    memory: str | None
    name: str | None
    grace: float | None
    is_module: bool
    program: str
    args: tuple[str, ...]

    def start(self, grace: float) -> StartCommand:
        """Return what starts on each node, with ``grace`` unless the user gave another."""
        from lockstep.schedulers.start import StartCommand

        grace = grace if self.grace is None else self.grace
        return StartCommand(self.program, self.args, self.is_module, machines=self.nodes, ranks=self.ranks, grace=grace)

    def target(self) -> Program:
        """Return the program, which names the job."""
        from lockstep.launch.spec import Program

        return Program(self.program, is_module=self.is_module)


def _prints_job(
    unit: str, *, memory: str, grace_option: Callable[[Any], Any]
) -> Callable[[Callable[..., str]], Callable[..., None]]:
    """Return a decorator that adds the options of all schedulers to a command, and prints the text it returns.

    The command gets an :class:`_Asked`, and its own options by name.

    Args:
        unit: what a node is under this scheduler.
        memory: a size as the scheduler takes it, as an example.
        grace_option: the option --grace with this scheduler's default.
    """

    def decorate(command: Callable[..., str]) -> Callable[..., None]:
        def call(**options: Any) -> None:
            asked = _Asked(**{name: options.pop(name) for name in _Asked.__dataclass_fields__})
            with errors(ValueError):
                click.echo(command(asked, **options), nl=False)

        least, none = click.IntRange(min=1), click.IntRange(min=0)
        added = [
            click.option(
                "--nodes", "--nnodes", type=least, metavar="N", default=1, show_default=True, help=f"Number of {unit}s."
            ),
            fixed_local_ranks(f"Number of ranks per {unit}."),
            click.option(
                "--cpus-per-rank", type=least, metavar="N", default=1, show_default=True, help="CPU cores per rank."
            ),
            click.option(
                "--gpus-per-rank", type=none, metavar="N", default=0, show_default=True, help="GPUs per rank."
            ),
            click.option("--mem", "memory", metavar="SIZE", help=f"Memory per {unit}, such as {memory}."),
            click.option("--name", metavar="NAME", help="Name of the job. [default: the program's name]"),
            grace_option,
            takes_program,
        ]
        described: Callable[..., None] = functools.update_wrapper(call, command)
        for add in reversed(added):
            described = add(described)
        return described

    return decorate


@submit.command(context_settings=PASSES_ON, options_metavar="--time TIME -n N [OPTIONS]")
@click.option(
    "--time", required=True, metavar="TIME", help="Time limit, as for sbatch: [DAYS-]HOURS:MINUTES:SECONDS and others."
)
@click.option("--partition", metavar="NAME", help="Partition to submit to. [default: the site's default]")
@click.option("--account", metavar="NAME", help="Account to charge. [default: the user's default]")
@click.option(
    "--signal-before",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    help="Time before the time limit at which the ranks are asked to stop. [default: --grace plus 60]",
)
@click.option(
    "--requeue",
    type=click.Choice(["script", "slurm", "never"]),
    default="script",
    show_default=True,
    help="What requeues the job after it has saved: the script itself, Slurm (needs RequeueExit=75 in slurm.conf), or "
    "nothing.",
)
@log_dir("Folder for the logs of the ranks.", default="logs")
@click.option("--sbatch", "more", multiple=True, metavar="OPTION", help="Additional option for sbatch; repeatable.")
@click.option("--setup", multiple=True, metavar="LINE", help="Shell command to run before srun; repeatable.")
@_prints_job(
    "node",
    memory="64G",
    grace_option=grace(None, more="[default: 240, or a quarter of the time limit if that is less]"),
)
def slurm(
    asked: _Asked,
    *,
    time: str,
    partition: str | None,
    account: str | None,
    signal_before: int | None,
    requeue: str,
    log_dir: Path,
    more: tuple[str, ...],
    setup: tuple[str, ...],
) -> str:
    """Print a Slurm batch script that runs PROGRAM.

    Arguments after PROGRAM are passed to it unchanged. The ranks are asked to stop before the time limit: a script
    with a Checkpointer finishes its step and saves, the job is requeued, and the script resumes.

    \b
    lockstep submit slurm --nodes 2 -n 4 --time 04:00:00 train.py > train.sh
    sbatch train.sh
    """
    from lockstep.schedulers.sbatch import BatchJob, Requeue, default_grace

    return BatchJob(
        asked.start(default_grace(time)),
        time=time,
        name=asked.name or asked.target().name,
        cpus_per_rank=asked.cpus_per_rank,
        gpus_per_rank=asked.gpus_per_rank,
        memory=asked.memory,
        partition=partition,
        account=account,
        signal_before=signal_before,
        requeue=Requeue(requeue),
        logs=str(log_dir),
        more=more,
        setup=setup,
    ).text()


@submit.command(context_settings=PASSES_ON, options_metavar="--controller CONTROLLER --image IMAGE -n N [OPTIONS]")
@click.option(
    "--controller",
    type=click.Choice(["jobset", "job", "trainjob"]),
    required=True,
    help="Kind of resource: a JobSet, an Indexed Job with a Service, or a Kubeflow TrainJob with a TrainingRuntime.",
)
@click.option("--image", required=True, metavar="IMAGE", help="Container image that has the program and lockstep.")
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    metavar="CLAIM:/PATH",
    help="PersistentVolumeClaim to mount at /PATH; repeatable.",
)
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Environment variable of the program; repeatable.")
@click.option("--namespace", metavar="NAME", help="Namespace of the job. [default: kubectl's current namespace]")
@max_restarts("10")
@click.option(
    "--rdzv",
    metavar="service|file:/FOLDER",
    help="Where the launchers find each other, to restart ranks without new pods: a Service, or a folder on a volume. "
    "Needed for --max-restarts with --controller job.",
)
@_prints_job("pod", memory="64Gi", grace_option=grace(_PODS_GRACE))
def kubernetes(
    asked: _Asked,
    *,
    controller: str,
    image: str,
    volumes: tuple[str, ...],
    env: tuple[str, ...],
    namespace: str | None,
    max_restarts: int | None,
    rdzv: str | None,
) -> str:
    """Print a Kubernetes manifest that runs PROGRAM.

    Arguments after PROGRAM are passed to it unchanged. When a node is drained or a pod evicted, a script with a
    Checkpointer finishes its step and saves. It resumes in new pods if the checkpoints are on a volume.

    \b
    lockstep submit kubernetes --controller jobset --image registry/train:1 --nodes 2 -n 4 \\
        --volume runs:/runs train.py /runs/first | kubectl apply -f -
    """
    from lockstep.schedulers.kubernetes import Controller, JobManifest, Volume

    return JobManifest(
        asked.start(_PODS_GRACE),
        controller=Controller(controller),
        image=image,
        name=asked.name or "-".join(asked.target().name.lower().replace("_", ".").split(".")),
        namespace=namespace,
        cpus_per_rank=asked.cpus_per_rank,
        gpus_per_rank=asked.gpus_per_rank,
        memory=asked.memory,
        volumes=tuple(Volume.parse(text) for text in volumes),
        env=env,
        max_restarts=max_restarts,
        rdzv=rdzv,
    ).text()
