"""Training on GPUs, real or simulated (tests/device): what a CPU computes comes out, whatever stream is late."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from tests.device import shared
from tests.device.simulation import Stress
from tests.harness import run_ranks
from tests.launching import run
from tests.ranks import gpu_features as features
from tests.ranks.gpu_features import Trained, Values

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(300)]

#: What computes in the same order on a simulated device as on a CPU, so that not a bit may differ.
EXACT = (
    "plain",
    "workers",
    "accumulation",
    "adamw",
    "batchnorm",
    "unused parameter",
    "raises if not finite",
    "skips what is not finite",
    "compared",
    "mean",
    "log",
    "slices",
)
#: What a GPU computes in another order or precision than a CPU. It is compared with itself on streams that are even.
ROUNDED = ("norms", "weighed", "synchronised batchnorm", "local steps")
OWN = ("dropout", "slices with dropout", "autocast", "scaler")

#: Late: copies ahead and collectives, then the stream that computes, then any at random.
QUICK = (Stress(seed=1, jitter=400, side=1500), Stress(seed=2, jitter=200, main=300))
SEEDS = [
    *QUICK,
    *(pytest.param(Stress(seed=s, jitter=600, side=500 * (s % 4)), marks=pytest.mark.campaign) for s in range(3, 21)),
]


@functools.cache
def _reference(feature: str, on: str, ranks: int, folder: str) -> list[Trained]:
    found: list[Trained] = run_ranks(features.train, ranks, feature, on, None, folder)
    return found


def _compare(found: list[Trained], wanted: list[Trained], *, exact: bool, close: float = 1e-5) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert len(one.losses) == len(other.losses) > 0
        for a, b in zip(one.state, other.state, strict=True):
            np.testing.assert_allclose(a, b, rtol=0 if exact else 1e-4, atol=0 if exact else close)
        for numbers, others in ((one.losses, other.losses), (one.more, other.more)):
            assert numbers == (others if exact else pytest.approx(others, rel=1e-4, nan_ok=True))


@pytest.mark.parametrize("stress", SEEDS, ids=lambda each: f"seed {each.seed}")
@pytest.mark.parametrize("feature", [*EXACT, *ROUNDED, *OWN])
def test_training_on_two_gpus(
    feature: str, stress: Stress, gpus: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("run"))
    simulated = gpus == "simulated"
    if not simulated and stress.seed > 1:
        pytest.skip("real streams are not told how late to be")
    found = run_ranks(features.train, 2, feature, "gpu", stress if simulated else None, folder)
    if feature not in OWN:
        exact = simulated and feature in EXACT and feature != "skips what is not finite"
        wanted = _reference(feature, "cpu", 2, str(tmp_path_factory.getbasetemp() / "reference"))
        # AdamW makes a step of its full size of a gradient that is nothing but rounding.
        _compare(found, wanted, exact=exact, close=1e-5 if simulated or feature != "local steps" else 1e-4)
    if feature not in EXACT:
        again = _reference(feature, "gpu", 2, str(tmp_path_factory.getbasetemp() / "reference"))
        _compare(found, again, exact=simulated)


@pytest.mark.parametrize("feature", ["plain", "slices"])
def test_training_on_one_gpu(feature: str, gpus: str, tmp_path: Path) -> None:
    simulated = gpus == "simulated"
    found = run_ranks(features.train, 1, feature, "gpu", QUICK[0] if simulated else None, str(tmp_path))
    _compare(found, run_ranks(features.train, 1, feature, "cpu", None, str(tmp_path)), exact=simulated)


@pytest.mark.parametrize("stress", SEEDS, ids=lambda each: f"seed {each.seed}")
def test_a_save_beside_training_holds_what_was_there_when_it_began(stress: Stress, gpus: str, tmp_path: Path) -> None:
    simulated = gpus == "simulated"
    for then, held in run_ranks(features.saved_beside_training, 2, "gpu", stress if simulated else None, str(tmp_path)):
        assert all(map(np.array_equal, then, held))


def test_a_resumed_run_draws_what_an_undisturbed_one_draws(gpus: str, tmp_path: Path) -> None:
    stress = QUICK[0] if gpus == "simulated" else None
    undisturbed = run_ranks(_resumed, 2, None, str(tmp_path), stress, False)
    run_ranks(_resumed, 2, 3, str(tmp_path), stress, True)
    resumed = run_ranks(_resumed, 2, None, str(tmp_path), stress, True)
    for one, other in zip(resumed, undisturbed, strict=True):
        assert all(map(np.array_equal, one, other))


def _resumed(stop: int | None, folder: str, stress: Stress | None, is_saved: bool) -> list[Values]:
    return features.resumed(stop, folder, stress, is_saved=is_saved)


@pytest.mark.parametrize(
    "feature", ["plain", "accumulation", "adamw", "norms", "batchnorm", "compared", "weighed", "log"]
)
def test_a_step_waits_for_no_gpu(feature: str, gpus: str, tmp_path: Path) -> None:
    if gpus != "simulated":
        pytest.skip("only a simulated stream can be held back")
    for counts in run_ranks(features.steps_behind_a_held_stream, 2, feature, str(tmp_path)):
        assert counts.waits == 0
        assert counts.to_host <= 3  # flags, to pinned memory
        assert counts.collectives > 0


@pytest.mark.parametrize("overlap", [None, False])
def test_no_step_needs_much_beyond_its_gradients(overlap: bool | None) -> None:
    for gradients, peaks in run_ranks(features.peaks_of_steps, 2, overlap):
        assert max(peaks) < 0.5 * gradients, peaks


@pytest.mark.parametrize("stress", [*SEEDS, Stress(side=30_000)], ids=lambda each: f"seed {each.seed}")
def test_batches_with_sparse_tensors_are_there_when_they_are_used(stress: Stress, gpus: str) -> None:
    found = run_ranks(features.sparse_batches, 2, stress if gpus == "simulated" else None)
    for rank, sums in enumerate(found):
        assert sums == [3.0 * sum(6 * batch + 3 * rank + each for each in range(3)) for batch in range(4)]


def test_gradients_that_are_not_finite_are_told_in_the_next_backward_of_a_late_gpu(gpus: str) -> None:
    if gpus != "simulated":
        pytest.skip("only a simulated stream can be made late")
    for step, message in run_ranks(features.not_finite, 2, 3):
        assert step == 4
        assert "an average of gradients was infinite or NaN, and it has reached the parameters: '0.weight'" in message


def test_replicas_that_differ_are_told_soon_also_on_late_gpus(gpus: str) -> None:
    if gpus != "simulated":
        pytest.skip("only a simulated stream can be made late")
    for step, message in run_ranks(features.drifted, 2, 4):
        assert 4 <= step <= 6
        assert "0.weight" in message


def test_each_rank_has_a_gpu_and_numbers_of_its_own() -> None:
    (first, one, here, common), (second, other, there, also_common) = run_ranks(features.own_device_and_numbers, 2)
    assert (first, second) == ("cuda:0", f"cuda:{shared.index(1)}")
    assert (one, other) == (0, shared.index(1))
    assert here != there
    assert common == also_common


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_in_a_graph_is_what_it_is_without(ranks: int) -> None:
    for captured, plain in run_ranks(features.captured_steps, ranks):
        assert all(map(np.array_equal, captured, plain))


def test_slices_on_gpus_draw_the_same_on_any_number_of_ranks(gpus: str, tmp_path: Path) -> None:
    one, two = (run_ranks(features.train, ranks, "slices with dropout", "gpu", None, str(tmp_path)) for ranks in (1, 2))
    for a, b in zip(one[0].state, two[0].state, strict=True):
        np.testing.assert_allclose(a, b, rtol=0 if gpus == "simulated" else 1e-4)


_JOB = """
import lockstep, torch
world = lockstep.init()
model = lockstep.replicate(torch.nn.Linear(8, 8).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    optimizer.zero_grad()
    model(torch.ones(4, 8, device=world.device)).sum().backward()
    optimizer.step()
print(f"rank {world.rank} trained on {world.device}")
"""


def test_a_job_of_the_launcher_trains_on_gpus_and_says_what_they_did(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_JOB)
    done = run(["lockstep", "run", "-n", "2", str(script)], tmp_path, torch=True, LOCKSTEP_QUIET="")
    assert done.code == 0, done.err
    assert "rank 0 trained on cuda:0" in done.out
    assert re.search("^on the GPUs: .*backward [0-9]+%", done.err, re.MULTILINE), "over NCCL there may be nothing else"
