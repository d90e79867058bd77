"""The c10d backend ``"shm"``: torch's interface, translated into collectives over rounds.

torch calls a Python process group in two ways: ``torch.distributed`` calls these methods directly; C++ (DDP's reducer,
functional collectives) calls them through torch's PyProcessGroup, by the same names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep.comm.shm import fingerprint, tensors
from lockstep.comm.shm.collectives import all_reduce as _all_reduce
from lockstep.comm.shm.collectives import all_reduce_shared as _all_reduce_shared
from lockstep.comm.shm.collectives import all_to_all as _all_to_all
from lockstep.comm.shm.collectives import broadcast as _broadcast
from lockstep.comm.shm.collectives import gather as _gather
from lockstep.comm.shm.collectives import reduce as _reduce
from lockstep.comm.shm.collectives import reduce_scatter as _reduce_scatter
from lockstep.comm.shm.collectives import scatter as _scatter
from lockstep.comm.shm.collectives import sparse as _sparse
from lockstep.comm.shm.group import Call, Group, Move, seconds
from lockstep.comm.shm.reduction import Reduction, reduction
from lockstep.comm.shm.rounds import Rounds
from lockstep.comm.shm.work import ShmWork

Tensors = list[torch.Tensor]
#: torch.distributed exports the other option types, but not this one.
_AllgatherOptions: Any = distributed_c10d.AllgatherOptions  # type: ignore[attr-defined]

# Private, but the one cheap way to ask; record_function costs microseconds also when nobody records.
_profiler_enabled: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

_OP_NUMBERS: dict[Any, int] = {kind: kind.value for kind in dist.ReduceOp.RedOpType.__members__.values()}
_PREMUL_SUM = fingerprint.REDUCE_OPS.index("PREMUL_SUM")


# torch's stubs list these methods with overloads and argument names that change from version to version.
_Base: Any = dist.ProcessGroup


class ProcessGroupShm(_Base):  # type: ignore[misc]
    """A process group whose ranks are processes on one host that share memory."""

    def __init__(self, store: Any, rank: int, size: int, *, timeout: timedelta, chunk: int, name: str) -> None:
        super().__init__(rank, size)  # (the constructor with a store can't be used by Python subclasses)
        self._shm_store = store
        self._group = Group(store, rank=rank, size=size, timeout=timeout.total_seconds(), chunk=chunk, name=name)
        self._shm_name = name
        self._shm_description = ""
        self._shm_rank = rank
        self._shm_size = size
        self._reductions: dict[tuple[int, torch.dtype], Reduction] = {}

    # --- who this is -----------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "shm"

    # torch keeps a group's name in its C++ backends; this group has none of these, so it keeps its own. C++ calls the
    # first four methods, Python reads the properties.

    def getGroupName(self) -> str:
        return self._shm_name

    def setGroupName(self, name: str) -> None:
        self._shm_name = name

    def getGroupDesc(self) -> str:
        return self._shm_description

    def setGroupDesc(self, description: str) -> None:
        self._shm_description = description

    @property
    def group_name(self) -> str:
        return self._shm_name

    @property
    def group_desc(self) -> str:
        return self._shm_description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> ProcessGroupShm:  # noqa: ARG002  (one backend for all there is)
        return self

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    def get_group_store(self) -> Any:
        return self._shm_store

    def set_timeout(self, timeout: timedelta) -> None:
        """**Local.** Change how long collectives may wait from now on."""
        self._group.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """**Local.** What destroy_process_group calls: complete what was issued, then let go of everything."""
        self._group.close()

    def abort(self) -> None:
        """**Local.** End the group on every rank; whatever is in flight raises."""
        self._group.abort("abort() was called")

    # --- reductions ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors_: Tensors, opts: Any = None) -> ShmWork:
        opts = opts or dist.AllreduceOptions()
        tensor = _single("allreduce", tensors_)
        if tensor.layout is torch.sparse_coo:
            return self._allreduce_sparse(tensors_, opts)
        tensors.check("allreduce", tensors_)
        op, how = self._reduction(opts, tensor.dtype)
        shared = self._find_shared(tensor)
        detail: object = shared[:2] if shared is not None else None
        if how.factor != 1:
            detail = (detail, how.factor)
        body = fingerprint.take("all_reduce", dtype=tensor.dtype, numel=tensor.numel(), reduce_op=op, detail=detail)

        def move(rounds: Rounds) -> None:
            if shared is not None:
                _all_reduce_shared.all_reduce_shared(rounds, [_as(view, how) for view in shared[2]], how)
                return
            finishes: list[tensors.Finish] = []
            _all_reduce.all_reduce(rounds, _as(tensors.target(tensor, finishes), how), how)
            _finish(finishes)

        return self._issue("all_reduce", body, move, tensors_, opts)

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
            result.append(self._group.shared.allocate(rounds, math.prod(shape), dtype).view(shape))

        self._group.issue(Call("allocate_tensor", body, move, result, self._group.timeout, False))
        return result[0]

    def _find_shared(self, tensor: torch.Tensor) -> tuple[int, int, Tensors] | None:
        if not self._group.shared or not tensors.is_flat(tensor):
            return None
        return self._group.shared.find(tensor)

    def allreduce_coalesced(self, tensors_: Tensors, opts: Any = None) -> ShmWork:
        opts = opts or dist.AllreduceCoalescedOptions()
        tensors.check("allreduce_coalesced", tensors_)
        hows = [self._reduction(opts, tensor.dtype)[1] for tensor in tensors_]
        body = fingerprint.take(
            "all_reduce_coalesced",
            dtype=tensors_[0].dtype if tensors_ else None,
            numel=sum(tensor.numel() for tensor in tensors_),
            reduce_op=_op(opts)[0],
            detail=(_sizes(tensors_), tuple(how.factor for how in hows)),
        )

        def move(rounds: Rounds) -> None:
            finishes: list[tensors.Finish] = []
            for tensor, how in zip(tensors_, hows, strict=True):
                _all_reduce.all_reduce(rounds, _as(tensors.target(tensor, finishes), how), how)
            _sync_if_none(rounds, tensors_)
            _finish(finishes)

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

        return self._issue("all_reduce", body, move, tensors_, opts)

    def reduce(self, tensors_: Tensors, opts: Any = None) -> ShmWork:
        opts = opts or dist.ReduceOptions()
        tensor = _single("reduce", tensors_)
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
                _finish(finishes)

        return self._issue("reduce", body, move, tensors_, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> ShmWork:
        opts = opts or dist.ReduceScatterOptions()
        output, sources = _single("reduce_scatter", outputs), _single("reduce_scatter", inputs)
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
            detail=(_sizes(outputs), tuple(how.factor for how in hows)),
        )

        def move(rounds: Rounds) -> None:
            finishes: list[tensors.Finish] = []
            for (output, inputs), how in zip(pairs, hows, strict=True):
                flat = _as(tensors.target(output, finishes), how)
                _reduce_scatter.reduce_scatter(rounds, flat, [_as(tensors.source(t), how) for t in inputs], how)
            _sync_if_none(rounds, pairs)
            _finish(finishes)

        return self._issue(name, body, move, outputs, opts)

    # --- moves -----------------------------------------------------------------------------------------------------

    def broadcast(self, tensors_: Tensors, opts: Any = None) -> ShmWork:
        opts = opts or dist.BroadcastOptions()
        tensor = _single("broadcast", tensors_)
        tensors.check("broadcast", tensors_)
        root = self._root("broadcast", opts.rootRank)
        body = fingerprint.take("broadcast", dtype=tensor.dtype, numel=tensor.numel(), root=root)

        def move(rounds: Rounds) -> None:
            finishes: list[tensors.Finish] = []
            flat = tensors.source(tensor) if rounds.rank == root else tensors.target(tensor, finishes)
            _broadcast.broadcast(rounds, flat, root=root)
            _finish(finishes)

        return self._issue("broadcast", body, move, tensors_, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        source, targets = _single("allgather", inputs), _single("allgather", outputs)
        tensors.check_sizes("allgather", targets, self._shm_size, like=source)
        return self._all_gather("all_gather", [(targets, source)], targets, opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        if len(outputs) != self._shm_size or any(len(each) != len(inputs) for each in outputs):
            raise RuntimeError(
                f"allgather_coalesced: expected {self._shm_size} lists of {len(inputs)} tensors, one list per rank"
            )
        pairs = [([each[index] for each in outputs], source) for index, source in enumerate(inputs)]
        for targets, source in pairs:
            tensors.check_sizes("allgather_coalesced", targets, self._shm_size, like=source)
        return self._all_gather("all_gather_coalesced", pairs, [t for each in outputs for t in each], opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> ShmWork:
        pair = self._split("all_gather_single", output, source), source
        return self._all_gather("all_gather_single", [pair], [output], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        name = "all_gather_coalesced"
        pairs = [(self._split(name, out, each), each) for out, each in zip(outputs, inputs, strict=True)]
        return self._all_gather(name, pairs, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(
        self, name: str, pairs: list[tuple[Tensors, torch.Tensor]], result: list[Any], opts: Any
    ) -> ShmWork:
        inputs = [source for _, source in pairs]
        tensors.check(name, inputs)
        body = fingerprint.take(
            name,
            dtype=inputs[0].dtype if inputs else None,
            numel=sum(source.numel() for source in inputs),
            detail=_sizes(inputs) if len(inputs) != 1 else None,
        )

        def move(rounds: Rounds) -> None:
            finishes: list[tensors.Finish] = []
            for targets, source in pairs:
                flats = [tensors.target(target, finishes) for target in targets]
                _gather.all_gather(rounds, flats, tensors.source(source))
            _sync_if_none(rounds, pairs)
            _finish(finishes)

        return self._issue(name, body, move, result, opts or _AllgatherOptions())

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        opts = opts or dist.GatherOptions()
        source = _single("gather", inputs)
        tensors.check("gather", inputs)
        root = self._root("gather", opts.rootRank)
        targets = self._list_of_root("gather", outputs, root=root, like=source)
        body = fingerprint.take("gather", dtype=source.dtype, numel=source.numel(), root=root)

        def move(rounds: Rounds) -> None:
            finishes: list[tensors.Finish] = []
            flats = [tensors.target(target, finishes) for target in targets]
            _gather.gather(rounds, flats, tensors.source(source), root=root)
            _finish(finishes)

        return self._issue("gather", body, move, targets, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> ShmWork:
        opts = opts or dist.ScatterOptions()
        output = _single("scatter", outputs)
        tensors.check("scatter", outputs)
        root = self._root("scatter", opts.rootRank)
        sources = self._list_of_root("scatter", inputs, root=root, like=output)
        body = fingerprint.take("scatter", dtype=output.dtype, numel=output.numel(), root=root)

        def move(rounds: Rounds) -> None:
            finishes: list[tensors.Finish] = []
            flat = tensors.target(output, finishes)
            _scatter.scatter(rounds, flat, [tensors.source(source) for source in sources], root=root)
            _finish(finishes)

        return self._issue("scatter", body, move, outputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> ShmWork:
        for name, list_ in (("output", outputs), ("input", inputs)):
            if len(list_) != self._shm_size:
                raise RuntimeError(f"alltoall: expected {self._shm_size} {name} tensors, got {len(list_)}")
        return self._all_to_all("all_to_all", outputs, inputs, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> ShmWork:
        finishes: list[tensors.Finish] = []
        flat = tensors.target(output, finishes)
        outputs = _pieces(flat, output, output_splits, self._shm_size)
        inputs = _pieces(tensors.source(source), source, input_splits, self._shm_size)
        return self._all_to_all("all_to_all_single", outputs, inputs, [output], opts, finishes)

    alltoall_base = all_to_all_single

    def _all_to_all(
        self,
        name: str,
        outputs: Tensors,
        inputs: Tensors,
        result: Tensors,
        opts: Any,
        finishes: Sequence[tensors.Finish] = (),
    ) -> ShmWork:
        tensors.check(name, [*outputs, *inputs], dtype=inputs[0].dtype)
        body = fingerprint.take(name, dtype=inputs[0].dtype)

        def move(rounds: Rounds) -> None:
            finishes_: list[tensors.Finish] = []
            flats = [tensors.target(output, finishes_) for output in outputs]
            _all_to_all.all_to_all(rounds, flats, [tensors.source(each) for each in inputs])
            _finish(finishes_)
            _finish(finishes)

        return self._issue(name, body, move, result, opts or dist.AllToAllOptions())

    def barrier(self, opts: Any = None) -> ShmWork:
        return self._issue("barrier", fingerprint.take("barrier"), Rounds.sync, [], opts or dist.BarrierOptions())

    # --- messages --------------------------------------------------------------------------------------------------

    def send(self, tensors_: Tensors, to: int, tag: int = 0) -> ShmWork:
        tensor = _single("send", tensors_)
        tensors.check("send", tensors_)
        self._group.check("send")
        self._root("send", to)
        flat = tensors.source(tensor)
        return self._group.mail.send(flat, to=to, tag=tag, timeout=self._group.timeout, result=tensors_)

    def recv(self, tensors_: Tensors, source: int, tag: int = 0) -> ShmWork:
        return self._receive("recv", tensors_, self._root("recv", source), tag)

    def recv_anysource(self, tensors_: Tensors, tag: int = 0) -> ShmWork:
        return self._receive("recv_anysource", tensors_, None, tag)

    def _receive(self, name: str, tensors_: Tensors, source: int | None, tag: int) -> ShmWork:
        tensor = _single(name, tensors_)
        tensors.check(name, tensors_)
        self._group.check(name)
        finishes: list[tensors.Finish] = []
        flat = tensors.target(tensor, finishes)
        return self._group.mail.receive(
            flat,
            source=source,
            tag=tag,
            timeout=self._group.timeout,
            finish=lambda: _finish(finishes),
            result=tensors_,
        )

    # --- shared by the above ---------------------------------------------------------------------------------------

    def _issue(self, name: str, body: bytes, move: Move, result: list[Any], opts: Any) -> ShmWork:
        group = self._group
        call = Call(name, body, move, result, seconds(opts.timeout, group.timeout), opts.asyncOp)
        if _profiler_enabled():
            with torch.profiler.record_function(f"shm:{name}"):
                return group.issue(call)
        return group.issue(call)

    def _reduction(self, opts: Any, dtype: torch.dtype) -> tuple[int, Reduction]:
        op, factor = _op(opts)
        if factor != 1.0:
            return op, reduction(op, dtype, self._shm_size, factor)
        how = self._reductions.get((op, dtype))
        if how is None:
            how = self._reductions[op, dtype] = reduction(op, dtype, self._shm_size)
        return op, how

    def _root(self, name: str, root: int) -> int:
        if not 0 <= root < self._shm_size:
            raise RuntimeError(f"ProcessGroupShm::{name}: invalid root rank: {root}")
        return root

    def _split(self, name: str, whole: torch.Tensor, piece: torch.Tensor) -> Tensors:
        """The ranks' pieces of the larger tensor of all_gather_single and reduce_scatter_single, as views or copies."""
        if whole.numel() != piece.numel() * self._shm_size:
            raise RuntimeError(
                f"{name}: the larger tensor has {whole.numel()} elements, expected {self._shm_size} (ranks) times "
                f"the {piece.numel()} of the smaller one"
            )
        tensors.check(name, [whole, piece], dtype=piece.dtype)
        if not tensors.is_flat(whole):
            raise RuntimeError(f"{name}: the larger tensor must be contiguous")
        flat = whole.data.view(-1)
        return [flat[rank * piece.numel() : (rank + 1) * piece.numel()] for rank in range(self._shm_size)]

    def _list_of_root(self, name: str, lists: list[Tensors], *, root: int, like: torch.Tensor) -> Tensors:
        if self._shm_rank != root:
            if lists and lists[0]:
                raise RuntimeError(f"{name}: a list of tensors belongs to the root, rank {root}, only")
            return []
        list_: Tensors = _single(name, lists)
        tensors.check_sizes(name, list_, self._shm_size, like=like)
        return list_


def _single(name: str, list_: list[Any]) -> Any:
    if len(list_) != 1:
        raise RuntimeError(f"{name}: expected one tensor (or list of tensors) per rank, got {len(list_)}")
    return list_[0]


def _op(opts: Any) -> tuple[int, float]:
    """The reduce op as torch numbers it, and the factor of PREMUL_SUM (1 for all else)."""
    op = opts.reduceOp
    kind = _OP_NUMBERS[op.op]
    return kind, float(op.__getstate__()[1]) if kind == _PREMUL_SUM else 1.0


def _as(flat: torch.Tensor, how: Reduction) -> torch.Tensor:
    """``flat`` as the dtype that the reduction's operator takes (of the same size)."""
    return flat if flat.dtype is how.dtype else flat.view(how.dtype)


def _finish(finishes: Sequence[tensors.Finish]) -> None:
    for finish in finishes:
        finish()


def _sync_if_none(rounds: Rounds, list_: Sequence[object]) -> None:
    """A coalesced collective of no tensors still compares fingerprints."""
    if not list_:
        rounds.sync()


def _sizes(list_: Tensors) -> tuple[Any, ...]:
    return tuple((tensor.dtype, tensor.numel()) for tensor in list_)


def _sparse_shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (*tensor.shape, tensor.sparse_dim())


def _pieces(flat: torch.Tensor, tensor: torch.Tensor, splits: Sequence[int], size: int) -> Tensors:
    """Views of ``flat``: ``splits`` count rows of ``tensor`` (its first dimension); no splits mean equal ones."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        splits = [rows // size] * size
    if len(splits) != size:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(splits) != rows:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")
    width = flat.numel() // rows if rows else 0
    return list(flat.split([count * width for count in splits]))
