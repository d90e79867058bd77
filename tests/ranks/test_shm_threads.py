"""Collectives from several threads of a rank: the main one, others of the program, and those of autograd."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import knobs
from lockstep.comm import renewal
from tests.harness import run_ranks
from tests.launching import wait_for


def _init() -> tuple[int, int]:
    os.environ[knobs.SHM_CHUNK] = "1024"
    world = lockstep.init("shm", timeout=20)
    return world.rank, world.world_size


def _in_threads(*works: Callable[[], None]) -> None:
    """Run all of ``works`` at once; the first error of any is raised."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (raised below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


# --- groups in use at once -------------------------------------------------------------------------------------------


def _groups_at_once() -> None:
    rank, size = _init()
    groups = [dist.new_group(backend="shm") for _ in range(4)]

    def use(index: int) -> None:
        for step in range(30):
            tensor = torch.full((700,), float(rank + index + step))
            dist.all_reduce(tensor, group=groups[index])
            assert tensor.unique().tolist() == [float(sum(r + index + step for r in range(size)))]

    _in_threads(*(lambda index=index: use(index) for index in range(4)))


def test_a_group_for_each_thread() -> None:
    run_ranks(_groups_at_once, 3)


def _crosswise() -> None:
    """Two groups, used by two threads, each rank beginning with another one: neither group waits for the other."""
    rank, size = _init()
    first, second = dist.new_group(backend="shm"), dist.new_group(backend="shm")
    begun = [threading.Event(), threading.Event()]

    def use(group: Any, before: threading.Event | None, after: threading.Event) -> None:
        if before is not None:
            assert before.wait(10)
        tensor = torch.full((3000,), float(rank))
        after.set()
        dist.all_reduce(tensor, group=group)
        assert tensor.unique().tolist() == [float(sum(range(size)))]

    order = (first, second) if rank % 2 else (second, first)
    for _ in range(10):
        for event in begun:
            event.clear()
        _in_threads(lambda: use(order[0], None, begun[0]), lambda: use(order[1], begun[0], begun[1]))


def test_two_groups_in_opposite_order_do_not_wait_for_each_other() -> None:
    run_ranks(_crosswise, 3)


# --- one group -------------------------------------------------------------------------------------------------------


def _in_order() -> None:
    """Sync and async ones take turns among threads; the order of issue, agreed by a lock, is the order of the group."""
    rank, size = _init()
    lock = threading.Lock()
    turn = iter(range(60))
    tensors = [torch.full((500,), float(rank + index)) for index in range(60)]
    works: list[Any] = []

    def use(asynchronous: bool) -> None:
        while True:
            with lock:
                index = next(turn, None)
                if index is None:
                    return
                works.append(dist.all_reduce(tensors[index], async_op=asynchronous))

    _in_threads(lambda: use(True), lambda: use(True), lambda: use(True))
    _in_threads(*(lambda work=work: work.wait() for work in works[::-1]))
    for index, tensor in enumerate(tensors):
        assert tensor.unique().tolist() == [float(sum(r + index for r in range(size)))], index


def test_a_group_keeps_the_order_of_issue() -> None:
    run_ranks(_in_order, 3)


def _many_in_flight() -> None:
    rank, size = _init()
    tensors = [torch.full((500,), float(rank + index)) for index in range(40)]
    works = [dist.all_reduce(t, async_op=index % 3 > 0) for index, t in enumerate(tensors)]
    for work in works:
        if work is not None:
            work.wait()
    for index, tensor in enumerate(tensors):
        assert tensor.unique().tolist() == [float(sum(r + index for r in range(size)))]


def test_many_in_flight_with_synchronous_ones_between() -> None:
    run_ranks(_many_in_flight, 3)


def _callbacks() -> None:
    """Callbacks issue collectives, at once or long after the main thread has issued the next: in one order anyway."""
    rank, size = _init()
    total = float(sum(range(size)))

    def reduced(count: int, asynchronous: bool = False) -> tuple[torch.Tensor, Any]:
        tensor = torch.full((count,), float(rank))
        return tensor, dist.all_reduce(tensor, async_op=asynchronous)

    for step in range(12):
        given: list[torch.Tensor] = []
        first, work = reduced(2000, asynchronous=True)

        def answer(future: Any, given: list[torch.Tensor] = given) -> Any:
            given.append(reduced(7)[0])
            inner, inner_work = reduced(1500, asynchronous=True)
            given.append(inner)
            inner_work.get_future().then(lambda _: given.append(reduced(11)[0])).wait()
            return future.value()

        done = work.get_future().then(answer)
        if (step + rank) % 3 == 0:
            time.sleep(0.01)  # (on this rank the callback is through before the next is issued)
        later, later_work = reduced(900, asynchronous=True)
        last, _ = reduced(3)
        done.wait()
        later_work.wait()
        assert [tensor.numel() for tensor in given] == [7, 1500, 11]
        for tensor in (first, later, last, *given):
            assert tensor.unique().tolist() == [total]


def test_what_callbacks_issue_comes_before_what_was_issued_since() -> None:
    run_ranks(_callbacks, 3)


# --- groups that begin anew ------------------------------------------------------------------------------------------


def _stopped_groups() -> tuple[str, float]:
    """A callback that goes on for longer than is waited for; then a collective of another thread, which ends."""
    rank, size = _init()
    group: Any = dist.group.WORLD
    store = group.get_group_store()
    said = ""
    if rank == 1:
        store.wait(["has a callback"])
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    if rank == 0:
        goes_on = threading.Event()
        done = work.get_future().then(lambda _: goes_on.wait(20))
        store.set("has a callback", "")
        store.wait(["complete"])  # (on rank 1; an end may overtake what completes there)
        work.wait()
        renewal._SETTLING = 0.2
        with pytest.raises(lockstep.LockstepError) as caught:
            renewal.stop("of a test")
        said = str(caught.value)
        goes_on.set()
        done.wait()
        renewal._SETTLING = 20.0
    work.wait()
    store.set("complete", "")
    _together(store, "done", rank, size)
    renewal.stop("of a test")
    _together(store, "stopped", rank, size)
    renewal.renew()
    _together(store, "renewed", rank, size)
    if rank == 0:
        other = threading.Thread(target=lambda: _in_vain(lambda: dist.barrier()))
        other.start()
        wait_for(lambda: group._shm_group._turns.in_use, "the other thread's collective")
    _together(store, "in use", rank, size)
    renewal.stop("of a test")
    assert group._shm_group.is_at_rest
    _together(store, "stopped again", rank, size)
    if rank == 0:
        other.join(20)
    renewal.renew()
    _together(store, "renewed again", rank, size)
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    return said, float(tensor[0])


def _together(store: Any, name: str, rank: int, size: int) -> None:
    """Wait for all ranks, without their group."""
    store.set(f"{name}/{rank}", "")
    store.wait([f"{name}/{each}" for each in range(size)])


def _in_vain(action: Callable[[], object]) -> None:
    with pytest.raises(lockstep.LockstepError, match="of a test"):
        action()


def test_groups_are_stopped_only_when_nothing_runs_in_them() -> None:
    (said, total), other = run_ranks(_stopped_groups, 2, timeout=60)
    assert "a collective that was issued on this rank still runs, 0.2 s after" in said
    assert (total, *other) == (1.0, "", 1.0)


# --- autograd --------------------------------------------------------------------------------------------------------


def _in_backward() -> None:
    """Hooks all-reduce on the threads of two backwards at once, while the main thread uses the default group."""
    rank, size = _init()
    groups = [dist.new_group(backend="shm") for _ in range(2)]

    def train(index: int) -> None:
        torch.manual_seed(index)
        last = torch.nn.Linear(30, 30)
        net = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.ReLU(), last)
        works: list[Any] = []

        def hook(parameter: torch.Tensor) -> None:
            works.append(dist.all_reduce(parameter.grad, group=groups[index], async_op=True))

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        for step in range(5):
            data = torch.full((4, 30), float(rank + step + index))
            net.zero_grad()
            net(data).sum().backward()
            for work in works:
                work.wait()
            works.clear()
            assert last.bias.grad is not None
            assert last.bias.grad.unique().tolist() == [4.0 * size]

    def beside() -> None:
        for step in range(30):
            tensor = torch.full((900,), float(rank + step))
            dist.all_reduce(tensor)
            assert tensor.unique().tolist() == [float(sum(r + step for r in range(size)))]

    _in_threads(lambda: train(0), lambda: train(1), beside)


def test_collectives_from_the_threads_of_autograd() -> None:
    run_ranks(_in_backward, 2)
