"""The reducer, driven by made-up events: no autograd, but real ranks and a real backend."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import lockstep
from lockstep.ddp.absent import AbsentGradients
from lockstep.ddp.backward import Backward
from lockstep.ddp.bucket import SMALL, Bucket
from lockstep.ddp.comm_hooks import GradBucket
from lockstep.ddp.reducer import Reducer
from tests.harness import run_ranks

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


def _reducer(
    *,
    overlap: bool = True,
    as_view: bool = True,
    sizes: tuple[int, ...] = (2, 3, 4, 5),
    absent: AbsentGradients | None = None,
) -> Reducer:
    """Parameters 0, 1, 2, 3; buckets (3,), (2, 1), (0,)."""
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    plan = [(3,), (2, 1), (0,)]
    buckets = [Bucket(index, chosen, [params[i] for i in chosen]) for index, chosen in enumerate(plan)]
    return Reducer(
        params,
        [f"p{i}" for i in range(4)],
        buckets=buckets,
        group=lockstep.world().group,
        overlap=overlap,
        as_view=as_view,
        absent=absent,
    )


@torch.no_grad()  # as inside a backward
def _deliver(reducer: Reducer, order: list[int], step: int) -> list[int]:
    """Give each parameter a gradient unique to rank, step and element; how many buckets were launched after each."""
    launched = []
    for position in order:
        param = reducer.params[position]
        new = torch.arange(float(param.numel())) + 100 * position + 1000 * lockstep.world().rank + 10_000 * step
        param.grad = new if param.grad is None else param.grad + new
        reducer.ready_hook(position)(None)
        assert reducer.backward is not None
        launched.append(reducer.backward.next)
    return launched


def _assert_averages(reducer: Reducer, step: int, times: int = 1) -> None:
    world_size = lockstep.world().world_size
    for position, param in enumerate(reducer.params):
        ranks = torch.arange(float(world_size)).mean() * 1000
        expected = (torch.arange(float(param.numel())) + 100 * position + ranks + 10_000 * step) * times
        assert param.grad is not None
        assert torch.allclose(param.grad, expected), (position, param.grad, expected)


def _orders() -> list[list[int]]:
    w = lockstep.init()
    reducer = _reducer()
    orders = [[3, 2, 1, 0], [3, 2, 1, 0], [0, 1, 2, 3], [2, 0, 3, 1], [1, 3, 0, 2]]
    launches = []
    for step, order in enumerate(orders):
        for param in reducer.params:
            param.grad = None
        mine = order if w.rank == 0 else list(reversed(order))  # another order on another rank
        reducer.begin(sync=True)
        launches.append(_deliver(reducer, mine, step))
        assert reducer.backward is not None
        assert reducer.finish().mistake is None
        assert reducer.backward is None
        assert reducer.step == step + 1
        _assert_averages(reducer, step)
    return launches


def test_buckets_are_launched_in_order_whatever_the_order_of_gradients() -> None:
    first, second = run_ranks(_orders, 2)
    assert first == [
        [0, 0, 0, 0],  # the first step only learns
        [1, 1, 2, 2],  # the last bucket waits for the end
        [0, 0, 0, 2],
        [0, 0, 1, 2],
        [0, 1, 1, 2],
    ]
    assert second == [[0, 0, 0, 0], [0, 0, 0, 2], [1, 1, 2, 2], [0, 1, 1, 2], [0, 0, 1, 2]]


def _no_overlap() -> list[list[int]]:
    lockstep.init()
    reducer = _reducer(overlap=False)
    launches = []
    for step in range(2):
        for param in reducer.params:
            param.grad = None
        reducer.begin(sync=True)
        launches.append(_deliver(reducer, [3, 2, 1, 0], step))
        assert reducer.finish().mistake is None
        _assert_averages(reducer, step)
    return launches


def test_without_overlap_everything_is_launched_at_the_end() -> None:
    assert run_ranks(_no_overlap, 2) == [[[0, 0, 0, 0], [0, 0, 0, 0]]] * 2


def _portions() -> list[list[int]]:
    """Parameter 2 gets its gradient in two portions from the first step on."""
    lockstep.init()
    reducer = _reducer()
    launches = []
    for step in range(3):
        for param in reducer.params:
            param.grad = None
        reducer.begin(sync=True)
        launches.append(_deliver(reducer, [3, 2, 1], step) + _deliver(reducer, [2, 0], step))
        reducer.params[2].grad /= 2  # type: ignore[operator, assignment]
        assert reducer.finish().mistake is None
        _assert_averages(reducer, step)
    return launches


def test_a_parameter_with_several_portions_is_sent_at_the_end_from_then_on() -> None:
    assert run_ranks(_portions, 2) == [[[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]] * 2


class _Expected(AbsentGradients):
    """Predicts what it is told to, without autograd."""

    def __init__(self, positions: set[int]) -> None:
        super().__init__([])
        self.positions = positions

    def expect(self) -> set[int]:
        return self.positions


def _predicted_earlier() -> list[list[int]]:
    """Parameter 2 is absent from an averaged backward; the next one begins as one that does not average."""
    lockstep.init()
    reducer = _reducer(absent=_Expected({2}))
    launches = []
    for step, order in enumerate([[3, 2, 1, 0], [3, 1, 0]]):
        for param in reducer.params:
            param.grad = None
        reducer.begin(sync=True)
        launches.append(_deliver(reducer, order, step))
        assert reducer.finish().mistake is None
    for param in reducer.params:
        param.grad = None
    reducer.begin(sync=False)
    reducer.require_sync()
    launches.append(_deliver(reducer, [3, 1], 2) + _deliver(reducer, [1, 2, 0], 2))
    reducer.params[1].grad /= 2  # type: ignore[operator, assignment]
    assert reducer.finish().mistake is None
    _assert_averages(reducer, 2)
    return launches


def test_what_an_earlier_backward_did_not_expect_is_waited_for() -> None:
    assert run_ranks(_predicted_earlier, 2) == [[[0, 0, 0, 0], [1, 2, 2], [1, 1, 1, 1, 1]]] * 2


def _incomplete_but_counted() -> None:
    """As many events as parameters, but one parameter twice and one not yet: the bucket must not be sent."""
    lockstep.init()
    reducer = _reducer()
    for step, order in enumerate([[3, 2, 1, 0], [3, 2, 2, 1, 0]]):
        for param in reducer.params:
            param.grad = None
        reducer.begin(sync=True)
        launched = _deliver(reducer, order, step)
        if step == 1:
            assert launched == [1, 1, 1, 1, 1]
            reducer.params[2].grad /= 2  # type: ignore[operator, assignment]
        assert reducer.finish().mistake is None
        _assert_averages(reducer, step)


def test_a_bucket_that_only_counts_enough_events_is_not_sent() -> None:
    run_ranks(_incomplete_but_counted, 2)


def _late_portion() -> None:
    lockstep.init()
    reducer = _reducer()
    for step in range(2):
        reducer.begin(sync=True)
        _deliver(reducer, [3, 2, 1, 0], step)
        if step == 1:
            _deliver(reducer, [3], step)  # its bucket is on its way
            assert re.search(r"'p3' received more .* pass overlap=False", str(reducer.finish().mistake))
            assert reducer.backward is None
        else:
            assert reducer.finish().mistake is None


def test_a_portion_that_comes_too_late_is_an_error() -> None:
    run_ranks(_late_portion, 2)


def _large() -> None:
    """Large gradients go into their bucket as they come, and are averaged all the same."""
    lockstep.init()
    reducer = _reducer(sizes=(2, SMALL, SMALL + 1, 5))
    for step in range(3):
        for param in reducer.params:
            param.grad = None
        reducer.begin(sync=True)
        _deliver(reducer, [2], step)
        assert reducer.params[2].grad is reducer.buckets[1].views[0]
        _deliver(reducer, [0, 1, 3], step)
        assert reducer.finish().mistake is None
        _assert_averages(reducer, step)


def test_large_gradients_are_packed_as_they_come() -> None:
    run_ranks(_large, 2)


def _large_in_portions(weight: float) -> None:
    """A large gradient comes in two portions from the first step on, the second one into its bucket."""
    world = lockstep.init()
    reducer = _reducer(sizes=(2, SMALL, SMALL, 5))
    for step in range(3):
        for param in reducer.params:
            param.grad = None
        reducer.begin(sync=True, weight=weight if world.rank == 0 else 2 - weight)
        large = reducer.params[2]
        for portion in range(2):
            new = torch.full_like(large, 1.0 + world.rank + 10 * portion + 100 * step)
            with torch.no_grad():
                large.grad = new if large.grad is None else large.grad.add_(new)  # as autograd does
                reducer.ready_hook(2)(None)
            assert large.grad is reducer.buckets[1].views[0]
        _deliver(reducer, [0, 1, 3], step)
        assert reducer.finish().mistake is None
        own = [12.0 + 2 * rank + 200 * step for rank in range(2)]
        expected = (own[0] * weight + own[1] * (2 - weight)) / 2
        assert large.grad is not None
        assert large.grad.unique().tolist() == [expected]


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_portions_of_a_large_gradient_are_added_in_its_bucket(weight: float) -> None:
    run_ranks(_large_in_portions, 2, weight)


def _late_portion_of_a_large_one() -> None:
    lockstep.init()
    reducer = _reducer(sizes=(2, SMALL, SMALL, 5))
    for step in range(2):
        for param in reducer.params:
            param.grad = None
        reducer.begin(sync=True)
        _deliver(reducer, [2], step)
        if step == 1:
            _deliver(reducer, [2, 1, 3, 0], step)  # the first portion was packed, and its bucket has not been sent
            assert "'p2' received more" in str(reducer.finish().mistake)
        else:
            _deliver(reducer, [1, 3, 0], step)
            assert reducer.finish().mistake is None


def test_a_portion_that_comes_after_packing_is_an_error() -> None:
    run_ranks(_late_portion_of_a_large_one, 2)


def _abandoned() -> None:
    lockstep.init()
    reducer = _reducer()
    for step in range(3):
        for param in reducer.params:
            param.grad = None
        reducer.begin(sync=True)
        if step == 1:
            _deliver(reducer, [3, 2], step)
            reducer.abandon()
            for param in reducer.params:
                param.grad = None
            reducer.begin(sync=True)
        _deliver(reducer, [3, 2, 1, 0], step)
        assert reducer.finish().mistake is None
        _assert_averages(reducer, step)


def test_an_abandoned_backward_leaves_a_clean_state() -> None:
    run_ranks(_abandoned, 2)


def _taken_over() -> None:
    """A backward fails with a bucket under way, and the parameters are laid out anew."""
    world = lockstep.init()
    old, new = _reducer(), _reducer()
    for step in range(2):
        for param in old.params:
            param.grad = None
        old.begin(sync=True)
        if step == 0:  # the first one sends all at the end
            _deliver(old, [3, 2, 1, 0], step)
            old.finish()
    assert _deliver(old, [3], 1) == [1]
    old.abandon()
    assert [bucket.index for bucket in old._under_way] == [0]
    new.take_over(old)
    assert not old._under_way
    new.begin(sync=True)
    _deliver(new, [3, 2, 1, 0], 2)
    new.finish()
    _assert_averages(new, 2)
    assert world.world_size == 2


def test_a_new_layout_waits_for_what_a_failed_backward_has_sent() -> None:
    run_ranks(_taken_over, 2)


def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(_: Backward) -> None:
        raise torch.OutOfMemoryError("no memory")

    reducer = _reducer()
    for param in reducer.params:
        param.grad = torch.ones_like(param)
    reducer.begin(sync=False, weight=1.0)
    _deliver(reducer, [3, 2, 1, 0], 0)
    reducer.finish()
    with monkeypatch.context() as patch:
        patch.setattr(Backward, "prepare", prepare)
        with pytest.raises(torch.OutOfMemoryError):
            reducer.begin(sync=True, weight=0.5)
    assert not any(param._backward_hooks for param in reducer.params)
    reducer.begin(sync=True, weight=0.5)
    assert all(len(param._backward_hooks or {}) == 1 for param in reducer.params)


def _without_memory() -> None:
    lockstep.init()
    with pytest.MonkeyPatch.context() as monkeypatch:
        _no_memory(monkeypatch)


def test_a_backward_that_cant_begin_leaves_no_hooks() -> None:
    run_ranks(_without_memory, 1)


def _unannounced() -> None:
    lockstep.init()
    reducer = _reducer()
    with pytest.raises(lockstep.LockstepError, match="a gradient arrived, but no backward began"):
        reducer.ready_hook(0)(None)


def test_an_event_outside_a_backward_is_an_error() -> None:
    run_ranks(_unannounced, 1)


def _copies() -> None:
    """Not as views: grad stays the tensor it was, and the bucket is not shared with it."""
    lockstep.init()
    reducer = _reducer(as_view=False)
    mine = [torch.zeros(param.numel()) for param in reducer.params]
    for param, grad in zip(reducer.params, mine, strict=True):
        param.grad = grad
    reducer.begin(sync=True)
    for position in (3, 2, 1, 0):
        mine[position] += torch.arange(float(len(mine[position]))) + 100 * position + 1000 * lockstep.world().rank
        reducer.ready_hook(position)(None)
    reducer.finish()
    _assert_averages(reducer, 0)
    assert all(param.grad is grad for param, grad in zip(reducer.params, mine, strict=True))


def test_without_views_grad_stays_the_same_tensor() -> None:
    run_ranks(_copies, 2)


def _late_portion_on_one_rank() -> None:
    """The rank with the mistake sends the rest all the same, and the next step is as if nothing had happened."""
    w = lockstep.init(timeout=20)
    reducer = _reducer()
    for step in range(3):
        for param in reducer.params:
            param.grad = None
        reducer.begin(sync=True)
        _deliver(reducer, [3], step)
        if step == 1 and w.rank == 1:
            _deliver(reducer, [3], step)  # its bucket is on its way
            assert "rank 1 of 2, step 2: parameter 'p3' received more" in str(reducer.finish().mistake)
            continue
        _deliver(reducer, [2, 1, 0], step)
        assert reducer.finish().mistake is None
        if step != 1:
            _assert_averages(reducer, step)


def test_the_other_ranks_finish_a_step_in_which_one_has_a_late_portion() -> None:
    run_ranks(_late_portion_on_one_rank, 2)


def _failure_while_sending() -> None:
    """What is under way when ``finish`` fails is completed before its bucket is used again."""
    lockstep.init()
    reducer = _reducer(overlap=False)

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_exception(RuntimeError(f"bucket {bucket.index()} lost on the way"))  # type: ignore[arg-type]
        return future

    reducer.register_comm_hook(None, hook)
    reducer.begin(sync=True)
    _deliver(reducer, [3, 2, 1, 0], 0)
    with pytest.raises(lockstep.PeerLost, match=r"averaging the bucket before bucket 1.*bucket 0 lost on the way"):
        assert reducer.finish().mistake is None
    with pytest.raises(lockstep.PeerLost, match=r"completing what an earlier, .*bucket 0 lost on the way"):
        reducer.begin(sync=True)
    reducer.begin(sync=True)


def test_what_is_under_way_when_finish_fails_is_completed_first() -> None:
    run_ranks(_failure_while_sending, 1)
