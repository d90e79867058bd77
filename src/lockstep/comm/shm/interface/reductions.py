"""Operations that combine the ranks' tensors: all-reduce, reduce and reduce-scatter, and memory to do it in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.shm import fingerprint, tensors
from lockstep.comm.shm.collectives import all_reduce as _all_reduce
from lockstep.comm.shm.collectives import all_reduce_shared as _all_reduce_shared
from lockstep.comm.shm.collectives import reduce as _reduce
from lockstep.comm.shm.collectives import reduce_scatter as _reduce_scatter
from lockstep.comm.shm.collectives import sparse as _sparse
from lockstep.comm.shm.group import Call
from lockstep.comm.shm.interface.base import Operations, Tensors, finish, single, sizes, sync_if_none
from lockstep.comm.shm.reduction import Reduction, reduction
from lockstep.comm.shm.rounds import Rounds
from lockstep.comm.shm.shared_tensors import Part
from lockstep.comm.shm.work import ShmWork

_PREMUL_SUM = fingerprint.REDUCE_OPS.index("PREMUL_SUM")


class Reductions(Operations):
    """All-reduce, reduce, reduce-scatter."""

    _shm_reductions: dict[tuple[int, torch.dtype], Reduction]

    def allreduce(self, tensors_: Tensors, opts: Any = None) -> ShmWork:
        opts = opts or dist.AllreduceOptions()
        tensor = single("allreduce", tensors_)
        if tensor.layout is torch.sparse_coo:
            return self._allreduce_sparse(tensors_, opts)
        tensors.check("allreduce", tensors_)
        op, how = self._reduction(opts, tensor.dtype)
        shared = self._find_shared(tensor)
        detail: object = (shared.number, shared.offset) if shared is not None else None
        if how.factor != 1:
            detail = (detail, how.factor)
        body = fingerprint.take("all_reduce", dtype=tensor.dtype, numel=tensor.numel(), reduce_op=op, detail=detail)

        def move(rounds: Rounds) -> None:
            if shared is not None:
                views = shared.views(tensors.source(tensor))
                _all_reduce_shared.all_reduce_shared(rounds, [_as(view, how) for view in views], how)
                return
            finishes: list[tensors.Finish] = []
            _all_reduce.all_reduce(rounds, _as(tensors.target(tensor, finishes), how), how)
            finish(finishes)

        return self._issue("all_reduce", body, move, tensors_, opts)

    #: All-reducing a tensor from :meth:`allocate_tensor` copies nothing; see lockstep.comm.memory.
    reduces_in_place = True
    #: Labels of collectives are compared before any data moves: see lockstep.comm.labels.
    compares_labels = True

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """**Local.** Whether :meth:`allocate_tensor` has memory on ``device``; torch's name for the question."""
        return device.type == "cpu"

    def allocate_tensor(
        self, size: int | Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None
    ) -> torch.Tensor:
        """**Collective.** A tensor of zeros that the ranks share, so that all-reducing it copies nothing.

        An all-reduce of the whole tensor, or of the same contiguous part of it on every rank, works in place. The
        tensor may be used after the group is destroyed; it is then a tensor like any other.

        Raises:
            RendezvousError: some rank has no memory, or can't map another's.
            RuntimeError: ``device`` is not the CPU.
        """
        shape = (size,) if isinstance(size, int) else tuple(size)
        dtype = dtype or torch.get_default_dtype()
        if device is not None and torch.device(device).type != "cpu":
            raise RuntimeError(f'allocate_tensor: the backend "shm" has CPU memory, not {device}')
        body = fingerprint.take("allocate_tensor", dtype=dtype, numel=math.prod(shape), detail=shape)
        result: Tensors = []

        def move(rounds: Rounds) -> None:
            result.append(self._shm_group.shared.allocate(rounds, math.prod(shape), dtype).view(shape))

        self._shm_group.issue(Call("allocate_tensor", body, move, result, self._shm_group.timeout, False))
        return result[0]

    def _find_shared(self, tensor: torch.Tensor) -> Part | None:
        if not self._shm_group.shared or not tensors.is_flat(tensor):
            return None
        return self._shm_group.shared.find(tensor)

    def allreduce_coalesced(self, tensors_: Tensors, opts: Any = None) -> ShmWork:
        opts = opts or dist.AllreduceCoalescedOptions()
        tensors.check("allreduce_coalesced", tensors_)
        hows = [self._reduction(opts, tensor.dtype)[1] for tensor in tensors_]
        body = fingerprint.take(
            "all_reduce_coalesced",
            dtype=tensors_[0].dtype if tensors_ else None,
            numel=sum(tensor.numel() for tensor in tensors_),
            reduce_op=_op(opts)[0],
            detail=(sizes(tensors_), tuple(how.factor for how in hows)),
        )

        def move(rounds: Rounds) -> None:
            finishes: list[tensors.Finish] = []
            for tensor, how in zip(tensors_, hows, strict=True):
                _all_reduce.all_reduce(rounds, _as(tensors.target(tensor, finishes), how), how)
            sync_if_none(rounds, tensors_)
            finish(finishes)

        return self._issue("all_reduce_coalesced", body, move, tensors_, opts)

    def _allreduce_sparse(self, tensors_: Tensors, opts: Any) -> ShmWork:
        tensor = tensors_[0]
        op, _ = _op(opts)
        if fingerprint.REDUCE_OPS[op] != "SUM":
            raise RuntimeError(
                "allreduce: unsupported reduction operation (sparse tensors can be reduced with ReduceOp.SUM only)"
            )
        body = fingerprint.take(
            "all_reduce of a sparse tensor", dtype=tensor.dtype, numel=tensor.numel(), detail=_sparse_shape(tensor)
        )

        def move(rounds: Rounds) -> None:
            with torch.no_grad():  # (.data of a sparse tensor would be written apart from it)
                tensor.copy_(_sparse.all_reduce_sparse(rounds, tensor.detach().coalesce()))

        return self._issue("sparse_all_reduce", body, move, tensors_, opts)

    def reduce(self, tensors_: Tensors, opts: Any = None) -> ShmWork:
        opts = opts or dist.ReduceOptions()
        tensor = single("reduce", tensors_)
        tensors.check("reduce", tensors_)
        root = self._root("reduce", opts.rootRank)
        op, how = self._reduction(opts, tensor.dtype)
        body = fingerprint.take(
            "reduce", dtype=tensor.dtype, numel=tensor.numel(), reduce_op=op, root=root, detail=how.factor
        )

        def move(rounds: Rounds) -> None:
            finishes: list[tensors.Finish] = []
            _reduce.reduce(rounds, _as(tensors.target(tensor, finishes), how), how, root=root)
            if rounds.rank == root:
                finish(finishes)

        return self._issue("reduce", body, move, tensors_, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> ShmWork:
        opts = opts or dist.ReduceScatterOptions()
        output, sources = single("reduce_scatter", outputs), single("reduce_scatter", inputs)
        tensors.check_sizes("reduce_scatter", sources, self._shm_size, like=output)
        return self._reduce_scatter("reduce_scatter", [(output, sources)], opts)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> ShmWork:
        pair = output, self._split("reduce_scatter_single", source, output)
        return self._reduce_scatter("reduce_scatter_single", [pair], opts or dist.ReduceScatterOptions())

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        name = "reduce_scatter_coalesced"
        pairs = [(out, self._split(name, each, out)) for out, each in zip(outputs, inputs, strict=True)]
        return self._reduce_scatter(name, pairs, opts or dist.ReduceScatterOptions())

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, name: str, pairs: list[tuple[torch.Tensor, Tensors]], opts: Any) -> ShmWork:
        outputs = [output for output, _ in pairs]
        tensors.check(name, outputs)
        hows = [self._reduction(opts, output.dtype)[1] for output in outputs]
        body = fingerprint.take(
            name,
            dtype=outputs[0].dtype if outputs else None,
            numel=sum(output.numel() for output in outputs),
            reduce_op=_op(opts)[0],
            detail=(sizes(outputs), tuple(how.factor for how in hows)),
        )

        def move(rounds: Rounds) -> None:
            finishes: list[tensors.Finish] = []
            for (output, inputs), how in zip(pairs, hows, strict=True):
                flat = _as(tensors.target(output, finishes), how)
                _reduce_scatter.reduce_scatter(rounds, flat, [_as(tensors.source(t), how) for t in inputs], how)
            sync_if_none(rounds, pairs)
            finish(finishes)

        return self._issue(name, body, move, outputs, opts)

    def _reduction(self, opts: Any, dtype: torch.dtype) -> tuple[int, Reduction]:
        op, factor = _op(opts)
        if factor != 1.0:
            return op, reduction(op, dtype, self._shm_size, factor)
        how = self._shm_reductions.get((op, dtype))
        if how is None:
            how = self._shm_reductions[op, dtype] = reduction(op, dtype, self._shm_size)
        return op, how


def _op(opts: Any) -> tuple[int, float]:
    """The reduce op as torch numbers it, and the factor of PREMUL_SUM (1 for all else)."""
    op = opts.reduceOp
    kind = int(op.op)
    return kind, float(op.__getstate__()[1]) if kind == _PREMUL_SUM else 1.0


def _as(flat: torch.Tensor, how: Reduction) -> torch.Tensor:
    """``flat`` as the dtype that the reduction's operator takes (of the same size)."""
    return flat if flat.dtype is how.dtype else flat.view(how.dtype)


def _sparse_shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (*tensor.shape, tensor.sparse_dim())
