"""The place of this process in its job, read from the launcher's environment.

lockstep's own launcher, torchrun and ``torch.distributed.launch`` describe a rank with the same variables:
``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``GROUP_RANK`` (torchrun's word for the node rank),
``MASTER_ADDR`` and ``MASTER_PORT``. Where these are not set, the variables of MPI's launchers and of Slurm are read
(``schedulers/place.py``), so that ``mpirun -n 4 python train.py`` is one job of four ranks and not four jobs of one.
Without any of these variables, the process is alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from lockstep import knobs
from lockstep.errors import EnvironmentMismatch
from lockstep.schedulers import slurm
from lockstep.schedulers.place import mpi_variables, rank_variables, srun_task


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
            EnvironmentMismatch: some of the variables are missing, or they contradict each other.
        """
        if _is_undescribed(env):
            env = {**env, **rank_variables(env)}
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return cls()
        for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
            if name not in env:
                raise EnvironmentMismatch(
                    f"{other}={env[other]} is set but {name} is not: a launcher sets both "
                    f"(lockstep run, torchrun); to run alone, unset {other}"
                )
        rank, world_size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
        _refuse_leftovers(env, rank, world_size)
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
        # torch.distributed.launch, before torchrun, did not set LOCAL_WORLD_SIZE; equal ranks mean one machine.
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
    """Return an identifier of this rank in this job; ranks that this process itself starts get others."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", knobs.STORE)
    return " ".join(env.get(name, "-") for name in names)


def adopt(env: MutableMapping[str, str] = os.environ) -> None:
    """Write the place that MPI or Slurm gives this rank into ``env``, as the variables of a launcher: torch, other
    libraries and child processes read them there. Do nothing if a launcher has described the rank.

    Raises:
        EnvironmentMismatch: the variables of MPI or Slurm are incomplete or contradict each other.
    """
    if _is_undescribed(env):
        env.update(rank_variables(env))
        task = srun_task(env)
        if task is not None:
            env[knobs.WORLD] = task.title


def _is_undescribed(env: Mapping[str, str]) -> bool:
    """Return whether the variables of MPI or Slurm count: not if a launcher has described the rank, and not in
    processes that a rank starts without ``RANK``."""
    return not {"RANK", "WORLD_SIZE", knobs.JOB_DIR, knobs.JOINED} & env.keys()


def _refuse_leftovers(env: Mapping[str, str], rank: int, world_size: int) -> None:
    """Refuse leftover variables in a task of srun if they can't describe one job of all its tasks."""
    if {knobs.JOB_DIR, knobs.JOINED, "TORCHELASTIC_RUN_ID"} & env.keys():
        return  # a launcher below srun has described the ranks
    task = slurm.read(env)
    if task is None or "LOCAL_RANK" in mpi_variables(env):
        return
    if world_size < task.tasks or (world_size == task.tasks and rank != task.rank):
        raise EnvironmentMismatch(
            f"RANK={rank} and WORLD_SIZE={world_size} are set, but srun started {task.tasks} tasks, of which this is "
            f"number {task.rank}: unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in the batch script, and "
            "srun's variables count; if each task is to be alone: env -u SLURM_STEP_ID"
        )


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise EnvironmentMismatch(f"{name}={text!r}: expected a whole number") from None
