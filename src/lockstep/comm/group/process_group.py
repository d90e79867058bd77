"""torch's interface to a process group, in the verbs of an engine: backends "shm", "hierarchical" and "mpi4py".

torch calls a Python process group in two ways: ``torch.distributed`` calls these methods directly; C++ (DDP's reducer,
functional collectives) calls them through torch's PyProcessGroup, by the same names.

A collective is checked, gets its fingerprint, and is issued with what moves its data once its turn has come. Lists are
copied at the call: the caller may use its own again by then, and only tensors have to stay as they are. All refuse
impossible calls as gloo does: RuntimeError for sizes, dtypes, roots and lists that do not fit, NotImplementedError for
kinds of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep import _torch
from lockstep.comm.group import fingerprint, tensors
from lockstep.comm.group.engine import Engine
from lockstep.comm.group.fingerprint import REDUCE_OPS
from lockstep.comm.group.group import Group, Move
from lockstep.comm.group.reduction import Reduction, reduction
from lockstep.comm.group.work import GroupWork
from lockstep.comm.looks import SumLook
from lockstep.comm.memory import RowOrder

Tensors = list[torch.Tensor]

# torch's stubs list these methods with overloads and argument names that change from version to version.
_Base: Any = dist.ProcessGroup
_AllgatherOptions: Any = _torch.all_gather_options()
_SUM, _PREMUL_SUM = REDUCE_OPS.index("SUM"), REDUCE_OPS.index("PREMUL_SUM")
_profiler_enabled = _torch.profiler_enabled()


@_torch.untraced
class ProcessGroupLockstep(_Base):  # type: ignore[misc]
    """A process group over one of lockstep's engines."""

    #: Labels of collectives are compared before any data moves: see lockstep.comm.labels.
    compares_labels = True

    def __init__(self, store: Any, group: Group, *, name: str) -> None:
        # (The constructor with a store can't be used by Python subclasses.)
        engine = group.engine
        _Base.__init__(self, engine.rank, engine.size)
        self._shm_store = store
        self._shm_group = group
        self._shm_name = name
        self._shm_description = ""
        self._shm_rank = engine.rank
        self._shm_size = engine.size
        self._shm_reductions: dict[tuple[int, torch.dtype], Reduction] = {}

    # --- identity --------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return self._shm_group.engine.backend

    # torch keeps a group's name in its C++ backends; this group has none, so it keeps the name itself. C++ calls the
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

    def _get_backend(self, device: torch.device) -> ProcessGroupLockstep:  # noqa: ARG002  (one backend for all there is)
        return self

    # As above, under the public name that torch 2.15 gave it.
    get_backend = _get_backend

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...] | None:
        """The ranks by host, where the engine adds up each host's first; None: the bits do not depend on that."""
        return self._shm_group.engine.grouping

    def get_group_store(self) -> Any:
        return self._shm_store

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long collectives may wait from now on."""
        self._shm_group.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Complete what was issued, then release everything. destroy_process_group calls this."""
        self._shm_group.close()

    def abort(self) -> None:
        """End the group on every rank; whatever is in flight raises."""
        self._shm_group.abort("abort() was called")

    # --- combined elements -----------------------------------------------------------------------------------------

    def allreduce(self, tensors_: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or dist.AllreduceOptions()
        tensor = _single("allreduce", tensors_)
        if tensor.layout is torch.sparse_coo:
            return self._allreduce_sparse(tensors_, opts)
        tensors.check("allreduce", tensors_)
        op, how = self._reduction(opts, tensor.dtype)
        part = self._shm_group.engine.find(tensor)
        detail: object = None if part is None else (part.number, part.offset)
        if how.factor != 1:
            detail = (detail, how.factor)
        body = fingerprint.take("all_reduce", tensor.dtype, tensor.numel(), reduce_op=op, detail=detail)

        def move(engine: Engine) -> None:
            engine.all_reduce_tensor(tensor, how, part)

        return self._issue("all_reduce", body, move, tensors_, opts, tensors_)

    def _allreduce_sparse(self, tensors_: Tensors, opts: Any) -> GroupWork:
        tensor = tensors_[0]
        if REDUCE_OPS[_op(opts)[0]] != "SUM":
            raise RuntimeError(
                "allreduce: unsupported reduction operation (sparse tensors can be reduced with ReduceOp.SUM only)"
            )
        shape = (*tensor.shape, tensor.sparse_dim())
        body = fingerprint.take("all_reduce of a sparse tensor", tensor.dtype, tensor.numel(), detail=shape)

        def move(engine: Engine) -> None:
            with torch.no_grad():  # (.data of a sparse tensor would be written apart from it)
                tensor.copy_(engine.all_reduce_sparse(tensor.detach().coalesce()))

        return self._issue("sparse_all_reduce", body, move, tensors_, opts, tensors_)

    def allreduce_coalesced(self, tensors_: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or dist.AllreduceCoalescedOptions()
        tensors_ = list(tensors_)
        tensors.check("allreduce_coalesced", tensors_)
        body, hows = self._fingerprint_of_reductions("all_reduce_coalesced", tensors_, opts)

        def move(engine: Engine) -> None:
            for tensor, how in zip(tensors_, hows, strict=True):
                flat = tensors.target(tensor)
                engine.all_reduce(_as(flat, how), how)
                tensors.restore(tensor, flat)
            _sync_if_none(engine, tensors_)

        return self._issue("all_reduce_coalesced", body, move, tensors_, opts, tensors_)

    def reduce(self, tensors_: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or dist.ReduceOptions()
        tensor = _single("reduce", tensors_)
        tensors.check("reduce", tensors_)
        root = self._root("reduce", opts)
        op, how = self._reduction(opts, tensor.dtype)
        body = fingerprint.take(
            "reduce",
            tensor.dtype,
            tensor.numel(),
            reduce_op=op,
            root=root,
            detail=how.factor if how.factor != 1 else None,
        )

        def move(engine: Engine) -> None:
            flat = tensors.target(tensor)
            engine.reduce(_as(flat, how), how, root=root)
            if engine.rank == root:
                tensors.restore(tensor, flat)

        return self._issue("reduce", body, move, tensors_, opts, tensors_)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> GroupWork:
        output, sources = _single("reduce_scatter", outputs), list(_single("reduce_scatter", inputs))
        tensors.check_sizes("reduce_scatter", sources, self._shm_size, like=output)
        return self._reduce_scatter("reduce_scatter", [(output, sources)], opts)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> GroupWork:
        pair = output, self._split("reduce_scatter_single", source, output)
        return self._reduce_scatter("reduce_scatter_single", [pair], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        name = "reduce_scatter_coalesced"
        pairs = [(out, self._split(name, each, out)) for out, each in zip(outputs, inputs, strict=True)]
        return self._reduce_scatter(name, pairs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, name: str, pairs: list[tuple[torch.Tensor, Tensors]], opts: Any) -> GroupWork:
        opts = opts or dist.ReduceScatterOptions()
        outputs = [output for output, _ in pairs]
        tensors.check(name, outputs)
        body, hows = self._fingerprint_of_reductions(name, outputs, opts)

        def move(engine: Engine) -> None:
            for (output, inputs), how in zip(pairs, hows, strict=True):
                flat = tensors.target(output)
                sources = [_as(tensors.source(each), how) for each in inputs]
                engine.reduce_scatter(_as(flat, how), sources, how)
                tensors.restore(output, flat)
            _sync_if_none(engine, pairs)

        return self._issue(name, body, move, outputs, opts, [each for _, inputs in pairs for each in inputs])

    def _reduction(self, opts: Any, dtype: torch.dtype) -> tuple[int, Reduction]:
        op, factor = _op(opts)
        if factor != 1.0:
            return op, reduction(op, dtype, self._shm_size, factor)
        how = self._shm_reductions.get((op, dtype))
        if how is None:
            how = self._shm_reductions[op, dtype] = reduction(op, dtype, self._shm_size)
        return op, how

    def _fingerprint_of_reductions(self, name: str, list_: Tensors, opts: Any) -> tuple[bytes, list[Reduction]]:
        hows = [self._reduction(opts, tensor.dtype)[1] for tensor in list_]
        body = fingerprint.take(
            name,
            list_[0].dtype if list_ else None,
            sum(tensor.numel() for tensor in list_),
            reduce_op=_op(opts)[0],
            detail=(_sizes(list_), tuple(how.factor for how in hows)),
        )
        return body, hows

    # --- memory that all ranks share -------------------------------------------------------------------------------

    @property
    def reduces_in_place(self) -> bool:
        """Whether all-reducing a tensor from :meth:`allocate_tensor` copies nothing; see lockstep.comm.memory."""
        return self._shm_group.engine.reduces_in_place

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Say whether :meth:`allocate_tensor` has memory on ``device``; torch's name for the question."""
        return device.type == "cpu" and self.reduces_in_place

    def allocate_tensor(
        self, size: int | Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None
    ) -> torch.Tensor:
        """**Collective.** Make a tensor of zeros that the ranks share, so that all-reducing it copies nothing.

        An all-reduce of the whole tensor, or of the same contiguous part of it on every rank, works in place. The
        tensor may be used after the group is destroyed; it is then a tensor like any other.

        Raises:
            RendezvousError: some rank has no memory, or can't map another's.
            RuntimeError: ``device`` is not the CPU.
        """
        shape = (size,) if isinstance(size, int) else tuple(size)
        dtype = dtype or torch.get_default_dtype()
        if device is not None and torch.device(device).type != "cpu":
            raise RuntimeError(f'allocate_tensor: the backend "{self.getBackendName()}" has CPU memory, not {device}')
        body = fingerprint.take("allocate_tensor", dtype, math.prod(shape), detail=shape)
        result: Tensors = []
        group = self._shm_group

        def move(engine: Engine) -> None:
            result.append(engine.allocate(math.prod(shape), dtype).view(shape))

        group.issue("allocate_tensor", body, move, result, group.timeout, False)
        return result[0]

    def in_place_sum(self, tensor: torch.Tensor, look: SumLook | None = None) -> Callable[[str], None]:
        """Return a **collective** function that adds up all ranks' ``tensor``; see lockstep.comm.memory.

        Raises:
            RuntimeError: it is not memory that :meth:`allocate_tensor` has made.
        """
        group = self._shm_group
        part, engine = group.engine.find(tensor), group.engine
        if part is None:
            raise RuntimeError("in_place_sum: expected memory that allocate_tensor has made, on every rank")
        dtype, count, detail, inputs = tensor.dtype, tensor.numel(), (part.number, part.offset), [tensor]
        add_up = engine.in_place_sum(tensor, self._reduction(dist.AllreduceOptions(), dtype)[1], part, look)

        def sum_up(label: str) -> None:
            body = fingerprint.take("all_reduce", dtype, count, reduce_op=_SUM, detail=detail, label=label)
            if not _profiler_enabled():
                group.complete("all_reduce", body, add_up, group.timeout)
                return
            with _recorded("all_reduce", inputs):
                group.complete("all_reduce", body, add_up, group.timeout)

        return sum_up

    def add_rows(self, rows: torch.Tensor, order: RowOrder) -> None:
        """**Collective.** Add up rows that lie in memory of :meth:`allocate_tensor`; see lockstep.comm.memory.

        Raises:
            RuntimeError: they lie elsewhere.
        """
        group, engine = self._shm_group, self._shm_group.engine
        part = engine.find(rows)
        if part is None:
            raise RuntimeError("add_rows: expected memory that allocate_tensor has made, on every rank")
        detail = (part.number, part.offset, order.width, order.places, order.pairs, order.factors)
        body = fingerprint.take("add_rows", rows.dtype, rows.numel(), detail=detail)

        def move(_: Engine) -> None:
            engine.add_rows(rows, order, part)

        group.issue("add_rows", body, move, [rows], group.timeout, False)

    # --- elements as they are --------------------------------------------------------------------------------------

    def broadcast(self, tensors_: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or dist.BroadcastOptions()
        tensor = _single("broadcast", tensors_)
        tensors.check("broadcast", tensors_)
        root = self._root("broadcast", opts)
        body = fingerprint.take("broadcast", tensor.dtype, tensor.numel(), root=root)

        def move(engine: Engine) -> None:
            if engine.rank == root:
                engine.broadcast(tensors.source(tensor), root=root)
            else:
                flat = tensors.target(tensor)
                engine.broadcast(flat, root=root)
                tensors.restore(tensor, flat)

        return self._issue("broadcast", body, move, tensors_, opts, tensors_)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        source, targets = _single("allgather", inputs), list(_single("allgather", outputs))
        tensors.check_sizes("allgather", targets, self._shm_size, like=source)
        return self._all_gather("all_gather", [(targets, source)], targets, opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        if len(outputs) != self._shm_size or any(len(each) != len(inputs) for each in outputs):
            raise RuntimeError(
                f"allgather_coalesced: expected {self._shm_size} lists of {len(inputs)} tensors, one list per rank"
            )
        pairs = [([each[index] for each in outputs], source) for index, source in enumerate(inputs)]
        for targets, source in pairs:
            tensors.check_sizes("allgather_coalesced", targets, self._shm_size, like=source)
        return self._all_gather("all_gather_coalesced", pairs, [t for each in outputs for t in each], opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> GroupWork:
        pair = self._split("all_gather_single", output, source), source
        return self._all_gather("all_gather_single", [pair], [output], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        name = "all_gather_coalesced"
        pairs = [(self._split(name, out, each), each) for out, each in zip(outputs, inputs, strict=True)]
        return self._all_gather(name, pairs, list(outputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(
        self, name: str, pairs: list[tuple[Tensors, torch.Tensor]], result: list[Any], opts: Any
    ) -> GroupWork:
        inputs = [source for _, source in pairs]
        tensors.check(name, inputs)
        body = fingerprint.take(
            name,
            inputs[0].dtype if inputs else None,
            sum(source.numel() for source in inputs),
            detail=_sizes(inputs) if len(inputs) != 1 else None,
        )

        def move(engine: Engine) -> None:
            for targets, source in pairs:
                self._gather(engine, targets, source)
            _sync_if_none(engine, pairs)

        return self._issue(name, body, move, result, opts or _AllgatherOptions(), inputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or dist.GatherOptions()
        source = _single("gather", inputs)
        tensors.check("gather", inputs)
        root = self._root("gather", opts)
        targets = self._list_of_root("gather", outputs, root=root, like=source)
        body = fingerprint.take("gather", source.dtype, source.numel(), root=root)

        def move(engine: Engine) -> None:
            self._gather(engine, targets, source, root)

        return self._issue("gather", body, move, targets, opts, inputs)

    @staticmethod
    def _gather(engine: Engine, targets: Tensors, source: torch.Tensor, root: int | None = None) -> None:
        flats = [tensors.target(target) for target in targets]
        engine.gather(flats, tensors.source(source), root=root)
        for target, flat in zip(targets, flats, strict=True):
            tensors.restore(target, flat)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> GroupWork:
        opts = opts or dist.ScatterOptions()
        output = _single("scatter", outputs)
        tensors.check("scatter", outputs)
        root = self._root("scatter", opts)
        sources = self._list_of_root("scatter", inputs, root=root, like=output)
        body = fingerprint.take("scatter", output.dtype, output.numel(), root=root)

        def move(engine: Engine) -> None:
            flat = tensors.target(output)
            engine.scatter(flat, [tensors.source(source) for source in sources], root=root)
            tensors.restore(output, flat)

        return self._issue("scatter", body, move, outputs, opts, sources)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        outputs, inputs = list(outputs), list(inputs)
        for name, list_ in (("output", outputs), ("input", inputs)):
            if len(list_) != self._shm_size:
                raise RuntimeError(f"alltoall: expected {self._shm_size} {name} tensors, got {len(list_)}")
        tensors.check("all_to_all", [*outputs, *inputs], dtype=inputs[0].dtype)
        body = fingerprint.take("all_to_all", inputs[0].dtype)

        def move(engine: Engine) -> None:
            flats, sources = [tensors.target(output) for output in outputs], [tensors.source(each) for each in inputs]
            engine.all_to_all(flats, sources, engine.agreed_sizes(flats, sources))
            for output, flat in zip(outputs, flats, strict=True):
                tensors.restore(output, flat)

        return self._issue("all_to_all", body, move, outputs, opts or dist.AllToAllOptions(), inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> GroupWork:
        tensors.check("all_to_all_single", [output, source], dtype=source.dtype)
        output_counts = _counts(output, output_splits, self._shm_size)
        input_counts = _counts(source, input_splits, self._shm_size)
        body = fingerprint.take("all_to_all_single", source.dtype)

        def move(engine: Engine) -> None:
            flat = tensors.target(output)
            outputs, inputs = flat.split(output_counts), tensors.source(source).split(input_counts)
            engine.all_to_all(outputs, inputs, engine.agreed_sizes(outputs, inputs))
            tensors.restore(output, flat)

        return self._issue("all_to_all", body, move, [output], opts or dist.AllToAllOptions(), [source])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> GroupWork:
        return self._issue("barrier", fingerprint.take("barrier"), _barrier, [], opts or dist.BarrierOptions(), [])

    # --- between two ranks -----------------------------------------------------------------------------------------

    def send(self, tensors_: Tensors, to: int, tag: int = 0) -> GroupWork:
        tensor = self._message("send", tensors_)
        self._partner("send", to)
        with _recorded("send", tensors_):
            return self._shm_group.engine.send(tensor, to=to, tag=tag, timeout=self._shm_group.timeout)

    def recv(self, tensors_: Tensors, source: int, tag: int = 0) -> GroupWork:
        tensor = self._message("recv", tensors_)
        self._partner("recv", source)
        with _recorded("recv", tensors_):
            return self._shm_group.engine.receive(tensor, source=source, tag=tag, timeout=self._shm_group.timeout)

    def recv_anysource(self, tensors_: Tensors, tag: int = 0) -> GroupWork:
        tensor = self._message("recv_anysource", tensors_)
        with _recorded("recvAnySource", tensors_):  # (as gloo calls it)
            return self._shm_group.engine.receive(tensor, source=None, tag=tag, timeout=self._shm_group.timeout)

    def _message(self, name: str, tensors_: Tensors) -> torch.Tensor:
        tensor: torch.Tensor = _single(name, tensors_)
        tensors.check(name, tensors_)
        self._shm_group.check(name)
        return tensor

    def _partner(self, name: str, rank: int) -> None:
        if not 0 <= rank < self._shm_size:
            raise RuntimeError(
                f"{self.getBackendName()}: {name}: there is no rank {rank} in a group of {self._shm_size}"
            )

    # --- what several have in common -------------------------------------------------------------------------------

    def _issue(self, name: str, body: bytes, move: Move, result: list[Any], opts: Any, inputs: Tensors) -> GroupWork:
        """**Collective.** Issue a collective with the time limit of ``opts``, or the group's.

        Args:
            inputs: the tensors whose sizes the profiler is to show.
        """
        group = self._shm_group
        timeout = opts.timeout.total_seconds()
        if timeout <= 0:  # torch's way to say that none was given
            timeout = group.timeout
        if _profiler_enabled():
            with _recorded(name, inputs):
                return group.issue(name, body, move, result, timeout, opts.asyncOp)
        return group.issue(name, body, move, result, timeout, opts.asyncOp)

    def _root(self, name: str, opts: Any) -> int:
        root: int = opts.rootRank
        if not 0 <= root < self._shm_size:
            raise RuntimeError(f"{self.getBackendName()}: {name}: invalid root rank: {root}")
        return root

    def _list_of_root(self, name: str, lists: list[Tensors], *, root: int, like: torch.Tensor) -> Tensors:
        if self._shm_rank != root:
            if lists and lists[0]:
                raise RuntimeError(f"{name}: a list of tensors belongs to the root, rank {root}, only")
            return []
        list_: Tensors = list(_single(name, lists))
        tensors.check_sizes(name, list_, self._shm_size, like=like)
        return list_

    def _split(self, name: str, whole: torch.Tensor, piece: torch.Tensor) -> Tensors:
        """Return the ranks' pieces, as views, of the larger tensor of all_gather_single or reduce_scatter_single."""
        size = self._shm_size
        if whole.numel() != piece.numel() * size:
            raise RuntimeError(
                f"{name}: the larger tensor has {whole.numel()} elements, expected {size} (ranks) times "
                f"the {piece.numel()} of the smaller one"
            )
        tensors.check(name, [whole, piece], dtype=piece.dtype)
        whole = whole.data
        if tensors.is_flat(whole):
            flat = whole.view(-1)
            return list(flat.split(piece.numel())) if piece.numel() else [flat] * size
        if whole.dim() == 0 or whole.shape[0] % size:
            raise RuntimeError(
                f"{name}: the larger tensor (shape {tuple(whole.shape)}) must be contiguous, or its first dimension "
                f"a multiple of {size}, the number of ranks"
            )
        return list(whole.split(whole.shape[0] // size)) if whole.shape[0] else [whole] * size


def _recorded(name: str, inputs: Tensors) -> AbstractContextManager[None]:
    """Return a context that the profiler shows as ``shm:name``, with the sizes of ``inputs``, while it records.

    (So over every engine: tests and whoever reads profiles look for this name.)
    """
    return _torch.recorded(f"shm:{name}", inputs) if _profiler_enabled() else nullcontext()


def _single(name: str, list_: list[Any]) -> Any:
    if len(list_) != 1:
        raise RuntimeError(f"{name}: expected one tensor (or list of tensors) per rank, got {len(list_)}")
    return list_[0]


def _barrier(engine: Engine) -> None:
    engine.barrier()


def _sync_if_none(engine: Engine, list_: Sequence[object]) -> None:
    """Compare fingerprints also in a coalesced collective of no tensors."""
    if not list_:
        engine.barrier()


def _sizes(list_: Tensors) -> tuple[Any, ...]:
    return tuple((tensor.dtype, tensor.numel()) for tensor in list_)


def _counts(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return each rank's number of elements: ``splits`` counts rows (dimension 0) of ``tensor``; empty: equal parts."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        splits = [rows // size] * size
    if len(splits) != size:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(splits) != rows:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")
    width = tensor.numel() // rows if rows else 0
    return [count * width for count in splits]


def _op(opts: Any) -> tuple[int, float]:
    """Return the reduce op as torch numbers it, and the factor of PREMUL_SUM (1 for all else)."""
    op = opts.reduceOp
    kind = hash(op)  # its number, at a third of the cost of int(op.op)
    return kind, float(op.__getstate__()[1]) if kind == _PREMUL_SUM else 1.0


def _as(flat: torch.Tensor, how: Reduction) -> torch.Tensor:
    """Return ``flat`` viewed as the dtype that the reduction's operator takes (of the same size)."""
    return flat if flat.dtype is how.dtype else flat.view(how.dtype)
