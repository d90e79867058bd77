"""Steps on simulated GPUs ask for no more than under torch's DistributedDataParallel; what need not wait does not."""

from __future__ import annotations

import math

import pytest

from tests.device import shared
from tests.harness import run_ranks
from tests.ranks import gpu_counts

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def only_simulated(gpus: str) -> None:
    if gpus != "simulated":
        pytest.skip("only a simulated device counts what it is asked for")


@pytest.mark.parametrize("model", gpu_counts.MODELS)
def test_a_step_asks_for_no_more_than_torchs(model: str) -> None:
    for found in run_ranks(gpu_counts.asked, 2, model):
        theirs = found["torch"]
        assert found["alone"]["launches"] < theirs["launches"]  # (the wrapper is counted at all)
        assert theirs["collectives"] > 0
        # By flags that are copied to pinned memory the ranks tell whether they are in the same step and batch; the
        # default also looks whether averages are finite.
        for how, copies in (("unchecked", 1), ("replica", 2)):
            for column, count in found[how].items():
                assert count <= theirs[column] + (copies if column == "to_host" else 0), (column, found)


@pytest.mark.parametrize("feature", ["skips what is not finite", "raises if not finite", "unused parameter"])
def test_what_has_to_be_read_in_a_step_is_read_at_once(feature: str) -> None:
    assert run_ranks(gpu_counts.waits, 2, feature) == [[1] * 2] * 2


def test_ranks_that_gather_sparse_gradients_wait_as_often_however_many_they_are() -> None:
    two, four = (run_ranks(gpu_counts.waits_with_sparse_gradients, ranks) for ranks in (2, 4))
    assert two[0] == four[0]
    assert two == [two[0]] * 2
    assert four == [four[0]] * 4


def test_kept_gradients_are_looked_at_with_one_wait_however_many_they_are() -> None:
    few, many = (run_ranks(gpu_counts.waits_with_kept_gradients, 2, layers) for layers in (1, 12))
    assert few == many
    assert max(map(max, many)) <= 2


def test_within_a_round_of_local_steps_nothing_waits_and_its_end_waits_as_often_however_many_parameters() -> None:
    few, many = (run_ranks(gpu_counts.waits_of_local_steps, 2, layers) for layers in (1, 12))
    assert few == many
    for within, of_two_rounds in many:
        assert within == 0
        assert of_two_rounds <= 2 * 3


def test_rows_are_gathered_without_a_wait() -> None:
    for rank, (counts, gradient) in enumerate(run_ranks(gpu_counts.gathered_behind_a_held_stream, 2)):
        assert (counts["waits"], counts["to_host"]) == (0, 0)
        assert gradient == [4.0 * (1 + rank)] * (6 + 3 * rank)


def test_slices_whose_pace_is_measured_are_not_waited_for() -> None:
    for found in run_ranks(gpu_counts.waits_in_slices, 2):
        assert len(found) >= 8
        assert set(found) == {0, 1}  # in some steps parameters are looked at after each slice


def test_gradients_in_buckets_are_aligned_and_their_norm_is_theirs_alone() -> None:
    found = run_ranks(gpu_counts.places, 2, True)
    for places, values in found:
        assert places == [0] * 6
        assert math.sqrt(sum(value**2 for each in values for value in each)) == pytest.approx(0.5, rel=1e-4)
    assert found[0][1] == found[1][1] == run_ranks(gpu_counts.places, 2, False)[0][1]


def test_collectives_of_the_world_take_tensors_where_they_are() -> None:
    for counts, results in run_ranks(gpu_counts.of_the_world, 2):
        assert (counts["waits"], counts["to_host"], counts["to_device"]) == (0, 0, 0)
        assert counts["collectives"] == 5
        assert results == [
            [10.0, 12.0, 14.0, 16.0],
            [5.0, 6.0, 7.0, 8.0],
            [10.0, 11.0, 12.0, 13.0],
            [0.0, 1.0],
            [10.0, 11.0, 12.0],
            [10.0, 11.0, 12.0, 13.0],
        ]


def test_tensors_of_several_kinds_of_device_meet() -> None:
    for rank, found in enumerate(run_ranks(gpu_counts.mixed_in_the_world, 3)):
        assert found == [[0, 1, 2], [0, 1], "a word", [5.0, 5.0], [2.0, 4.0], f"cuda:{shared.index(rank)}"]
