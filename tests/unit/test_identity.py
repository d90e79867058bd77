"""Identity reads what launchers write, and refuses what makes no sense."""

from __future__ import annotations

import pytest

from lockstep import EnvironmentMismatch
from lockstep.identity import Identity


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
