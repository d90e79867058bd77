"""Replicas that train apart for some steps: what a round makes of them, what is sent, and that a run resumes."""

from __future__ import annotations

import gc
import os
import re
import signal
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.ddp.in_rounds import InRounds
from lockstep.step.local_training import local_training_of
from tests.backends import BOTH, EACH_BACKEND, ON_GPUS, OVER_BOTH
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.ddp_cases import batch, differentiate, mlp, squares
from tests.selection import each_value

pytestmark = EACH_BACKEND

_LR = 0.05


def _replica(model: nn.Module) -> InRounds:
    found = local_training_of(model)
    assert isinstance(found, InRounds)
    return found


def _bits(model: nn.Module) -> bytes:
    return b"".join(tensor.detach().cpu().contiguous().numpy().tobytes() for tensor in model.state_dict().values())


def _steps(model: nn.Module, rank: int, first: int, last: int, optimizer: torch.optim.Optimizer) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        differentiate(squares(model, rank, step))
        optimizer.step()


# One round after the other, against the same worked out in one process.


def _train_apart(every: int, steps: int, compress: Literal["int8"] | None, overlap: bool) -> tuple[Any, ...]:
    world = lockstep.init(timeout=20)
    how = lockstep.LocalSteps(every=every, compress=compress, overlap=overlap)
    model = lockstep.replicate(mlp().to(world.device), sync=how)
    _steps(model, world.rank, 0, steps, torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.5))
    lockstep.finish_round(model)
    lockstep.finish_round(model)  # nobody has trained since: nothing changes
    replica = _replica(model)
    return [param.tolist() for param in model.parameters()], _bits(model), replica.rounds, replica.sent


def _by_hand(every: int, steps: int, world_size: int, *, overlap: bool) -> list[Tensor]:
    """All ranks in one process, without compression."""
    models = [mlp() for _ in range(world_size)]
    inner = [torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.5) for model in models]
    anchors = [nn.Parameter(param.detach().clone()) for param in models[0].parameters()]
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
    left: list[list[Tensor]] | None = None

    def average() -> list[list[Tensor]]:
        told = [[param.detach().clone() for param in model.parameters()] for model in models]
        for i, anchor in enumerate(anchors):
            # As it travels: in float32.
            ways = torch.stack([(anchor.detach() - one[i]).float() for one in told])
            anchor.grad = ways.mean(dim=0).double()
        return told

    def move(told: list[list[Tensor]]) -> None:
        outer.step()
        with torch.no_grad():
            for model, before in zip(models, told, strict=True):
                for param, anchor, was in zip(model.parameters(), anchors, before, strict=True):
                    param.copy_(anchor + (param - was))

    since = 0
    for step in range(steps):
        if left is not None and since >= max(1, every // 4):
            move(left)
            left = None
        if since >= every:
            left, since = average(), 0
            if not overlap:
                move(left)
                left = None
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            _steps(model, rank, step, step + 1, optimizer)
        since += 1
    if left is not None:
        move(left)
    move(average())
    return [anchor.detach() for anchor in anchors]


@each_value(str, on_gpus=True, each_backend=BOTH, rounds=((4, 14, False), (9, 25, True), (1, 4, True), (1, 5, False)))
def test_rounds_are_those_of_one_process_that_holds_all_replicas(rounds: tuple[int, int, bool]) -> None:
    every, steps, overlap = rounds
    expected = _by_hand(every, steps, 3, overlap=overlap)
    results = run_ranks(_train_apart, 3, every, steps, None, overlap)
    for values, bits, taken, _ in results:
        assert bits == results[0][1], "the same bits on every rank"
        assert taken == -(-steps // every) + 1
        for found, wanted in zip(values, expected, strict=True):
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
@ON_GPUS
def test_compressed_rounds_end_with_the_same_bits_everywhere_and_near_the_others(overlap: bool) -> None:
    expected = _by_hand(4, 24, 2, overlap=overlap)
    results = run_ranks(_train_apart, 2, 4, 24, "int8", overlap)
    assert results[0][1] == results[1][1]
    start = [param.detach() for param in mlp().parameters()]
    for found, wanted, before in zip(results[0][0], expected, start, strict=True):
        way = (wanted - before).abs().max()
        assert (torch.tensor(found, dtype=torch.float64) - wanted).abs().max() < 0.05 * way


def _sends(world_size: int) -> int:
    world = lockstep.init(timeout=20)
    assert world.world_size == world_size
    model = lockstep.replicate(nn.Linear(256, 256), sync=lockstep.LocalSteps(every=32))
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    for step in range(65):
        optimizer.zero_grad()
        differentiate(model(batch(world.rank, step, 2, 256, dtype=torch.float32)).square().mean())
        optimizer.step()
    assert _replica(model).rounds == 2
    return _replica(model).sent


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_round_sends_a_hundredth_of_what_its_gradients_would_have(world_size: int) -> None:
    gradients = 64 * 2 * (world_size - 1) / world_size * 4 * (256 * 256 + 256)  # a ring's, which is the least there is
    for sent in run_ranks(_sends, world_size, world_size):
        assert 0 < sent < gradients / 100


class _Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(600))

    def forward(self, slopes: Tensor) -> Tensor:
        return -(self.weight * slopes).sum()


def _learns_what_is_small() -> list[float]:
    world = lockstep.init(timeout=20)
    rule = lockstep.LocalSteps(every=1, outer=lambda params: torch.optim.SGD(params, lr=1.0))
    model = lockstep.replicate(_Slopes(), sync=rule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slopes = torch.full((600,), 1e-3)  # beside a one in each block, it is rounded to nothing
    slopes[::100] = 1.0
    for _ in range(100):
        optimizer.zero_grad()
        differentiate(model((1 + world.rank) * slopes))
        optimizer.step()
    lockstep.finish_round(model)
    return (model.weight.detach() / slopes).tolist()


def test_what_is_too_small_for_a_byte_arrives_in_later_rounds() -> None:
    first, second, third = run_ranks(_learns_what_is_small, 3)
    assert first == second == third
    assert max(abs(value - 20.0) for value in first) < 8.0, "a hundred steps of 0.1 along the mean slope of 2"


# What a training script does besides.


class _Mixed(nn.Module):
    """Batch statistics, another buffer, parameters of three dtypes, and one that is frozen."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.low = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))
        self.high = nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += inputs.sum()
        hidden: Tensor = self.norm(self.body(inputs)) * self.low.float()
        scores: Tensor = self.frozen(hidden) * self.high.float()
        return scores


def _mixed() -> bytes:
    world = lockstep.init(timeout=20)
    torch.manual_seed(world.rank)
    model = lockstep.replicate(_Mixed(), sync=lockstep.LocalSteps(every=3))
    frozen = model.frozen.weight.clone()
    first = torch.optim.SGD([*model.body.parameters(), model.low], lr=_LR)
    second = torch.optim.AdamW([*model.norm.parameters(), model.high])

    def step(number: int) -> None:
        first.zero_grad()
        second.zero_grad()
        with lockstep.no_sync(model):  # two micro-batches are one step
            differentiate(model(batch(world.rank, 2 * number, 4, 5, dtype=torch.float32)).square().mean())
        differentiate(model(batch(world.rank, 2 * number + 1, 4, 5, dtype=torch.float32)).square().mean())
        first.step()
        second.step()

    for number in range(7):
        step(number)
    replica = _replica(model)
    assert replica.rounds == 2
    seen, means = world.gather(model.seen), world.gather(model.norm.running_mean)
    lockstep.finish_round(model)
    assert torch.equal(model.seen, seen[0])
    assert not torch.equal(seen[1], seen[0]), "or nothing was there to be made equal"
    assert model.norm.running_mean is not None
    torch.testing.assert_close(model.norm.running_mean, torch.stack(means).mean(dim=0))
    assert model.low.dtype == torch.bfloat16
    assert torch.equal(model.frozen.weight, frozen)

    model.frozen.requires_grad_(True)  # trained from here on
    third = torch.optim.SGD(model.frozen.parameters(), lr=_LR)
    for number in range(7, 11):
        third.zero_grad()
        step(number)
        third.step()
    lockstep.finish_round(model)
    assert not torch.equal(model.frozen.weight, frozen)
    model.eval()
    with torch.no_grad():
        model(batch(world.rank, 0, 4, 5, dtype=torch.float32))  # an evaluation sends nothing, and may be one rank's
    return b"".join(tensor.detach().view(torch.uint8).numpy().tobytes() for tensor in model.parameters())


@OVER_BOTH
def test_buffers_micro_batches_several_optimizers_dtypes_and_frozen_parameters() -> None:
    first, second = run_ranks(_mixed, 2)
    assert first == second


def _with_a_scaler() -> tuple[bytes, int]:
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp(torch.float32), sync=lockstep.LocalSteps(every=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(9):
        optimizer.zero_grad()
        loss = model(batch(world.rank, step, 4, 5, dtype=torch.float32)).square().mean()
        if world.rank == 1 and step in (2, 3):
            loss = loss * torch.inf  # this rank leaves these steps out
        differentiate(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        world.mean(loss)  # what ranks do together in each step meets in the same step
    lockstep.finish_round(model)
    return _bits(model), _replica(model).rounds


@OVER_BOTH
def test_a_rank_whose_scaler_leaves_a_step_out_ends_its_rounds_with_the_others() -> None:
    first, second = run_ranks(_with_a_scaler, 2)
    assert first == second
    assert first[1] == 3


def _overlapped_beside_collectives() -> bytes:
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp(), sync=lockstep.LocalSteps(every=4, overlap=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    for step in range(30):
        _steps(model, world.rank, step, step + 1, optimizer)
        assert world.all_reduce(step, "max") == step
    lockstep.finish_round(model)
    assert world.all_reduce(1) == 3
    return _bits(model)


@OVER_BOTH
def test_messages_under_way_do_not_meet_those_of_the_program() -> None:
    results = run_ranks(_overlapped_beside_collectives, 3)
    assert results[0] == results[1] == results[2]


def _uneven(overlap: bool) -> tuple[bytes, int]:
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp(), sync=lockstep.LocalSteps(every=4, overlap=overlap))
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    _steps(model, world.rank, 0, (18, 6, 0)[world.rank], optimizer)
    lockstep.finish_round(model)
    drawn = torch.rand(())
    _steps(model, world.rank, 20, 25, optimizer)  # and on they go
    lockstep.finish_round(model)
    return _bits(model) + drawn.numpy().tobytes(), _replica(model).rounds


@pytest.mark.parametrize("overlap", [False, True])
@OVER_BOTH
def test_a_rank_without_batches_takes_part_until_all_are_through(overlap: bool) -> None:
    results = run_ranks(_uneven, 3, overlap)
    assert results[0] == results[1] == results[2]


def _empty_slices() -> bytes:
    lockstep.init(timeout=20)
    data = TensorDataset(torch.arange(45.0).reshape(9, 5))
    model = lockstep.replicate(mlp(torch.float32), sync=lockstep.LocalSteps(every=2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for (inputs,) in lockstep.shard(DataLoader(data, batch_size=4)):  # the last batch has one sample, on rank 0
            optimizer.zero_grad()
            differentiate(model(inputs).square().mean())
            optimizer.step()
    lockstep.finish_round(model)
    assert all(torch.isfinite(param).all() for param in model.parameters())
    assert _replica(model).rounds == 3
    return _bits(model)


def test_an_empty_slice_leaves_its_rank_where_it_is() -> None:
    first, second = run_ranks(_empty_slices, 2)
    assert first == second


_SAMPLES, _GLOBAL, _EVERY_TWO = 17, 8, 2


def _few(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return drawn[:, :5], drawn[:, 5:]


def _inner(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that moves parameters without gradients of samples, too."""
    return torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9, weight_decay=0.1)


def _step_with(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    differentiate((model(inputs) - targets).square().mean())
    optimizer.step()


def _rounds_with_a_single_sample(overlap: bool) -> list[list[float]]:
    """Two rounds, of whose second only one sample is left, on rank 0; parameters afterwards."""
    world = lockstep.init(timeout=20)
    rule = lockstep.LocalSteps(
        every=_EVERY_TWO, outer=lambda params: torch.optim.SGD(params, lr=1.0), compress=None, overlap=overlap
    )
    model = lockstep.replicate(mlp().to(world.device), sync=rule)
    optimizer = _inner(model)
    for inputs, targets in lockstep.shard(DataLoader(TensorDataset(*_few(_SAMPLES)), _GLOBAL)):
        _step_with(model, optimizer, inputs, targets)
    lockstep.finish_round(model)
    return [param.flatten().tolist() for param in model.parameters()]


def _by_hand_with_a_single_sample(world_size: int, overlap: bool) -> list[list[float]]:
    inputs, targets = _few(_SAMPLES)
    models = [mlp() for _ in range(world_size)]
    optimizers = [_inner(model) for model in models]
    for step in range(_EVERY_TWO):
        begin, count = step * _GLOBAL, _GLOBAL // world_size
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = slice(begin + rank * count, begin + (rank + 1) * count)
            _step_with(model, optimizer, inputs[mine], targets[mine])
    with torch.no_grad():
        every = zip(*(model.parameters() for model in models), strict=True)
        means = [torch.stack(list(params)).mean(dim=0) for params in every]
        for param, mean in zip(models[0].parameters(), means, strict=True):
            param.copy_(param if overlap else mean)
    before = [param.detach().clone() for param in models[0].parameters()]
    _step_with(models[0], optimizers[0], inputs[-1:], targets[-1:])  # rank 0's way is the average
    after = [param.detach() for param in models[0].parameters()]
    return [(mean + (new - old)).flatten().tolist() for mean, new, old in zip(means, after, before, strict=True)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_that_had_no_sample_in_a_round_does_not_count(overlap: bool) -> None:
    """Also if momentum and decay move its parameters: 17 samples, two steps a round, and the last step has one."""
    expected = _by_hand_with_a_single_sample(4, overlap)
    for found in run_ranks(_rounds_with_a_single_sample, 4, overlap):
        for values, wanted in zip(found, expected, strict=True):
            assert values == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def _no_sample_anywhere(pieces: bool) -> tuple[bool, bytes]:
    """A round in which no rank has a sample; with pieces, in which only an accumulated backward has some."""
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp(), sync=lockstep.LocalSteps(every=2))
    optimizer = _inner(model)
    _steps(model, world.rank, 0, 3, optimizer)
    lockstep.finish_round(model)
    before = _bits(model)
    optimizer.zero_grad(set_to_none=False)
    inputs, targets = _few(4)
    if pieces:
        world.share = lockstep.BatchShare(2, 4)
        with lockstep.no_sync(model):
            differentiate((model(inputs[:2]) - targets[:2]).square().mean())
    world.share = lockstep.BatchShare(0, 4)
    differentiate((model(inputs[:0]) - targets[:0]).square().mean())
    optimizer.step()
    lockstep.finish_round(model)
    return _bits(model) == before, _bits(model)


@pytest.mark.parametrize("pieces", [False, True])
def test_nothing_moves_where_no_rank_had_a_sample_in_a_round(pieces: bool) -> None:
    first, second = run_ranks(_no_sample_anywhere, 2, pieces)
    assert first == second
    assert first[0] == (not pieces), "samples of any backward of a step count"


def _otherwise(way: str) -> tuple[bytes, int]:
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp(), sync=lockstep.LocalSteps(every=3))
    forward: Callable[[Tensor], Tensor] = model
    if way == "compiled":
        forward = torch.compile(model, backend="eager")
    elif way == "in evaluation mode":
        model.eval()
    elif way == "part by part":
        forward = lambda inputs: model[2:](model[:2](inputs))  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    for step in range(10):
        optimizer.zero_grad()
        differentiate(forward(batch(world.rank, step, 4, 5)).square().mean())
        optimizer.step()
    lockstep.finish_round(model)
    return _bits(model), _replica(model).rounds


@pytest.mark.parametrize("way", ["compiled", "in evaluation mode", "part by part"])
def test_rounds_end_however_the_model_is_called(way: str) -> None:
    first, second = run_ranks(_otherwise, 2, way)
    assert first == second
    assert first[1] == 4


def _loads_weights() -> tuple[bool, bytes]:
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp(), sync=lockstep.LocalSteps(every=2))
    loaded = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    _steps(model, world.rank, 0, 2, torch.optim.SGD(model.parameters(), lr=1e-6))
    lockstep.finish_round(model)
    return all((param - 0.25).abs().max() < 1e-4 for param in model.parameters()), _bits(model)


def test_weights_loaded_after_replicate_are_where_the_rounds_begin() -> None:
    first, second = run_ranks(_loads_weights, 2)
    assert first[0]
    assert first == second


def _trained_from_loaded(way: str, place: str) -> list[list[float]]:
    """Two rounds of one step each with weights that are loaded in front of one of them; parameters afterwards."""
    world = lockstep.init(timeout=20)
    rule = lockstep.LocalSteps(every=4, outer=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9))
    model = lockstep.replicate(mlp(), sync=rule)
    forward: Callable[[Tensor], Tensor] = model
    if way == "part by part":
        forward = lambda inputs: model[2:](model[:2](inputs))  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for number in range(2):
        if number == (place == "between"):
            loaded = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
            if way == "load_state_dict":
                model.load_state_dict(loaded)
            for name, param in model.named_parameters() if way != "load_state_dict" else ():
                if way == "another memory":
                    param.data = loaded[name]
                else:
                    param.data.copy_(loaded[name])
            if way == "a round without steps":
                lockstep.finish_round(model)
        optimizer.zero_grad()
        differentiate(forward(batch(world.rank, number, 4, 5)).square().mean())
        optimizer.step()
        lockstep.finish_round(model)
    return [param.flatten().tolist() for param in model.parameters()]


@pytest.mark.parametrize("place", ["before", "between"])
@pytest.mark.parametrize(
    "way", ["load_state_dict", "in place", "another memory", "a round without steps", "part by part"]
)
def test_a_round_begins_where_weights_were_loaded_in_whatever_way(way: str, place: str) -> None:
    """An outer optimizer with a rate of its own and momentum would take a load for progress."""
    first, second = run_ranks(_trained_from_loaded, 2, way, place)
    assert first == second
    assert all(value == pytest.approx(0.25, abs=1e-4) for values in first for value in values)


def _released() -> None:
    world = lockstep.init(timeout=20)
    for overlap in (False, True):
        model = lockstep.replicate(mlp(), sync=lockstep.LocalSteps(every=2, overlap=overlap))
        optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
        _steps(model, world.rank, 0, 3, optimizer)
        lockstep.release(model)
        assert local_training_of(model) is None
        _steps(model, world.rank, 3, 9, optimizer)
        lockstep.replicate(model)  # as any other


@OVER_BOTH
def test_a_released_model_trains_alone() -> None:
    run_ranks(_released, 2)


def _gone() -> bool:
    lockstep.init(timeout=20)
    model = lockstep.replicate(mlp(), sync=lockstep.LocalSteps(every=2))
    _steps(model, 0, 0, 3, torch.optim.SGD(model.parameters(), lr=_LR))
    replica = weakref.ref(_replica(model))
    del model
    gc.collect()
    return replica() is None


def test_a_replica_goes_with_its_module() -> None:
    assert run_ranks(_gone, 1) == [True]


def _restored_after_a_failure(folder: str, rank_first: int) -> list[str]:
    """Go back to a checkpoint where a round with messages under way has found NaN, early on one rank."""
    world = lockstep.init(timeout=20)
    model = mlp()
    lockstep.replicate(model, sync=lockstep.LocalSteps(every=4, overlap=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    saved.save(epoch_done=False)
    said = []
    with torch.no_grad():
        model.get_parameter("2.weight")[1, 2] = torch.inf
    try:
        for step in range(20):
            _steps(model, world.rank, step, step + 1, optimizer)
            if world.rank == rank_first:  # the others come to it later
                _replica(model)._rounds._exchange.advance()
    except lockstep.NonFiniteGradient as error:
        said.append(str(error))
    saved.restore()
    _steps(model, world.rank, 0, 9, optimizer)
    lockstep.finish_round(model)
    saved.save(epoch_done=False)
    lockstep.release(model)
    assert all(bool(param.isfinite().all()) for param in model.parameters())
    return said


def test_a_checkpoint_is_restored_after_a_round_that_failed_under_way(tmp_path: Path) -> None:
    for said in run_ranks(_restored_after_a_failure, 2, str(tmp_path), 0):
        assert len(said) == 1


# What is refused.


def _refused(way: str) -> None:
    world = lockstep.init(timeout=20)
    odd = world.rank == 1
    sync = lockstep.LocalSteps(every=2)
    if way == "every":
        sync = lockstep.LocalSteps(every=3 if odd else 2)
    elif way == "outer":
        sync = lockstep.LocalSteps(every=2, outer=lambda params: torch.optim.SGD(params, lr=0.5 if odd else 0.7))
    model: nn.Module = mlp()
    if way == "sparse":
        model = nn.Sequential(nn.Embedding(3, 5, sparse=True), model)
    elif way == "statistics":
        model = lockstep.convert_sync_batchnorm(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)))
    lockstep.replicate(model, sync=sync)
    if way == "join":
        with lockstep.join(model):
            pass
    elif way == "hook":
        lockstep.register_comm_hook(model, None, lockstep.bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    _steps(model, world.rank, 0, 2 if way == "diverged" else 1, optimizer)  # else the next step would spread it
    with torch.no_grad():
        if way == "diverged" and odd:
            model.get_parameter("2.weight")[1, 2] = torch.inf
        elif way == "loaded":
            lockstep.finish_round(model)
            for param in model.parameters() if odd else ():
                param.add_(1)
    _steps(model, world.rank, 1, 4, optimizer)
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize(
    ("way", "error", "words"),
    [
        ("every", "ReplicaMismatch", r"rank 0 has sync=LocalSteps\(every=2.*rank 1 has sync=LocalSteps\(every=3"),
        ("outer", "ReplicaMismatch", r"outer optimizers differ: rank 0 has SGD with .*'lr': 0.7.*rank 1 has SGD with"),
        ("sparse", "ValueError", r"'0' has sparse gradients.*sparse=False"),
        ("statistics", "ValueError", r"'1' is a SyncBatchNorm, which waits for all ranks in every forward"),
        ("join", "LockstepError", r"call lockstep.finish_round\(model\) after the loop"),
        ("hook", "LockstepError", r"choose LocalSteps\(compress=...\) instead"),
        (
            "diverged",
            "NonFiniteGradient",
            r"round 1 of local steps: after 2 steps of.*'2.weight' of rank 1 is infinite",
        ),
        ("loaded", "ReplicaMismatch", r"ending round 2 .*load the same on every rank"),
    ],
)
@OVER_BOTH
def test_what_can_not_be_is_said_on_every_rank(way: str, error: str, words: str) -> None:
    for outcome in collect_outcomes(_refused, 2, way):
        assert outcome.error == error, outcome.traceback
        assert re.search(words, str(outcome.message)), outcome.message


def _no_rounds() -> None:
    lockstep.init()
    model = lockstep.replicate(mlp())
    with pytest.raises(ValueError, match="so it has no rounds"):
        lockstep.finish_round(model)


def test_a_model_that_averages_every_gradient_has_no_rounds() -> None:
    run_ranks(_no_rounds, 1)


# Checkpoints.


class _Job:
    """A training over a sharded loader, with everything that a checkpoint holds of it."""

    def __init__(self, folder: str, *, overlap: bool = False, every: int = 4) -> None:
        self.world = lockstep.init(timeout=20)
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2))
        self.model[4].to(torch.bfloat16)
        self.model.insert(4, _ToLow())
        lockstep.replicate(self.model, sync=lockstep.LocalSteps(every=every, overlap=overlap))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        data = TensorDataset(torch.randn(60, 3, generator=torch.Generator().manual_seed(1)))
        self.loader = lockstep.shard(DataLoader(data, batch_size=6, shuffle=True))
        self.saved = lockstep.Checkpointer(folder, model=self.model, optimizer=self.optimizer, loader=self.loader)
        #: What each step of this rank came from, for comparison.
        self.losses: list[float] = []

    def run(self, epochs: int, *, save_at: int | None = None, strike_at: int | None = None) -> None:
        for _ in self.saved.epochs(epochs):
            for (inputs,) in self.loader:
                loss = self.model(inputs).float().square().mean()
                self.losses.append(loss.item())
                self.optimizer.zero_grad()
                differentiate(loss)
                self.optimizer.step()
                if self.saved.step == save_at:
                    self.saved.save()
                if self.saved.step == strike_at and self.world.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
        lockstep.finish_round(self.model)

    def all(self) -> tuple[Any, ...]:
        outer = _replica(self.model).outer
        momentum = [entry["momentum_buffer"].tolist() for entry in outer.state_dict()["state"].values()]
        own = [value.tolist() for entry in self.optimizer.state_dict()["state"].values() for value in entry.values()]
        error = _replica(self.model).own_state()["error"].tolist()
        return [value.tolist() for value in self.model.state_dict().values()], momentum, own, error


class _ToLow(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.bfloat16()


def _uninterrupted(folder: str, overlap: bool) -> tuple[Any, ...]:
    job = _Job(folder, overlap=overlap)
    job.run(3, save_at=14)  # in the middle of a round and of an epoch
    return job.all(), job.losses[14:]


def _resumed(folder: str, overlap: bool) -> tuple[Any, ...]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        job = _Job(folder, overlap=overlap)
        job.run(3)
    return job.all(), job.losses, [str(one.message) for one in told]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_resumes_with_the_same_bits(tmp_path: Path, overlap: bool) -> None:
    whole = run_ranks(_uninterrupted, 2, str(tmp_path), overlap)
    assert [folder.name for folder in tmp_path.iterdir() if folder.name.startswith("step")] == ["step-00000014"]
    resumed = run_ranks(_resumed, 2, str(tmp_path), overlap)
    for before, after in zip(whole, resumed, strict=True):
        assert after[:2] == before
        assert after[2] == [], "no warning of replicas that have drifted apart"
    assert resumed[0][0][:2] == resumed[1][0][:2]
    assert resumed[0][0][2] != resumed[1][0][2], "each rank has an optimizer's state of its own"


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_resumes_with_another_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    run_ranks(_uninterrupted, 2, str(tmp_path), False)
    resumed = run_ranks(_resumed, world_size, str(tmp_path), False)
    for state, losses, told in resumed:
        assert state[:2] == resumed[0][0][:2]
        assert len(losses) == 16, "three epochs of ten steps, and fourteen were done"
        assert all("there are" in words for words in told), told


def _first_loss(folder: str, apart: bool) -> float:
    world = lockstep.init(timeout=20)
    model = mlp()
    lockstep.replicate(model, sync=lockstep.LocalSteps(every=2) if apart else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        resumed = saved.restore()
    assert [str(one.message) for one in told if "the state of LocalSteps" not in str(one.message)] == []
    assert bool(told) == (resumed is not None and not apart and world.is_main)
    loss = squares(model, 0, 100).item()
    _steps(model, world.rank, 0, 3, optimizer)
    saved.save()
    return loss if resumed is not None else squares(model, 0, 100).item()


@pytest.mark.parametrize("first", [False, True])
def test_a_run_may_change_how_it_averages(tmp_path: Path, first: bool) -> None:
    left = run_ranks(_first_loss, 2, str(tmp_path), first)
    assert run_ranks(_first_loss, 2, str(tmp_path), not first) == left


def _stopped(folder: str, overlap: bool) -> None:
    job = _Job(folder, overlap=overlap)
    job.run(5, strike_at=9)
    raise AssertionError("it was not stopped")


@each_value(each_backend=BOTH, overlap=(False, True))
def test_a_run_that_is_asked_to_stop_ends_its_round_first(tmp_path: Path, overlap: bool) -> None:
    for outcome in collect_outcomes(_stopped, 2, str(tmp_path), overlap):
        assert (outcome.error, outcome.message) == ("SystemExit", "75"), outcome.traceback
    (folder,) = (folder for folder in tmp_path.iterdir() if folder.name.startswith("step"))
    assert int(folder.name.removeprefix("step-")) in ((16, 20) if overlap else (12,))
    resumed = run_ranks(_resumed, 2, str(tmp_path), overlap)
    assert resumed[0][0][:2] == resumed[1][0][:2]


def _saves_another() -> None:
    lockstep.init()
    first, second = mlp(), lockstep.replicate(mlp(), sync=lockstep.LocalSteps())
    with pytest.raises(lockstep.CheckpointError, match="replicate and save both as one module"):
        lockstep.Checkpointer("run", model=first, extra={"critic": second})


def test_a_second_model_with_rounds_of_its_own_is_refused() -> None:
    run_ranks(_saves_another, 1)


def _in_a_part_of_the_world() -> bytes:
    world = lockstep.init(timeout=20)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = lockstep.replicate(
        mlp(), process_group=pairs[world.rank // 2], sync=lockstep.LocalSteps(every=2, overlap=True)
    )
    _steps(model, world.rank, 0, 7, torch.optim.SGD(model.parameters(), lr=_LR))
    lockstep.finish_round(model)
    return _bits(model)


def test_pairs_of_ranks_train_models_of_their_own() -> None:
    bits = run_ranks(_in_a_part_of_the_world, 4)
    assert bits[0] == bits[1] != bits[2] == bits[3]
