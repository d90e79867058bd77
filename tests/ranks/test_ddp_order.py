"""Buckets in the order in which gradients come: learned once, the same on all ranks, and kept by a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import lockstep
from lockstep.ddp.api import replica_of
from lockstep.ddp.comm_hooks import bf16_compress_hook
from tests.backends import EACH_BACKEND, GPUS
from tests.harness import run_ranks

pytestmark = [EACH_BACKEND, pytest.mark.parametrize("each_backend", ["gloo", *GPUS], indirect=True)]

Values = NDArray[Any]

LAYERS = 6


class HeadFirst(nn.Module):
    """A model that uses first what it registers last."""

    def __init__(self, spare: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(LAYERS)])
        if spare:
            self.spare = nn.Linear(4, 4)
        self.stem = nn.Linear(8, 16)
        #: Asked when the backward has passed all layers, and the stem's gradients are still to come.
        self.at_the_stem: list[Any] = []

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.at_the_stem.append(_issued(self)))
        found: Tensor = self.layers(hidden)
        return found


def _issued(model: nn.Module) -> int:
    backward = replica_of(model).reducer.backward
    assert backward is not None
    return backward.next


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def _new(world: lockstep.World, **options: Any) -> tuple[HeadFirst, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = HeadFirst(options.pop("spare", False)).to(world.device)
    lockstep.replicate(model, bucket_cap_mb=0.001, first_bucket_mb=0.001, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _step(model: HeadFirst, optimizer: torch.optim.Optimizer, world: lockstep.World, step: int, zeroes: bool) -> None:
    model(_batch(step, world.rank).to(world.device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not zeroes)


def _learned(options: dict[str, Any], zeroes: bool) -> tuple[list[int], list[list[str]], list[Values]]:
    """Return how many buckets were on their way at the stem in each step, the buckets, and the parameters."""
    world = lockstep.init()
    model, optimizer = _new(world, **options)
    for step in range(4):
        _step(model, optimizer, world, step, zeroes)
    reducer = replica_of(model).reducer
    buckets = [[reducer.names[position] for position in bucket.positions] for bucket in reducer.buckets]
    return model.at_the_stem, buckets, _values(model)


def _values(model: nn.Module) -> list[Values]:
    return [param.detach().cpu().numpy() for param in model.parameters()]


def _alone(spare: bool) -> list[Values]:
    torch.manual_seed(0)
    model = HeadFirst(spare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = sum(nn.Sequential(model.stem, model.layers)(_batch(step, rank)).square().mean() for rank in range(2))
        (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _values(model)


@pytest.mark.parametrize(
    ("options", "zeroes"),
    [({}, False), ({"gradient_as_bucket_view": False}, False), ({}, True), ({"spare": True}, False)],
)
def test_what_is_used_first_holds_up_no_bucket_from_the_second_step_on(options: dict[str, Any], zeroes: bool) -> None:
    (issued, buckets, params), other = run_ranks(_learned, 2, options, zeroes)
    assert issued[0] == 0
    assert min(issued[-2:]) >= LAYERS - 1  # all but those that wait for the stem
    assert other[:2] == (issued, buckets)
    assert "layers.5.weight" in buckets[0] + buckets[1]
    assert any(name.startswith("stem") for name in buckets[-1])
    for own, expected in zip(params, _alone(bool(options.get("spare"))), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


def _as_registered() -> tuple[object, int]:
    """Train a model whose layers are used as they are registered, and one whose buckets a comm hook reduces."""
    world = lockstep.init()
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]).to(world.device)
    lockstep.replicate(model, bucket_cap_mb=0.001, first_bucket_mb=0.001)
    before = replica_of(model).reducer
    model(torch.ones(2, 16, device=world.device)).sum().backward()
    hooked, optimizer = _new(world)
    lockstep.register_comm_hook(hooked, None, bf16_compress_hook)
    first = replica_of(hooked).reducer
    for step in range(2):
        _step(hooked, optimizer, world, step, False)
    assert replica_of(hooked).reducer is first
    return replica_of(model).reducer is before, len(before.buckets)


def test_buckets_stay_where_nothing_is_gained_and_where_a_hook_reduces_them() -> None:
    assert run_ranks(_as_registered, 2) == [(True, 4)] * 2


def _resumed(folder: str, stop: int | None) -> tuple[list[Values], int]:
    """Train on three ranks to the end, or stop and save, or go on from there; count layouts after the resumption."""
    world = lockstep.init()
    model, optimizer = _new(world)
    saved = lockstep.Checkpointer(Path(folder), model=model, optimizer=optimizer)
    start = 0
    for _ in saved.epochs(1):
        start = saved.step
        resumed = replica_of(model).reducer
        for step in range(start, 6):
            _step(model, optimizer, world, step, False)
            if step == stop:
                saved.save(epoch_done=False)
                return [], 0
        break
    return _values(model), int(replica_of(model).reducer is not resumed)


def test_a_resumed_run_averages_in_the_order_that_was_learned(tmp_path: Path) -> None:
    undisturbed = run_ranks(_resumed, 3, str(tmp_path / "one"), None)
    run_ranks(_resumed, 3, str(tmp_path / "two"), 2)
    resumed = run_ranks(_resumed, 3, str(tmp_path / "two"), None)
    assert [layouts for _, layouts in undisturbed] == [1] * 3
    assert [layouts for _, layouts in resumed] == [0] * 3
    for (one, _), (other, _) in zip(undisturbed, resumed, strict=True):
        assert all(map(np.array_equal, one, other))


def _restored_before(folder: str) -> list[int]:
    """Go back to a checkpoint from before the first step; return the layouts that follow, and whether bits repeat."""
    world = lockstep.init()
    model, optimizer = _new(world)
    saved = lockstep.Checkpointer(Path(folder), model=model, optimizer=optimizer)
    saved.save(epoch_done=False)
    layouts, ends = [], []
    for _ in range(2):
        for step in range(3):
            _step(model, optimizer, world, step, False)
            layouts.append(len(replica_of(model).reducer.buckets[0].positions))
        ends.append(_values(model))
        saved.restore()
        layouts.append(len(replica_of(model).reducer.buckets[0].positions))
    assert all(map(np.array_equal, *ends))
    return layouts


def test_going_back_to_before_the_first_step_forgets_the_order(tmp_path: Path) -> None:
    for layouts in run_ranks(_restored_before, 3, str(tmp_path)):
        registered, learned = layouts[3], layouts[0]
        assert layouts == [learned] * 3 + [registered] + [learned] * 3 + [registered]
        assert registered != learned


def _frozen(folder: str, resumes: bool) -> tuple[list[str], list[Values]]:
    """Freeze layers after ``replicate``, before the order of gradients is learned or loaded; thaw them later."""
    world = lockstep.init()
    model, optimizer = _new(world)
    saved = lockstep.Checkpointer(Path(folder), model=model, optimizer=optimizer)
    model.layers[:3].requires_grad_(False)
    if resumes:
        saved.restore()
    for step in range(6):
        if step == 4:
            model.layers.requires_grad_(True)
        _step(model, optimizer, world, step, False)
        if step == 2 and not resumes:
            saved.save(epoch_done=False)
    return [*replica_of(model).reducer.names], _values(model)


def _frozen_alone(first: int) -> list[Values]:
    torch.manual_seed(0)
    model = HeadFirst()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in [*range(first), *range(6)]:
        model.layers[:3].requires_grad_(step >= 4)
        loss = sum(nn.Sequential(model.stem, model.layers)(_batch(step, rank)).square().mean() for rank in range(2))
        (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _values(model)


def test_layers_that_are_frozen_after_replicate_stay_in_the_order(tmp_path: Path) -> None:
    for resumes, first in ((False, 0), (True, 3)):
        for names, params in run_ranks(_frozen, 2, str(tmp_path), resumes):
            assert "layers.0.weight" in names
            for own, expected in zip(params, _frozen_alone(first), strict=True):
                np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
