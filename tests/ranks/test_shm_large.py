"""Tensors of more than 2 GiB, and the offsets that come with them."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import knobs
from tests.harness import run_ranks
from tests.ranks.collectives import MOVING, REDUCING, Case, issue

#: Where a signed offset of 32 bits ends.
EDGE = 2**31


# --- offsets: little memory is touched -------------------------------------------------------------------------------


def _far_apart() -> None:
    """Stages of 512 MiB lie beyond 2 GiB of the segment, of which the few pages in use take memory."""
    os.environ[knobs.SHM_CHUNK] = str(2**29)
    world = lockstep.init("shm", timeout=30)
    for salt, name in enumerate((*REDUCING, *MOVING, "barrier")):
        issue(Case(name, torch.float32, 5000), salt)()
    got = torch.zeros(5000)
    receive = dist.irecv(got, 1 - world.rank)
    dist.send(torch.arange(5000.0) + world.rank, 1 - world.rank)
    assert receive is not None
    receive.wait()
    assert torch.equal(got, torch.arange(5000.0) + 1 - world.rank)


def test_memory_beyond_2_gib_of_the_segment() -> None:
    run_ranks(_far_apart, 2)


def _around_the_edge() -> None:
    """Parts of huge tensors that lie across element 2**31; the rest is never touched."""
    world = lockstep.init("shm", timeout=30)
    rank, size = world.rank, world.world_size
    group: Any = dist.group.WORLD
    index = torch.arange(1000)
    for whole in (torch.empty(EDGE + 700, dtype=torch.uint8), group.allocate_tensor(EDGE + 700, dtype=torch.uint8)):
        part = whole[EDGE - 300 :]
        part.copy_((index * 3 + rank) % 100)
        dist.all_reduce(part)
        want = sum((index * 3 + each) % 100 for each in range(size)).to(torch.uint8)  # type: ignore[union-attr]
        assert torch.equal(part, want)
        part.copy_((index * 5 + rank) % 251)
        dist.broadcast(part, 1)
        assert torch.equal(part, ((index * 5 + 1) % 251).to(torch.uint8))


def test_parts_of_huge_tensors() -> None:
    run_ranks(_around_the_edge, 2)


# --- whole tensors: gigabytes are moved ------------------------------------------------------------------------------

#: A prime, so that no chunk of a stage's size repeats another.
_PERIOD = 251
_COUNT = EDGE + 3


def _filled(count: int, shift: int) -> torch.Tensor:
    """Element i is (i + shift) mod 251."""
    tensor = torch.empty(count, dtype=torch.uint8)
    for start, block in _blocks(tensor):
        block.copy_(_pattern(start + shift, block.numel()))
    return tensor


def _blocks(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    step = 64 * 1024 * 1024
    return [(start, tensor[start : start + step]) for start in range(0, tensor.numel(), step)]


@cache
def _periods() -> torch.Tensor:
    return torch.arange(_PERIOD, dtype=torch.uint8).repeat(300_000)


def _pattern(start: int, count: int) -> torch.Tensor:
    return _periods()[start % _PERIOD : start % _PERIOD + count]


def _check(tensor: torch.Tensor, *shifts: int) -> None:
    """That every element is the sum of the patterns with these shifts."""
    for start, block in _blocks(tensor):
        want = _pattern(start + shifts[0], block.numel())
        for shift in shifts[1:]:
            want = want + _pattern(start + shift, block.numel())
        assert torch.equal(block, want), f"elements {start} to {start + block.numel()}"


def _huge(what: str) -> None:
    rank = lockstep.init("shm", timeout=60).rank
    group: Any = dist.group.WORLD
    if what == "all_reduce":
        tensor = _filled(_COUNT, 7 * rank)
        dist.all_reduce(tensor)
        _check(tensor, 0, 7)
    elif what == "all_reduce of an allocated tensor":
        tensor = group.allocate_tensor(_COUNT, dtype=torch.uint8)
        for start, block in _blocks(tensor):
            block.copy_(_pattern(start + 7 * rank, block.numel()))
        dist.all_reduce(tensor)
        _check(tensor, 0, 7)
    elif what == "broadcast":
        tensor = _filled(_COUNT, 7 * rank)
        dist.broadcast(tensor, 1)
        _check(tensor, 7)
    elif what == "all_gather":
        count = EDGE // 2 + 3  # (the output is what passes 2 GiB: more would take more memory than many machines have)
        output = torch.empty(2 * count, dtype=torch.uint8)
        group.all_gather_single(output, _filled(count, 7 * rank)).wait()
        _check(output[:count], 0)
        _check(output[count:], 7)
    elif what == "send and recv":
        if rank == 0:
            dist.send(_filled(_COUNT, 3), 1)
        else:
            tensor = torch.empty(_COUNT, dtype=torch.uint8)
            dist.recv(tensor, 0)
            _check(tensor, 3)
    dist.barrier()


@pytest.mark.campaign
@pytest.mark.parametrize(
    "what", ["all_reduce", "all_reduce of an allocated tensor", "broadcast", "all_gather", "send and recv"]
)
def test_more_than_2_gib(what: str) -> None:
    run_ranks(_huge, 2, what, timeout=200)
