"""Losses that are means over items which only each rank can count: the mean over all items of all ranks is exact."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.backends import BOTH, EACH_BACKEND, OVER_ALL, OVER_BOTH
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.ddp_cases import (
    Attach,
    batch,
    differentiate,
    mlp,
    name_of,
    replicate_at_end,
    replicate_tiny,
    squares,
    wide,
    wrap_tiny,
)
from tests.selection import each_value

pytestmark = EACH_BACKEND

#: By micro-batch: items of each of at most four ranks.
UNEVEN = (7, 1, 40, 3)
OTHERS = (2, 9, 0, 1)
EMPTY_FIRST = (0, 5, 1, 1)
EQUAL = (7, 7, 7, 7)
PLANS = [
    [UNEVEN],
    [EMPTY_FIRST],
    [EQUAL, EQUAL],
    [UNEVEN, OTHERS],
    [OTHERS, UNEVEN, EMPTY_FIRST],
    [EMPTY_FIRST, EMPTY_FIRST, UNEVEN, EQUAL],
]


def mean_of_items(model: nn.Module, items: Tensor) -> Tensor:
    """NaN over no items, and so are its gradients."""
    loss: Tensor = model(items).square().mean(dim=1).mean()
    return loss


def by_one_process(build: Callable[[], nn.Module], plans: Sequence[Sequence[int]], *, first: int = 0) -> list[Tensor]:
    """The gradients of the mean over all items of all ranks and micro-batches."""
    model = build()
    parts = [batch(rank, first + step, n, 5) for step, counts in enumerate(plans) for rank, n in enumerate(counts)]
    differentiate(mean_of_items(model, torch.cat(parts)))
    return [param.grad for param in model.parameters() if param.grad is not None]


def assert_gradients(model: nn.Module, expected: Sequence[Tensor], tolerance: float = 1e-10) -> None:
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert param.grad is not None
        came = param.grad.to_dense().to("cpu", grad.dtype)
        assert torch.allclose(came, grad, rtol=tolerance, atol=tolerance), f"{came} instead of {grad}"


def cut_to(plans: Sequence[Sequence[int]], world_size: int) -> list[tuple[int, ...]]:
    return [tuple(counts[:world_size]) for counts in plans]


def _weighed(attach: Attach, plans: Sequence[Sequence[int]], set_to_none: bool) -> None:
    world = lockstep.init(timeout=20)
    model = attach(wide().to(world.device))
    plans = cut_to(plans, world.world_size)
    for step in range(3):
        model.zero_grad(set_to_none=set_to_none)
        for number, counts in enumerate(plans):
            mine = counts[world.rank]
            inputs = batch(world.rank, number, mine, 5).to(world.device)
            if step == 1:
                world.weigh(mine)  # before the forward or after it
            with lockstep.no_sync(model) if number < len(plans) - 1 else torch.enable_grad():
                loss = mean_of_items(model, inputs)
                if step != 1:
                    world.weigh(mine)
                differentiate(loss)
        assert_gradients(model, by_one_process(wide, plans))


@each_value(name_of, plans=PLANS, attach=(replicate_tiny, wrap_tiny, replicate_at_end, lockstep.replicate))
def test_the_mean_over_items_is_exact(attach: Attach, plans: list[tuple[int, ...]]) -> None:
    run_ranks(_weighed, 3, attach, plans, True)


@each_value(on_gpus=True, each_backend=BOTH, world_size=(1, 2, 4))
def test_it_is_exact_on_any_number_of_ranks(world_size: int) -> None:
    run_ranks(_weighed, world_size, replicate_tiny, [UNEVEN, OTHERS, EQUAL, EQUAL], True)


def test_it_is_exact_in_gradients_that_are_kept_and_zeroed() -> None:
    run_ranks(_weighed, 2, replicate_tiny, [UNEVEN, OTHERS], False)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(11, 6, sparse=True, dtype=torch.float64)
        self.scores = nn.Linear(6, 11, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.table(tokens))
        return scores


class OnlySparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(11, 11, sparse=True, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.table(tokens)
        return scores


def _texts(count: int) -> tuple[Tensor, Tensor]:
    """Texts of 9 tokens, some of which are padding; the targets say which."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 11, (count, 9), generator=generator)
    return tokens, torch.where(torch.rand(count, 9, generator=generator) < 0.5, -100, tokens)


def _cross_entropy(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)


def _tokens(build: Callable[[], nn.Module], cuts: Sequence[int]) -> None:
    """Texts that each rank holds a part of; the mean is over the tokens that are no padding."""
    world = lockstep.init(timeout=20)
    model, alone = lockstep.replicate(build().to(world.device)), build()
    tokens, targets = _texts(cuts[-1])
    parts = list(pairwise(cuts))[world.rank :: world.world_size]
    for _ in range(2):
        model.zero_grad()
        for number, (begin, end) in enumerate(parts):
            mine = targets[begin:end].to(world.device)
            with lockstep.no_sync(model) if number < len(parts) - 1 else torch.enable_grad():
                loss = _cross_entropy(model, tokens[begin:end].to(world.device), mine)
                world.weigh((mine != -100).sum())  # type: ignore[arg-type]  # a tensor is a whole number, too
                differentiate(loss)
                mean = world.mean(loss)
        alone.zero_grad()
        whole = _cross_entropy(alone, tokens, targets)
        differentiate(whole)
        assert_gradients(model, [param.grad.to_dense() for param in alone.parameters() if param.grad is not None])
        if len(parts) == 1:
            assert abs(mean - whole.item()) < 1e-12


@pytest.mark.parametrize("build", [Tokens, OnlySparse])
@OVER_ALL
def test_tokens_and_sparse_gradients(build: Callable[[], nn.Module]) -> None:
    run_ranks(_tokens, 2, build, [0, 3, 10])
    run_ranks(_tokens, 2, build, [0, 1, 4, 6, 11])


def test_tokens_in_one_process() -> None:
    run_ranks(_tokens, 1, Tokens, [0, 2, 3, 11])


def _onto_an_average() -> None:
    """Micro-batches of several items are added to an average that is there already."""
    world = lockstep.init(timeout=20)
    model = replicate_tiny(wide())
    plans = cut_to([UNEVEN, OTHERS, EQUAL, EMPTY_FIRST, OTHERS], world.world_size)

    def backward(number: int) -> None:
        mine = plans[number][world.rank]
        world.weigh(mine)
        differentiate(mean_of_items(model, batch(world.rank, number, mine, 5)))

    backward(0)
    for number in (1, 2):
        with lockstep.no_sync(model):
            backward(number)
    backward(3)
    first, second = by_one_process(wide, plans[:1]), by_one_process(wide, plans[1:4], first=1)
    assert_gradients(model, [one + two for one, two in zip(first, second, strict=True)])
    # A script that drops what it has accumulated begins anew.
    for set_to_none in (False, True):
        model.zero_grad()
        with lockstep.no_sync(model):
            backward(0)
        model.zero_grad(set_to_none=set_to_none)
        with lockstep.no_sync(model):
            backward(1)
        backward(2)
        assert_gradients(model, by_one_process(wide, plans[1:3], first=1))
    # So does one that weighs no more.
    world.share = None
    model.zero_grad()
    differentiate(mean_of_items(model, batch(world.rank, 0, 4, 5)))
    assert_gradients(model, by_one_process(wide, [(4,) * world.world_size]))


@pytest.mark.parametrize("world_size", [1, 3])
@OVER_BOTH
def test_it_is_exact_on_top_of_an_average_and_after_what_was_dropped(world_size: int) -> None:
    run_ranks(_onto_an_average, world_size)


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(5, 5, dtype=torch.float64)
        self.net = mlp()

    def forward(self, x: Tensor, touch_idle: bool) -> Tensor:
        scores: Tensor = self.net(self.idle(x) if touch_idle else x)
        return scores


def _unused(check_finite: str) -> None:
    """A parameter that only the rank without items touched was used by nobody, and keeps what it had."""
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(HalfUsed(), find_unused_parameters=True, check_finite=check_finite)  # type: ignore[arg-type]
    mine = [2, 0][world.rank]
    for step in range(3):
        model.zero_grad()
        if step == 2:
            model.idle.weight.grad = torch.full((5, 5), 3.0, dtype=torch.float64)
        world.weigh(mine)
        differentiate(model(batch(world.rank, 0, mine, 5), world.rank == 1).square().mean(dim=1).mean())
        assert_gradients(model.net, by_one_process(mlp, [(2,)]))
        assert model.idle.bias.grad is None
        kept = model.idle.weight.grad
        assert kept is None if step < 2 else kept is not None and bool(kept.eq(3).all())


@pytest.mark.parametrize("check_finite", ["off", "raise"])
@OVER_BOTH
def test_no_items_leave_no_trace(check_finite: str) -> None:
    run_ranks(_unused, 2, check_finite)


def _skipped() -> None:
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp(), check_finite="skip")
    for step in range(4):
        model.zero_grad()
        mine = UNEVEN[world.rank]
        world.weigh(mine)
        loss = mean_of_items(model, batch(world.rank, 0, mine, 5))
        if step % 2 and world.rank == 1:
            loss = loss * float("inf")
            with pytest.warns(RuntimeWarning, match="rank 1"):
                differentiate(loss)
        elif step % 2 and world.rank == 0:
            with pytest.warns(RuntimeWarning, match="rank 1"):
                differentiate(loss)
        else:
            differentiate(loss)
        if step % 2:
            assert all(param.grad is None for param in model.parameters())
        else:
            assert_gradients(model, by_one_process(mlp, [UNEVEN[:2]]))


@OVER_BOTH
def test_a_step_that_is_skipped_leaves_its_items_out() -> None:
    run_ranks(_skipped, 2)


def _in_low_precision(dtype: torch.dtype, factor: float) -> None:
    """Losses so large that gradients, multiplied by thousands of items, would not fit into float16."""
    world = lockstep.init(timeout=20)
    model, alone = lockstep.replicate(mlp(dtype)), mlp(dtype)
    counts = [3001, 1, 977][: world.world_size]
    for _ in range(3):
        model.zero_grad()
        world.weigh(counts[world.rank])
        differentiate(model(batch(world.rank, 0, 4, 5, dtype=dtype)).square().mean() * factor)
        sums = [torch.zeros(param.shape, dtype=torch.float64) for param in alone.parameters()]
        for rank, count in enumerate(counts):
            alone.zero_grad()
            differentiate(alone(batch(rank, 0, 4, 5, dtype=dtype)).square().mean() * factor)
            for total, param in zip(sums, alone.parameters(), strict=True):
                assert param.grad is not None
                total += param.grad.double() * (count / sum(counts))
        for expected, param in zip(sums, model.parameters(), strict=True):
            assert param.grad is not None
            error = (param.grad.double() - expected).abs().max() / expected.abs().max()
            assert error < 4 * torch.finfo(dtype).eps, f"{error} in {dtype}"


@each_value(str, each_backend=BOTH, dtype=(torch.bfloat16, torch.float16, torch.float32), factor=(300.0, 1.0))
def test_low_precision(dtype: torch.dtype, factor: float) -> None:
    run_ranks(_in_low_precision, 3, dtype, factor)


def _hooked(compressed: bool) -> None:
    world = lockstep.init(timeout=20)
    model = replicate_tiny(wide())
    if compressed:
        lockstep.register_comm_hook(model, None, lockstep.fp16_compress_hook)
    else:
        lockstep.register_comm_hook(model, None, _averaging_hook)
    for _ in range(3):
        model.zero_grad()
        counts = cut_to([UNEVEN, OTHERS], world.world_size)
        with lockstep.no_sync(model):
            world.weigh(counts[0][world.rank])
            differentiate(mean_of_items(model, batch(world.rank, 0, counts[0][world.rank], 5)))
        world.weigh(counts[1][world.rank])
        differentiate(mean_of_items(model, batch(world.rank, 1, counts[1][world.rank], 5)))
        assert_gradients(model, by_one_process(wide, counts), 1e-3 if compressed else 1e-10)


def _averaging_hook(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    del state
    buffer = bucket.buffer().div_(lockstep.world().world_size)
    future = torch.distributed.all_reduce(buffer, async_op=True).get_future()
    averaged: torch.futures.Future[Tensor] = future.then(lambda done: done.value()[0])
    return averaged


@pytest.mark.parametrize("compressed", [False, True])
@OVER_BOTH
def test_comm_hooks(compressed: bool) -> None:
    run_ranks(_hooked, 2, compressed)


def _all_without_items() -> None:
    world = lockstep.init(timeout=20)
    model = replicate_tiny(mlp())
    world.weigh(0)
    differentiate(mean_of_items(model, batch(world.rank, 0, 0, 5)))


@pytest.mark.parametrize("world_size", [1, 2])
@OVER_BOTH
def test_no_items_at_all_are_an_error_on_all_ranks(world_size: int) -> None:
    for outcome in collect_outcomes(_all_without_items, world_size):
        assert outcome.error == "LockstepError", outcome.traceback
        assert f"rank {outcome.rank} of {world_size}, step 1: every rank has called world.weigh(0)" in str(
            outcome.message
        )


def _one_does_not(way: str, build: Callable[[], nn.Module]) -> None:
    world = lockstep.init(timeout=20)
    model = replicate_tiny(build()) if way == "overlapped" else lockstep.replicate(build())
    if way == "hooked":
        lockstep.register_comm_hook(model, None, _averaging_hook)
    inputs = _texts(4)[0] if build is not mlp else batch(world.rank, 0, 4, 5)
    for step in range(4):
        model.zero_grad()
        if way == "accumulated":
            if step != 2 or world.rank != 1:
                world.weigh(3)
            with lockstep.no_sync(model):
                differentiate(model(inputs).square().mean())
            world.weigh(4)
        elif step != 2 or world.rank != 1:
            world.weigh(3)
        differentiate(model(inputs).square().mean())
        world.share = None
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("way", ["plain", "overlapped", "hooked", "accumulated"])
@OVER_BOTH
def test_a_rank_that_does_not_weigh_is_an_error_on_all_ranks(way: str) -> None:
    for outcome in collect_outcomes(_one_does_not, 2, way, mlp):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        assert "call world.weigh before each backward, on all ranks" in str(outcome.message)
        assert re.search(r"rank \d of 2, step 3", str(outcome.message)), outcome.message


@pytest.mark.parametrize("build", [Tokens, OnlySparse])
@OVER_BOTH
def test_neither_does_one_with_sparse_gradients(build: Callable[[], nn.Module]) -> None:
    for outcome in collect_outcomes(_one_does_not, 2, "plain", build):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        assert "call world.weigh before each backward, on all ranks" in str(outcome.message)


def _with_a_loader() -> None:
    """What is weighed is of the batch in hand, and goes with it, unless its backward is still to come."""
    world = lockstep.init(timeout=20)
    data = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loader = lockstep.shard(DataLoader(TensorDataset(data), batch_size=4))
    model = replicate_tiny(mlp())
    weights = [5, 1]
    slices = [data[first + 2 * rank : first + 2 * rank + 2] for first in (0, 4, 8) for rank in range(2)]

    def expected(number: int, counts: Sequence[int]) -> list[Tensor]:
        alone = mlp()
        parts = [mean_of_items(alone, slices[2 * number + rank]) * count for rank, count in enumerate(counts)]
        differentiate(sum(parts[1:], parts[0]) / sum(counts))
        return [param.grad for param in alone.parameters() if param.grad is not None]

    # Weighed in the first step only.
    for number, (inputs,) in enumerate(loader):
        model.zero_grad()
        loss = mean_of_items(model, inputs)
        if number == 0:
            world.weigh(weights[world.rank])
            assert world.mean(float(world.rank)) == pytest.approx(1 / 6)
        differentiate(loss)
        assert_gradients(model, expected(number, weights if number == 0 else [1, 1]))
    # Two steps at once: the next batch is there, and weighed, before this one's backward.
    iterator = iter(loader)
    losses = []
    for number in range(3):
        (inputs,) = next(iterator)
        world.weigh([[5, 1], [1, 2], [8, 0]][number][world.rank])
        losses.append(mean_of_items(model, inputs))
    for number, loss in enumerate(losses):
        model.zero_grad()
        differentiate(loss)
        assert_gradients(model, expected(number, [[5, 1], [1, 2], [8, 0]][number]))
    assert next(iterator, None) is None
    # Said after the forward, and the loop has gone on; with an evaluation in between that weighs its own.
    iterator = iter(loader)
    (inputs,) = next(iterator)
    loss = mean_of_items(model, inputs)
    world.weigh(weights[world.rank])
    next(iterator)
    model.zero_grad()
    differentiate(loss)
    assert_gradients(model, expected(0, weights))
    (inputs,) = next(iterator)
    with torch.no_grad():
        for (others,) in loader:
            world.weigh(3)
            world.mean(mean_of_items(model, others))
    model.zero_grad()
    differentiate(mean_of_items(model, inputs))
    assert_gradients(model, expected(2, [1, 1]))


@OVER_BOTH
def test_the_count_is_of_the_batch_in_hand() -> None:
    run_ranks(_with_a_loader, 2)


def _two_in_one_backward() -> None:
    world = lockstep.init(timeout=10)
    model = replicate_tiny(mlp())
    world.weigh(3)
    first = mean_of_items(model, batch(world.rank, 0, 3, 5))
    world.weigh(4)
    second = mean_of_items(model, batch(world.rank, 1, 4, 5))
    differentiate(first + second)


def test_one_backward_through_what_was_weighed_apart_is_refused() -> None:
    for outcome in collect_outcomes(_two_in_one_backward, 2):
        assert outcome.error == "LockstepError"
        assert "weighed apart" in str(outcome.message)


def _several_replicas() -> None:
    """One count for all models that one backward goes through, and for several forwards of one."""
    world = lockstep.init(timeout=20)
    first, second = replicate_tiny(mlp()), replicate_tiny(nn.Linear(3, 5).double())
    counts = UNEVEN[: world.world_size]
    mine = counts[world.rank]
    inputs = batch(world.rank, 0, mine, 5)
    for _ in range(2):
        first.zero_grad()
        output = first(second(first(inputs)))
        world.weigh(mine)
        differentiate(output.square().mean(dim=1).mean())
    alone, other = mlp(), nn.Linear(3, 5).double()
    other.load_state_dict(second.state_dict())
    whole = torch.cat([batch(rank, 0, count, 5) for rank, count in enumerate(counts)])
    differentiate(alone(other(alone(whole))).square().mean(dim=1).mean())
    assert_gradients(first, [param.grad for param in alone.parameters() if param.grad is not None])


@OVER_BOTH
def test_one_count_for_all_forwards_of_a_backward() -> None:
    run_ranks(_several_replicas, 2)


def _batch_norm() -> None:
    world = lockstep.init(timeout=20)

    def build() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()

    model = lockstep.replicate(lockstep.convert_sync_batchnorm(build()))
    counts = UNEVEN[: world.world_size]
    mine = counts[world.rank]
    for early in (True, False):
        model.zero_grad()
        if early:
            world.weigh(mine)
        loss = mean_of_items(model, batch(world.rank, 0, mine, 5))
        if not early:
            world.share = None
            world.weigh(mine)
        differentiate(loss)
        assert_gradients(model, by_one_process(build, [counts]))


@OVER_BOTH
def test_batch_statistics() -> None:
    run_ranks(_batch_norm, 3)


def _refused() -> list[str]:
    world = lockstep.init(timeout=10)
    messages = []
    for wrong in (1.0, -1, True, 2**48, "3", None):
        with pytest.raises((TypeError, ValueError)) as caught:
            world.weigh(wrong)  # type: ignore[arg-type]
        messages.append(str(caught.value))
    model = lockstep.replicate(mlp(), sync=lockstep.LocalSteps(2))
    world.weigh(3)
    with pytest.raises(lockstep.LockstepError, match="weigh with LocalSteps"):
        differentiate(mean_of_items(model, batch(world.rank, 0, 3, 5)))
    return messages


def test_what_weigh_does_not_take() -> None:
    for messages in run_ranks(_refused, 2):
        assert all("expected" in message and "of 2" in message for message in messages)


def _in_join() -> None:
    world = lockstep.init(timeout=10)
    model = lockstep.replicate(mlp())
    with lockstep.join(model):
        world.weigh(2)
        differentiate(mean_of_items(model, batch(world.rank, 0, 2, 5)))


def test_join_is_refused() -> None:
    for outcome in collect_outcomes(_in_join, 2):
        assert outcome.error == "LockstepError", outcome.traceback
        assert "world.weigh inside lockstep.join" in str(outcome.message)


def _logged(folder: str) -> None:
    world = lockstep.init(timeout=20)
    log = lockstep.Log(folder, every=2)
    for step in range(4):
        world.weigh(counts := UNEVEN[world.rank] * step)
        log(loss=float(world.rank) if counts else float("nan"))
    log.close()


def test_a_log_counts_items(tmp_path: Path) -> None:
    run_ranks(_logged, 2, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [pytest.approx(1 / 8)] * 2


def _kept_outside(again: bool) -> list[str]:
    """Two phases without a loader: the count of the first is not meant for the second."""
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            if step < 2 or again:
                world.weigh(UNEVEN[world.rank] + 1)
            for part in range(2):  # several backwards of one batch need it said once
                differentiate(squares(model, world.rank, 2 * step + part))
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught]


def test_a_count_that_outlives_its_step_outside_of_a_loop_is_warned_of() -> None:
    assert run_ranks(_kept_outside, 2, True) == [[], []]
    for rank, texts in enumerate(run_ranks(_kept_outside, 2, False)):
        assert len(texts) == 1, texts
        assert (
            f"rank {rank} of 2: this backward is weighed by world.weigh({UNEVEN[rank] + 1}), a count from before"
            in texts[0]
        )


def _two_models_of_one_batch() -> None:
    """As adversaries: each has its own optimizer, and one count weighs both."""
    world = lockstep.init(timeout=20)
    models = [lockstep.replicate(mlp()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            world.weigh(UNEVEN[world.rank] + 1)
            for model, optimizer in zip(models, optimizers, strict=True):
                differentiate(squares(model, world.rank, step))
                optimizer.step()
                optimizer.zero_grad()


def test_several_models_may_be_weighed_by_one_count() -> None:
    run_ranks(_two_models_of_one_batch, 2)
