"""torch's switches for results that repeat: set in one place, on all ranks or on none."""

from __future__ import annotations

import os
from typing import Any

import torch

import lockstep
from lockstep.step import deterministic
from tests.harness import collect_outcomes, run_ranks


def _switches() -> dict[str, Any]:
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "mkldnn": torch.backends.mkldnn.deterministic,
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


_ON = {
    "algorithms": True,
    "warn only": False,
    "fill": False,
    "cudnn": (True, False),
    "mkldnn": True,
    "cublas": ":4096:8",
}


def _init(asks: bool) -> tuple[dict[str, Any], dict[str, Any], bool]:
    before = _switches()
    lockstep.init(deterministic=asks)
    return before, _switches(), deterministic.is_on()


def test_init_sets_every_switch_only_where_it_was_asked_to() -> None:
    assert [(after, on) for _, after, on in run_ranks(_init, 2, True)] == [(_ON, True)] * 2
    for before, after, on in run_ranks(_init, 2, False):
        assert (after, on) == (before, False)


def _init_on_rank_1_alone() -> None:
    lockstep.init(deterministic=os.environ["RANK"] == "1")


def test_ranks_that_ask_for_different_things_are_an_error_on_all() -> None:
    for outcome in collect_outcomes(_init_on_rank_1_alone, 2):
        assert outcome.error == "LockstepError"
        assert "init(deterministic=…) must be the same on every rank; the ranks passed [False, True]" in str(
            outcome.message
        )


def _init_with_a_workspace() -> dict[str, Any]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    lockstep.init(deterministic=True)
    return _switches()


def test_the_users_own_workspace_is_kept() -> None:
    assert run_ranks(_init_with_a_workspace, 2) == [{**_ON, "cublas": ":16:8"}] * 2


def _raise_and_warn() -> list[str]:
    said = []
    for warn_only in (False, True):  # (what warns only does not weaken what raises)
        deterministic.switch_on(warn_only=warn_only)
        try:
            torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_an_operation_without_such_an_algorithm_is_named() -> None:
    (said,) = run_ranks(_raise_and_warn, 1)
    assert len(said) == 2
    assert all("put_" in each and "deterministic" in each for each in said)
