"""Ranks that issue different collectives, or one with different arguments: the same error on all, and nothing moved."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from tests.harness import run_ranks

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too

#: From the last rank's arrival to the error on every rank; busy machines get a margin.
SOON = 0.2
MARGIN = 8.0


def _wrong_operation(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(_untouched(4))
    else:
        dist.broadcast(_untouched(4), 0)


def _wrong_dtype(rank: int) -> None:
    dist.all_reduce(_untouched(4, dtype=torch.int32 if rank == 1 else torch.float32))


def _wrong_size(rank: int) -> None:
    dist.all_reduce(_untouched(4 + rank))


def _wrong_order(rank: int) -> None:
    sizes = (3, 1000) if rank == 0 else (1000, 3)
    for size in sizes:
        dist.all_reduce(_untouched(size))


def _wrong_label(rank: int) -> None:
    from lockstep.comm.labels import labelled

    for name in ("bucket 0", "bucket 1") if rank == 0 else ("bucket 1", "bucket 0"):
        with labelled(name):
            dist.all_reduce(_untouched(3))


def _wrong_root(rank: int) -> None:
    dist.broadcast(_untouched(4), rank % 2)


def _wrong_reduce_op(rank: int) -> None:
    dist.all_reduce(_untouched(4), dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM)


def _missing_call(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(_untouched(2))
    dist.barrier()


def _wrong_splits(rank: int) -> None:
    size = dist.get_world_size()
    rows = [2 if rank == 0 else 1] * size
    dist.all_to_all_single(torch.zeros(size), torch.ones(sum(rows)), [1] * size, rows)


def _asynchronous(rank: int) -> None:
    dist.all_reduce(_untouched(4 + rank), async_op=True).wait()


def _wrong_list(rank: int) -> None:
    """The same number of elements, divided in another way."""
    counts = (2, 3) if rank == 0 else (3, 2)
    group: Any = dist.group.WORLD
    group.allreduce_coalesced([_untouched(count) for count in counts]).wait()


def _wrong_gather(rank: int) -> None:
    size = dist.get_world_size()
    count = 4 + rank
    dist.all_gather([_untouched(count) for _ in range(size)], _untouched(count))


def _wrong_kind_of_gather(rank: int) -> None:
    size = dist.get_world_size()
    if rank == 0:
        dist.all_gather([_untouched(4) for _ in range(size)], _untouched(4))
    else:
        dist.all_gather_into_tensor(_untouched(4 * size), _untouched(4))


def _wrong_reduce_scatter(rank: int) -> None:
    size = dist.get_world_size()
    dist.reduce_scatter_tensor(_untouched(4), _untouched(4 * size), dist.ReduceOp.MAX if rank else dist.ReduceOp.MIN)


def _wrong_scatter_root(rank: int) -> None:
    size = dist.get_world_size()
    root = rank % 2
    dist.scatter(_untouched(4), [_untouched(4) for _ in range(size)] if rank == root else None, root)


def _wrong_sparse_shape(rank: int) -> None:
    shape = (4, 6) if rank == 0 else (6, 4)
    dist.all_reduce(torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), shape, check_invariants=False))


def _wrong_allocation(rank: int) -> None:
    group: Any = dist.group.WORLD
    group.allocate_tensor((4, 6) if rank == 0 else (6, 4))


def _wrong_part(rank: int) -> None:
    group: Any = dist.group.WORLD
    bucket = group.allocate_tensor(20)
    dist.all_reduce(bucket[:10] if rank == 0 else bucket[10:])


def _wrong_factor(rank: int) -> None:
    dist.all_reduce(_untouched(4), dist._make_nccl_premul_sum(2.0 + rank))  # type: ignore[attr-defined]


#: What ranks 0 and 1 are in: some words of the line on each; then their functions, which the source lines name.
_MISMATCHES: dict[str, tuple[Callable[[int], None], str, str]] = {
    "operation": (_wrong_operation, "all_reduce #1 (SUM", "broadcast #1 ("),
    "dtype": (_wrong_dtype, "torch.float32", "torch.int32"),
    "size": (_wrong_size, "4 elements", "5 elements"),
    "order": (_wrong_order, "3 elements", "1000 elements"),
    "label": (_wrong_label, "[bucket 0]", "[bucket 1]"),
    "root": (_wrong_root, "root 0", "root 1"),
    "reduce op": (_wrong_reduce_op, "MAX", "SUM"),
    "missing call": (_missing_call, "all_reduce #1", "barrier #1"),
    "asynchronous": (_asynchronous, "4 elements", "5 elements"),
    "sizes in a list": (_wrong_list, "all_reduce_coalesced", "all_reduce_coalesced"),
    "size gathered": (_wrong_gather, "4 elements", "5 elements"),
    "kind of gather": (_wrong_kind_of_gather, "all_gather #1", "all_gather_single #1"),
    "reduce op of reduce-scatter": (_wrong_reduce_scatter, "MIN", "MAX"),
    "root of scatter": (_wrong_scatter_root, "root 0", "root 1"),
    "sparse shape": (_wrong_sparse_shape, "24 elements", "24 elements"),
    "shape allocated": (_wrong_allocation, "allocate_tensor", "allocate_tensor"),
    "part of an allocated tensor": (_wrong_part, "10 elements", "10 elements"),
    "factor": (_wrong_factor, "PREMUL_SUM", "PREMUL_SUM"),
}

#: Those that only show when all have come: one line for all ranks.
_DISAGREEMENTS: dict[str, tuple[Callable[[int], None], str]] = {
    "splits": (_wrong_splits, "rank 0 sends 2 elements to rank 0, which expects 1 from it"),
}


@dataclass(frozen=True)
class _Told:
    kind: str
    message: str
    #: Of this rank's wait, and of being told the same again.
    seconds: float
    again: str
    #: The tensors that the collective was to write and has written.
    touched: int


_given: list[torch.Tensor] = []


def _untouched(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that nothing must be written to."""
    _given.append(torch.full((count,), 7, dtype=dtype))
    return _given[-1]


def _timed(action: Callable[[], object]) -> tuple[str, str, float]:
    begun = time.monotonic()
    try:
        action()
    except lockstep.LockstepError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    raise AssertionError("no error was raised")


def _mismatches() -> dict[str, _Told]:
    """Every mismatch in a group of its own; what the rank was told, and what it is told afterwards."""
    world = lockstep.init("shm", timeout=20)
    told = {}
    acts = {name: each[0] for name, each in (*_MISMATCHES.items(), *_DISAGREEMENTS.items())}
    for name, act in acts.items():
        dist.barrier()  # (in the default group, which stays whole)
        group = dist.new_group(backend="shm")
        default, dist.distributed_c10d.GroupMember.WORLD = dist.group.WORLD, group
        _given.clear()
        try:
            kind, message, seconds = _timed(lambda act=act: act(world.rank))  # type: ignore[misc]
            again = _timed(lambda: dist.barrier())
        finally:
            dist.distributed_c10d.GroupMember.WORLD = default
        touched = sum(1 for tensor in _given if not bool((tensor == 7).all()))
        told[name] = _Told(kind, message, max(seconds, again[2]), again[1], touched)
        dist.destroy_process_group(group)
    return told


def _sides(message: str) -> dict[int, tuple[str, str, int, str]]:
    """By rank: what it was in, and the file, line and function of the call."""
    found = re.findall(r"^  rank (\d+): (.*) at (\S+):(\d+) in (\w+)(?: \[.*\])?$", message, re.MULTILINE)
    return {int(rank): (what, file, int(line), function) for rank, what, file, line, function in found}


@cache
def _told_to(world_size: int) -> list[dict[str, _Told]]:
    """What each rank was told of each mismatch, found out once."""
    return run_ranks(_mismatches, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_mismatch_is_the_same_error_on_every_rank(world_size: int) -> None:
    told = _told_to(world_size)
    for name in (*_MISMATCHES, *_DISAGREEMENTS):
        for rank, by_name in enumerate(told):
            each = by_name[name]
            assert each.kind == "CollectiveMismatch", (name, rank, each)
            assert each.message == each.again == told[0][name].message, (name, rank)
            assert each.seconds < SOON + MARGIN, (name, rank, each)
            assert each.touched == 0, (name, rank, each)


@pytest.mark.campaign  # where nothing else runs
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_mismatch_is_known_everywhere_within_200_ms(world_size: int) -> None:
    assert median(each.seconds for by_name in _told_to(world_size) for each in by_name.values()) < SOON


def test_a_mismatch_names_both_sides_and_both_source_lines() -> None:
    told = _told_to(2)[0]
    for name, (act, *words) in _MISMATCHES.items():
        message = told[name].message
        sides = _sides(message)
        assert sorted(sides) == [0, 1], (name, message)
        lines = [line for line in message.splitlines() if line.startswith("  rank")]
        for rank, word in enumerate(words):
            assert word in lines[rank], (name, rank, message)
            _, file, line, function = sides[rank]
            assert file.endswith("test_shm_mismatches.py"), message
            assert function == act.__name__, message
            assert line > act.__code__.co_firstlineno, message
        assert sides[0] != sides[1] or "[" in message, (name, message)  # also where digests differ
    assert _sides(told["operation"].message)[0][2] != _sides(told["operation"].message)[1][2]
    for name, (_, words_) in _DISAGREEMENTS.items():
        assert words_ in told[name].message
        assert "test_shm_mismatches.py:" in told[name].message
