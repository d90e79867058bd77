"""Identity reads what launchers write, and refuses what makes no sense."""

from __future__ import annotations

import pytest

from lockstep import EnvironmentMismatch, knobs
from lockstep.identity import Identity, refuse_to_be_alone, refuse_to_launch


def test_without_a_launcher_a_process_is_alone() -> None:
    assert Identity.from_environment({}) == Identity(0, 1, 0, 1, 0, launched=False)


def test_it_reads_back_what_it_writes() -> None:
    identity = Identity(rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1, launched=True)
    assert Identity.from_environment(identity.to_environment()) == identity


def test_torch_distributed_launch_sets_no_local_world_size() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert Identity.from_environment(env) == Identity(1, 2, 1, 2, 0, launched=True)


def test_the_node_rank_follows_from_the_ranks() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Identity.from_environment(env).node_rank == 1


@pytest.mark.parametrize(
    "env",
    [
        {
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        },
        {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
    ],
)
def test_mpirun_makes_one_job_not_many(env: dict[str, str]) -> None:
    assert Identity.from_environment(env) == Identity(5, 8, 1, 4, 1, launched=True)
    ours = Identity(0, 2, 0, 2, 0, launched=True)
    assert Identity.from_environment({**env, **ours.to_environment()}) == ours, "our own variables come first"


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK is not"),
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE is not set"),
        ({"RANK": "two", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='two': expected a whole number"),
        ({"RANK": "", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='': expected a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=2 does not fit WORLD_SIZE=2: expected 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        ({"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0"}, "both must be at least 1"),
    ],
)
def test_a_broken_environment_is_named(env: dict[str, str], text: str) -> None:
    with pytest.raises(EnvironmentMismatch, match=text.replace("(", r"\(")):
        Identity.from_environment(env)


#: As srun, sbatch and salloc set them (Slurm 22.05; 24 for salloc's interactive step).
_TASK = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
_BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
_SHELL = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}


def test_tasks_of_srun_are_no_worlds_of_one() -> None:
    with pytest.raises(
        EnvironmentMismatch, match=r"srun started 2 tasks, .* number 1, .*srun -n 1 lockstep run -n RANKS"
    ):
        refuse_to_be_alone(_TASK)
    with pytest.raises(EnvironmentMismatch, match=r"srun started 2 tasks, .* each would start a job of its own"):
        refuse_to_launch(_TASK)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_NTASKS": "4"},
        _BATCH,
        _SHELL,
        {**_TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {**_SHELL, "SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_batch_scripts_shells_and_single_tasks_are_alone(env: dict[str, str]) -> None:
    refuse_to_be_alone(env)
    refuse_to_launch(env)
    assert not Identity.from_environment(env).launched


def test_what_a_task_of_srun_may_be_nevertheless() -> None:
    ours = Identity(0, 2, 0, 2, 0, launched=True)
    assert Identity.from_environment({**_TASK, **ours.to_environment()}) == ours, "described by a launcher or by hand"
    refuse_to_be_alone({**_TASK, knobs.JOB_DIR: "/job"})  # what a rank starts on its own, without RANK
    mpirun = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert Identity.from_environment({**_TASK, **mpirun}).rank == 1, "mpirun started its daemons through srun"
    by_pmi2 = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert not Identity.from_environment({**_TASK, **by_pmi2}).launched, "srun --mpi=pmi2: refused as any task"
