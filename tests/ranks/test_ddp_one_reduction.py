"""Replicas over a backend that reduces in place: one reduction at the end, in the group's memory."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.ddp.api import replica_of
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.ddp_cases import averages, batch, differentiate, mlp, squares, wide

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


def _close(model: nn.Module, expected: dict[str, Tensor | None]) -> None:
    for name, param in model.named_parameters():
        want = expected[name]
        assert (param.grad is None) == (want is None), name
        if param.grad is not None and want is not None:
            torch.testing.assert_close(param.grad, want, rtol=1e-12, atol=1e-12, msg=name)


def _one_reduction() -> None:
    world = lockstep.init("shm")
    model = nn.Sequential(wide(), nn.Linear(3, 2))  # two dtypes: the second part is float32
    model[0].register_forward_hook(lambda _module, _inputs, output: output.float())
    lockstep.replicate(model, bucket_cap_mb=1e-4)
    buckets = replica_of(model).reducer.buckets
    assert [bucket.flat.dtype for bucket in buckets] == [torch.float32, torch.float64]
    for bucket in buckets:
        assert world.group._shm_group.engine.find(bucket.message) is not None  # type: ignore[attr-defined]
    for step in range(3):
        model.zero_grad()
        differentiate(model(batch(world.rank, step, 4, 5)).square().mean())
        for bucket in buckets:
            for param in bucket.params:
                assert param.grad is not None
                start = bucket.flat.data_ptr()
                assert start <= param.grad.data_ptr() < start + bucket.flat.nbytes


def test_buckets_lie_in_shared_memory_and_gradients_in_them() -> None:
    run_ranks(_one_reduction, 2)


def _accumulated(set_to_none: bool) -> None:
    world = lockstep.init("shm")
    model = lockstep.replicate(wide())
    for step in range(3):
        model.zero_grad(set_to_none)
        with lockstep.no_sync(model):
            differentiate(squares(model, world.rank, 10 * step))
        differentiate(squares(model, world.rank, 10 * step + 1))
        _close(model, averages(wide, squares, world.world_size, [10 * step, 10 * step + 1]))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_whether_zeroed_or_gone(set_to_none: bool) -> None:
    run_ranks(_accumulated, 3, set_to_none)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.always, self.sometimes = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        output: Tensor = self.always(inputs)
        return output + self.sometimes(inputs) if both else output

    def encode(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.sometimes(inputs)
        return output


def _unused_for_a_while() -> None:
    world = lockstep.init("shm")
    model = lockstep.replicate(_Branches(), find_unused_parameters=True)
    users = [[0, 1], [], [1], [], [0]]  # the ranks that use the second branch, step by step

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        result: Tensor = module(batch(rank, step, 4, 5), rank in users[step]).square().mean()
        return result

    for step in range(len(users)):
        model.zero_grad()
        differentiate(loss(model, world.rank, step))
        _close(model, averages(_Branches, loss, world.world_size, [step]))


def test_parameters_that_get_no_gradient_for_a_while() -> None:
    run_ranks(_unused_for_a_while, 2)


def _penalised(module: nn.Module, rank: int, step: int) -> Tensor:
    """Every third step has a penalty on the inputs' gradient; its backward does not come through the outputs."""
    inputs = batch(rank, step, 4, 5).requires_grad_()
    loss: Tensor = module(inputs).square().mean()
    if step % 3 == 2:
        differentiate(loss, retain_graph=True)
        (slope,) = torch.autograd.grad(module(inputs).sum(), inputs, create_graph=True)
        return (slope.square().sum(1) - 1).square().mean()
    return loss


def _penalty() -> None:
    world = lockstep.init("shm")
    for build in (mlp, wide):
        model = lockstep.replicate(build())
        for step in range(7):
            model.zero_grad()
            differentiate(_penalised(model, world.rank, step))
            _close(model, averages(build, _penalised, world.world_size, [step]))


def test_a_backward_that_does_not_come_through_the_outputs_is_averaged() -> None:
    run_ranks(_penalty, 2)


def _changed(how: str) -> None:
    world = lockstep.init("shm")
    model = lockstep.replicate(wide().float())
    for step in range(3):
        differentiate(model(batch(world.rank, step, 4, 5).float()).square().mean())
    if how == "converted":
        model.double()
    else:
        model.load_state_dict({name: value.double() for name, value in model.state_dict().items()}, assign=True)
    differentiate(model(batch(world.rank, 3, 4, 5)).square().mean())


@pytest.mark.parametrize(("how", "text"), [("converted", "it was converted"), ("replaced", "was added or replaced")])
def test_parameters_that_are_changed_later_are_found_at_the_next_backward(how: str, text: str) -> None:
    for outcome in collect_outcomes(_changed, 2, how):
        assert outcome.error == "LockstepError", outcome.traceback
        assert "parameter '0.weight'" in str(outcome.message)
        assert text in str(outcome.message)


class _Stumble(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: object, *_: Tensor) -> Tensor:
        raise ArithmeticError("stumbled")


def _one_rank_stumbles() -> None:
    world = lockstep.init("shm", timeout=20)
    model = lockstep.replicate(mlp())
    for step in range(3):
        loss = squares(model, world.rank, step)
        if step == 1 and world.rank == 1:
            inputs = _Stumble.apply(batch(1, 1, 4, 5).requires_grad_())  # type: ignore[no-untyped-call]
            with pytest.raises(ArithmeticError):
                differentiate(model(inputs).square().mean())
            continue
        differentiate(loss)


def test_backwards_of_different_steps_are_told_apart() -> None:
    for outcome in collect_outcomes(_one_rank_stumbles, 2):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        assert "[backward 2 of each 16, bucket 0 of 1" in str(outcome.message)
        assert "[backward 3 of each 16, after 1 forward without a backward, bucket 0 of 1" in str(outcome.message)


def _overlapped() -> None:
    world = lockstep.init("shm")
    model = lockstep.replicate(mlp(), first_bucket_mb=1e-5, bucket_cap_mb=3e-4, overlap=True)
    assert len(replica_of(model).reducer.buckets) > 2
    for step in range(3):
        model.zero_grad()
        differentiate(squares(model, world.rank, step))
        _close(model, averages(mlp, squares, world.world_size, [step]))


def test_overlap_can_be_asked_for() -> None:
    run_ranks(_overlapped, 2)


def _no_memory() -> None:
    lockstep.init("shm", timeout=20)
    if torch.distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    group = torch.distributed.group.WORLD
    with pytest.raises(lockstep.RendezvousError, match=r"no shared memory of|rank.s. .1. could not make"):
        group.allocate_tensor(1 << 20, dtype=torch.float32)  # type: ignore[union-attr]
    small = group.allocate_tensor(100, dtype=torch.float32)  # type: ignore[union-attr]
    torch.distributed.all_reduce(small.fill_(1))
    assert small.tolist() == [2.0] * 100


def test_memory_that_one_rank_has_not_is_an_error_on_all_and_the_group_goes_on() -> None:
    run_ranks(_no_memory, 2)


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:lockstep")


def _come_and_go() -> None:
    world = lockstep.init("shm")
    before = _mapped()
    for step in range(5):
        model = lockstep.replicate(wide())
        differentiate(squares(model, world.rank, step))
        assert _mapped() == before + world.world_size
        del model
        gc.collect()
        world.all_reduce(1)  # the other ranks' parts go at the next all-reduce
        assert _mapped() == before, step
    kept = lockstep.replicate(wide())
    differentiate(squares(kept, world.rank, 0))
    lockstep.shutdown()
    for param in kept.parameters():
        assert param.grad is not None
        param.grad.mul_(2)  # a tensor like any other once the group is gone


def test_memory_goes_with_the_replica() -> None:
    run_ranks(_come_and_go, 2)
