"""What a shm group takes of the system: descriptors, memory, processor time; and what it gives back."""

from __future__ import annotations

import os
import resource
import time
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
from tests.launching import own_mount, run

# --- descriptors -----------------------------------------------------------------------------------------------------


def _many_groups(count: int) -> tuple[int, int]:
    """Descriptors of this process before and with ``count`` groups, all of them in use."""
    world = lockstep.init("shm", timeout=20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    before = len(os.listdir("/proc/self/fd"))
    groups = [dist.new_group(backend="shm") for _ in range(count)]
    works = []
    for number, group in enumerate(groups):
        tensor = torch.full((100,), float(number + world.rank))
        works.append((number, tensor, dist.all_reduce(tensor, group=group, async_op=number % 2 == 1)))
        if number % 10 == 0:
            group.allocate_tensor(1000)
    for number, tensor, work in works:
        if work is not None:
            work.wait()
        assert tensor.unique().tolist() == [float(sum(number + rank for rank in range(world.world_size)))]
    if world.rank == 0:
        dist.send(torch.ones(3), 1, group=groups[-1])
    elif world.rank == 1:
        dist.recv(torch.ones(3), 0, group=groups[-1])
    return before, len(os.listdir("/proc/self/fd"))


def test_60_groups_with_256_descriptors() -> None:
    for before, now in run_ranks(_many_groups, 3, 60):
        assert now <= before


@pytest.mark.campaign
def test_300_groups_with_256_descriptors() -> None:
    run_ranks(_many_groups, 3, 300)


def _leave(count: int) -> None:
    """From now on this process can open ``count`` more descriptors (the open ones stay)."""
    free = [os.dup(0) for _ in range(count)]
    for each in free:
        os.close(each)
    limit = free[-1] + 1 if free else 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def _none_left(folder: str) -> str:
    """Rank 1 has no descriptor to watch rank 0 with, and in the end none at all."""
    rank = int(os.environ["RANK"])
    limit = timedelta(seconds=20)
    store = FileStore(f"{folder}/store", 2)
    if rank == 1:
        _leave(1)
    dist.init_process_group("shm", store=store, rank=rank, world_size=2, timeout=limit)
    if rank == 1:
        _leave(0)
    else:
        time.sleep(0.2)  # late, but not gone
    dist.barrier()
    with pytest.raises(lockstep.RendezvousError) as caught:
        dist.new_group(backend="shm", timeout=timedelta(seconds=1))
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)  # the group that is open goes on
    assert tensor.unique().tolist() == [2.0]
    return str(caught.value)


def test_a_process_without_descriptors(tmp_path: Path) -> None:
    told = run_ranks(_none_left, 2, str(tmp_path))
    assert "rank 0: rank 1 did not come" in told[0]
    assert "rank 1 could not join the process group" in told[1]
    assert "Too many open files" in told[1]


# --- memory ----------------------------------------------------------------------------------------------------------


def _shared_memory() -> int:
    """Bytes of shared memory that this process has touched."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem:"))


def _memory(chunk: int) -> tuple[int, int, int, int, int]:
    os.environ[knobs.SHM_CHUNK] = str(chunk)
    before = _shared_memory()
    lockstep.init("shm", timeout=20)
    dist.all_reduce(torch.ones(100))
    small = _shared_memory() - before
    for _ in range(3):
        dist.all_reduce(torch.ones(5_000_000))
        dist.all_gather([torch.ones(500_000) for _ in range(dist.get_world_size())], torch.ones(500_000))
    large = _shared_memory() - before
    group: Any = dist.group.WORLD
    bucket = group.allocate_tensor(1_000_000)
    dist.all_reduce(bucket)
    allocated = _shared_memory() - before
    lockstep.shutdown()
    del group
    kept = _shared_memory() - before
    bucket.fill_(1.0)
    del bucket
    return small, large, allocated, kept, _shared_memory() - before


def test_memory_is_taken_when_needed_bounded_and_given_back() -> None:
    chunk, world_size = 256 * 1024, 3
    for small, large, allocated, kept, after in run_ranks(_memory, world_size, chunk):
        assert small < 400_000  # words, headers, and the first pages of the stages
        assert large < small + 3 * world_size * chunk + 100_000  # three stages per rank
        assert allocated < large + world_size * 4_000_000 + 400_000
        assert kept <= 4_000_000 + 400_000  # the tensor outlives its group, the others' views do not
        assert after < 100_000


_SMALL = """
import os
import torch
import torch.distributed as dist
import lockstep

world = lockstep.init("shm")
there = os.statvfs("/dev/shm")
assert there.f_blocks * there.f_frsize <= 64 * 2**20

def untouched():
    return os.listdir("/dev/shm") == [] and os.statvfs("/dev/shm").f_bfree == there.f_blocks

tensor = torch.full((25_000_000,), float(world.rank + 1))
bucket = dist.group.WORLD.allocate_tensor(25_000_000)
bucket.copy_(tensor)
for each in (tensor, bucket):  # 100 MB
    dist.all_reduce(each)
    assert each.min() == each.max() == 3.0
    assert untouched()
output = torch.empty(50_000_000)
work = dist.group.WORLD.all_gather_single(output, tensor, )
work.wait()
assert untouched()
lockstep.shutdown()
"""


@pytest.mark.parametrize("options", ["size=64m", "size=64m,ro"])
def test_a_small_dev_shm_or_one_that_can_not_be_written(tmp_path: Path, options: str) -> None:
    """As in a container: 64 MB at /dev/shm. Nothing is ever put there: it may as well be read-only."""
    (tmp_path / "script.py").write_text(_SMALL)
    mounted = own_mount("/dev/shm", options)
    done = run(["lockstep", "run", "-n", "2", "script.py"], tmp_path, torch=True, before=mounted, OMP_NUM_THREADS="1")
    assert done.code == 0, done


# --- time ------------------------------------------------------------------------------------------------------------


def _idle() -> float:
    """Rank 0 comes two seconds late: rank 1 waits in a barrier, rank 2 for a message, rank 3 for work in flight."""
    world = lockstep.init("shm", timeout=20)
    group = dist.new_group([0, 3], backend="shm")
    dist.barrier()
    before = time.process_time()
    if world.rank == 0:
        time.sleep(2.0)
        dist.send(torch.ones(1), 2)
    elif world.rank == 2:
        dist.recv(torch.ones(1), 0)
    if world.rank in (0, 3):
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        assert work is not None
        work.wait()
    dist.barrier()
    return time.process_time() - before


def test_a_rank_that_waits_sleeps() -> None:
    spent = run_ranks(_idle, 4)
    assert max(spent) < 0.4, spent  # a rank that spins takes a second at least, on a busy machine too


# --- groups that come and go -----------------------------------------------------------------------------------------


def _cycles(count: int) -> tuple[list[int], list[int]]:
    world = lockstep.init("shm", timeout=20)

    def cycle() -> None:
        group = dist.new_group(backend="shm")
        dist.all_reduce(torch.full((3,), float(world.rank)), group=group)
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.send(torch.ones(3), 1, group=group) if world.rank == 0 else dist.recv(torch.ones(3), 0, group=group)
        group.allocate_tensor(1000)
        dist.destroy_process_group(group)

    for _ in range(20):
        cycle()
    before = _possessions()
    for _ in range(count):
        cycle()
    return before, _possessions()


def _possessions() -> list[int]:
    """Descriptors, mappings of shared segments, threads, and memory (MB)."""
    with open("/proc/self/maps") as file:
        maps = sum("memfd:lockstep" in line for line in file)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 10**6
    return [len(os.listdir("/proc/self/fd")), maps, len(os.listdir("/proc/self/task")), resident]


def _flat(count: int) -> None:
    for before, after in run_ranks(_cycles, 2, count, timeout=100):
        assert after[0] == before[0], "descriptors"
        assert after[1] <= before[1] + 1, "mappings"  # (one may wait for the garbage collector)
        assert after[2] <= before[2] + 1, "threads"
        assert after[3] <= before[3] + 8, "memory"


def test_groups_come_and_go_without_a_trace() -> None:
    _flat(100)


@pytest.mark.campaign
def test_a_thousand_groups_come_and_go_without_a_trace() -> None:
    _flat(1000)


# --- two jobs at once ------------------------------------------------------------------------------------------------


def _two_jobs(folder: str) -> tuple[float, float]:
    """Ranks 0 and 1 are one job, 2 and 3 another; they know nothing of each other but when to begin."""
    place = int(os.environ["RANK"])
    job, rank = divmod(place, 2)
    limit = timedelta(seconds=20)
    dist.init_process_group("shm", store=FileStore(f"{folder}/{job}", 2), rank=rank, world_size=2, timeout=limit)
    group: Any = dist.group.WORLD
    bucket = group.allocate_tensor(5000)
    start = FileStore(f"{folder}/start", 4)
    start.add("ready", 1)
    while start.add("ready", 0) < 4:
        time.sleep(0.001)
    begun = time.monotonic()
    for step in range(150):
        tensor = torch.full((5000,), float(1000 * job + step + rank))
        bucket.copy_(tensor)
        dist.all_reduce(tensor)
        dist.all_reduce(bucket)
        want = 2000.0 * job + 2 * step + 1
        assert tensor.unique().tolist() == bucket.unique().tolist() == [want]
        if step % 10 == job:
            inner = dist.new_group(backend="shm")
            dist.broadcast(tensor.fill_(float(job + rank)), 1, group=inner)
            assert tensor.unique().tolist() == [job + 1.0]
            dist.destroy_process_group(inner)
    ended = time.monotonic()
    dist.destroy_process_group()
    return begun, ended


def test_two_jobs_at_once(tmp_path: Path) -> None:
    told = run_ranks(_two_jobs, 4, str(tmp_path))
    assert max(begun for begun, _ in told) < min(ended for _, ended in told), "they did not run at once"
