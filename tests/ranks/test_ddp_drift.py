"""Replicas that stop being equal while they train: found on all ranks, by name, and nothing found where nothing is."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.ddp.api import replica_of
from tests.backends import BOTH, EACH_BACKEND, OVER_ALL, OVER_BOTH
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.ddp_cases import batch, differentiate, inputs_for, mlp
from tests.selection import each_value

pytestmark = EACH_BACKEND


def _write_bit(tensor: Tensor, bit: int) -> None:
    """Flip a bit of a tensor as a debugger would: past torch, in the process's memory or that of a GPU."""
    if tensor.device.type != "cpu":
        tensor.data.reshape(-1).view(torch.uint8)[bit // 8].bitwise_xor_(1 << bit % 8)
        return
    memory = os.open("/proc/self/mem", os.O_RDWR)
    try:
        address = tensor.data_ptr() + bit // 8
        (byte,) = os.pread(memory, 1, address)
        os.pwrite(memory, bytes([byte ^ (1 << (bit % 8))]), address)
    finally:
        os.close(memory)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    dtype = next(model.parameters()).dtype
    differentiate(model(inputs_for(model, rank, step, dtype)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def _steps_until_found(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, first: int, most: int
) -> tuple[int, str] | None:
    """Return how many steps it took to find a difference, and what was said; None if none was found."""
    for step in range(most):
        try:
            _step(model, optimizer, dist.get_rank(), first + step)
        except lockstep.ReplicaMismatch as error:
            return step + 1, str(error)
    return None


class _Langevin(torch.optim.SGD):
    """Adds noise in each step: from torch's generator, or from one of its own that all ranks seed alike."""

    def __init__(self, model: nn.Module, *, generator: torch.Generator | None) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self._generator = generator

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                noise = torch.randn(param.shape, generator=self._generator, dtype=param.dtype).to(param.device)
                param.add_(noise, alpha=0.01)
        return loss


def _train_with_noise(own: bool) -> list[float]:
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp(torch.float32).to(world.device), compare_every=1)
    optimizer = _Langevin(model, generator=torch.Generator().manual_seed(5) if own else None)
    data = TensorDataset(torch.randn(48, 5))
    for (inputs,) in lockstep.shard(DataLoader(data, batch_size=8)):
        optimizer.zero_grad()
        differentiate(model(inputs).square().mean())
        optimizer.step()
    return [float(param.sum()) for param in model.parameters()]


@OVER_ALL
def test_noise_from_a_generator_that_all_ranks_seed_alike_keeps_replicas_equal() -> None:
    first, second = run_ranks(_train_with_noise, 2, True)
    assert first == second


def test_noise_of_each_rank_is_found_and_the_way_out_is_said() -> None:
    for outcome in collect_outcomes(_train_with_noise, 2, False):
        assert outcome.error == "ReplicaMismatch", outcome.traceback
        assert "generator=torch.Generator(device).manual_seed(step)" in str(outcome.message)


# Planted ------------------------------------------------------------------------------------------------------------

_KINDS = ("parameter", "exp_avg", "exp_avg_sq", "step")
#: Steps until a difference that was found on a GPU is read by the host, which does not wait for it.
_LATER = {"nccl": 1}


def _flip_and_train(
    seed: int, kinds: tuple[str, ...], trials: int, every: int | None, most: int
) -> list[tuple[Any, ...]]:
    """In each trial flip a bit, on a rank, in a tensor and after a step that are drawn; train until it is found.

    Returns:
        For each trial: what was drawn, and what came of it.
    """
    w = lockstep.init()
    results = []
    for trial in range(trials):
        drawn = random.Random(f"{seed} {trial}")
        model = mlp(torch.float32).to(w.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        lockstep.replicate(model, compare_every="auto" if every is None else every)
        name, param = drawn.choice([*model.named_parameters()])
        kind, victim = drawn.choice(kinds), drawn.randrange(w.world_size)
        calm = drawn.randrange(1, 20)
        for step in range(calm):
            _step(model, optimizer, w.rank, step)
        tensor = param if kind == "parameter" else optimizer.state[param][kind]
        bit = drawn.randrange(8 * tensor.nbytes)
        if w.rank == victim:
            _write_bit(tensor, bit)
        found = _steps_until_found(model, optimizer, first=calm, most=most)
        results.append((name, kind, victim, bit % 32, found, _equal(model, optimizer)))
        lockstep.release(model)
    return results


def _arrays(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [each.detach().cpu().numpy() for each in [*model.parameters(), *states]]


def _equal(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all ranks hold the same bits."""
    everything = torch.cat([torch.from_numpy(each).reshape(-1).view(torch.uint8) for each in _arrays(model, optimizer)])
    everything = everything.to(lockstep.world().device)
    rows = [torch.empty_like(everything) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, everything)
    return all(torch.equal(row, rows[0]) for row in rows)


def _assert_found(results: list[list[tuple[Any, ...]]], *, every: int) -> None:
    for trial in zip(*results, strict=True):
        for rank, (name, kind, victim, _, found, _) in enumerate(trial):
            assert found is not None, trial
            steps, said = found
            assert steps <= every
            assert f"rank {rank} of {len(trial)}, step " in said
            assert f"parameter '{name}'" in said
            if len(trial) > 2:
                assert f"Rank {victim} differs from the other {len(trial) - 1} in " in said
            else:
                assert "Ranks 0 and 1 differ in " in said
            if kind == "step":  # all elements of the parameter differ once it is used
                continue
            assert "0 of" in said or "1 of" in said


@each_value(on_gpus=True, each_backend=BOTH, world_size=(2, 3))
def test_a_flipped_bit_is_found_in_the_next_step(each_backend: str, world_size: int) -> None:
    _assert_found(run_ranks(_flip_and_train, world_size, 1, _KINDS, 6, 1, 3), every=1 + _LATER.get(each_backend, 0))


@OVER_ALL
def test_a_flipped_bit_of_a_parameter_is_found_within_the_steps_asked_for(each_backend: str) -> None:
    found = run_ranks(_flip_and_train, 3, 2, ("parameter",), 4, 7, 10)
    _assert_found(found, every=7 + _LATER.get(each_backend, 0))


@pytest.mark.campaign
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_of_a_hundred_flipped_bits_are_found_in_the_next_step(world_size: int) -> None:
    _assert_found(run_ranks(_flip_and_train, world_size, 10 + world_size, _KINDS, 100, 1, 3, timeout=500), every=1)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_all_of_a_hundred_flipped_bits_are_found_by_default_unless_none_is_left() -> None:
    # (With a count of steps below 0 AdamW itself raises, on that rank alone.)
    results = run_ranks(_flip_and_train, 2, 20, _KINDS[:3], 100, None, 1026, timeout=800)
    assert len(results[0]) == 100
    assert [row[4] is None for row in results[0]] == [row[4] is None for row in results[1]]
    for name, kind, _, bit, found, equal in results[0]:
        # What was rounded away, or has made all ranks' parameters NaN, makes no difference any more.
        assert found is not None or equal, (name, kind, bit)
    assert sum(found is not None for _, _, _, _, found, _ in results[0]) >= 90


# What is said -------------------------------------------------------------------------------------------------------


def _differ(world_size: int, how: str) -> None:
    w = lockstep.init()
    model = mlp(torch.float32)
    frozen = model.get_parameter("0.bias").requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    lockstep.replicate(model, compare_every=2)
    for step in range(10):
        _step(model, optimizer, w.rank, step)
    if how == "lr" and w.rank == 1:
        optimizer.param_groups[0]["lr"] = 1e-3
    if how == "frozen" and w.rank == world_size - 1:
        frozen.data[2] += 1.0
    if how == "halves" and w.rank % 2:
        frozen.data[2] += 1.0
    if how == "all":
        frozen.data[2] += w.rank
    for step in range(10, 20):
        _step(model, optimizer, w.rank, step)


def _said(world_size: int, how: str) -> str:
    outcomes = collect_outcomes(_differ, world_size, world_size, how)
    assert {outcome.error for outcome in outcomes} == {"ReplicaMismatch"}, outcomes[0].traceback
    told = {str(outcome.message).partition(": ")[2] for outcome in outcomes}
    assert len(told) == 1  # all ranks say the same, but for who says it
    return told.pop()


def test_another_learning_rate_is_told_from_a_flipped_bit() -> None:
    said = _said(3, "lr")
    assert said.startswith("the replicas differ. Rank 1 differs from the other 2 in parameter '0.weight'. Element [")
    assert "5 of 6 parameters and 0 of 15 tensors of optimizers differ, also parameter '2.weight'" in said
    assert "It happened between step 10, when it was equal on all ranks, and step 12 (of this process's" in said
    assert "another learning rate" in said
    assert "a checkpoint that was saved before step 10" in said
    assert "compare_every=None" in said


def test_a_frozen_parameter_is_compared_too() -> None:
    said = _said(2, "frozen")
    assert (
        "Ranks 0 and 1 differ in parameter '0.bias'; which of the two is right can't be told. Element [2] is " in said
    )
    assert "and the only one of it that differs. In all, 1 of 6 parameters and 0 of 15 tensors" in said
    assert "a bit that flipped in memory, or a line that writes to it on one rank alone: lockstep verify finds" in said
    assert "have the memory of the machines of these ranks tested" in said


def test_without_a_majority_every_version_is_told() -> None:
    said = _said(4, "halves")
    assert (
        "The ranks hold 2 versions of parameter '0.bias', and none has a majority: ranks 0 and 2; ranks 1 and 3."
        in said
    )
    assert "The ranks hold 3 versions of parameter '0.bias'" in _said(3, "all")


# Nothing to find ----------------------------------------------------------------------------------------------------

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "adamw, fused": functools.partial(torch.optim.AdamW, fused=True),
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "adafactor": torch.optim.Adafactor,
    "nadam": torch.optim.NAdam,
    "rmsprop": functools.partial(torch.optim.RMSprop, centered=True, momentum=0.1),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
}


def _train_quietly(name: str, dtype: torch.dtype) -> tuple[bool, int]:
    w = lockstep.init()
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 3)).to(dtype)
    model[3].bias.requires_grad = False
    lockstep.replicate(model, compare_every=1)
    optimizer = _OPTIMIZERS[name](model.parameters())
    for step in range(12):
        differentiate(model(batch(w.rank, step, 4, 5, dtype=dtype)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            optimizer.load_state_dict(optimizer.state_dict())
        if step == 7:
            model[3].bias.requires_grad = True
    return True, len(optimizer.state)


@each_value(str, name=tuple(_OPTIMIZERS), dtype=(torch.float32, torch.bfloat16))
def test_replicas_that_are_equal_train_on(name: str, dtype: torch.dtype) -> None:
    if name == "adafactor" and dtype is torch.bfloat16:
        dtype = torch.float64
    results = run_ranks(_train_quietly, 2, name, dtype)
    assert results[0] == results[1]


class _Own(torch.optim.SGD):
    """Keeps a tensor for each parameter that no other rank has like this."""

    def __init__(self, params: Any, shape: str) -> None:
        super().__init__(params, lr=0.01)
        self._shape = shape

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                own = param if self._shape == "like the parameter" else param.view(-1)[:2]
                self.state[param]["own"] = torch.full_like(own, float(dist.get_rank()))


def _keep_own(shape: str) -> None:
    w = lockstep.init()
    model = lockstep.replicate(mlp(), compare_every=3)
    optimizer = _Own(model.parameters(), shape)
    for step in range(12):
        _step(model, optimizer, w.rank, step)
    if w.rank:
        _write_bit(model.get_parameter("0.weight"), 3)
    for step in range(12, 24):
        _step(model, optimizer, w.rank, step)


def test_what_an_optimizer_keeps_for_its_rank_alone_is_left_out() -> None:
    for outcome in collect_outcomes(_keep_own, 2, "a part"):
        assert outcome.error == "ReplicaMismatch"
        assert "differ in parameter '0.weight'" in str(outcome.message)
        assert "1 of 6 parameters and 0 of 0 tensors" in str(outcome.message)


def test_what_has_the_parameters_shape_must_be_equal() -> None:
    for outcome in collect_outcomes(_keep_own, 2, "like the parameter"):
        assert "differ in _Own's 'own' of parameter '0.weight'" in str(outcome.message)


class _Large(torch.optim.SGD):
    """Keeps 5 MiB on rank 0 alone, which are more parts than the other ranks have."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if dist.get_rank() == 0:
            param = self.param_groups[0]["params"][0]
            self.state[param]["own"] = torch.zeros(5 << 18, device=param.device)


def _keep_more() -> tuple[int, str] | None:
    w = lockstep.init()
    model = lockstep.replicate(mlp(torch.float32).to(w.device), compare_every=20)
    optimizer = _Large(model.parameters(), lr=0.01)
    for step in range(50):
        _step(model, optimizer, w.rank, step)
    if w.rank:
        _write_bit(model.get_parameter("0.weight"), 3)
    return _steps_until_found(model, optimizer, first=50, most=25)


@OVER_ALL
def test_ranks_that_hold_more_than_others_compare_in_the_same_steps_as_they(each_backend: str) -> None:
    for found in run_ranks(_keep_more, 2):
        assert found is not None
        steps, said = found
        assert steps <= 20 + _LATER.get(each_backend, 0)
        assert "differ in parameter '0.weight'" in said


def _share_the_state_out() -> bool:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    w = lockstep.init("gloo")
    model = lockstep.replicate(mlp(), compare_every=1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    for step in range(8):
        _step(model, optimizer, w.rank, step)
    if w.rank:
        _write_bit(model.get_parameter("2.bias"), 3)
    return _steps_until_found(model, optimizer, first=8, most=3) is not None


def test_an_optimizer_that_shares_its_state_out_is_no_difference() -> None:
    assert run_ranks(_share_the_state_out, 2) == [True, True]


def _train_apart() -> None:
    w = lockstep.init()
    with pytest.raises(ValueError, match="compare_every=5 compares replicas after each step"):
        lockstep.replicate(mlp(), sync=lockstep.LocalSteps(every=4), compare_every=5)
    model = lockstep.replicate(mlp(), sync=lockstep.LocalSteps(every=4))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(20):
        _step(model, optimizer, w.rank, step)


def test_local_steps_are_no_difference() -> None:
    run_ranks(_train_apart, 2)


def _leave_early(every: int) -> None:
    w = lockstep.init()
    model = lockstep.replicate(mlp(), compare_every=every)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        with lockstep.join(model):
            for step in range(5 + 3 * w.rank):
                _step(model, optimizer, w.rank, 100 * epoch + step)
        for step in range(4):
            _step(model, optimizer, w.rank, 100 * epoch + 50 + step)


@each_value(each_backend=BOTH, every=(1, 3))
def test_ranks_that_leave_a_loop_early_are_no_difference(every: int) -> None:
    run_ranks(_leave_early, 3, every)


# Where the flags travel ---------------------------------------------------------------------------------------------


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)

    def forward(self, rows: Tensor) -> Tensor:
        looked_up: Tensor = self.table(rows)
        return looked_up


def _train_words() -> tuple[int, str] | None:
    w = lockstep.init()
    torch.manual_seed(1)
    model = lockstep.replicate(_Words(), compare_every=2)
    optimizer = torch.optim.SparseAdam(model.parameters())

    def step(number: int) -> None:
        differentiate(model(torch.arange(3) + w.rank + number % 7).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    for number in range(6):
        step(number)
    if w.rank == 0:
        _write_bit(optimizer.state[model.table.weight]["exp_avg"], 32 * 79 + 5)
    for number in range(6, 10):
        try:
            step(number)
        except lockstep.ReplicaMismatch as error:
            return number - 5, str(error)
    return None


@OVER_BOTH
def test_a_replica_without_a_bucket_is_compared_by_a_message_of_its_own() -> None:
    for found in run_ranks(_train_words, 2):
        assert found is not None
        assert found[0] <= 2
        assert "SparseAdam's 'exp_avg' of parameter 'table.weight'" in found[1]
        assert "Element [19, 3] is " in found[1]


def _train_in_slices() -> tuple[int, str] | None:
    w = lockstep.init()
    model = lockstep.replicate(mlp(torch.float32), compare_every=3)
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(batch(0, 0, 40, 5, dtype=torch.float32))
    loader = lockstep.shard(DataLoader(data, batch_size=4), slices=4)
    for number, step in enumerate(loader.steps()):
        try:
            for (inputs,) in step:
                differentiate(model(inputs).square().mean())
        except lockstep.ReplicaMismatch as error:
            return number - 5, str(error)
        optimizer.step()
        optimizer.zero_grad()
        if number == 5 and w.rank == 1:
            _write_bit(optimizer.state[model.get_parameter("2.weight")]["exp_avg_sq"], 32 * 8 + 27)
    return None


def test_steps_in_slices_are_compared_by_a_message_of_their_own() -> None:
    for found in run_ranks(_train_in_slices, 3):
        assert found is not None
        assert found[0] <= 3
        assert "Rank 1 differs from the other 2 in parameter '2.weight'. Element [1, 1] is " in found[1]
        assert "1 of 6 parameters and 1 of 18 tensors" in found[1]


def _several(options: dict[str, Any]) -> tuple[int, str] | None:
    w = lockstep.init()
    model = mlp(torch.float32)
    model[2].to(torch.float64)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            for part in self.net:
                weight = getattr(part, "weight", None)
                x = part(x if weight is None else x.to(weight.dtype))
            return x

    mixed = lockstep.DistributedDataParallel(Mixed(), bucket_cap_mb=1e-4, compare_every=1, **options)
    optimizer = torch.optim.AdamW(mixed.parameters())
    for step in range(5):
        _step(mixed, optimizer, w.rank, step)
    if w.rank == 1:
        _write_bit(model.get_parameter("2.weight"), 9)
    return _steps_until_found(mixed, optimizer, first=5, most=2)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"check_finite": "skip"}], ids=str)
@OVER_BOTH
def test_several_buckets_and_dtypes(options: dict[str, Any]) -> None:
    for found in run_ranks(_several, 2, options):
        assert found is not None
        assert found[0] == 1
        assert "differ in parameter 'net.2.weight'" in found[1]


def _by_a_hook(hook: str, every: Any) -> bool:
    w = lockstep.init()
    model = lockstep.replicate(mlp(), compare_every=every)

    def keep(_: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    lockstep.register_comm_hook(model, None, keep if hook == "none" else lockstep.bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if hook == "bf16":
        for step in range(4):
            _step(model, optimizer, w.rank, step)
        if w.rank:
            _write_bit(model.get_parameter("0.weight"), 50)
    return _steps_until_found(model, optimizer, first=4, most=1030 if hook == "bf16" else 40) is not None


@OVER_BOTH
def test_with_a_hook_that_averages_nothing_replicas_are_compared_on_request() -> None:
    assert run_ranks(_by_a_hook, 2, "none", "auto") == [False, False]
    assert run_ranks(_by_a_hook, 2, "none", 2) == [True, True]
    assert run_ranks(_by_a_hook, 2, "bf16", "auto") == [True, True]


def _off(every: int | None) -> bool:
    w = lockstep.init()
    model = lockstep.replicate(mlp(), compare_every=every)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if w.rank:
        _write_bit(model.get_parameter("0.weight"), 7)
    return _steps_until_found(model, optimizer, first=0, most=20) is None


@pytest.mark.parametrize("every", [None, 0])
def test_what_is_switched_off_finds_nothing(every: int | None) -> None:
    assert run_ranks(_off, 2, every) == [True, True]


def _late(seconds: float) -> list[int]:
    """Rank 1 takes longer for each comparison; return in which backwards this rank compared."""
    w = lockstep.init()
    model = lockstep.replicate(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    drift = replica_of(model).checks.drift
    assert drift is not None
    took = drift._costs.add
    compared: list[int] = []

    def add(spent: float, *, parts: int, step: float | None) -> None:
        took(seconds if w.rank else spent, parts=parts, step=step)

    drift._costs.add = add  # type: ignore[method-assign, assignment]
    fill = drift.fill

    def filled(flags: Tensor) -> None:
        compared.append(drift._schedule.step)
        fill(flags)

    drift.fill = filled  # type: ignore[method-assign]
    for step in range(150):
        _step(model, optimizer, w.rank, step)
    return compared


def test_ranks_compare_in_the_same_steps_by_the_slowest() -> None:
    one, other = run_ranks(_late, 2, 5.0)
    assert one == other
    assert one[:2] == [2, 6]
    assert len(one) <= 4  # then rank 1 asks for the most steps that there are


# Optimizers that go by the loss ---------------------------------------------------------------------------------------


class _ByLoss(torch.optim.SGD):
    """Keeps the loss that its closure returned with each parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["prev_loss"] = float(loss.detach())
        return loss


def _train_by_closure(kind: str, line_search: str | None, means: bool) -> list[float]:
    """Train; return a number for each parameter."""
    w = lockstep.init()
    model = mlp(torch.float32)
    lockstep.replicate(model, compare_every=1)
    optimizer: Any
    if kind == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)
    else:
        optimizer = _ByLoss(model.parameters(), lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batch(w.rank, 0, 4, 5, dtype=torch.float32)).square().mean()
        loss.backward()
        return w.mean(loss) if means else loss

    for _ in range(4):
        optimizer.step(closure)
    return [float(param.detach().double().sum()) for param in model.parameters()]


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_trains_on_where_its_closure_returns_the_mean(line_search: str | None) -> None:
    first, second = run_ranks(_train_by_closure, 2, "lbfgs", line_search, True)
    assert first == second


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lbfgs", "LBFGS uses the loss that its closure returns"),
        ("lbfgs, strong_wolfe", "LBFGS uses the loss that its closure returns"),
        ("other", "_ByLoss keeps this number"),
    ],
)
def test_numbers_made_of_a_ranks_own_loss_are_no_flipped_bits(kind: str, words: str) -> None:
    name, _, line_search = kind.partition(", ")
    outcomes = collect_outcomes(_train_by_closure, 2, name, line_search or None, False)
    assert {outcome.error for outcome in outcomes} == {"ReplicaMismatch"}, outcomes[0].traceback
    for outcome in outcomes:
        said = str(outcome.message)
        assert words in said
        assert "world.mean(loss)" in said
        assert "flipped" not in said
        assert "bits apart" not in said
        assert len(said) < 900, said  # once, and compactly
