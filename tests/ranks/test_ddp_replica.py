"""What else a replica does: agreement at construction, buffers, join, comm hooks, checks, copies, errors."""

from __future__ import annotations

import copy
import io
import os
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import lockstep
from tests.backends import EACH_BACKEND, OVER_BOTH
from tests.harness import Outcome, collect_outcomes, run_ranks
from tests.ranks.ddp_cases import (
    Attach,
    assert_averaged,
    averages,
    batch,
    differentiate,
    gradients,
    mlp,
    name_of,
    replicate_tiny,
    squares,
    wrap_tiny,
)

pytestmark = [
    pytest.mark.internals,  # run on other versions of torch and Python, too
    EACH_BACKEND,
]

BOTH: list[Attach] = [replicate_tiny, wrap_tiny]

# Under another default device ----------------------------------------------------------------------------------------


def _trained_under(device: str, folder: str) -> list[list[float]]:
    """Train with two dtypes, an unused parameter and a checkpoint, while ``device`` is the default for new tensors."""
    world = lockstep.init()
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3, dtype=torch.float64), nn.Linear(2, 2)])
    samples = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))[world.rank :: world.world_size]
    with torch.device(device):
        lockstep.replicate(model, find_unused_parameters=True, compare_every=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
        for step in range(4):
            optimizer.zero_grad()
            (model[0](samples).square().mean() + model[1](samples.double()).square().mean()).backward()
            optimizer.step()
            if step == 1:
                saved.save()
        assert world.all_reduce(world.rank) == 1
        saved.restore()
    return [param.flatten().tolist() for param in model.parameters()]


def test_replicas_and_checkpoints_do_not_depend_on_the_default_device(tmp_path: Path) -> None:
    one, other = (run_ranks(_trained_under, 2, device, str(tmp_path / device)) for device in ("cpu", "meta"))
    assert one == other
    assert one[0] == one[1]


# Construction -------------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Parameters and buffers of several dtypes, all different on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((3, 2), 1.0 + rank, dtype=torch.float64))
        self.b = nn.Parameter(torch.full((5,), 2.0 + rank, dtype=torch.bfloat16))
        self.c = nn.Parameter(torch.full((), 3.0 + rank), requires_grad=False)
        self.register_buffer("count", torch.tensor(4 + rank))
        self.register_buffer("mask", torch.tensor([True, rank == 0]))
        self.register_buffer("phase", torch.tensor([1j * rank, 2.0]))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("flipped", torch.arange(6.0).add(rank).view(2, 3).T)


def _equal_at_start(attach: Attach) -> list[Any]:
    w = lockstep.init()
    model = attach(Everything(w.rank))
    return [value.tolist() for value in model.state_dict().values()]


@pytest.mark.parametrize("attach", BOTH, ids=name_of)
@OVER_BOTH
def test_all_ranks_start_with_rank_0s_parameters_and_buffers(attach: Attach) -> None:
    for got in run_ranks(_equal_at_start, 3, attach):
        assert got == [value.tolist() for value in Everything(0).state_dict().values()]


def _no_init_sync() -> float:
    w = lockstep.init()
    model = lockstep.replicate(Everything(w.rank), init_sync=False)
    return float(model.c)


def test_init_sync_false_sends_nothing() -> None:
    assert run_ranks(_no_init_sync, 2) == [3.0, 4.0]


def _in_place() -> None:
    lockstep.init()
    net = mlp()
    names = list(net.state_dict())
    assert lockstep.replicate(net) is net
    assert list(net.state_dict()) == names
    wrapped = lockstep.DistributedDataParallel(mlp())
    assert list(wrapped.state_dict()) == ["module." + name for name in names]
    assert isinstance(wrapped.module, nn.Sequential)


def test_replicate_returns_the_module_itself_and_the_wrapper_adds_a_prefix() -> None:
    run_ranks(_in_place, 1)


def _named(rank: int, kind: str) -> nn.Module:
    odd = rank == 1
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    if odd and kind == "shape":
        model[1] = nn.Linear(7, 4)
    elif odd and kind == "dtype":
        model[1].double()
    elif odd and kind == "name":
        model = nn.Sequential()
        model.add_module("0", nn.Linear(5, 7))
        model.add_module("last", nn.Linear(7, 3))
    elif odd and kind == "count":
        model.append(nn.Linear(3, 3))
    elif odd and kind == "frozen":
        model[0].bias.requires_grad_(False)
    elif odd and kind == "buffer":
        model.register_buffer("extra", torch.zeros(2))
    elif kind == "sparse":
        model.append(nn.Embedding(4, 3, sparse=odd))
    return model


def _mismatch(kind: str, attach: Attach) -> None:
    w = lockstep.init()
    model = _named(w.rank, kind)
    if kind == "option":
        lockstep.replicate(model, bucket_cap_mb=25 - w.rank)
    else:
        attach(model)


@pytest.mark.parametrize("attach", BOTH, ids=name_of)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "shape",
            "parameter 2, '1.weight': rank 0 has '1.weight' of shape (3, 7), torch.float32, rank 1 has '1.weight'",
        ),
        ("dtype", "parameter 2, '1.weight': rank 0 has '1.weight' of shape (3, 7), torch.float32"),
        (
            "name",
            "parameter 2, '1.weight': rank 0 has '1.weight' of shape (3, 7), torch.float32, rank 1 has 'last.weig",
        ),
        ("count", "parameter 4, '2.weight': rank 0 has none at this place, rank 1 has '2.weight' of shape (3, 3)"),
        ("frozen", "parameter 1, '0.bias'"),
        ("buffer", "buffer 0, 'extra'"),
        ("sparse", "rank 1 has '2.weight' of shape (4, 3), torch.float32, with sparse gradients. Nothing was sent"),
        ("option", "option 1, 'bucket_cap_mb': rank 0 has bucket_cap_mb=25, rank 1 has bucket_cap_mb=24"),
    ],
)
def test_different_replicas_are_an_error_on_every_rank(kind: str, text: str, attach: Attach) -> None:
    for rank, outcome in enumerate(collect_outcomes(_mismatch, 3, kind, attach)):
        assert outcome.error == "ReplicaMismatch", outcome.traceback
        assert text in str(outcome.message)
        assert f"rank {rank} of 3" in str(outcome.message)


def _different_buffers() -> list[float]:
    w = lockstep.init()
    model = lockstep.replicate(_named(w.rank, "buffer"), broadcast_buffers=False)
    model(torch.full((1, 5), 1.0 + w.rank)).sum().backward()
    return [float(param.grad.sum()) for param in model.parameters() if param.grad is not None]


def test_buffers_that_are_never_sent_may_differ() -> None:
    first, second = run_ranks(_different_buffers, 2)
    assert first == second


def _refusals() -> None:
    lockstep.init()
    net = mlp()
    with pytest.raises(ValueError, match="expected one device"):
        lockstep.DistributedDataParallel(net, device_ids=[0, 1])
    with pytest.raises(ValueError, match="start a process for each"):
        lockstep.DistributedDataParallel(net, device_ids=[0, 1])
    with pytest.raises(ValueError, match="the module is on the CPU"):
        lockstep.DistributedDataParallel(net, device_ids=[0], output_device=[0])
    with pytest.raises(ValueError, match="output_device=0 without device_ids"):
        lockstep.DistributedDataParallel(net, output_device=0)
    with pytest.raises(ValueError, match="expected one device"):
        lockstep.DistributedDataParallel(net, output_device=[0, 1])
    with pytest.raises(RuntimeError, match="is not needed when a module doesn't have any parameter"):
        lockstep.DistributedDataParallel(nn.ReLU())
    with pytest.raises(ValueError, match="bucket_cap_mb=0"):
        lockstep.replicate(net, bucket_cap_mb=0)
    with pytest.raises(ValueError, match="check_finite='always'"):
        lockstep.replicate(net, check_finite="always")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no shape yet"):
        lockstep.replicate(nn.LazyLinear(3))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, not list"):
        lockstep.replicate([net])  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"is not a replica: call lockstep\.replicate"):
        lockstep.no_sync(net)
    lockstep.replicate(net)
    with pytest.raises(ValueError, match="belongs to a replica already"):
        lockstep.replicate(net)
    with pytest.raises(ValueError, match="'weight' belongs to a replica already"):
        lockstep.DistributedDataParallel(net[0])
    with pytest.raises(TypeError, match="a comm hook must be callable, not int"):
        lockstep.register_comm_hook(net, None, 3)  # type: ignore[arg-type]
    lockstep.register_comm_hook(net, None, lockstep.bf16_compress_hook)
    with pytest.raises(lockstep.LockstepError, match="a comm hook is registered already"):
        lockstep.register_comm_hook(net, None, lockstep.bf16_compress_hook)
    with pytest.warns(UserWarning, match="dim and check_reduction without effect") as said:
        lockstep.DistributedDataParallel(mlp(), dim=1, check_reduction=True)
    assert said[0].filename == __file__


def test_arguments_that_make_no_sense_are_refused() -> None:
    run_ranks(_refusals, 1)


def _no_group() -> None:
    lockstep.replicate(mlp())


def test_without_a_process_group_the_error_names_init() -> None:
    (outcome,) = collect_outcomes(_no_group, 1)
    assert outcome.error == "LockstepError"
    assert "call lockstep.init() first" in str(outcome.message)


def _with_torchs_group(folder: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = lockstep.DistributedDataParallel(mlp())
    differentiate(squares(model, rank, 0))
    expected = averages(mlp, squares, 2, [0])
    for name, grad in gradients(model).items():
        assert grad is not None
        assert torch.allclose(grad, expected[name])  # type: ignore[arg-type]
    del model
    dist.destroy_process_group()


@OVER_BOTH
def test_a_group_that_torch_opened_will_do(tmp_path: object) -> None:
    run_ranks(_with_torchs_group, 2, str(tmp_path))


def _subgroup() -> list[float]:
    w = lockstep.init()
    w.share = lockstep.BatchShare(w.rank + 1, 6)  # of the world, not of the group: it must not count
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    model = lockstep.replicate(nn.Linear(1, 1, bias=False), process_group=pairs[w.rank // 2])
    model(torch.full((1, 1), float(w.rank))).sum().backward()
    assert model.weight.grad is not None
    return [float(model.weight.grad)]


@OVER_BOTH
def test_replicas_in_a_subgroup() -> None:
    assert run_ranks(_subgroup, 3) == [[0.5], [0.5], [2.0]]


def _without_parameters() -> float:
    w = lockstep.init()
    model = lockstep.replicate(nn.Sequential(nn.ReLU(), nn.Flatten()))
    x = torch.full((1, 2), float(w.rank), requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    return float(x.grad.sum())


def test_a_module_without_parameters_works() -> None:
    assert run_ranks(_without_parameters, 2) == [0.0, 2.0]


# Buffers ------------------------------------------------------------------------------------------------------------


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.BatchNorm1d(5, dtype=torch.float64)
        self.net = mlp()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.at_forward = float(self.norm.running_mean.sum())  # type: ignore[union-attr]
        if self.training:
            self.seen += len(x)
        scores: Tensor = self.net(self.norm(x))
        return scores


def _buffers(attach: Attach) -> list[list[float]]:
    w = lockstep.init()
    model = attach(Normalised())
    inner: Normalised = getattr(model, "module", model)  # type: ignore[arg-type]
    history = []
    for step in range(3):
        if step == 1:
            inner.norm.running_mean.fill_(100.0 + w.rank)  # type: ignore[union-attr]
        differentiate(squares(model, w.rank, step))
        history.append([inner.at_forward, float(inner.norm.running_mean.sum()), float(inner.seen)])  # type: ignore[union-attr]
    model.eval()
    if w.is_main:  # nothing is sent in evaluation: one rank may do it alone
        model(batch(0, 0, 2, 5))
    return history


@pytest.mark.parametrize("attach", BOTH, ids=name_of)
def test_buffers_are_rank_0s_before_each_forward_and_after_each_backward(attach: Attach) -> None:
    first, second = run_ranks(_buffers, 2, attach)
    assert first == second
    assert first[1][0] == 500.0
    alone = Normalised()
    squares(alone, 0, 0)
    assert first[0][1] == pytest.approx(float(alone.norm.running_mean.sum()))  # type: ignore[union-attr]


def _two_modes(forgets: bool) -> list[float]:
    """A backward through a forward in training and one in evaluation, which it reaches first, on all ranks or some."""
    w = lockstep.init(timeout=20)
    model = Normalised()
    lockstep.replicate(model)
    sums = []
    for step in range(2):
        trained = squares(model, w.rank, step)
        model.eval()
        other = squares(model, w.rank, 10 + step)
        model.train()
        differentiate(trained if forgets and w.rank == 1 else trained + other)
        sums.append(float(model.norm.running_mean.sum()))  # type: ignore[union-attr]
    return sums


@pytest.mark.parametrize("forgets", [False, True])
def test_buffers_are_rank_0s_whichever_forward_a_backward_reaches_first(forgets: bool) -> None:
    first, second = run_ranks(_two_modes, 2, forgets)
    assert first == second


def _own_buffers() -> float:
    w = lockstep.init()
    model = lockstep.replicate(Normalised(), broadcast_buffers=False)
    differentiate(squares(model, w.rank, 0))
    return float(model.norm.running_mean.sum())  # type: ignore[union-attr]


def test_buffers_stay_each_ranks_own_if_asked() -> None:
    first, second = run_ranks(_own_buffers, 2)
    assert first != second


def _two_forwards_with_buffers() -> None:
    """Two forwards, one backward, and it again: sending buffers must not spoil what autograd saved."""
    w = lockstep.init()
    model = lockstep.replicate(Normalised())
    loss = squares(model, w.rank, 0) + squares(model, w.rank, 1)
    differentiate(loss, retain_graph=True)
    differentiate(loss)


def test_sending_buffers_does_not_spoil_a_second_backward() -> None:
    run_ranks(_two_forwards_with_buffers, 2)


# Join ---------------------------------------------------------------------------------------------------------------


class Growing(nn.Module):
    """Has a table as long as the longest batch so far, before the statistics in the order of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.body = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(self.table) < len(inputs):
            self.table = torch.arange(len(inputs), dtype=torch.float64)
        return cast(torch.Tensor, self.body(inputs) + self.table[: len(inputs), None])


def _grow_apart(extra: int) -> list[float]:
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(Growing())
    differentiate(model(torch.ones(4 + extra * world.rank, 3, dtype=torch.float64)).sum())
    return [float(value) for value in model.body[0].get_buffer("running_mean")]


@OVER_BOTH
def test_buffers_of_other_sizes_are_an_error_and_move_no_others(each_backend: str) -> None:
    assert run_ranks(_grow_apart, 2, 0) == [[0.1] * 3] * 2
    other = collect_outcomes(_grow_apart, 2, 2)[1]
    assert other.error == "CollectiveMismatch"
    if each_backend == "gloo":  # shm says so before anything is sent
        assert "rank 0 sent tensors of other shapes or dtypes than this rank's ([6] of torch.float64" in str(
            other.message
        )


def _uneven(attach: Attach, divide_by_initial: bool, build: Callable[[], nn.Module]) -> list[list[float]]:
    w = lockstep.init(timeout=20)
    model = attach(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    with lockstep.join(model, divide_by_initial_world_size=divide_by_initial):
        for step in range(2 + w.rank):
            optimizer.zero_grad()
            with lockstep.no_sync(model):
                differentiate(squares(model, w.rank, 100 + step))
            differentiate(squares(model, w.rank, step))
            optimizer.step()
            history.append([float(p.grad.sum()) for p in model.parameters() if p.grad is not None])
    history.append([float(value.double().sum()) for value in model.state_dict().values()])
    return history


def _uneven_by_hand(world_size: int, divide_by_initial: bool) -> list[list[float]]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for step in range(1 + world_size):
        ranks = [rank for rank in range(world_size) if step < 2 + rank]
        optimizer.zero_grad()
        for rank in ranks:
            loss = squares(model, rank, step) + squares(model, rank, 100 + step)
            differentiate(loss / (world_size if divide_by_initial else len(ranks)))
        optimizer.step()
        history.append([float(p.grad.sum()) for p in model.parameters() if p.grad is not None])
    history.append([float(value.sum()) for value in model.state_dict().values()])
    return history


@pytest.mark.parametrize("divide_by_initial", [True, False])
@pytest.mark.parametrize("attach", BOTH, ids=name_of)
def test_join_answers_for_ranks_that_have_run_out(attach: Attach, divide_by_initial: bool) -> None:
    (expected,) = run_ranks(_uneven_by_hand, 1, 3, divide_by_initial)
    for rank, history in enumerate(run_ranks(_uneven, 3, attach, divide_by_initial, mlp)):
        assert len(history) == 2 + rank + 1
        for got, by_hand in zip(history[:-1], expected, strict=False):
            assert got == pytest.approx(by_hand, rel=1e-12)
        assert history[-1] == pytest.approx(expected[-1], rel=1e-12)


def test_join_with_buffers_and_many_buckets() -> None:
    states = [history[-1] for history in run_ranks(_uneven, 3, replicate_tiny, True, Normalised)]
    assert states[0] == states[1] == states[2]


def _join_with_zero() -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    w = lockstep.init(timeout=20)
    model = lockstep.DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(1 + w.rank):
            optimizer.zero_grad()
            differentiate(squares(model, w.rank, step))
            optimizer.step()
    return [float(value.sum()) for value in model.state_dict().values()]


@OVER_BOTH
def test_join_together_with_another_joinable() -> None:
    first, second = run_ranks(_join_with_zero, 2)
    assert first == second


def _join_and_throw() -> None:
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp())
    with lockstep.join(model, throw_on_early_termination=True):
        for step in range(1 + w.rank):
            differentiate(squares(model, w.rank, step))


@OVER_BOTH
def test_join_can_stop_all_ranks_instead() -> None:
    first, second = collect_outcomes(_join_and_throw, 2)
    assert "Rank 0 exhausted all inputs" in str(first.message)
    assert "at least one rank that exhausted inputs" in str(second.message)


# Comm hooks ---------------------------------------------------------------------------------------------------------


def _with_hook(attach: Attach, hook: str, tolerance: float) -> None:
    w = lockstep.init()
    model = attach(mlp(torch.float32))

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        scores: Tensor = model(batch(rank, step, 4, 5, dtype=torch.float32)).square().mean()
        return scores

    lockstep.register_comm_hook(model, None, _hook_named(hook))
    for step in range(3):
        model.zero_grad()
        differentiate(loss(model, w.rank, step))
        assert_averaged(model, lambda: mlp(torch.float32), loss, [step], tolerance=tolerance)


@pytest.mark.parametrize("attach", BOTH, ids=name_of)
@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        ("fp16_compress_hook", 1e-2),
        ("bf16_compress_hook", 3e-2),
        ("torch.allreduce_hook", 1e-6),
        ("torch.fp16_compress_hook", 1e-2),
        ("torch.fp16_compress_wrapper", 1e-2),
    ],
)
def test_comm_hooks(attach: Attach, hook: str, tolerance: float) -> None:
    run_ranks(_with_hook, 2, attach, hook, tolerance)


def _hook_named(name: str) -> Any:
    """lockstep's hooks by their names, torch's by theirs after "torch."."""
    if not name.startswith("torch."):
        return getattr(lockstep, name)
    # Here and not above: importing torch's hooks warns of torch.jit's end.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if name == "torch.fp16_compress_wrapper":
        return default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    return getattr(default_hooks, name.removeprefix("torch."))


def _what_a_hook_sees() -> list[Any]:
    w = lockstep.init()
    model = replicate_tiny(mlp())
    seen: list[Any] = []

    def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        seen.append([state, bucket.index(), bucket.is_last(), bucket.buffer().numel()])
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        assert torch.equal(torch.cat([g.reshape(-1) for g in bucket.gradients()]), bucket.buffer())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 10.0 + bucket.index()))
        return future

    lockstep.register_comm_hook(model, "a state", hook)
    differentiate(squares(model, w.rank, 0))
    assert {float(p.grad.min()) for p in model.parameters() if p.grad is not None} == {
        10.0 + i for i in range(len(seen))
    }
    return seen


def test_a_hook_sees_buckets_in_order_and_its_result_is_the_gradient() -> None:
    first, second = run_ranks(_what_a_hook_sees, 2)
    assert first == second
    assert [entry[1] for entry in first] == list(range(len(first)))
    assert [entry[2] for entry in first] == [False] * (len(first) - 1) + [True]
    assert sum(entry[3] for entry in first) == sum(param.numel() for param in mlp().parameters())


def _power_sgd() -> list[float]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    w = lockstep.init()
    model = lockstep.replicate(mlp(torch.float32))
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    lockstep.register_comm_hook(model, state, powerSGD_hook)
    for step in range(4):
        model.zero_grad()
        model(batch(w.rank, step, 4, 5, dtype=torch.float32)).square().mean().backward()
    return [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]


@OVER_BOTH
def test_torchs_power_sgd_runs_on_lockstep() -> None:
    first, second = run_ranks(_power_sgd, 2)
    assert first == second


def _hook_and_unused() -> None:
    from tests.ranks.test_ddp_gradients import Branches, branching

    w = lockstep.init()
    model = lockstep.replicate(Branches(), find_unused_parameters=True)
    lockstep.register_comm_hook(model, None, _hook_named("torch.allreduce_hook"))
    for step in range(2):
        model.zero_grad()
        differentiate(branching(model, w.rank, step))
        assert_averaged(model, Branches, branching, [step])


def test_unused_parameters_with_a_comm_hook() -> None:
    run_ranks(_hook_and_unused, 2)


# Non-finite gradients -----------------------------------------------------------------------------------------------


def _non_finite(check: Any, hooked: bool) -> list[str]:
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp(), first_bucket_mb=1e-5, bucket_cap_mb=3e-4, check_finite=check)
    if hooked:
        lockstep.register_comm_hook(model, None, _hook_named("torch.allreduce_hook"))
    differentiate(squares(model, w.rank, 0))
    model.zero_grad()
    poisoned = model(batch(w.rank, 1, 4, 5)).square().mean()
    if w.rank == 1:
        *_, last_bias = model.parameters()
        last_bias.register_hook(lambda grad: grad * float("nan"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        poisoned.backward()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("check", ["warn", "skip"])
def test_a_non_finite_gradient_is_warned_about_where_it_is_and_on_rank_0(check: str) -> None:
    first, second, third = run_ranks(_non_finite, 3, check, False)
    assert (len(first), len(second), len(third)) == (1, 1, 0)
    assert "rank 0 of 3, step 2: infinite or NaN gradients before averaging: of '4.bias' on rank 1. " in first[0]
    assert "rank 1 of 3, step 2: infinite or NaN gradients before averaging: of '4.bias' on rank 1. " in second[0]


@pytest.mark.parametrize("hooked", [False, True])
def test_all_ranks_stop_at_a_non_finite_gradient(hooked: bool) -> None:
    first, second = collect_outcomes(_non_finite, 2, "raise", hooked)
    assert (first.error, second.error) == ("NonFiniteGradient", "NonFiniteGradient"), first.traceback
    for rank, outcome in enumerate((first, second)):
        place = f"rank {rank} of 2, step 2: infinite or NaN gradients before averaging: of '4.bias' on rank 1. Every"
        assert place in str(outcome.message)


def _skip(world_size: int, hooked: bool) -> None:
    """Steps 1 and 2 are bad, on different ranks, one after an accumulating backward. A run without them is equal."""
    w = lockstep.init(timeout=20)
    trained = []
    for bad_steps in ([1, 2], []):
        model = lockstep.replicate(mlp(), first_bucket_mb=1e-5, bucket_cap_mb=3e-4, check_finite="skip")
        if hooked:
            lockstep.register_comm_hook(model, None, _hook_named("torch.allreduce_hook"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for step in range(5) if bad_steps else (0, 3, 4):
            factor = float("inf") if step in bad_steps and w.rank == step % world_size else 1.0
            if step == 2:
                with lockstep.no_sync(model):
                    differentiate(squares(model, w.rank, step))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (squares(model, w.rank, step) * factor).backward()
            assert (model[0].weight.grad is None) == (step in bad_steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        trained.append([*model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_skipped_step_changes_nothing_on_any_rank(world_size: int, hooked: bool) -> None:
    run_ranks(_skip, world_size, world_size, hooked)


def _skip_for_ever() -> int:
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp(), check_finite="skip")
    steps = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for bad in [True] * 60 + [False] + [True] * 200:
            factor = float("nan") if bad and w.rank == 1 else 1.0
            try:
                (squares(model, w.rank, 0) * factor).backward()
            except lockstep.NonFiniteGradient as error:
                assert "the 100th step in a row that was skipped" in str(error)  # noqa: PT017  (inside a loop)
                return steps
            steps += 1
    return steps


def test_training_that_skips_every_step_is_an_error() -> None:
    assert run_ranks(_skip_for_ever, 2) == [160, 160]


def _non_finite_and_unused() -> None:
    """The gradient is in its bucket, as after any step; averaging three thirds of it would change its last bits."""
    from tests.ranks.test_ddp_gradients import Branches, branching

    w = lockstep.init(timeout=20)
    model = Branches()
    lockstep.replicate(model, find_unused_parameters=True, check_finite="raise")
    differentiate(branching(model, w.rank, 0) + model.idle.weight.sum())
    assert model.idle.weight.grad is not None
    before = batch(0, 0, 5, 5)
    model.idle.weight.grad.copy_(before)
    with pytest.raises(lockstep.NonFiniteGradient):
        differentiate(branching(model, w.rank, 1) * float("nan" if w.rank == 1 else 1))
    assert torch.equal(model.idle.weight.grad, before)


def test_unused_parameters_keep_their_gradient_when_another_is_not_finite() -> None:
    run_ranks(_non_finite_and_unused, 3)


class Bag(nn.Module):
    """An embedding with sparse gradients, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(11, 5, sparse=True, dtype=torch.float64)
        self.last = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.last(self.words(tokens))
        return scores


def _non_finite_sparse(check: Any, world_size: int) -> list[str]:
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(Bag(), check_finite=check)
    tokens = torch.arange(3) + w.rank
    differentiate(model(tokens).square().mean())
    model.zero_grad()
    if w.rank == world_size - 1:
        # Between the layers: the embedding's gradient is bad, the others' are not.
        model.words.register_forward_hook(lambda _m, _a, rows: Poison.apply(rows))  # type: ignore[no-untyped-call]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        differentiate(model(tokens).square().mean())
    return [str(warning.message) for warning in caught]


class Poison(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Any:
        return grads[0] * float("nan")


@pytest.mark.parametrize("check", ["warn", "skip"])
@OVER_BOTH
def test_a_non_finite_sparse_gradient_is_warned_about(check: str) -> None:
    for rank, caught in enumerate(run_ranks(_non_finite_sparse, 2, check, 2)):
        assert len(caught) == 1
        assert (
            f"rank {rank} of 2, step 2: infinite or NaN gradients before averaging: of 'words.weight' on rank 1. "
            in (caught[0])
        )


def test_all_ranks_stop_at_a_non_finite_sparse_gradient() -> None:
    first, second = collect_outcomes(_non_finite_sparse, 2, "raise", 2)
    assert (first.error, second.error) == ("NonFiniteGradient", "NonFiniteGradient"), first.traceback
    assert "rank 0 of 2, step 2: infinite or NaN gradients before averaging: of 'words.weight' on rank 1. Every" in str(
        first.message
    )
    assert "rank 1 of 2, step 2: infinite or NaN gradients before averaging: of 'words.weight' on rank 1. Every" in str(
        second.message
    )


def test_a_world_of_one_stops_at_a_non_finite_sparse_gradient() -> None:
    (outcome,) = collect_outcomes(_non_finite_sparse, 1, "raise", 1)
    assert outcome.error == "NonFiniteGradient", outcome.traceback


# Frozen, copied, failed ---------------------------------------------------------------------------------------------


def _freeze_and_thaw() -> None:
    w = lockstep.init()

    def build() -> nn.Sequential:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    model = lockstep.replicate(build(), bucket_cap_mb=3e-4)
    differentiate(squares(model, w.rank, 0))
    assert_averaged(model, build, squares, [0])
    model.zero_grad()
    model[0].requires_grad_(True)
    for step in (1, 2):
        model.zero_grad()
        differentiate(squares(model, w.rank, step))
        assert_averaged(model, mlp, squares, [step])
    model[0].requires_grad_(False)
    model.zero_grad()
    differentiate(squares(model, w.rank, 3))
    assert_averaged(model, build, squares, [3])


def test_parameters_may_be_frozen_and_thawed() -> None:
    run_ranks(_freeze_and_thaw, 2)


def _copies() -> None:
    w = lockstep.init(timeout=10)
    model = replicate_tiny(mlp())
    differentiate(squares(model, w.rank, 0))
    for plain in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  (our own bytes)
        if w.is_main:  # a copy is a plain module: rank 0 may train it alone
            plain.zero_grad()
            differentiate(squares(plain, 5, 5))
    file = io.BytesIO()
    torch.save(model, file)
    model.zero_grad()
    differentiate(squares(model, w.rank, 1))
    assert_averaged(model, mlp, squares, [1])


def test_a_copy_of_a_replica_is_a_plain_module() -> None:
    run_ranks(_copies, 2)


def _copied_wrapper() -> None:
    w = lockstep.init()
    model = wrap_tiny(mlp())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  (our own bytes)
        assert isinstance(again, lockstep.DistributedDataParallel)
        differentiate(squares(again, w.rank, 2))
        assert_averaged(again, mlp, squares, [2])
    other = lockstep.DistributedDataParallel(mlp(), process_group=dist.new_group([0, 1]))
    with pytest.raises(RuntimeError, match="only if it uses the default process group"):
        pickle.dumps(other)


def test_a_copy_of_the_wrapper_is_a_replica_as_in_torch() -> None:
    run_ranks(_copied_wrapper, 2)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(*_: Any) -> Any:
        raise ZeroDivisionError("in backward")


def _errors_in_between() -> None:
    w = lockstep.init()
    model = lockstep.replicate(mlp(), first_bucket_mb=1e-5, bucket_cap_mb=3e-4)
    for step in range(3):
        squares(model, w.rank, 50)  # a forward whose backward never comes
        model.zero_grad()
        hidden = model[:3](batch(w.rank, step, 4, 5))
        failing = model[3:](Fails.apply(hidden))  # type: ignore[no-untyped-call]
        with pytest.raises(ZeroDivisionError):
            failing.square().mean().backward()
        model.zero_grad()
        differentiate(squares(model, w.rank, step))
        assert_averaged(model, mlp, squares, [step])


def test_an_error_in_forward_or_backward_leaves_nothing_behind() -> None:
    run_ranks(_errors_in_between, 2)


def _peer_dies() -> None:
    w = lockstep.init(timeout=30)
    model = replicate_tiny(mlp())
    differentiate(squares(model, w.rank, 0))
    if w.rank == 1:
        os._exit(7)
    differentiate(squares(model, w.rank, 1))


@OVER_BOTH
def test_a_lost_peer_is_named_with_step_and_bucket() -> None:
    outcomes: list[Outcome] = collect_outcomes(_peer_dies, 2)
    assert outcomes[0].error == "PeerLost", outcomes[0].traceback
    assert "rank 0 of 2, step 2: averaging bucket 0 of" in str(outcomes[0].message)
    assert "'4.bias'" in str(outcomes[0].message)
    assert outcomes[1].exit_code == 7


def _late_peer(fifo: str) -> None:
    w = lockstep.init(timeout=60)
    model = replicate_tiny(mlp())
    w.barrier()
    w.group.set_timeout(timedelta(seconds=1))
    if w.rank == 1:
        with open(fifo) as wait_for_rank_0:
            wait_for_rank_0.read()
        return
    try:
        differentiate(squares(model, w.rank, 1))
    finally:
        with open(fifo, "w"):
            pass


@OVER_BOTH
def test_a_late_peer_is_a_timeout(tmp_path: Any) -> None:
    fifo = tmp_path / "rank-0-is-done"
    os.mkfifo(fifo)
    outcome = collect_outcomes(_late_peer, 2, str(fifo))[0]
    assert outcome.error == "CollectiveTimeout", outcome.traceback
    assert "rank 0 of 2, step 1: averaging " in str(outcome.message)


def _world_of_one() -> None:
    lockstep.init()
    model = lockstep.replicate(mlp())
    loss = squares(model, 0, 0)
    differentiate(loss)
    alone = mlp()
    differentiate(squares(alone, 0, 0))
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_a_world_of_one_gets_exactly_its_own_gradients() -> None:
    run_ranks(_world_of_one, 1)


# An optimizer inside backward ---------------------------------------------------------------------------------------


def _step_inside_backward(hooked: str) -> None:
    """Rank 0, which sends the buffers, steps inside backward; the other rank must get all it waits for."""
    w = lockstep.init(timeout=20)
    model = Normalised()
    layer = model.net.get_submodule("2")

    def step_and_clear(param: Tensor) -> None:
        if w.is_main and steps:
            with torch.no_grad():
                param -= 0.1 * param.grad  # type: ignore[operator]
            param.grad = None

    steps: list[int] = []
    if hooked == "before":
        layer.get_parameter("weight").register_post_accumulate_grad_hook(step_and_clear)
    lockstep.replicate(model, first_bucket_mb=1e-5, bucket_cap_mb=3e-4, compare_every=None)
    if hooked == "after":
        layer.get_parameter("weight").register_post_accumulate_grad_hook(step_and_clear)
    differentiate(squares(model, w.rank, 0))
    steps.append(0)
    differentiate(squares(model, w.rank, 1))


@pytest.mark.parametrize("hooked", ["before", "after"])
def test_an_optimizer_that_steps_inside_backward_is_an_error(hooked: str) -> None:
    first, second = collect_outcomes(_step_inside_backward, 2, hooked)
    assert first.error == "LockstepError", first.traceback
    assert "rank 0 of 2, step 2: the gradient of parameter 'net.2.weight' was removed" in str(first.message)
    assert "let the optimizer step after backward" in str(first.message)
    assert second.ok, second.traceback


class OneOrBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(1, 1, bias=False)
        self.other = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        scores: Tensor = self.one(x) + self.other(x) if both else self.one(x)
        return scores


def _discarded_after_accumulation() -> list[Any]:
    """Rank 1 has an empty batch after one that counted: a first gradient that comes to nothing, and is no mistake."""
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(OneOrBoth())
    w.share = lockstep.BatchShare(1, 2)
    with lockstep.no_sync(model):
        differentiate(model(torch.ones(1, 1), False).sum())
    w.share = lockstep.BatchShare(2 - 2 * w.rank, 2)
    differentiate(model(torch.ones(1, 1), True).sum())
    return [None if grad is None else float(grad) for grad in gradients(model).values()]


def test_gradients_of_an_empty_batch_after_accumulation_are_no_mistake() -> None:
    assert run_ranks(_discarded_after_accumulation, 2) == [[2.0, 1.0]] * 2


def _changed_after_replicate(how: str) -> None:
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    if how == "head":
        model[1] = nn.Linear(4, 3)
    elif how == "added":
        model.append(nn.Linear(2, 2))
    elif how == "parameter":
        model[0].weight = nn.Parameter(torch.ones(4, 4))
    else:
        model.double()
    dtype = torch.float64 if how == "double" else torch.float32
    model(torch.full((2, 4), float(w.rank + 1), dtype=dtype)).sum().backward()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("head", "parameter '1.weight' was added or replaced after replicate"),
        ("added", "parameter '2.weight' was added or replaced after replicate"),
        ("parameter", "parameter '0.weight' was added or replaced after replicate"),
        ("double", "parameter '0.weight' was torch.float32 and is torch.float64: it was converted after replicate"),
    ],
)
def test_a_model_that_changed_after_replicate_is_refused_on_every_rank(how: str, text: str) -> None:
    for outcome in collect_outcomes(_changed_after_replicate, 2, how):
        assert outcome.error == "LockstepError"
        assert text in str(outcome.message)
