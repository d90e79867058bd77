"""A loader that nobody has sharded is told, once; batches that are rightly the same on all ranks are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.ddp.api import replica_of
from lockstep.ddp.same_batches import STEPS
from tests.backends import EACH_BACKEND, OVER_ALL, OVER_BOTH
from tests.harness import run_ranks
from tests.ranks.ddp_cases import differentiate, mlp

pytestmark = EACH_BACKEND

_DATA = torch.arange(5 * 24.0, dtype=torch.float64).view(24, 5) / 60 - 1


def _loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(_DATA), batch_size=4, **options)


def _train(model: nn.Module, batches: Iterable[Any], **options: Any) -> None:
    device = next(model.parameters()).device
    for batch in batches:
        model.zero_grad()
        differentiate(model(batch[0].to(device), **options).square().mean())


def _said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if "the same inputs" in str(each.message)]


def _unsharded(how: str, dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """Return what is said of a loader that all ranks read alike, and the files at which the warnings point."""
    w = lockstep.init()
    model: nn.Module = mlp(dtype).to(w.device)
    if how == "wrapped":
        model = lockstep.DistributedDataParallel(model)
    else:
        lockstep.replicate(model, overlap=how == "overlap" or None)
    if how == "compiled":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    if how == "hooked":
        lockstep.register_comm_hook(model, None, lockstep.bf16_compress_hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # two epochs: it is said once
            _train(model, ((each.to(dtype),) for (each,) in _loader(shuffle=True)))
    return _said(caught), [each.filename for each in caught if "the same inputs" in str(each.message)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@OVER_ALL
def test_a_loader_that_nobody_has_sharded_is_told_once(world_size: int) -> None:
    told = run_ranks(_unsharded, world_size, "plain", torch.float64)
    assert [len(said) for said, _ in told] == ([1, *[0] * (world_size - 1)] if world_size > 1 else [0])
    for said, files in told[:1] if world_size > 1 else []:
        assert said[0].startswith(
            f"rank 0 of {world_size}: in each of the first {STEPS} steps all {world_size} ranks have given the model "
            "the same inputs, bit by bit: the data are not divided among the ranks"
        )
        assert "loader = lockstep.shard(loader)" in said[0]
        assert "lockstep.replicate(model, same_batches=True)" in said[0]
        assert files == [__file__]  # the line that feeds the model


@pytest.mark.parametrize("how", ["wrapped", "compiled", "hooked", "overlap", "bfloat16", "float16"])
@OVER_BOTH
def test_it_is_told_in_whichever_way_gradients_are_averaged(how: str) -> None:
    dtype = getattr(torch, how) if how.endswith("16") else torch.float64
    told = run_ranks(_unsharded, 2, how, dtype)
    assert [len(said) for said, _ in told] == [1, 0]


def _in_a_group() -> list[str]:
    w = lockstep.init()
    group = dist.new_group([1, 2])
    if w.rank == 0:
        return []
    model = lockstep.replicate(mlp(), process_group=group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _train(model, _loader())
    return _said(caught)


def test_it_is_told_of_a_group_that_is_not_the_whole_world() -> None:
    nobody, first, second = run_ranks(_in_a_group, 3)
    assert (nobody, second) == ([], [])
    assert len(first) == 1
    assert "in each of the first 3 steps all 2 ranks have given the model the same inputs" in first[0]


class _Holder:
    """An object of the user's own, as some libraries hand batches over."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs


class _Takes(nn.Module):
    """Takes its inputs in whatever form."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, given: Any = None, *, inputs: Any = None, words: object = None) -> Tensor:
        del words
        given = inputs if given is None else given
        if isinstance(given, dict):
            given = given["x"][0]
        if isinstance(given, _Holder):
            given = given.inputs
        if given.layout != torch.strided:
            given = given.to_dense()
        out: Tensor = self.inner(given)
        return out


def _in_forms() -> dict[str, int]:
    lockstep.init()
    forms: dict[str, Callable[[Tensor], dict[str, Any]]] = {
        "by name": lambda each: {"inputs": each},
        "nested": lambda each: {"given": {"x": [each], "n": 3}},
        "object": lambda each: {"given": _Holder(each)},
        "strided": lambda each: {"given": each.t().contiguous().t()},
        "sparse": lambda each: {"given": each.to_sparse()},
        "large": lambda each: {"given": each.repeat(20_000, 1)},  # more than is looked at
        "unknown": lambda each: {"given": each, "words": object()},
        "words": lambda each: {"given": each, "words": f"rank {dist.get_rank()}"},
    }
    told = {}
    for name, form in forms.items():
        model = lockstep.replicate(_Takes())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for (each,) in _loader():
                model.zero_grad()
                differentiate(model(**form(each)).square().mean())
        told[name] = len(_said(caught))
    return told


def test_inputs_are_found_in_whatever_form_they_come() -> None:
    expected = dict.fromkeys(["by name", "nested", "object", "strided", "sparse", "large"], 1)
    assert run_ranks(_in_forms, 2)[0] == expected | {"unknown": 0, "words": 0}


def _rightly_so() -> None:
    w = lockstep.init()
    every = [*_loader()]
    mine = DataLoader(
        TensorDataset(_DATA), batch_size=4, sampler=lockstep.DistributedSampler(TensorDataset(_DATA), shuffle=False)
    )
    each_twice = _DATA[:6].repeat_interleave(2 * w.world_size, dim=0)  # every rank's share of a batch is the same
    full = DataLoader(TensorDataset(_DATA), batch_size=24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _train(lockstep.replicate(mlp()), lockstep.shard(_loader()))
        _train(lockstep.replicate(mlp()), lockstep.shard(DataLoader(TensorDataset(each_twice), 2 * w.world_size)))
        _train(lockstep.replicate(mlp()), mine)
        _train(lockstep.replicate(mlp()), [*full] * 5)  # the whole data set as one batch
        _train(lockstep.replicate(mlp()), [every[1]] * 5)  # one batch to be overfitted
        _train(lockstep.replicate(mlp()), every[:2] * 4)  # two of them
        _train(lockstep.replicate(mlp()), [(torch.ones(2, 5, dtype=torch.float64),)] * 5)  # made up, in a test
        _train(lockstep.replicate(mlp(), same_batches=True), every)  # said to be on purpose
        wrapped = lockstep.DistributedDataParallel(mlp(), same_batches=True)
        _train(wrapped, every)
        # The same for two steps, and no longer: an agent's first observations, say.
        _train(lockstep.replicate(mlp()), [*every[:2], (every[2][0] + w.rank,), *every[3:]])
        model = lockstep.replicate(mlp())
        for number, (inputs,) in enumerate(every):  # accumulated: the second half of each step differs
            with lockstep.no_sync(model):
                differentiate(model(inputs).square().mean())
            differentiate(model(inputs + number + w.rank).square().mean())
        # One rank has no batches; the others' are theirs.
        model = lockstep.replicate(mlp())
        with lockstep.join(model):
            _train(model, every if w.rank < w.world_size - 1 else [])
        with torch.no_grad():  # an evaluation
            for inputs, *_ in every:
                model(inputs)


@pytest.mark.parametrize("world_size", [2, 3])
@OVER_BOTH
def test_nothing_is_told_of_batches_that_are_rightly_the_same_or_differ(world_size: int) -> None:
    run_ranks(_rightly_so, world_size)


def _unfrozen_between() -> list[int]:
    lockstep.init()
    told = []
    for frozen_for in (0, 1, 4):
        model = mlp()
        first = next(model.parameters())
        first.requires_grad_(False)
        lockstep.replicate(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number, (inputs,) in enumerate(_loader()):
                if number == frozen_for:
                    first.requires_grad_(True)  # buckets are laid out anew
                _train(model, [(inputs,)])
        told.append(len(_said(caught)))
    return told


def test_it_is_told_once_also_where_buckets_are_laid_out_anew() -> None:
    assert run_ranks(_unfrozen_between, 2) == [[1, 1, 1], [0, 0, 0]]


def _flags_afterwards() -> tuple[list[int], list[int], int]:
    lockstep.init()
    model = lockstep.replicate(mlp())
    replica = replica_of(model)
    averaging, looks = replica.reducer._all, replica.checks.looks
    riders, looking = [], []
    for inputs in torch.randn(6, 2, 5, dtype=torch.float64):
        _train(model, [(inputs + lockstep.world().rank,)])
        riders.append(sum(map(len, averaging.riding)))
        looking.append(len(looks))
    return riders, looking, len(averaging.riders)


def test_no_step_after_the_first_ones_knows_of_it() -> None:
    for riders, looking, all_riders in run_ranks(_flags_afterwards, 2):
        assert riders == [all_riders] * (STEPS - 1) + [all_riders - 1] * (7 - STEPS)
        assert looking == [1] * STEPS + [0] * (6 - STEPS)


def test_a_rank_that_is_alone_looks_at_no_inputs() -> None:
    ((_, looking, _),) = run_ranks(_flags_afterwards, 1)
    assert looking == [0] * 6
