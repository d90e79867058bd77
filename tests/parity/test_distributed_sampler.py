"""lockstep.DistributedSampler against torch's, index by index."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import DistributedSampler as TorchDistributedSampler

import lockstep
from tests.harness import run_ranks

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


def _dataset(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length))


# (with drop_last and fewer samples than replicas torch computes a negative size, so that case has no parity)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 100, 101])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("shuffle", "drop_last"), [(True, False), (False, False), (True, True), (False, True)])
def test_the_order_is_exactly_torchs(length: int, replicas: int, shuffle: bool, drop_last: bool) -> None:
    drop_last = drop_last and length >= replicas
    for rank in range(replicas):
        arguments = (_dataset(length), replicas, rank, shuffle, 5, drop_last)
        ours = lockstep.DistributedSampler(*arguments)
        torchs: TorchDistributedSampler[int] = TorchDistributedSampler(*arguments)
        assert isinstance(ours, TorchDistributedSampler)
        assert len(ours) == len(torchs)
        for epoch in (0, 1, 9):
            ours.set_epoch(epoch)
            torchs.set_epoch(epoch)
            assert list(ours) == list(torchs)


def _sampler(length: int = 20, replicas: int = 2, rank: int = 0, **options: Any) -> lockstep.DistributedSampler:
    return lockstep.DistributedSampler(_dataset(length), replicas, rank, **options)


def _take(sampler: lockstep.DistributedSampler, count: int) -> list[int]:
    iterator = iter(sampler)
    return [next(iterator) for _ in range(count)]


def test_a_pass_continues_where_it_was_saved() -> None:
    sampler = _sampler()
    sampler.set_epoch(3)
    whole = list(sampler)
    taken = _take(sampler, 4)
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = _sampler()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.set_epoch(3)  # as a training loop does at the start of each epoch
    assert taken + list(resumed) == whole
    assert list(resumed) == whole, "the pass after that is a whole one"
    assert len(resumed) == 10


def test_samples_fetched_ahead_can_be_left_uncounted() -> None:
    sampler = _sampler()
    loader = DataLoader(sampler.dataset, batch_size=2, sampler=sampler)
    iterator = iter(loader)
    seen = [index for _ in range(2) for index in next(iterator)[0].tolist()]
    resumed = _sampler()
    resumed.load_state_dict(sampler.state_dict(), position=len(seen))
    assert seen + list(resumed) == list(_sampler())


def test_another_epoch_begins_at_its_beginning() -> None:
    sampler = _sampler()
    _take(sampler, 4)
    resumed = _sampler()
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(1)
    sampler.set_epoch(1)
    assert list(resumed) == list(sampler)
    finished = _sampler()
    list(finished)
    resumed.load_state_dict(finished.state_dict())
    assert list(resumed) == list(_sampler()), "after the last sample, the next pass is whole"


def test_a_state_moves_to_another_number_of_replicas() -> None:
    handed_out = [index for rank in range(2) for index in _take(_sampler(24, 2, rank), 6)]
    one = _sampler(24, 2)
    _take(one, 6)
    rest: list[int] = []
    for rank in range(3):
        resumed = _sampler(24, 3, rank)
        resumed.load_state_dict(one.state_dict())
        rest += list(resumed)
    assert sorted(handed_out + rest) == list(range(24))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"length": 21}, "dataset_length=20"),
        ({"seed": 1}, "seed=0"),
        ({"shuffle": False}, "shuffle=True"),
        ({"drop_last": True}, "drop_last=False"),
        ({"replicas": 3}, "can't continue evenly"),
    ],
)
def test_a_state_of_something_else_is_refused(other: dict[str, Any], message: str) -> None:
    sampler = _sampler()
    _take(sampler, 4)
    with pytest.raises(lockstep.CheckpointMismatch, match=message):
        _sampler(**other).load_state_dict(sampler.state_dict())


def test_wrong_arguments_are_refused() -> None:
    loader = DataLoader(_dataset(4))
    with pytest.raises(TypeError, match=r"takes the dataset, not the DataLoader.*lockstep\.shard"):
        lockstep.DistributedSampler(cast(Any, loader), 2, 0)
    with pytest.raises(TypeError, match="dataset with a length"):
        lockstep.DistributedSampler(cast(Any, iter([])), 2, 0)
    with pytest.raises(ValueError, match="Invalid rank 2"):
        _sampler(rank=2)
    with pytest.raises(lockstep.LockstepError, match=r"call lockstep\.init\(\) first"):
        lockstep.DistributedSampler(_dataset(4))
    with pytest.raises(ValueError, match="mutually exclusive"):
        DataLoader(_dataset(20), shuffle=True, sampler=_sampler())


def _place_from_world(opened_by_torch: bool) -> tuple[int, int]:
    if opened_by_torch:
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's stubs
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    else:
        lockstep.init()
    sampler = lockstep.DistributedSampler(_dataset(10))
    if opened_by_torch:
        torch.distributed.destroy_process_group()
    return sampler.rank, sampler.num_replicas


def test_the_place_comes_from_the_world_or_the_open_group() -> None:
    assert run_ranks(_place_from_world, 2, False) == [(0, 2), (1, 2)]
    assert run_ranks(_place_from_world, 1, True) == [(0, 1)]
