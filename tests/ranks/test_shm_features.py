"""The rest of what c10d offers, over shm: messages, objects, sub-groups, works, unusual tensors, rendezvous."""

from __future__ import annotations

import os
import time
import warnings
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

import lockstep
from lockstep import knobs
from lockstep.launch.ports import free_port
from tests.harness import run_ranks
from tests.ranks.collectives import all_gather_single, reduce_scatter_single

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


def _init(chunk: int | None = None, timeout: float = 20.0) -> tuple[int, int]:
    if chunk is not None:
        os.environ[knobs.SHM_CHUNK] = str(chunk)
    world = lockstep.init("shm", timeout=timeout)
    return world.rank, world.world_size


def _same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got, want), (got, want)


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


# --- sub-groups ------------------------------------------------------------------------------------------------------


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


def test_overlapping_groups_in_any_order() -> None:
    run_ranks(_groups, 3)


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


def test_works_and_futures() -> None:
    run_ranks(_works, 2)


def _lists_reused() -> None:
    """The caller uses its lists again as soon as each call returns, long before its turn comes."""
    rank, size = _init()
    group: Any = dist.group.WORLD
    everyone = range(size)
    junk = [torch.full((3,), -1.0) for _ in everyone]

    def row(of: int) -> list[torch.Tensor]:
        return [torch.full((3,), 10.0 * of + to) for to in everyone]

    def outputs() -> list[torch.Tensor]:
        return [torch.zeros(3) for _ in everyone]

    out, mine = torch.zeros(3), torch.full((3,), float(rank))
    scattered, received, exchanged, gathered, pair = torch.zeros(3), outputs(), outputs(), outputs(), row(rank)[:2]
    coalesced = [outputs() for _ in everyone]
    lists: list[Any] = [row(rank), [*gathered], row(0) if rank == 0 else [], [*received] if rank == 0 else []]
    lists += [[*exchanged], row(rank), [*pair], [[*each] for each in coalesced], [*pair]]
    if rank == 0:
        group.get_group_store().wait(["issued"])  # (until then the other ranks' thread waits for this one)
    works = [
        dist.reduce_scatter(out, lists[0], async_op=True),
        dist.all_gather(lists[1], mine, async_op=True),
        dist.scatter(scattered, lists[2] or None, src=0, async_op=True),
        dist.gather(mine, lists[3] or None, dst=0, async_op=True),
        dist.all_to_all(lists[4], lists[5], async_op=True),
        group.allreduce_coalesced(lists[6]),
        group.allgather_coalesced(lists[7], [torch.full((3,), rank + 0.5)] * size),
    ]
    for each in lists:
        each[:] = [junk if isinstance(part, list) else junk[0] for part in each]
    if rank == 1:
        group.get_group_store().set("issued", "")
    for work in works:
        work.wait()
    _same(out, torch.full((3,), sum(10.0 * r + rank for r in everyone)))
    _same(scattered, torch.full((3,), float(rank)))
    for source in everyone:
        _same(gathered[source], torch.full((3,), float(source)))
        _same(exchanged[source], torch.full((3,), 10.0 * source + rank))
        if rank == 0:
            _same(received[source], torch.full((3,), float(source)))
        for each in coalesced[source]:
            _same(each, torch.full((3,), source + 0.5))
    for to, each in enumerate(pair):
        _same(each, torch.full((3,), sum(10.0 * r + to for r in everyone)))
    assert all((each == -1).all() for each in junk)


def test_lists_are_read_at_the_call() -> None:
    run_ranks(_lists_reused, 3)


def _under_another_device() -> None:
    rank, size = _init()
    dist.barrier()
    early = torch.zeros(3, device="cpu")
    with torch.device("meta"):
        if rank == 0:
            dist.send(torch.full((3,), 4.0, device="cpu"), 1)
        elif rank == 1:
            dist.recv(torch.zeros(1, device="cpu"), 2)
            dist.recv(early, 0)  # (it has come before this, and lay in memory of this rank's)
            _same(early, torch.full((3,), 4.0, device="cpu"))
        sources = [torch.full((1 + to,), float(rank), device="cpu") for to in range(size)]
        targets = [torch.zeros(1 + rank, device="cpu") for _ in range(size)]
        if rank == 2:
            dist.send(torch.zeros(1, device="cpu"), 1)
        dist.all_to_all(targets, sources)  # (ranks tell each other the sizes)
        assert [each.tolist() for each in targets] == [[float(source)] * (1 + rank) for source in range(size)]
        group: Any = dist.group.WORLD
        tensor = group.allocate_tensor(4, dtype=torch.float32)
        tensor.fill_(1.0)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [float(size)] * 4


def test_tensors_of_our_own_are_on_the_cpu_whatever_the_default_device_is() -> None:
    run_ranks(_under_another_device, 3)


def _profiled(backend: str) -> list[str]:
    """What the profiler shows of one operation of each kind."""
    world = lockstep.init(backend, timeout=20)
    rank, size = world.rank, world.world_size
    ones, group = torch.ones, dist.group.WORLD
    several = [ones(2) for _ in range(size)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(ones(2))
        dist.all_reduce(ones(2).to_sparse())
        dist.reduce(ones(2), 0)
        dist.broadcast(ones(2), 0)
        dist.all_gather(several, ones(2))
        all_gather_single(ones(2 * size), ones(2))
        dist.gather(ones(2), several if rank == 0 else None, 0)
        dist.scatter(ones(2), several if rank == 0 else None, 0)
        dist.reduce_scatter(ones(2), several)
        dist.all_to_all_single(ones(2 * size), ones(2 * size))
        dist.barrier()
        group.allreduce_coalesced(several).wait()  # type: ignore[union-attr]
        if rank == 0:
            dist.send(ones(2), 1)
            dist.recv(ones(2))
        else:
            dist.recv(ones(2), 0)
            dist.send(ones(2), 0)
    return sorted({event.key for event in profile.key_averages() if event.key.startswith(f"{backend}:")})


def test_the_profiler_shows_operations_by_name() -> None:
    over_shm, over_gloo = run_ranks(_profiled, 2, "shm"), run_ranks(_profiled, 2, "gloo")
    for shown, by_gloo in zip(over_shm, over_gloo, strict=True):
        assert {name.replace("gloo:", "shm:") for name in by_gloo} <= set(shown)
        # (gloo shows these under other names, or not at all.)
        assert {"shm:all_gather_single", "shm:reduce_scatter", "shm:all_reduce_coalesced"} <= set(shown)


def _small_in_inference_mode() -> None:
    """Of one size inside and outside, in whichever order: what is kept from call to call serves both."""
    rank, size = _init()
    total = float(sum(range(size)))
    for modes in ((True, False), (False, True)):
        for mode in modes:
            with torch.inference_mode(mode):
                tensor = torch.full((100 + modes[0],), float(rank))
                dist.all_reduce(tensor)
                assert tensor.unique().tolist() == [total]


def test_small_tensors_of_inference_mode_and_others() -> None:
    run_ranks(_small_in_inference_mode, 2)


def _profiled_sizes(backend: str) -> dict[str, list[list[int]]]:
    world = lockstep.init(backend, timeout=20)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 4))
        dist.broadcast(torch.ones(5), 0)
        dist.all_gather([torch.ones(2, 3) for _ in range(world.world_size)], torch.ones(2, 3))
        work = dist.all_reduce(torch.ones(6), async_op=True)
        assert work is not None
        work.wait()
        dist.barrier()
    shapes: dict[str, list[list[int]]] = {}
    for event in profile.events():
        if event.name.startswith(f"{backend}:"):
            shapes.setdefault(event.name.removeprefix(f"{backend}:"), []).append(list(event.input_shapes))
    return shapes


def test_the_profiler_shows_the_sizes_that_it_shows_of_gloo() -> None:
    over_shm, over_gloo = run_ranks(_profiled_sizes, 2, "shm"), run_ranks(_profiled_sizes, 2, "gloo")
    assert over_shm == over_gloo
    assert over_shm[0]["all_reduce"] == [[[3, 4]], [[6]]]


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
    columns = torch.zeros(4 * size, 3)
    all_gather_single(columns[:, 1], torch.arange(4.0) + 10 * rank)
    _same(columns[:, 1], torch.cat([torch.arange(4.0) + 10 * r for r in range(size)]))
    assert torch.count_nonzero(columns[:, ::2]) == 0
    mine = torch.zeros(4)
    reduce_scatter_single(mine, columns[:, 1])
    _same(mine, (torch.arange(4.0) + 10 * rank) * size)
    scaled = torch.full((200,), float(rank))
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(2.5))  # type: ignore[attr-defined]
    _same(scaled, torch.full((200,), 2.5 * ranks))


def _bits(chunk: int, count: int) -> list[list[int]]:
    """Where the operator's result depends on the order of its arguments: the bits that this rank ends with.

    The ranks have different numbers of threads, and so divide their loops at different places.
    """
    rank, _ = _init(chunk=chunk)
    torch.set_num_threads(1 + rank)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for dtype, bits in ((torch.float32, torch.int32), (torch.float64, torch.int64), (torch.bfloat16, torch.int16)):
        noise = torch.randn(count, generator=generator).to(dtype)
        zeros = torch.where(torch.arange(count) % 3 == rank, torch.tensor(-0.0), torch.tensor(0.0)).to(dtype)
        odd = noise.clone()
        odd[rank::5] = float("nan")
        odd[rank + 3 :: 7] = float("inf")
        odd[rank + 1 :: 7] = -float("inf")
        for values in (noise, zeros, odd):
            for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                for _ in range(2):  # and the same again
                    tensor = values.clone()
                    dist.all_reduce(tensor, op)
                    numbers = tensor.view(bits).numpy()
                    found.append([*numbers[:200].tolist(), zlib.crc32(numbers.tobytes())])
    return found


@pytest.mark.parametrize(("world_size", "chunk", "count"), [(2, 512, 1000), (3, 512, 1000), (2, 512 * 1024, 150_007)])
def test_every_rank_ends_with_the_same_bits_and_again_with_the_same(world_size: int, chunk: int, count: int) -> None:
    told = run_ranks(_bits, world_size, chunk, count)
    for found in told:
        assert found == told[0]
        assert found[0::2] == found[1::2]


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


def test_tensors_of_every_kind() -> None:
    run_ranks(_tensors, 3)


def _allocated_in_inference_mode() -> None:
    """Sums over memory of the group, and sums that are staged: whatever mode it is made, opened and used in."""
    with torch.inference_mode():
        rank, size = _init(chunk=1024)
        group: Any = dist.group.WORLD
        made = [group.allocate_tensor(count) for count in (7, 5000)]
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            for count in (7, 5000):
                tensor = torch.full((count,), rank + 1.0)
                dist.all_reduce(tensor)
                _same(tensor, torch.full((count,), size * (size + 1) / 2))
            for tensor in made:
                tensor.fill_(rank + 1.0)
                dist.all_reduce(tensor)
                _same(tensor, torch.full_like(tensor, size * (size + 1) / 2))
                dist.barrier()


def _allocated_after_a_missed_count() -> None:
    """As after an interrupt on rank 1 right at the end of an allocation, which the other ranks have made."""
    rank, size = _init()
    group: Any = dist.group.WORLD
    first = group.allocate_tensor(5)
    if rank == 1:
        group._shm_group.engine._shared._made -= 1
    for tensor in (group.allocate_tensor(70), group.allocate_tensor(5), first):
        tensor.fill_(rank + 1.0)
        dist.all_reduce(tensor)
        _same(tensor, torch.full_like(tensor, size * (size + 1) / 2))


def test_tensors_allocated_in_inference_mode_are_reduced() -> None:
    run_ranks(_allocated_in_inference_mode, 3)


def test_ranks_agree_on_the_number_of_an_allocation() -> None:
    run_ranks(_allocated_after_a_missed_count, 3)


def test_tensors_allocated_by_the_group_are_reduced_in_place() -> None:
    run_ranks(_allocated, 3)


# --- meeting ---------------------------------------------------------------------------------------------------------


def _meet(folder: str, port: int, another_port: int) -> None:
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
    dist.init_process_group(
        "shm", init_method=f"tcp://127.0.0.1:{another_port}", rank=rank, world_size=size, timeout=limit
    )
    use()
    served = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
    if served is not None:
        store.set("port", str(served.port))
    tcp = served or TCPStore("127.0.0.1", int(store.get("port")), size, is_master=False)
    prefixed = [PrefixStore("one", store), PrefixStore("two", store), tcp, PrefixStore("a", PrefixStore("b", tcp))]
    for each in prefixed:
        dist.init_process_group("shm", store=each, rank=rank, world_size=size, timeout=limit)
        use()
    # Two backends of one world, and shm inside a world of gloo.
    dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=rank, world_size=size, timeout=limit)
    group = dist.new_group(backend="shm", timeout=limit)
    tensor = torch.full((2,), float(rank))
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(sum(range(size))) * size] * 2
    dist.destroy_process_group()
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < size:  # the served store is rank 0's
        time.sleep(0.005)


def test_every_way_to_meet(tmp_path: Path) -> None:
    run_ranks(_meet, 2, str(tmp_path), free_port(), free_port())


def _apart() -> str:
    from lockstep.comm.group import meeting

    rank = int(os.environ["RANK"])
    if rank == 1:
        mine = meeting.Whereabouts.mine()
        meeting.Whereabouts.mine = classmethod(  # type: ignore[assignment,method-assign]
            lambda _: meeting.Whereabouts(mine.pid, mine.started, "another-boot", mine.pid_namespace)
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
        assert now <= before + 2  # a pidfd per peer
