"""Who am I: the place of this process in its job, read from the launcher's environment.

lockstep's own launcher, torchrun and ``torch.distributed.launch`` describe a rank with the same variables:
``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``GROUP_RANK`` (torchrun's word for the node rank),
``MASTER_ADDR`` and ``MASTER_PORT``. Where these are not set, the variables of MPI's launchers are read, so that
``mpirun -n 4 python train.py`` is one job of four and not four jobs of one. With none of them, the process is alone,
unless srun started several of it: :func:`refuse_to_be_alone`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep import knobs
from lockstep.errors import EnvironmentMismatch

#: What other launchers call our variables: Open MPI's mpirun, then MPICH's and Intel MPI's (hydra).
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


#: Slurm's own steps (the batch script, a shell of salloc …) have numbers from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Identity:
    """The place of one process in its job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    #: True if a launcher described this process; False if it was started by hand, alone.
    launched: bool = False

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.local_world_size < 1:
            raise EnvironmentMismatch(
                f"WORLD_SIZE={self.world_size}, LOCAL_WORLD_SIZE={self.local_world_size}: both must be at least 1"
            )
        if not 0 <= self.rank < self.world_size:
            raise EnvironmentMismatch(
                f"RANK={self.rank} does not fit WORLD_SIZE={self.world_size}: expected 0 to {self.world_size - 1}"
            )
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            raise EnvironmentMismatch(
                f"LOCAL_RANK={self.local_rank}, LOCAL_WORLD_SIZE={self.local_world_size}, "
                f"WORLD_SIZE={self.world_size}: expected 0 <= LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE"
            )

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Identity:
        """Read this process's place from ``env``.

        Raises:
            EnvironmentMismatch: only some of the variables are there, or they contradict each other.
        """
        if "RANK" not in env and "WORLD_SIZE" not in env:
            env = _translate_mpi(env)
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return cls()
        for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
            if name not in env:
                raise EnvironmentMismatch(
                    f"{other}={env[other]} is set but {name} is not: a launcher sets both "
                    f"(lockstep run, torchrun); to run alone, unset {other}"
                )
        rank, world_size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
        if "LOCAL_RANK" not in env and world_size > 1:
            raise EnvironmentMismatch(
                f"RANK={rank} and WORLD_SIZE={world_size} are set but LOCAL_RANK is not, so rank {rank} can't know "
                "its device: start with lockstep run or torchrun, or set LOCAL_RANK and LOCAL_WORLD_SIZE"
            )
        local_rank = _integer(env, "LOCAL_RANK", 0)
        if "LOCAL_WORLD_SIZE" not in env and local_rank != rank < world_size:
            raise EnvironmentMismatch(
                f"RANK={rank} and LOCAL_RANK={local_rank} differ, so there are several machines, but LOCAL_WORLD_SIZE "
                "is not set: set it to the number of ranks on each machine (torchrun and lockstep do)"
            )
        # torch.distributed.launch before torchrun did not set LOCAL_WORLD_SIZE; equal ranks mean one machine.
        local_world_size = _integer(env, "LOCAL_WORLD_SIZE", world_size)
        node_rank = _integer(env, "GROUP_RANK", (rank - local_rank) // max(1, local_world_size))
        return cls(rank, world_size, local_rank, local_world_size, node_rank, launched=True)

    def to_environment(self) -> dict[str, str]:
        """Return the variables that :meth:`from_environment` reads back."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
        }


def place(env: Mapping[str, str] = os.environ) -> str:
    """Return what tells this rank of this job from any other; the ranks that it starts in its turn have others."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", knobs.STORE)
    return " ".join(env.get(name, "-") for name in names)


def tasks_of_step(env: Mapping[str, str] = os.environ) -> int:
    """Return how many processes srun started as one step, this one among them; 1 outside of such a step.

    A batch script and a shell of salloc have ``SLURM_PROCID`` and ``SLURM_NTASKS`` as well, but are not a task of a
    step.
    """
    step, tasks = env.get("SLURM_STEP_ID", ""), env.get("SLURM_STEP_NUM_TASKS", "")
    is_task = "SLURM_PROCID" in env and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    return max(1, int(tasks)) if is_task and tasks.isdecimal() else 1


def refuse_to_be_alone(env: Mapping[str, str] = os.environ) -> None:
    """Refuse a world of one for each of several tasks that srun started.

    Raises:
        EnvironmentMismatch: this process is one of them, and no launcher has described it.
    """
    tasks = tasks_of_step(env)
    if tasks > 1 and not {"RANK", knobs.JOB_DIR} & env.keys():
        raise EnvironmentMismatch(
            f"srun started {tasks} tasks, of which this is number {env['SLURM_PROCID']}, but lockstep.init() does not "
            f"read SLURM_* variables, and {tasks} tasks would be {tasks} worlds of one. Start one task on each machine "
            f"and let lockstep start the ranks: {_BY_SRUN}. Or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT for each task. If each is to be alone: env -u SLURM_STEP_ID python …"
        )


#: How to start a job under Slurm.
_BY_SRUN = (
    "srun -n 1 lockstep run -n RANKS train.py on one; on several, srun --ntasks-per-node=1 bash -c 'python -m "
    "lockstep.launch --nnodes=$SLURM_NNODES --node_rank=$SLURM_NODEID --master_addr=FIRST_HOST --nproc_per_node=RANKS "
    "--use_env train.py'"
)


def refuse_to_launch(env: Mapping[str, str] = os.environ) -> None:
    """Refuse to start a job on one machine from each of several tasks that srun started.

    Raises:
        EnvironmentMismatch: this process is one of them.
    """
    tasks = tasks_of_step(env)
    if tasks > 1:
        raise EnvironmentMismatch(
            f"srun started {tasks} tasks, of which this is number {env['SLURM_PROCID']}, and each would start a job "
            f"of its own. Start one task on each machine: {_BY_SRUN}. If there are to be {tasks} separate jobs: "
            "env -u SLURM_STEP_ID lockstep run …"
        )


def _translate_mpi(env: Mapping[str, str]) -> Mapping[str, str]:
    """``env`` in our words, if an MPI launcher wrote it; else as it is."""
    for dialect in _MPI_DIALECTS:
        # Slurm's own PMI says no local rank; what to do about that is refuse_to_be_alone()'s to say.
        by_slurm = dialect["LOCAL_RANK"] not in env and tasks_of_step(env) > 1
        if dialect["RANK"] in env and dialect["WORLD_SIZE"] in env and not by_slurm:
            return {ours: env[theirs] for ours, theirs in dialect.items() if theirs in env}
    return env


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise EnvironmentMismatch(f"{name}={text!r}: expected a whole number") from None
