"""Where a sharded loader stands: after a load, in the hooks at a pass's end, and beside a newer pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.harness import run_ranks


def _numbers(**options: Any) -> DataLoader[Any]:
    """Five batches."""
    return DataLoader(TensorDataset(torch.arange(20)), batch_size=4, **options)


def _loaded_between_passes() -> None:
    """States of the middle of a pass, and of its end, loaded after a pass that has come to its end."""
    lockstep.init()
    loader = lockstep.shard(_numbers(shuffle=True))
    states: list[dict[str, Any]] = []
    loader._register_end_of_pass_hook(lambda: states.append(loader.state_dict()))
    whole: list[list[int]] = []
    for (batch,) in loader:
        whole.append(batch.tolist())
        if len(whole) == 2:
            inside = loader.state_dict()
    over = states[0]
    loader.load_state_dict(inside)
    assert loader.state_dict() == inside
    assert loader._position_now().state() == inside
    assert loader.batches_left == 3
    assert [batch.tolist() for (batch,) in loader] == whole[2:]
    loader.load_state_dict(over)
    assert loader.state_dict() == over
    assert loader.batches_left == 0
    assert [*loader] == []
    assert (loader.epoch, loader.in_epoch, loader.batches_left) == (1, False, 5)
    loader.load_state_dict(over)
    loader.load_state_dict(inside)
    assert [batch.tolist() for (batch,) in loader] == whole[2:]


def test_what_is_loaded_after_a_pass_is_where_the_loader_stands() -> None:
    run_ranks(_loaded_between_passes, 2)


def _hook_fails(at: str) -> dict[str, Any]:
    """A hook of a loop's end raises; the position is that of a pass that is over, and the next one is a whole one."""
    lockstep.init()
    loader = lockstep.shard(_numbers(shuffle=True))
    register = loader._register_end_of_pass_hook if at == "end" else loader._register_early_end_hook

    def fails() -> None:
        raise OSError("the disk is full")

    handle = register(fails)
    batches = iter(loader)
    next(batches)
    with pytest.raises(OSError, match="the disk is full"):
        [*batches] if at == "end" else batches.close()  # type: ignore[attr-defined]
    handle.remove()
    state = loader.state_dict()
    assert loader.batches_left == 0
    assert len([*loader]) == 5
    assert loader.epoch == 2
    return {name: state["cursor"][name] for name in ("epoch", "in_epoch")} | {"over": state.get("over")}


@pytest.mark.parametrize("at", ["end", "early end"])
def test_a_pass_whose_last_hook_fails_is_over(at: str) -> None:
    assert run_ranks(_hook_fails, 1, at) == [{"epoch": 0, "in_epoch": True, "over": True}]


def _superseded(by: str) -> list[int]:
    """The numbers of batches at which a hook was called."""
    lockstep.init()
    loader = lockstep.shard(_numbers())
    at: list[int] = []
    loader._register_step_boundary_hook(lambda: at.append(loader.state_dict()["cursor"]["batches"]))
    older = iter(loader)
    next(older)
    state = loader.state_dict()
    next(older)
    if by == "a pass":
        newer = iter(loader)
        next(newer)
    else:
        loader.load_state_dict(state)
    with pytest.raises(lockstep.LockstepError, match="another pass over this loader has begun"):
        next(older)
    return at


@pytest.mark.parametrize("by", ["a pass", "a state"])
def test_a_pass_that_is_superseded_calls_no_hook(by: str) -> None:
    assert run_ranks(_superseded, 1, by) == [[1]]
