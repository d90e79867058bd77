"""The rest of what c10d offers, over shm: messages, objects, sub-groups, works, unusual tensors, rendezvous."""

from __future__ import annotations

import os
import socket
import sys
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

import lockstep
from lockstep import knobs
from tests.harness import run_ranks


def _init(chunk: int | None = None, timeout: float = 20.0) -> tuple[int, int]:
    if chunk is not None:
        os.environ[knobs.SHM_CHUNK] = str(chunk)
    world = lockstep.init("shm", timeout=timeout)
    return world.rank, world.world_size


def _same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got, want), (got, want)


# --- messages --------------------------------------------------------------------------------------------------------


def _messages() -> None:
    rank, size = _init(chunk=512)
    big = torch.arange(5000.0)
    # Tags that are asked for in another order than they were sent, larger than the mailbox.
    if rank == 0:
        works = [dist.isend(big + tag, 1, tag=tag) for tag in (1, 2, 3)]
        for work in works:
            assert work is not None
            work.wait()
    elif rank == 1:
        for tag in (3, 1, 2):
            got = torch.zeros(5000)
            assert dist.recv(got, 0, tag=tag) == 0
            _same(got, big + tag)
    # Everyone sends to everyone, and receives from whoever comes first.
    works = [dist.isend(torch.full((3,), rank * 10 + to), to) for to in range(size) if to != rank]
    seen = {}
    for _ in range(size - 1):
        got = torch.zeros(3, dtype=torch.int64)
        source = dist.recv(got)
        seen[source] = got
    for source, got in seen.items():
        _same(got, torch.full((3,), source * 10 + rank))
    assert sorted(seen) == [r for r in range(size) if r != rank]
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()


def _both_ways() -> None:
    """Two ranks send to each other at once, more than the mailboxes hold, and wait for the sends first."""
    rank, _ = _init(chunk=512)
    got = torch.zeros(4000)
    receive = dist.irecv(got, 1 - rank)
    dist.send(torch.arange(4000.0) + rank, 1 - rank)
    assert receive is not None
    receive.wait()
    _same(got, torch.arange(4000.0) + 1 - rank)
    # A receive that nobody waits for completes while its rank is in a collective.
    late = torch.zeros(4000)
    if rank == 0:
        receive = dist.irecv(late, 1)
        dist.barrier()
        assert receive is not None
        receive.wait()
        _same(late, torch.arange(4000.0))
    else:
        dist.send(torch.arange(4000.0), 0)
        dist.barrier()
    # In a batch, a ring; and to itself.
    out, into, own = torch.arange(3000) + rank, torch.zeros(3000, dtype=torch.int64), torch.zeros(7)
    ops = [dist.P2POp(dist.irecv, into, 1 - rank), dist.P2POp(dist.isend, out, 1 - rank)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    _same(into, torch.arange(3000) + 1 - rank)
    send, receive = dist.isend(torch.arange(7.0), rank, tag=9), dist.irecv(own, rank, tag=9)
    assert send is not None
    assert receive is not None
    receive.wait()
    send.wait()
    assert receive.is_completed()
    _same(own, torch.arange(7.0))
    # No elements, a complex tensor, and one whose elements lie apart.
    for tensor in (torch.zeros(0), torch.arange(6).to(torch.complex64), torch.arange(12.0).view(3, 4)[:, ::2]):
        copy = torch.zeros_like(tensor)
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(copy, 0)
            _same(copy, tensor)
    future = torch.zeros(3)
    if rank == 0:
        work = dist.irecv(future, 1)
        assert work is not None
        _same(work.get_future().wait()[0], torch.ones(3))
    else:
        dist.send(torch.ones(3), 0)


def _unequal_message() -> str:
    rank, _ = _init()
    try:
        if rank == 0:
            dist.send(torch.ones(4), 1)
            dist.recv(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(5), 0)
    except lockstep.CollectiveMismatch as error:
        return str(error)
    return "no error"


def test_messages_with_tags_and_from_anyone() -> None:
    run_ranks(_messages, 3)


def test_messages_in_both_directions() -> None:
    run_ranks(_both_ways, 2)


def test_a_message_of_another_size_is_an_error_on_both_sides() -> None:
    told = run_ranks(_unequal_message, 2)
    assert told[0] == told[1]
    assert "rank 0 sent 16 bytes of torch.float32" in told[0]
    assert "5 elements" in told[0]


# --- objects ---------------------------------------------------------------------------------------------------------


def _objects() -> None:
    rank, size = _init()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "more": "x" * rank * 100})
    assert [each["rank"] for each in gathered] == list(range(size))
    some: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(rank * 2, some, dst=1)
    assert some is None or some == [2 * r for r in range(size)]
    shared = ["a", {"b": 1}] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, src=0)
    assert shared == ["a", {"b": 1}]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]


def test_object_collectives() -> None:
    run_ranks(_objects, 3)


# --- sub-groups and threads ------------------------------------------------------------------------------------------


def _groups() -> None:
    rank, size = _init(chunk=1024)
    pairs = [dist.new_group(members, backend="shm") for members in ([0, 1], [1, 2], [2, 0])]
    for members, group in zip(([0, 1], [1, 2], [2, 0]), pairs, strict=True):
        if rank in members:
            tensor = torch.full((1000,), float(rank))
            dist.all_reduce(tensor, group=group)
            _same(tensor, torch.full((1000,), float(sum(members))))
    own, _ = dist.new_subgroups(group_size=1)
    dist.barrier(group=own)
    # Two groups of all ranks, used in opposite order: each has an order of its own.
    first, second = dist.new_group(backend="shm"), dist.new_group(backend="shm")
    a, b = torch.full((3000,), float(rank)), torch.full((3000,), float(rank * 2))
    order = [(a, first), (b, second)] if rank % 2 else [(b, second), (a, first)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in order]
    for work in reversed(works):
        assert work is not None
        work.wait()
    _same(a, torch.full((3000,), float(sum(range(size)))))
    _same(b, torch.full((3000,), float(2 * sum(range(size)))))


def _threads() -> None:
    rank, size = _init(chunk=1024)
    groups = [dist.new_group(backend="shm") for _ in range(4)]
    wrong: list[str] = []

    def use(index: int) -> None:
        for step in range(30):
            tensor = torch.full((700,), float(rank + index + step))
            dist.all_reduce(tensor, group=groups[index])
            if tensor[699] != sum(r + index + step for r in range(size)):
                wrong.append(f"group {index} step {step}: {tensor[699]}")

    threads = [threading.Thread(target=use, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    # In one group: many in flight, synchronous ones between, in the order of issue.
    tensors = [torch.full((500,), float(rank + index)) for index in range(40)]
    works = [dist.all_reduce(t, async_op=index % 3 > 0) for index, t in enumerate(tensors)]
    for work in works:
        if work is not None:
            work.wait()
    for index, tensor in enumerate(tensors):
        _same(tensor, torch.full((500,), float(sum(r + index for r in range(size)))))


def test_overlapping_groups_in_any_order() -> None:
    run_ranks(_groups, 3)


def test_threads_and_many_in_flight() -> None:
    run_ranks(_threads, 3)


# --- works -----------------------------------------------------------------------------------------------------------


def _works() -> None:
    rank, size = _init()
    total = float(sum(range(size)))
    tensor = torch.full((3,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert work.get_future().then(lambda future: future.value()[0] * 2).wait().tolist() == [2 * total] * 3
    assert work.wait(timedelta(seconds=5)) is True
    assert work.is_completed()
    assert work.is_success()
    _same(work.result()[0], tensor)
    assert work.get_future().done()
    if rank == 0:
        late = dist.barrier(async_op=True)
        assert late is not None
        assert not late.is_completed()
        with pytest.raises(lockstep.CollectiveTimeout, match="barrier was not complete"):
            late.wait(timedelta(seconds=0.05))
        dist.send(torch.ones(1), 1)
        late.wait()
        assert late.get_future().wait() == []
    else:
        if rank == 1:
            dist.recv(torch.ones(1), 0)
        dist.barrier()
    outputs = [torch.zeros(2) for _ in range(size)]
    gathered = dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True)
    assert gathered is not None
    for index, each in enumerate(gathered.get_future().wait()):
        _same(each, torch.full((2,), float(index)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(tensor)
    assert "shm:all_reduce" in {event.key for event in profile.key_averages()}


def test_works_futures_and_the_profiler() -> None:
    run_ranks(_works, 2)


# --- unusual tensors -------------------------------------------------------------------------------------------------


def _tensors() -> None:
    rank, size = _init(chunk=512)
    ranks = sum(range(size))
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.item() == ranks
    apart = torch.arange(600.0).view(20, 30)[:, ::2]
    dist.all_reduce(apart)
    _same(apart, torch.arange(600.0).view(20, 30)[:, ::2] * size)
    transposed = (torch.arange(600.0).view(20, 30) + rank).t()
    dist.all_reduce(transposed)
    _same(transposed, torch.arange(600.0).view(20, 30).t() * size + ranks)
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    dist.all_reduce(parameter)
    assert parameter.tolist() == [ranks] * 3
    assert parameter._version == 0
    assert parameter.requires_grad
    with torch.inference_mode():
        frozen = torch.full((3,), float(rank))
    dist.all_reduce(frozen)
    assert frozen.tolist() == [ranks] * 3
    several = [torch.full((3,), float(rank)), torch.full((400,), float(rank) + 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced(several)
    _same(several[0], torch.full((3,), float(ranks)))
    _same(several[1], torch.full((400,), float(ranks + size)))
    with dist.distributed_c10d._coalescing_manager():  # what FSDP uses
        dist.all_reduce(several[0])
        dist.all_reduce(several[1])
    _same(several[0], torch.full((3,), float(ranks * size)))
    # One more entry on each rank, and the same one on all.
    indices = torch.tensor([[rank + 1, 0]]) if rank else torch.tensor([[0]])
    sparse = torch.sparse_coo_tensor(indices, torch.full((indices.shape[1],), float(rank + 1)), (size + 1,))
    dist.all_reduce(sparse)
    want = torch.zeros(size + 1)
    want[0] = sum(r + 1 for r in range(size))
    for r in range(1, size):
        want[r + 1] = r + 1
    _same(sparse.to_dense(), want)
    scaled = torch.full((200,), float(rank))
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(2.5))  # type: ignore[attr-defined]
    _same(scaled, torch.full((200,), 2.5 * ranks))
    negative_zero = torch.full((5,), -0.0) if rank else torch.zeros(5)
    dist.all_reduce(negative_zero, dist.ReduceOp.MIN)


def _allocated() -> None:
    rank, size = _init(chunk=1024)
    ranks = sum(range(size))
    group: Any = dist.group.WORLD
    bucket = group.allocate_tensor(100_001, dtype=torch.float32)
    assert torch.count_nonzero(bucket) == 0
    index = torch.arange(100_001.0)
    bucket.copy_(index + rank)
    dist.all_reduce(bucket)
    _same(bucket, index * size + ranks)
    part = bucket[1000:90_000]
    part.fill_(float(rank))
    dist.all_reduce(part, dist.ReduceOp.AVG)
    _same(part, torch.full((89_000,), ranks / size))
    _same(bucket[90_000:], index[90_000:] * size + ranks)
    grid = group.allocate_tensor((3, 5), dtype=torch.int64)
    grid.fill_(rank)
    work = dist.all_reduce(grid, async_op=True)
    assert work is not None
    work.wait()
    _same(grid, torch.full((3, 5), ranks))
    dist.broadcast(bucket, 0)
    with pytest.raises(lockstep.CollectiveMismatch):
        dist.all_reduce(bucket[:10] if rank == 0 else bucket[1:11])
    dist.destroy_process_group()
    grid.fill_(7)
    _same(grid, torch.full((3, 5), 7))


def _refusals() -> dict[str, str]:
    _, size = _init()
    attempts: dict[str, Any] = {
        "op": lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND),
        "average": lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG),
        "root": lambda: dist.broadcast(torch.ones(2), group_src=size),
        "list": lambda: dist.all_gather([torch.ones(2)], torch.ones(2)),
        "sizes": lambda: dist.all_gather([torch.ones(r + 1) for r in range(size)], torch.ones(1)),
        "whole": lambda: dist.all_gather_single(torch.ones(2 * size + 1), torch.ones(2)),
        "splits": lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1] * size, [7] * size),
        "device": lambda: dist.all_reduce(torch.ones(2, device="meta")),
        "sparse": lambda: dist.all_reduce(torch.ones(2).to_sparse(), dist.ReduceOp.MAX),
    }
    refused = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except RuntimeError as error:
            refused[name] = f"{type(error).__name__}: {error}"
    dist.barrier()  # a refusal harms nobody
    return refused


def test_tensors_of_every_kind() -> None:
    run_ranks(_tensors, 3)


def test_tensors_allocated_by_the_group_are_reduced_in_place() -> None:
    run_ranks(_allocated, 3)


def test_wrong_arguments_are_refused_as_gloo_refuses_them() -> None:
    for refused in run_ranks(_refusals, 2):
        assert set(refused) == {"op", "average", "root", "list", "sizes", "whole", "splits", "device", "sparse"}
        assert all(text.startswith("RuntimeError: ") for text in refused.values()), refused


# --- meeting ---------------------------------------------------------------------------------------------------------


def _meet(folder: str, port: int) -> None:
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=20)

    def use() -> None:
        tensor = torch.full((2,), float(rank))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [float(sum(range(size)))] * 2
        dist.destroy_process_group()

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("shm", timeout=limit)
    use()
    dist.init_process_group("shm", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=limit)
    use()
    store = FileStore(f"{folder}/again", size)
    for _ in range(3):  # one store, several groups one after another
        dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=limit)
        use()
    dist.init_process_group("cpu:shm", store=store, rank=rank, world_size=size, timeout=limit)
    use()


def test_every_way_to_meet(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(_meet, 2, str(tmp_path), port)


def _apart() -> str:
    from lockstep.comm.shm import segment

    rank = int(os.environ["RANK"])
    if rank == 1:
        mine = segment.Whereabouts.mine()
        segment.Whereabouts.mine = classmethod(  # type: ignore[assignment,method-assign]
            lambda _: segment.Whereabouts(mine.pid, mine.started, "another-boot", mine.pid_namespace)
        )
    with pytest.raises(lockstep.RendezvousError) as caught:
        lockstep.init("shm", timeout=20)
    return str(caught.value)


def test_ranks_on_different_hosts_are_refused_everywhere() -> None:
    for message in run_ranks(_apart, 3):
        assert 'rank 1: the backend "shm" needs all ranks on one host, but they run on different hosts' in message
        assert 'use the backend "gloo"' in message


def _absent() -> str:
    if os.environ["RANK"] == "1":
        return ""
    with pytest.raises(lockstep.RendezvousError) as caught:
        lockstep.init("shm", timeout=1.5)
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    told = run_ranks(_absent, 2)
    assert "rank 1 did not come" in told[0]


def _nothing_left() -> tuple[list[str], int, int]:
    before, there = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    _init()
    dist.all_reduce(torch.ones(100_000))
    memory = sorted(set(os.listdir("/dev/shm")) - there)
    return memory, before, len(os.listdir("/proc/self/fd"))


def test_an_open_group_holds_no_memory_by_name_and_one_descriptor_per_peer() -> None:
    for names, before, now in run_ranks(_nothing_left, 3):
        assert names == []
        assert now <= before + 2 + 2  # a pidfd per peer; the store's file, and torch's own


def test_the_backend_is_registered_in_either_order() -> None:
    import subprocess

    for lines in ("import lockstep; import torch.distributed as d", "import torch.distributed as d; import lockstep"):
        code = f"{lines}; assert d.is_backend_available('shm')"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    code = "import sys, lockstep; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
