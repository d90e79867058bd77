"""Identity reads what launchers write, and refuses what makes no sense."""

from __future__ import annotations

import pytest

from lockstep import EnvironmentMismatch, knobs
from lockstep.identity import Identity, adopt
from lockstep.schedulers import slurm


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


def test_a_machine_among_several_is_not_silently_alone() -> None:
    with pytest.raises(EnvironmentMismatch, match="PET_NNODES=3 says that this is one of several machines"):
        Identity.from_environment({"PET_NNODES": "3", "PET_NODE_RANK": "1"})
    alone = Identity(0, 1, 0, 1, 0, launched=False)
    assert Identity.from_environment({"PET_NNODES": "1", "PET_NODE_RANK": "0"}) == alone
    assert Identity.from_environment({"PET_NNODES": "3", "TORCHELASTIC_RUN_ID": "x"}) == alone, "started by a rank"


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


#: As srun sets them for task 3 of 2 + 2, sbatch and salloc (Slurm 22.05; 24 for salloc's interactive step).
_TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
_BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
_SHELL = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}


def test_tasks_of_srun_are_ranks_of_one_job() -> None:
    assert Identity.from_environment(_TASK) == Identity(3, 4, 1, 2, 1, launched=True)
    adopted = dict(_TASK)
    adopt(adopted)
    assert adopted["MASTER_ADDR"] == "gpu07"
    assert 10000 <= int(adopted["MASTER_PORT"]) < 30000
    assert adopted[knobs.WORLD] == "Slurm's job 7, step 0"
    again = dict(adopted)
    adopt(again)
    assert again == adopted
    requeued = {**_TASK, "SLURM_RESTART_COUNT": "1"}
    adopt(requeued)
    assert requeued["MASTER_PORT"] != adopted["MASTER_PORT"], "no restart meets what is left of the run before"
    assert requeued[knobs.WORLD] == "Slurm's job 7, step 0, restart 1"
    by_user = {**_TASK, "SLURM_CLUSTER_NAME": "hill", "MASTER_ADDR": "fast0", "MASTER_PORT": "1234"}
    adopt(by_user)
    assert (by_user["MASTER_ADDR"], by_user["MASTER_PORT"]) == ("fast0", "1234")
    assert by_user[knobs.WORLD] == "Slurm's job 7, step 0 of the cluster hill"


def test_ranks_that_srun_deals_out_in_turn_know_their_node() -> None:
    cyclic = {
        **_TASK,
        "SLURM_PROCID": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "3,1",
        "SLURM_LOCALID": "1",
    }
    assert Identity.from_environment(cyclic) == Identity(2, 4, 1, 3, 0, launched=True)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_NTASKS": "4"},
        _BATCH,
        _SHELL,
        {**_TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {**_SHELL, "SLURM_STEP_NUM_TASKS": "4"},
        {**_TASK, knobs.JOB_DIR: "/job"},  # what a rank starts on its own, without RANK
        {**_TASK, knobs.JOINED: "1 -"},
    ],
)
def test_batch_scripts_shells_and_single_tasks_are_alone(env: dict[str, str]) -> None:
    assert not Identity.from_environment(env).launched
    before = dict(env)
    adopt(env)
    assert env == before


def test_what_a_task_of_srun_may_be_nevertheless() -> None:
    ours = Identity(0, 2, 0, 2, 0, launched=True)
    below = {**_TASK, **ours.to_environment(), knobs.JOB_DIR: "/job"}
    assert Identity.from_environment(below) == ours, "a launcher below srun has described it"
    by_hand = {**_TASK, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Identity.from_environment(by_hand).rank == 3
    mpirun = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert Identity.from_environment({**_TASK, **mpirun}).rank == 1, "mpirun started its daemons through srun"
    by_pmi2 = {"PMI_RANK": "3", "PMI_SIZE": "4"}
    assert Identity.from_environment({**_TASK, **by_pmi2}) == Identity(3, 4, 1, 2, 1, launched=True), "srun --mpi=pmi2"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"SLURM_NODEID": None}, "SLURM_NODEID is not: pass on all of srun's variables or none"),
        ({"SLURM_STEP_NODELIST": None, "SLURM_LOCALID": ""}, "SLURM_LOCALID, SLURM_STEP_NODELIST are not"),
        ({"SLURM_PROCID": "4"}, "srun's variables contradict each other .*SLURM_PROCID=4"),
        ({"SLURM_LOCALID": "2"}, "contradict each other"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "contradict each other"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2"}, "expected counts like"),
        ({"SLURM_STEP_NODELIST": "gpu[07"}, "expected names like"),
        ({"SLURM_STEP_NODELIST": "gpu[a-b]"}, "expected names like"),
        ({"SLURM_NODEID": "one"}, "SLURM_NODEID='one': expected a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "RANK=0 and WORLD_SIZE=1 are set, but srun started 4"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "of which this is number 3"),
    ],
)
def test_wrong_partial_or_left_over_variables_of_srun_are_refused(changes: dict[str, str | None], text: str) -> None:
    env = {name: value for name, value in {**_TASK, **changes}.items() if value is not None}
    with pytest.raises(EnvironmentMismatch, match=text):
        Identity.from_environment(env)


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", ["n1"]),
        ("gpu[07-09,12],login", ["gpu07", "gpu08", "gpu09", "gpu12", "login"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("host-a,host-b", ["host-a", "host-b"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
    ],
)
def test_lists_of_hosts_are_expanded(nodelist: str, hosts: list[str]) -> None:
    assert list(slurm.expand(nodelist)) == hosts


def test_counts_of_tasks_are_expanded() -> None:
    assert slurm.tasks_per_node("2(x3),1") == (2, 2, 2, 1)
    assert slurm.tasks_per_node("4") == (4,)
