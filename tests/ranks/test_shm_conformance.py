"""The conformance suite: every collective, dtype and reduce op, sync and async, on 1 to 5 ranks, over each engine of
lockstep's process group (shm; hierarchical, on two or three hosts), and over gloo, which they are compared with.

Every run of the tests has each collective with each dtype and op once; the campaign has them at all sizes, sync and
async.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import knobs
from tests.harness import run_ranks
from tests.ranks.collectives import (
    GLOO_DTYPES,
    MORE_DTYPES,
    MOVING,
    OPS,
    REDUCING,
    ROOTED,
    Case,
    all_gather_single,
    issue,
    reduce_scatter_single,
    supported,
)

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too

#: Bytes of a stage that make a few hundred elements take several rounds.
SMALL_CHUNK = 512

#: So many cases later a call may put in the same values again, which saves working them out.
_SALTS = 11

#: gloo refuses complex numbers here ("Invalid scalar type"); shm moves them.
_NOT_COMPLEX_OVER_GLOO = (
    "all_gather_coalesced",
    "all_gather_single_coalesced",
    "all_reduce_coalesced",
    "gather",
    "scatter",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_coalesced",
)
#: gloo wants equal sizes in a list, and before torch 2.13 took no lists.
_NOT_OVER_GLOO = ("all_to_all_uneven_list", *(() if hasattr(dist, "all_gather_single") else ("all_to_all",)))
#: These share their code with others, which go through all dtypes.
_FEW_DTYPES = (torch.bool, torch.int64, torch.bfloat16, torch.float32, torch.complex64)
_OF_FEW_DTYPES = (
    "all_to_all_uneven_list",
    "exchange",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter_coalesced",
)


def _cases(backend: str, size: int, counts: tuple[int, ...]) -> Iterator[Case]:
    dtypes = GLOO_DTYPES + (MORE_DTYPES if backend != "gloo" else ())
    root = 0
    for asynchronous, dtype, count, name in product((False, True), dtypes, counts, (*REDUCING, *MOVING)):
        if backend == "gloo" and (name in _NOT_OVER_GLOO or (dtype.is_complex and name in _NOT_COMPLEX_OVER_GLOO)):
            continue
        if dtype not in _FEW_DTYPES and (name in _OF_FEW_DTYPES or count == 0):
            continue
        for op in OPS if name in REDUCING else ("SUM",):
            if name in REDUCING and not supported(dtype, op, collective=name, backend=backend):
                continue
            root = (root + 1) % size
            yield Case(name, dtype, count, op, root if name in ROOTED else 0, asynchronous)
    for asynchronous in (False, True):
        yield Case("barrier", torch.float32, 0, asynchronous=asynchronous)


def _one_of_each(cases: Iterator[Case]) -> Iterator[Case]:
    """Each collective with each dtype and op once, in turn at every size, sync and async."""
    alike: dict[str, dict[tuple[torch.dtype, str], list[Case]]] = {}
    for case in cases:
        if case.name == "barrier":
            yield case
        else:
            alike.setdefault(case.name, {}).setdefault((case.dtype, case.op), []).append(case)
    for kinds in alike.values():
        for turn, variants in enumerate(kinds.values()):
            yield variants[turn % len(variants)]


def conform(backend: str, chunk: int | None, counts: tuple[int, ...], every: bool) -> tuple[int, list[str]]:
    if chunk is not None:
        os.environ[knobs.SHM_CHUNK] = str(chunk)
    world = lockstep.init(backend, timeout=30)
    wrong = []
    done = 0
    cases = _cases(backend, world.world_size, counts)
    for salt, case in enumerate(cases if every else _one_of_each(cases)):
        try:
            issue(case, salt % _SALTS)()
        except lockstep.LockstepError:
            raise
        except (AssertionError, RuntimeError, ValueError, TypeError) as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}")
        done += 1
    return done, wrong


def _selected(*arguments: Any, name: str, often: bool) -> list[Any]:
    """All cases, for the campaign, and before them one of each where every run of the tests is to have these."""
    everything = pytest.param(*arguments, True, id=name, marks=pytest.mark.campaign)
    return [pytest.param(*arguments, False, id=f"{name}-once"), everything] if often else [everything]


def _on(world_size: int, backend: str, chunk: int | None, counts: tuple[int, ...], name: str) -> list[Any]:
    # Every run of the tests has each world size of the backend itself, and one of what it is compared with.
    often = name == "shm" or (name, world_size) in (("gloo", 2), ("shm-small-chunks", 3))
    return _selected(world_size, backend, chunk, counts, name=f"{name}-{world_size}", often=often)


@pytest.mark.parametrize(
    ("world_size", "backend", "chunk", "counts", "every"),
    [
        each
        for world_size in (1, 2, 3, 4)
        for case in (
            ("gloo", None, (5,), "gloo"),
            ("shm", None, (0, 1, 257), "shm"),
            ("shm", SMALL_CHUNK, (3, 301), "shm-small-chunks"),
        )
        for each in _on(world_size, *case)
    ],
)
def test_every_collective(
    world_size: int, backend: str, chunk: int | None, counts: tuple[int, ...], every: bool
) -> None:
    for done, wrong in run_ranks(conform, world_size, backend, chunk, counts, every):
        assert not wrong, f"{len(wrong)} of {done} cases:\n" + "\n".join(wrong[:20])
        assert done > 300


#: Ranks on each host; elements, of which the larger number takes several chunks; and whether every run of the tests has
#: it. With three hosts each leader combines a part of a chunk, with two all of it.
_SPREAD = [
    ([2, 2], None, (0, 1, 257), True),
    ([1, 1, 1], SMALL_CHUNK, (301,), True),
    ([1, 1, 1], SMALL_CHUNK, (1301,), False),
    ([2, 1], SMALL_CHUNK, (3, 1301), False),
    ([1, 2, 2], None, (0, 1, 257), False),
    ([1], None, (0, 1, 257), False),
]


@pytest.mark.parametrize(
    ("hosts", "chunk", "counts", "every"),
    [
        each
        for hosts, chunk, counts, often in _SPREAD
        for each in _selected(hosts, chunk, counts, name=f"{'-'.join(map(str, hosts))}-of-{counts[-1]}", often=often)
    ],
)
def test_every_collective_across_hosts(
    hosts: list[int], chunk: int | None, counts: tuple[int, ...], every: bool
) -> None:
    for done, wrong in run_ranks(conform, sum(hosts), "hierarchical", chunk, counts, every, timeout=110, hosts=hosts):
        assert not wrong, f"{len(wrong)} of {done} cases:\n" + "\n".join(wrong[:20])
        assert done > 300


# --- what is refused -------------------------------------------------------------------------------------------------


def _attempts(size: int) -> dict[str, Callable[[], Any]]:
    """Calls that make no sense, or that some backend has no code for; each fails, or works, on every rank alike."""
    op, ones = dist.ReduceOp, torch.ones
    group: Any = dist.group.WORLD
    return {
        "bits of floats": lambda: dist.all_reduce(ones(2), op.BAND),
        "bits of halves": lambda: dist.all_reduce(ones(2, dtype=torch.half), op.BXOR),
        "average of ints": lambda: dist.all_reduce(ones(2, dtype=torch.int32), op.AVG),
        "average of truth values": lambda: dist.all_reduce(ones(2, dtype=torch.bool), op.AVG),
        "minimum of complex": lambda: dist.all_reduce(ones(2, dtype=torch.complex64), op.MIN),
        "product of complex": lambda: dist.all_reduce(ones(2, dtype=torch.complex64), op.PRODUCT),
        "sum of bytes of float8": lambda: dist.all_reduce(ones(2).to(torch.float8_e5m2)),
        "no such root": lambda: dist.broadcast(ones(2), group_src=size),
        "negative root": lambda: dist.reduce(ones(2), group_dst=-1),
        "short list": lambda: dist.all_gather([ones(2)], ones(2)),
        "unequal list": lambda: dist.all_gather([ones(r + 1) for r in range(size)], ones(1)),
        "list of another dtype": lambda: dist.all_gather([ones(1, dtype=torch.int32)] * size, ones(1)),
        "whole of another size": lambda: all_gather_single(ones(2 * size + 1), ones(2)),
        "whole of another dtype": lambda: all_gather_single(ones(2 * size, dtype=torch.int64), ones(2)),
        "part of another size": lambda: reduce_scatter_single(ones(2), ones(2 * size + 1)),
        "short list to scatter": lambda: dist.reduce_scatter(ones(2), [ones(2)]),
        "unequal list to scatter": lambda: dist.reduce_scatter(ones(2), [ones(3)] * size),
        "splits that do not add up": lambda: dist.all_to_all_single(ones(3), ones(3), [1] * size, [7] * size),
        "too few splits": lambda: dist.all_to_all_single(ones(3), ones(3), [3], [3]),
        "too short a list to exchange": lambda: dist.all_to_all([ones(1)], [ones(1)]),
        "sparse maximum": lambda: dist.all_reduce(ones(2).to_sparse(), op.MAX),
        "sparse broadcast": lambda: dist.broadcast(ones(2).to_sparse(), 0),
        "compressed sparse rows": lambda: dist.all_reduce(torch.eye(2).to_sparse_csr()),
        "no tensor": lambda: dist.all_reduce([1.0]),
        "itself": lambda: dist.send(ones(1), dist.get_rank()),
        "apart": lambda: all_gather_single(ones(2 * size, 2)[:, 0], ones(2)),
        "average": lambda: dist.all_reduce(ones(2), op.AVG),
        "premultiplied": lambda: dist.all_reduce(ones(2), dist._make_nccl_premul_sum(2.0)),  # type: ignore[attr-defined]
        "int16": lambda: dist.all_reduce(ones(2, dtype=torch.int16)),
        "dtypes mixed": lambda: group.allreduce_coalesced([ones(2), ones(2, dtype=torch.int32)]).wait(),
        "rows that do not divide": lambda: dist.all_to_all_single(ones(size + 1), ones(size + 1)),
        "meta": lambda: dist.all_reduce(ones(2, device="meta")),
    }


#: shm does what gloo refuses.
_MORE_THAN_GLOO = {"average of ints", "premultiplied", "int16", "dtypes mixed"}
#: shm refuses what gloo accepts (rows until torch 2.14): it moves a part of the elements, or none, and says nothing.
_SAID_BY_SHM_ALONE = {"rows that do not divide", "meta"}


#: For these gloo ended the whole process in torch 2.9; it raises RuntimeError in 2.13, and maybe before.
_ENDS = {"part of another size", "unequal list to scatter"}
_ENDED_BY_GLOO = _ENDS if torch.torch_version.TorchVersion(torch.__version__) < "2.13" else set()


def _refusals(backend: str) -> dict[str, str]:
    warnings.simplefilter("ignore")  # (sparse CSR is said to be in beta)
    world = lockstep.init(backend, timeout=20)
    outcomes = {}
    for name, attempt in _attempts(world.world_size).items():
        if backend == "gloo" and name in _ENDED_BY_GLOO:
            outcomes[name] = "RuntimeError"
            continue
        try:
            attempt()
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            outcomes[name] = type(error).__name__
        else:
            outcomes[name] = "works"
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # a refusal harms nobody
    assert tensor.tolist() == [2.0] * 3
    return outcomes


def test_what_gloo_refuses_is_refused_with_the_same_type_of_error() -> None:
    over_gloo = run_ranks(_refusals, 2, "gloo")
    over_shm = run_ranks(_refusals, 2, "shm")
    assert run_ranks(_refusals, 2, "hierarchical", hosts=[1, 1]) == over_shm
    assert over_shm[0] == over_shm[1]
    for name, got in over_shm[0].items():
        want = over_gloo[0][name]
        if name in _MORE_THAN_GLOO:
            assert (got, want) == ("works", "RuntimeError"), name
        elif name in _SAID_BY_SHM_ALONE:
            assert got == "RuntimeError", name
            assert want in ("works", "RuntimeError", "NotImplementedError"), name  # the last in torch 2.9
        else:
            assert got == want, name
