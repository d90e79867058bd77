"""``lockstep manifest``: print a manifest for Kubernetes."""

from __future__ import annotations

import sys

import click


@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    options_metavar="--engine ENGINE --image IMAGE [OPTIONS]",
)
@click.option(
    "--engine",
    type=click.Choice(["jobset", "job", "trainjob"]),
    required=True,
    help="A JobSet, an Indexed Job with its Service, or a TrainJob of Kubeflow with its TrainingRuntime.",
)
@click.option("--image", required=True, metavar="IMAGE", help="An image with the program and lockstep in it.")
@click.option("--nodes", "--nnodes", type=click.IntRange(min=1), default=1, show_default=True, help="Pods.")
@click.option(
    "-n",
    "--nproc-per-node",
    "--nproc_per_node",
    "ranks",
    type=click.IntRange(min=1),
    required=True,
    help="Ranks in each pod.",
)
@click.option("--cpus-per-rank", type=click.IntRange(min=1), default=1, show_default=True, help="Cores for each rank.")
@click.option("--gpus-per-rank", type=click.IntRange(min=0), default=0, show_default=True, help="GPUs for each rank.")
@click.option("--mem", "memory", metavar="SIZE", help="Memory of each pod, such as 64Gi.")
@click.option(
    "--volume", "volumes", multiple=True, metavar="CLAIM:/PATH", help="A PersistentVolumeClaim to mount; repeatable."
)
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable of the program; repeatable.")
@click.option("--name", metavar="NAME", help="The job's name; the program's if not given.")
@click.option("--namespace", metavar="NAME", help="Its namespace; the current one if not given.")
@click.option("--grace", default=60.0, show_default=True, metavar="SECONDS", help="Time to finish a step and save.")
@click.option(
    "--max-restarts",
    "--max_restarts",
    type=click.IntRange(min=0),
    metavar="K",
    help="Start all ranks again after a failure, up to K times; 10 if not given. With --engine job: --rdzv, too.",
)
@click.option(
    "--rdzv",
    metavar="service|file:FOLDER",
    help="Let the launchers find each other, at the first pod or on a volume: they restart without new pods.",
)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def manifest(
    engine: str,
    image: str,
    nodes: int,
    ranks: int,
    cpus_per_rank: int,
    gpus_per_rank: int,
    memory: str | None,
    volumes: tuple[str, ...],
    env: tuple[str, ...],
    name: str | None,
    namespace: str | None,
    grace: float,
    max_restarts: int | None,
    rdzv: str | None,
    is_module: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Print a manifest for Kubernetes that runs PROGRAM on N ranks in each of some pods.

    What follows PROGRAM is passed to it unchanged. When a node is drained or a pod evicted, a training with a
    Checkpointer finishes its step and saves, and resumes in new pods, if its folder is on a volume.

    \b
    lockstep manifest --engine jobset --image registry/train:1 --nodes 2 -n 4 \\
        --volume runs:/runs train.py /runs/first | kubectl apply -f -
    """
    from lockstep.launch.spec import Program
    from lockstep.schedulers.kubernetes import Controller, JobManifest, Volume
    from lockstep.schedulers.start import StartCommand

    try:
        described = JobManifest(
            StartCommand(program, args, is_module, machines=nodes, ranks=ranks, grace=grace),
            engine=Controller(engine),
            image=image,
            name=name or "-".join(Program(program, is_module=is_module).name.lower().replace("_", ".").split(".")),
            namespace=namespace,
            cpus_per_rank=cpus_per_rank,
            gpus_per_rank=gpus_per_rank,
            memory=memory,
            volumes=tuple(Volume.parse(text) for text in volumes),
            env=env,
            max_restarts=max_restarts,
            rdzv=rdzv,
        )
        click.echo(described.text(), nl=False)
    except ValueError as error:
        click.echo(f"lockstep manifest: {error}", err=True)
        sys.exit(2)
