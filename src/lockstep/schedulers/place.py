"""The place that a scheduler gives to a process: to a rank that it starts, or to a launcher, one on each machine.

Ranks: ``mpirun -n 4 python train.py`` and ``srun -n 4 python train.py`` start the ranks themselves. What they say is
put into the words that lockstep's launcher and torchrun use, with :func:`rank_variables`.

Launchers: ``srun --ntasks-per-node=1 lockstep run -n 4 train.py``, or one pod for each machine. What the scheduler says
is read by :func:`node`: torchrun's own variables (``PET_…``, which Kubeflow's Trainer sets), then mpirun's (it may run
inside a job of Slurm), Slurm's, those of an Indexed Job of Kubernetes, and those of a PyTorchJob, which describes a pod
as if it were a rank. The first that is there counts, as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import EnvironmentMismatch
from lockstep.schedulers import slurm

#: Our variables -> their names in other launchers: Open MPI's mpirun, then MPICH's and Intel MPI's (hydra).
_MPI_DIALECTS: tuple[dict[str, str], ...] = (
    {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    {
        "RANK": "PMI_RANK",
        "WORLD_SIZE": "PMI_SIZE",
        "LOCAL_RANK": "MPI_LOCALRANKID",
        "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
    },
)


@dataclass(frozen=True)
class LauncherPlace:
    """The place of a launcher among those of a job, one on each machine. What the scheduler does not say is None."""

    #: The scheduler's name, for messages.
    scheduler: str
    #: The machine's number, from 0.
    rank: int
    #: The number of machines.
    count: int | None = None
    #: Ranks on each machine, in the form of ``-n``.
    ranks: str | None = None
    #: The address at which the machines meet.
    address: str | None = None
    port: int | None = None
    #: The scheduler's name for the ranks of all of these launchers, which no other job has; empty: it has none.
    world: str = ""


def srun_task(env: Mapping[str, str]) -> slurm.SlurmTask | None:
    """Return the task of srun's that this process is; None: it is none, or the only one of its step, or mpirun's.

    Raises:
        EnvironmentMismatch: srun's variables are incomplete or contradict each other.
    """
    # mpirun inside a job of Slurm starts its helpers with srun, whose variables the ranks inherit. The other way round,
    # Slurm's own PMI says no local rank.
    return None if "LOCAL_RANK" in mpi_variables(env) else slurm.read(env)


def rank_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return what MPI's launchers or srun say of this rank, in our words; empty if they did not start it.

    ``MASTER_ADDR`` and ``MASTER_PORT`` are among them where the scheduler tells enough to work them out; those that the
    user has set come first.

    Raises:
        EnvironmentMismatch: srun's variables are incomplete or contradict each other, or this machine is one of several
            on which nothing has started ranks.
    """
    by_mpi = mpi_variables(env)
    task = srun_task(env)
    if task is not None:
        return {
            "RANK": str(task.rank),
            "WORLD_SIZE": str(task.tasks),
            "LOCAL_RANK": str(task.local_rank),
            "LOCAL_WORLD_SIZE": str(task.tasks_per_node[task.node]),
            "GROUP_RANK": str(task.node),
            "MASTER_ADDR": env.get("MASTER_ADDR", task.address),
            "MASTER_PORT": env.get("MASTER_PORT", str(task.port)),
        }
    if not by_mpi and "TORCHELASTIC_RUN_ID" not in env and env.get("PET_NNODES", "1") not in ("1", "1:1"):
        raise EnvironmentMismatch(
            f"PET_NNODES={env['PET_NNODES']} says that this is one of several machines, but nothing has started ranks "
            "on it, and each machine would train a model of its own: start with lockstep run, or env -u PET_NNODES to "
            "run alone"
        )
    return by_mpi


def node(env: Mapping[str, str]) -> LauncherPlace | None:
    """Return the place that a scheduler gives to a launcher; None: none does, so the machine is alone.

    Raises:
        EnvironmentMismatch: the variables are incomplete or contradict each other, or the scheduler has started several
            launchers on a machine.
    """
    for read in (_torchrun, _mpirun, _slurm, _indexed_job, _pytorch_job):
        found = read(env)
        if found is not None:
            return found
    return None


def mpi_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return what mpirun says of this rank, in our words; empty if it did not start it."""
    for dialect in _MPI_DIALECTS:
        if dialect["RANK"] in env and dialect["WORLD_SIZE"] in env:
            return {ours: env[theirs] for ours, theirs in dialect.items() if theirs in env}
    return {}


def _torchrun(env: Mapping[str, str]) -> LauncherPlace | None:
    if "PET_NNODES" not in env:
        return None
    count = env["PET_NNODES"]
    if ":" in count and count.partition(":")[0] != count.partition(":")[2]:
        raise EnvironmentMismatch(
            f"PET_NNODES={count}: the number of machines can change only where they find each other: say --rdzv HOST, "
            "or PET_RDZV_BACKEND=c10d and PET_RDZV_ENDPOINT, or ask for a fixed number"
        )
    nodes = _number("PET_NNODES", count.partition(":")[0])
    if nodes == 1:
        return LauncherPlace("PET_NNODES", 0, 1, env.get("PET_NPROC_PER_NODE"))
    if "PET_NODE_RANK" not in env:
        raise EnvironmentMismatch(f"PET_NNODES={count} is set but PET_NODE_RANK is not: which of the machines is this?")
    port = env.get("PET_MASTER_PORT")
    return LauncherPlace(
        "PET_NNODES",
        _number("PET_NODE_RANK", env["PET_NODE_RANK"]),
        nodes,
        env.get("PET_NPROC_PER_NODE"),
        env.get("PET_MASTER_ADDR"),
        None if port is None else _number("PET_MASTER_PORT", port),
    )


def _slurm(env: Mapping[str, str]) -> LauncherPlace | None:
    task = slurm.read(env)
    if task is None:
        return None
    if max(task.tasks_per_node) > 1:
        raise EnvironmentMismatch(
            f"srun started {task.tasks} tasks, {max(task.tasks_per_node)} of them on one machine, of which this is "
            f"number {task.rank}, and each would start ranks of its own: start one launcher on each machine (srun "
            "--ntasks-per-node=1 lockstep run -n RANKS train.py), or let srun start the ranks (srun python train.py)"
        )
    address = env.get("MASTER_ADDR", task.address)
    port = _number("MASTER_PORT", env.get("MASTER_PORT", str(task.port)))
    return LauncherPlace("srun", task.node, len(task.hosts), None, address, port, task.title)


def _indexed_job(env: Mapping[str, str]) -> LauncherPlace | None:
    if "JOB_COMPLETION_INDEX" not in env:
        return None
    return LauncherPlace("JOB_COMPLETION_INDEX", _number("JOB_COMPLETION_INDEX", env["JOB_COMPLETION_INDEX"]))


def _pytorch_job(env: Mapping[str, str]) -> LauncherPlace | None:
    """Read what a PyTorchJob (kubeflow.org/v1) says of a pod: the same words as of a rank, which has LOCAL_RANK too."""
    words = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "KUBERNETES_SERVICE_HOST"}
    if not env.keys() >= words or "LOCAL_RANK" in env:
        return None
    return LauncherPlace(
        "RANK and WORLD_SIZE of a PyTorchJob",
        _number("RANK", env["RANK"]),
        _number("WORLD_SIZE", env["WORLD_SIZE"]),
        None,
        env["MASTER_ADDR"],
        _number("MASTER_PORT", env["MASTER_PORT"]),
    )


def _mpirun(env: Mapping[str, str]) -> LauncherPlace | None:
    found = mpi_variables(env)
    if "LOCAL_WORLD_SIZE" not in found:
        return None
    if found["LOCAL_WORLD_SIZE"] != "1":
        raise EnvironmentMismatch(
            f"mpirun started {found['LOCAL_WORLD_SIZE']} launchers on this machine, and each would start ranks of its "
            "own: start one on each machine (mpirun -ppn 1 or --npernode 1), or let mpirun start the ranks (mpirun -n "
            "4 python train.py)"
        )
    return LauncherPlace("mpirun", _number("RANK", found["RANK"]), _number("WORLD_SIZE", found["WORLD_SIZE"]))


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise EnvironmentMismatch(f"{name}={text!r}: expected a whole number")
    return int(text)
