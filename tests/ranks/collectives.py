"""Every collective with inputs unique to rank and element, next to what a single process computes it must give.

Used by the conformance suite (each case on each backend) and by the random sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import torch
import torch.distributed as dist

Op = dist.ReduceOp
#: Names of newer versions of torch for functions that older ones have, too.
all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
OPS: dict[str, Any] = {
    name: getattr(Op, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
#: What gloo moves and reduces; shm must do these in the same way, and more.
GLOO_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
MORE_DTYPES = (
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass(frozen=True)
class Case:
    """One collective to issue."""

    name: str
    dtype: torch.dtype
    count: int
    op: str = "SUM"
    root: int = 0
    asynchronous: bool = False


class Wrong(AssertionError):
    """A collective gave something else than the model."""


def issue(case: Case, salt: int = 0, group: Any = None) -> Callable[[], None]:
    """Issue ``case`` on this rank. The function that is returned waits for it and compares the result.

    Args:
        salt: makes the values of one call differ from those of another.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    give, expect = _CASES[case.name](case, rank, size, salt, group)
    work = give()

    def finish() -> None:
        if case.asynchronous and work is not None:
            work.wait()
            if dist.get_backend(group) != "gloo" and not work.is_completed():  # gloo's reduce_scatter never says so
                raise Wrong(f"{case}: not complete after wait()")
        for what, got, want in expect():
            _compare(f"{case} on rank {rank} of {size}: {what}", got, want)

    return finish


def values(rank: int, case: Case, salt: int = 0, *, count: int | None = None, piece: int = 0) -> torch.Tensor:
    """The elements rank ``rank`` puts in: small whole numbers, so that sums are exact in every dtype."""
    count = case.count if count is None else count
    work_out = _few_values if count <= _FEW else _few_values.__wrapped__
    return work_out(rank, case.dtype, case.op == "PRODUCT", salt, count, piece).clone()


#: Elements that are kept for the next case.
_FEW = 1000


@lru_cache(maxsize=50_000)
def _few_values(rank: int, dtype: torch.dtype, product: bool, salt: int, count: int, piece: int) -> torch.Tensor:
    index = torch.arange(count, dtype=torch.int64)
    if product:
        whole = 1 + (index * 3 + rank * 5 + piece + salt) % 3
    else:
        whole = (index * 7 + rank * 13 + piece * 29 + salt * 3) % 59
    if dtype is torch.bool:
        return (index + rank + piece + salt) % 3 == 0
    if dtype.is_complex:
        return torch.complex(whole.double(), (whole * 2 + 1).double()).to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 2:
        whole = whole + index * 64 + rank * 100_003
        if product:
            whole = 1 + (whole % 7)
    if dtype.is_floating_point and dtype.itemsize == 1:
        whole = whole % 8
    return whole.to(dtype)


def model(case: Case, contributions: list[torch.Tensor]) -> torch.Tensor:
    """What reducing the ranks' contributions gives."""
    dtype = case.dtype
    if dtype is torch.bool:
        logic: dict[str, Callable[[Any, Any], Any]] = {
            "SUM": torch.logical_or,
            "MAX": torch.logical_or,
            "BOR": torch.logical_or,
            "PRODUCT": torch.logical_and,
            "MIN": torch.logical_and,
            "BAND": torch.logical_and,
            "BXOR": torch.logical_xor,
        }
        return reduce(logic[case.op], contributions)
    wide = [each.to(_wide(dtype)) for each in contributions]
    arithmetic: dict[str, Callable[[Any, Any], Any]] = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    total = reduce(arithmetic[case.op], wide)
    if case.op == "AVG" and not (dtype.is_floating_point or dtype.is_complex):
        return total.to(dtype).div(len(contributions), rounding_mode="trunc")
    if case.op == "AVG":
        total = total / len(contributions)
    return total.to(dtype)


def supported(dtype: torch.dtype, op: str, *, collective: str = "all_reduce", backend: str = "shm") -> bool:
    """Whether reducing ``dtype`` by ``op`` makes sense, for torch and for this backend."""
    unsigned = (torch.uint16, torch.uint32, torch.uint64)
    if dtype.is_complex:
        return op in ("SUM", "AVG") and collective != "reduce"
    if dtype.is_floating_point:
        return dtype.itemsize > 1 and op not in ("BAND", "BOR", "BXOR")
    if op == "AVG":
        return backend != "gloo" and dtype is not torch.bool and dtype not in unsigned
    return not (dtype in unsigned and op in ("MIN", "MAX"))


# --- the collectives -----------------------------------------------------------------------------------------------

_Checks = list[tuple[str, torch.Tensor, torch.Tensor]]
_Prepared = tuple[Callable[[], Any], Callable[[], _Checks]]


def _all_reduce(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    tensor = values(rank, case, salt)
    want = model(case, [values(r, case, salt) for r in range(size)])
    return (
        lambda: dist.all_reduce(tensor, OPS[case.op], group=group, async_op=case.asynchronous),
        lambda: [("tensor", tensor, want)],
    )


def _reduce(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    tensor = values(rank, case, salt)
    want = model(case, [values(r, case, salt) for r in range(size)])
    return (
        lambda: dist.reduce(tensor, group_dst=case.root, op=OPS[case.op], group=group, async_op=case.asynchronous),
        lambda: [("tensor", tensor, want)] if rank == case.root else [],
    )


def _broadcast(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:  # noqa: ARG001
    tensor = values(rank, case, salt)
    return (
        lambda: dist.broadcast(tensor, group_src=case.root, group=group, async_op=case.asynchronous),
        lambda: [("tensor", tensor, values(case.root, case, salt))],
    )


def _all_gather(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    tensor = values(rank, case, salt)
    outputs = [torch.zeros_like(tensor) for _ in range(size)]
    return (
        lambda: dist.all_gather(outputs, tensor, group=group, async_op=case.asynchronous),
        lambda: (
            [(f"output {r}", outputs[r], values(r, case, salt)) for r in range(size)]
            + [("input", tensor, values(rank, case, salt))]
        ),
    )


def _all_gather_single(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    output = torch.zeros(size * case.count, dtype=case.dtype)
    gather = all_gather_single
    return (
        lambda: gather(output, values(rank, case, salt), group=group, async_op=case.asynchronous),
        lambda: [("output", output, torch.cat([values(r, case, salt) for r in range(size)]))],
    )


def _gather(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    outputs = [torch.zeros(case.count, dtype=case.dtype) for _ in range(size)] if rank == case.root else None
    return (
        lambda: dist.gather(
            values(rank, case, salt), outputs, group_dst=case.root, group=group, async_op=case.asynchronous
        ),
        lambda: [(f"output {r}", t, values(r, case, salt)) for r, t in enumerate(outputs or [])],
    )


def _scatter(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    output = torch.zeros(case.count, dtype=case.dtype)
    inputs = [values(case.root, case, salt, piece=r) for r in range(size)] if rank == case.root else None
    return (
        lambda: dist.scatter(output, inputs, group_src=case.root, group=group, async_op=case.asynchronous),
        lambda: [("output", output, values(case.root, case, salt, piece=rank))],
    )


def _reduce_scatter(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    output = torch.zeros(case.count, dtype=case.dtype)
    inputs = [values(rank, case, salt, piece=r) for r in range(size)]
    want = model(case, [values(r, case, salt, piece=rank) for r in range(size)])
    return (
        lambda: dist.reduce_scatter(output, inputs, OPS[case.op], group=group, async_op=case.asynchronous),
        lambda: [("output", output, want)],
    )


def _reduce_scatter_single(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    output = torch.zeros(case.count, dtype=case.dtype)
    source = torch.cat([values(rank, case, salt, piece=r) for r in range(size)])
    want = model(case, [values(r, case, salt, piece=rank) for r in range(size)])
    scatter = reduce_scatter_single
    return (
        lambda: scatter(output, source, OPS[case.op], group=group, async_op=case.asynchronous),
        lambda: [("output", output, want)],
    )


def _all_to_all(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    outputs = [torch.zeros(case.count, dtype=case.dtype) for _ in range(size)]
    inputs = [values(rank, case, salt, piece=r) for r in range(size)]
    return (
        lambda: dist.all_to_all(outputs, inputs, group=group, async_op=case.asynchronous),
        lambda: [(f"from {r}", outputs[r], values(r, case, salt, piece=rank)) for r in range(size)],
    )


def _all_to_all_single(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    output = torch.zeros(size * case.count, dtype=case.dtype)
    source = torch.cat([values(rank, case, salt, piece=r) for r in range(size)])
    return (
        lambda: dist.all_to_all_single(output, source, group=group, async_op=case.asynchronous),
        lambda: [("output", output, torch.cat([values(r, case, salt, piece=rank) for r in range(size)]))],
    )


def _all_to_all_uneven(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    """Rank s sends count + s + 2 r rows of 3 to rank r; rank 0 sends none to the last."""

    def rows(source: int, target: int) -> int:
        return 0 if source == 0 and target == size - 1 else case.count + source + 2 * target

    def piece(source: int, target: int) -> torch.Tensor:
        return values(source, case, salt, count=3 * rows(source, target), piece=target).view(-1, 3)

    given = [rows(rank, r) for r in range(size)]
    taken = [rows(r, rank) for r in range(size)]
    output = torch.zeros(sum(taken), 3, dtype=case.dtype)
    source = torch.cat([piece(rank, r) for r in range(size)])
    return (
        lambda: dist.all_to_all_single(output, source, taken, given, group=group, async_op=case.asynchronous),
        lambda: [("output", output, torch.cat([piece(r, rank) for r in range(size)]))],
    )


def _all_to_all_uneven_list(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    """Rank s sends count + s + 2 r elements to rank r, in tensors of their own."""

    def piece(source: int, target: int) -> torch.Tensor:
        return values(source, case, salt, count=case.count + source + 2 * target, piece=target)

    outputs = [torch.zeros_like(piece(r, rank)) for r in range(size)]
    inputs = [piece(rank, r) for r in range(size)]
    return (
        lambda: dist.all_to_all(outputs, inputs, group=group, async_op=case.asynchronous),
        lambda: [(f"from {r}", outputs[r], piece(r, rank)) for r in range(size)],
    )


def _exchange(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    """A batch of messages from every rank to every other one, two with each tag."""
    peers = [r for r in range(size) if r != rank]
    outputs = [[torch.zeros(case.count + i, dtype=case.dtype) for i in range(2)] for _ in range(size)]

    def message(source: int, target: int, index: int) -> torch.Tensor:
        return values(source, case, salt, count=case.count + index, piece=2 * target + index)

    def give() -> Any:
        ops = []
        for r in peers:
            for i in range(2):
                ops.append(dist.P2POp(dist.isend, message(rank, r, i), group=group, group_peer=r))
                ops.append(dist.P2POp(dist.irecv, outputs[r][i], group=group, group_peer=r))
        works = dist.batch_isend_irecv(ops) if ops else []
        if not case.asynchronous:
            _All(works).wait()
        return _All(works)

    return give, lambda: [(f"{i} from {r}", outputs[r][i], message(r, rank, i)) for r in peers for i in range(2)]


class _All:
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


# Coalesced: several tensors of different sizes in one operation.

_SIZES = (0, 3, 1)


def _counts(case: Case) -> list[int]:
    return [case.count + more for more in _SIZES]


def _all_reduce_coalesced(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    tensors = [values(rank, case, salt, count=c, piece=i) for i, c in enumerate(_counts(case))]
    wants = [
        model(case, [values(r, case, salt, count=c, piece=i) for r in range(size)]) for i, c in enumerate(_counts(case))
    ]

    def give() -> Any:
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = OPS[case.op]
        return _issued(case, _group(group).allreduce_coalesced(tensors, options))

    return give, lambda: [(f"tensor {i}", *each) for i, each in enumerate(zip(tensors, wants, strict=True))]


def _all_gather_coalesced(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    inputs = [values(rank, case, salt, count=c, piece=i) for i, c in enumerate(_counts(case))]
    outputs = [[torch.zeros_like(each) for each in inputs] for _ in range(size)]
    return (
        lambda: _issued(case, _group(group).allgather_coalesced(outputs, inputs)),
        lambda: [
            (f"{i} from {r}", outputs[r][i], values(r, case, salt, count=c, piece=i))
            for r in range(size)
            for i, c in enumerate(_counts(case))
        ],
    )


def _all_gather_single_coalesced(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    inputs = [values(rank, case, salt, count=c, piece=i) for i, c in enumerate(_counts(case))]
    outputs = [torch.zeros(size * c, dtype=case.dtype) for c in _counts(case)]
    return (
        lambda: _issued(case, _group(group).allgather_into_tensor_coalesced(outputs, inputs)),
        lambda: [
            (f"{i}", outputs[i], torch.cat([values(r, case, salt, count=c, piece=i) for r in range(size)]))
            for i, c in enumerate(_counts(case))
        ],
    )


def _reduce_scatter_coalesced(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:
    def pieces(source: int, index: int, count: int) -> list[torch.Tensor]:
        return [values(source, case, salt, count=count, piece=2 * r + index) for r in range(size)]

    outputs = [torch.zeros(c, dtype=case.dtype) for c in _counts(case)]
    inputs = [torch.cat(pieces(rank, i, c)) for i, c in enumerate(_counts(case))]

    def give() -> Any:
        options = dist.ReduceScatterOptions()
        options.reduceOp = OPS[case.op]
        return _issued(case, _group(group).reduce_scatter_tensor_coalesced(outputs, inputs, options))

    return give, lambda: [
        (f"{i}", outputs[i], model(case, [pieces(r, i, c)[rank] for r in range(size)]))
        for i, c in enumerate(_counts(case))
    ]


def _group(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def _issued(case: Case, work: Any) -> Any:
    """The group's own methods always return a work."""
    if not case.asynchronous:
        work.wait()
    return work


def _barrier(case: Case, rank: int, size: int, salt: int, group: Any) -> _Prepared:  # noqa: ARG001
    return lambda: dist.barrier(group=group, async_op=case.asynchronous), list


_CASES: dict[str, Callable[[Case, int, int, int, Any], _Prepared]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_uneven": _all_to_all_uneven,
    "all_to_all_uneven_list": _all_to_all_uneven_list,
    "exchange": _exchange,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_single_coalesced": _all_gather_single_coalesced,
    "reduce_scatter_coalesced": _reduce_scatter_coalesced,
    "barrier": _barrier,
}
REDUCING = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_coalesced",
)
MOVING = tuple(name for name in _CASES if name not in (*REDUCING, "barrier"))
ROOTED = ("reduce", "broadcast", "gather", "scatter")


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _compare(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    if got.dtype is not want.dtype or got.shape != want.shape:
        raise Wrong(f"{what}: {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}")
    if got.dtype is torch.bool:  # gloo adds truth values as bytes; any other byte than 0 is true
        got = got.view(torch.uint8) != 0
    if got.dtype.itemsize == 1 and got.dtype.is_floating_point:
        got, want = got.float(), want.float()
    if not torch.equal(got, want) and not torch.allclose(got, want, rtol=_TOLERANCE.get(got.dtype, 1e-6), atol=0):
        at = int((got != want).nonzero()[0, 0])
        raise Wrong(f"{what}: element {at} is {got.view(-1)[at].item()}, expected {want.view(-1)[at].item()}")


#: An average may round once more or less than the model.
_TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float64: 1e-12}
