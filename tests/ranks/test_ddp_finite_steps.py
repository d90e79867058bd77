"""An average that is not finite never reaches the parameters; scripts that look themselves are left alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.ddp.finite import MOST_SKIPPED
from tests.backends import EACH_BACKEND, OVER_BOTH
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.ddp_cases import batch, differentiate, mlp, replicate_tiny, squares, wide

pytestmark = EACH_BACKEND

#: Steps that the rank W - 1 spoils.
BAD = (2, 3)


def _hooked(model: nn.Module) -> nn.Module:
    model = lockstep.replicate(model)
    lockstep.register_comm_hook(model, None, lockstep.bf16_compress_hook)
    return model


def _overlapped(model: nn.Module) -> nn.Module:
    return lockstep.replicate(model, overlap=True)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lockstep.replicate,
    "buckets": replicate_tiny,
    "overlapped": _overlapped,
    "wrapped": lambda model: lockstep.DistributedDataParallel(model),
    "hooked": _hooked,
}


def _snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for param in model.parameters() for value in optimizer.state[param].values()]
    return [torch.as_tensor(value).clone() for value in [*model.parameters(), *states]]


def _equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _steps(way: str, make: str, bad: tuple[int, ...], *, accumulates: bool = False) -> tuple[list[Tensor], list[str]]:
    """Train six steps, of which those in ``bad`` are spoiled on the last rank in the one parameter '2.weight'."""
    w = lockstep.world()
    model = WAYS[way](wide())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.1, weight_decay=0.5, fused=make == "fused" or None, foreach=make == "foreach" or None
    )
    weight = next(param for name, param in model.named_parameters() if name.endswith("2.weight"))
    spoils = False
    weight.register_hook(lambda grad: grad * float("inf") if spoils else grad)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            spoils = step in bad and w.rank == w.world_size - 1
            if step in (2, 3) and not bad:
                continue
            if accumulates:
                with lockstep.no_sync(model):
                    differentiate(squares(model, w.rank, step + 10))
            differentiate(squares(model, w.rank, step))
            before = _snapshot(model, optimizer)
            optimizer.step()
            assert _equal(before, _snapshot(model, optimizer)) == (step in bad)
            if step in bad:  # as torch's DDP leaves it, before the step and after
                assert weight.grad is not None
                assert not bool(weight.grad.isfinite().all())
    return _snapshot(model, optimizer), [str(each.message) for each in caught if each.category is RuntimeWarning]


def _lost_parameters() -> list[str]:
    """Something else than an average spoils a parameter, alike on all ranks."""
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(wide())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            optimizer.zero_grad()
            differentiate(squares(model, w.rank, step))
            optimizer.step()
            with torch.no_grad():
                model.get_parameter("2.weight").fill_(float("nan"))
    return [str(each.message) for each in caught if each.category is RuntimeWarning]


@OVER_BOTH
def test_parameters_that_are_lost_are_told_from_gradients_of_one_step() -> None:
    for (said,) in run_ranks(_lost_parameters, 2):
        assert "This step of SGD was left out on every rank" in said
        assert "Parameters hold infinite or NaN values themselves: '2.weight'. If they should not" in said
        assert "no step can help any more: resume from a checkpoint" in said


def _bad_on(bad: tuple[int, ...], check: Any) -> str:
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(wide(), check_finite=check)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = squares(model, w.rank, 0)
        differentiate(loss * float("nan") if w.rank in bad else loss)
        optimizer.step()
    return " ".join(str(each.message) for each in caught if each.category is RuntimeWarning)


@pytest.mark.parametrize("check", ["step", "warn"])
@pytest.mark.parametrize("bad", [(0,), (2,), (0, 1), (0, 1, 2), (1, 2)])
def test_no_rank_is_cleared_whose_gradients_are_not_finite(bad: tuple[int, ...], check: str) -> None:
    """Where all of several ranks' values are NaN, rank 0 is named, or said to be one perhaps."""
    said = run_ranks(_bad_on, 3, bad, check)[0]
    for rank in range(3):
        is_open = rank == 0 and "Rank 0 may have had such gradients" in said
        assert (f" on rank {rank}" in said) == (rank in bad) or is_open, said
    assert check == "step" or "may have" not in said


def _leaves_out(way: str, make: str, accumulates: bool) -> list[str]:
    lockstep.init(timeout=20)
    trained, said = _steps(way, make, BAD, accumulates=accumulates)
    assert _equal(trained, _steps(way, make, (), accumulates=accumulates)[0])  # as if there had been no such steps
    return said


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("way", sorted(WAYS))
@OVER_BOTH
def test_a_step_with_an_average_that_is_not_finite_is_left_out(way: str, world_size: int) -> None:
    said = run_ranks(_leaves_out, world_size, way, "plain", False)
    last = world_size - 1
    for rank, texts in enumerate(said):
        assert len(texts) == (2 if rank in (0, last) else 0), texts
        for step, text in zip(BAD, texts, strict=False):
            assert f"rank {rank} of {world_size}, step {step + 1}: the averaged gradients are infinite or NaN" in text
            assert f"2.weight' on rank {last} are. This step of AdamW was left out on every rank" in text


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("make", ["foreach", "fused"])
def test_whatever_the_optimizer_and_also_after_accumulation(make: str, accumulates: bool) -> None:
    run_ranks(_leaves_out, 2, "plain", make, accumulates)


def test_a_world_of_one_too() -> None:
    (said,) = run_ranks(_leaves_out, 1, "plain", "plain", True)
    assert len(said) == 2
    assert "because the gradients of '2.weight' on rank 0 are. " in said[0]


class _Kinds(nn.Module):
    """With parameters of many dtypes, small and large, strided in another order, and without elements."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((3,), (200, 200), (2, 3, 4, 5), (0,))
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
        self.all = nn.ParameterList(torch.ones(shape, dtype=dtype) for shape in shapes for dtype in dtypes)
        for param in self.all:
            if param.dim() == 4:
                param.data = param.data.to(memory_format=torch.channels_last)
        self.words = nn.Embedding(5, 3, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        terms = [(torch.view_as_real(each) if each.is_complex() else each).double().square() for each in self.all]
        return sum((term.mean() for term in terms if term.numel()), self.words(tokens).double().square().mean())


def _kinds() -> None:
    lockstep.init()
    model = lockstep.replicate(_Kinds())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = [param for param in model.parameters() if param.numel()]
    for bad in [None, *whole]:
        optimizer.zero_grad()
        differentiate(model(torch.arange(3)))
        if bad is not None:
            assert bad.grad is not None
            values = bad.grad._values() if bad.grad.is_sparse else bad.grad
            values[-1] = float("nan")
        before = [param.detach().clone() for param in whole]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if bad is not None else "error", RuntimeWarning)
            optimizer.step()
        same = [torch.equal(one, two) for one, two in zip(before, whole, strict=True)]
        assert all(same) == (bad is not None)


def test_gradients_of_all_kinds_are_looked_at() -> None:
    run_ranks(_kinds, 1)


def _in_slices() -> list[str]:
    w = lockstep.init(timeout=20)
    data = TensorDataset(batch(0, 0, 24, 5), torch.arange(24))
    loader = lockstep.shard(DataLoader(data, batch_size=6), slices=3)
    model = lockstep.replicate(mlp())
    optimizer, taken = torch.optim.AdamW(model.parameters(), lr=0.1), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in loader.steps():
            optimizer.zero_grad()
            for inputs, numbers in step:
                factor = float("nan") if 8 in numbers else 1.0
                differentiate(model(inputs).square().mean() * factor)
            before = _snapshot(model, optimizer)
            optimizer.step()
            taken.append(not _equal(before, _snapshot(model, optimizer)))
    assert taken == [True, False, True, True]
    return [str(each.message) for each in caught if each.category is RuntimeWarning] if w.rank == 0 else []


@pytest.mark.parametrize("world_size", [1, 2])
@OVER_BOTH
def test_steps_in_slices_too(world_size: int) -> None:
    said = run_ranks(_in_slices, world_size)[0]
    assert len(said) == 1
    assert "epoch 0, batch 1: the averaged gradients are infinite or NaN" in said[0]


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(11, 5, sparse=True)
        self.last = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.last(self.words(tokens))
        return scores


def _sparse() -> list[str]:
    """Two optimizers hold the parts of one model: only that with the bad gradients leaves its step out."""
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(_Bag())
    optimizers = [torch.optim.SparseAdam(model.words.parameters(), lr=0.1), torch.optim.SGD(model.last.parameters())]
    spoils = False
    model.words.weight.register_hook(lambda grad: grad * float("nan") if spoils else grad)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            model.zero_grad()
            spoils = step == 1 and w.rank == 1
            differentiate(model(torch.arange(3) + w.rank).square().mean())
            before = [param.detach().clone() for param in model.parameters()]
            for optimizer in optimizers:
                optimizer.step()
            same = [torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True)]
            assert same == [step == 1, False, False]
    return [str(each.message) for each in caught if each.category is RuntimeWarning]


@OVER_BOTH
def test_sparse_gradients_and_several_optimizers() -> None:
    for texts in run_ranks(_sparse, 2):
        assert len(texts) == 1
        assert "because the gradients of 'words.weight' on rank 1 are. This step of SparseAdam" in texts[0]


def _scripts_that_look_themselves() -> None:
    w = lockstep.init(timeout=20)

    def train(act: Callable[[nn.Module, Any], None], *, steps: int = 3) -> nn.Module:
        model = lockstep.replicate(mlp(torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(batch(w.rank, step, 4, 5, dtype=torch.float32)).square().mean()
            differentiate(loss * (float("nan") if step == 1 and w.rank == 1 else 1.0))
            act(model, optimizer)
        return model

    def sanitise(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.nan_to_num_(0.5)
        optimizer.step()

    def look(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if bool(norm.isfinite()):
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # neither is told anything
        for act in (sanitise, look):
            for param in train(act).parameters():
                assert bool(param.isfinite().all())


def test_scripts_that_look_themselves_are_left_alone() -> None:
    run_ranks(_scripts_that_look_themselves, 2)


def _scaled(fused: bool) -> None:
    """GradScaler finds an overflow, leaves the step out and halves its scale; the next step is taken."""
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            optimizer.zero_grad()
            loss = model(batch(w.rank, step, 4, 5, dtype=torch.float32)).square().mean()
            scaler.scale(loss * (float("inf") if step == 1 and w.rank == 1 else 1.0)).backward()
            before = [param.detach().clone() for param in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            same = [torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True)]
            assert all(same) == (step == 1)
            assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_sees_what_it_sees_without_lockstep(fused: bool) -> None:
    run_ranks(_scaled, 2, fused)


def _with_closures() -> None:
    w = lockstep.init(timeout=20)
    for make in (torch.optim.SGD, torch.optim.LBFGS):
        model = lockstep.replicate(mlp())
        optimizer = make(model.parameters(), lr=0.1)
        for step in range(3):

            def closure(step: int = step, model: nn.Module = model, optimizer: Any = optimizer) -> float:
                optimizer.zero_grad()
                loss = squares(model, w.rank, step) * (float("nan") if step == 1 and w.rank == 1 else 1.0)
                differentiate(loss)
                return float(w.mean(loss))  # LBFGS goes by it

            before = [param.detach().clone() for param in model.parameters()]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step(closure)  # type: ignore[no-untyped-call]
            same = [torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True)]
            assert all(same) == (step == 1), make
            assert any("was left out" in str(each.message) for each in caught) == (step == 1)


def test_closures_that_run_the_backward_inside_the_step() -> None:
    run_ranks(_with_closures, 2)


def _for_ever() -> int:
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp())
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2:])]
    steps = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for bad in [True] * 60 + [False] + [True] * 200:
            model.zero_grad()
            differentiate(squares(model, w.rank, 0) * (float("nan") if bad and w.rank == 1 else 1.0))
            try:
                for optimizer in optimizers:
                    optimizer.step()
            except lockstep.NonFiniteGradient as error:
                assert f"the {MOST_SKIPPED}th step in a row to be left out" in str(error)  # noqa: PT017
                return steps
            steps += 1
    return steps


def test_training_that_leaves_every_step_out_is_an_error() -> None:
    assert run_ranks(_for_ever, 2) == [61 + MOST_SKIPPED - 1] * 2


def _by_hand() -> None:
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp())
    for step in range(4):
        model.zero_grad()
        differentiate(squares(model, w.rank, step) * (float("nan") if step == 1 and w.rank == 1 else 1.0))
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param.sub_(0.1 * param.grad)
    raise AssertionError("nothing was noticed")


@OVER_BOTH
def test_parameters_that_were_stepped_by_hand_are_found_in_the_next_backward() -> None:
    for rank, outcome in enumerate(collect_outcomes(_by_hand, 2)):
        assert outcome.error == "NonFiniteGradient", outcome.traceback
        assert f"rank {rank} of 2, step 3: an average of gradients was infinite or NaN" in str(outcome.message)
        assert "step 2: of '0.bias'" in str(outcome.message)
        assert "it has reached the parameters: '0.weight'" in str(outcome.message)


class _Forbidding(nn.Module):
    """With a parameter that is infinite on purpose: a transition that is forbidden."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.transitions = nn.Parameter(torch.tensor([[0.0, -torch.inf], [1.0, 2.0]], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.net(x).mean() * self.transitions.softmax(1)
        return scores


def _forbids(by_hand: bool) -> None:
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(_Forbidding())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(batch(w.rank, step, 4, 5)).square().mean()
        differentiate(loss * (float("inf") if step == 1 and w.rank == 1 else 1.0))
        if by_hand:
            with torch.no_grad():
                for param in model.parameters():
                    assert param.grad is not None
                    param.sub_(0.1 * param.grad)
        elif step != 1:  # its script has looked, as a GradScaler does
            optimizer.step()


@OVER_BOTH
def test_parameters_that_are_infinite_on_purpose_have_not_been_reached() -> None:
    run_ranks(_forbids, 2, False)
    for outcome in collect_outcomes(_forbids, 2, True):
        assert outcome.error == "NonFiniteGradient", outcome.traceback
        assert "it has reached the parameters: 'net.0.weight'" in str(outcome.message)


def _sharded_state() -> None:
    """Each rank's inner optimizer holds a part of the parameters: what is decided is the same on all all the same."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    spoils = False
    next(model.parameters()).register_hook(lambda grad: grad * float("nan") if spoils else grad)
    for step in range(3):
        optimizer.zero_grad()
        spoils = step == 1 and w.rank == 1
        differentiate(squares(model, w.rank, step))
        before = copy.deepcopy([*model.parameters()])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        assert _equal([*before], [*model.parameters()]) == (step == 1)


def test_an_optimizer_whose_state_is_shared_out() -> None:
    run_ranks(_sharded_state, 2)


def _off() -> bool:
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp(), check_finite="off", compare_every=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    differentiate(squares(model, w.rank, 0) * (float("nan") if w.rank == 1 else 1.0))
    optimizer.step()
    return bool(next(model.parameters()).isnan().any())


def test_off_looks_at_nothing() -> None:
    assert run_ranks(_off, 2) == [True, True]
