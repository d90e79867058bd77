"""At the end of a job the last rank to leave looks whether the replicas are equal, and no rank waits for it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from tests.backends import EACH_BACKEND, OVER_BOTH
from tests.harness import run_ranks
from tests.ranks.ddp_cases import differentiate, mlp, squares

pytestmark = EACH_BACKEND


def _trained(rank: int, how: str) -> nn.Module:
    model = lockstep.replicate(mlp(), compare_every=None if how == "told" else "auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        differentiate(squares(model, rank, step))
        optimizer.step()
    if how != "equal" and rank == 1:
        with torch.no_grad():
            model.get_parameter("2.bias").add_(1)
    if how == "released":
        lockstep.release(model)
    return model


def _ends(how: str, holds: bool) -> list[str]:
    w = lockstep.init(timeout=20)
    model = _trained(w.rank, how)
    if not holds:
        del model  # as at the end of a main()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lockstep.shutdown()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("holds", [True, False])
@OVER_BOTH
def test_replicas_that_differ_at_the_end_are_told_of(holds: bool) -> None:
    said = [text for texts in run_ranks(_ends, 3, "differ", holds) for text in texts]
    assert said
    for text in said:
        assert "is not the same on all ranks at the end of the job: rank 0 differs from rank 1" in text
        assert "in '2.bias' for example" in text


@pytest.mark.parametrize("how", ["equal", "told", "released"])
def test_nothing_is_said_where_they_are_equal_or_need_not_be(how: str) -> None:
    assert run_ranks(_ends, 2, how, True) == [[], []]


def _never_averages() -> list[str]:
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp())
    for step in range(2):
        with lockstep.no_sync(model):
            differentiate(squares(model, w.rank, step))
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param.sub_(param.grad, alpha=0.1)
                param.grad = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lockstep.shutdown()
    return [str(each.message) for each in caught]


@OVER_BOTH
def test_a_run_that_never_averages_and_steps_by_hand_is_told_of() -> None:
    said = [text for texts in run_ranks(_never_averages, 2) for text in texts]
    assert said
    assert all(
        "is not the same on all ranks at the end of the job: rank 0 differs from rank 1" in text for text in said
    )


def _leaves_alone() -> float:
    """One rank ends, the other does not: it must not be waited for."""
    import time

    w = lockstep.init(timeout=20)
    _trained(w.rank, "equal")
    begun = time.monotonic()
    if w.rank == 0:
        lockstep.shutdown()
    return time.monotonic() - begun


def _ends_without_the_stores_folder(folder: str) -> float:
    """As where something tidies the folder for temporary files during a long run."""
    import os
    import shutil
    import time

    from lockstep import knobs

    os.environ[knobs.STORE] = f"{folder}/store"
    w = lockstep.init(timeout=120)
    model = _trained(w.rank, "equal")
    w.barrier()
    if w.rank == 0:
        shutil.rmtree(folder)
    w.barrier()
    begun = time.monotonic()
    lockstep.shutdown()
    del model
    return time.monotonic() - begun


@OVER_BOTH
def test_no_rank_waits_for_a_store_whose_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    assert max(run_ranks(_ends_without_the_stores_folder, 2, str(tmp_path / "job"))) < 60


def test_no_rank_waits_for_another() -> None:
    assert max(run_ranks(_leaves_alone, 2)) < 10
