"""Operations that move tensors between ranks as they are: broadcast, the gathers, scatter, all-to-all, and barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep import _torch
from lockstep.comm.shm import fingerprint, tensors
from lockstep.comm.shm.collectives import all_to_all as _all_to_all
from lockstep.comm.shm.collectives import broadcast as _broadcast
from lockstep.comm.shm.collectives import gather as _gather
from lockstep.comm.shm.collectives import scatter as _scatter
from lockstep.comm.shm.interface.base import Operations, Tensors, finish, single, sizes, sync_if_none
from lockstep.comm.shm.rounds import Rounds
from lockstep.comm.shm.work import ShmWork

_AllgatherOptions: Any = _torch.all_gather_options()


class Moves(Operations):
    """Broadcast, gather, scatter, all-to-all, barrier."""

    def broadcast(self, tensors_: Tensors, opts: Any = None) -> ShmWork:
        opts = opts or dist.BroadcastOptions()
        tensor = single("broadcast", tensors_)
        tensors.check("broadcast", tensors_)
        root = self._root("broadcast", opts.rootRank)
        body = fingerprint.take("broadcast", dtype=tensor.dtype, numel=tensor.numel(), root=root)

        def move(rounds: Rounds) -> None:
            finishes: list[tensors.Finish] = []
            flat = tensors.source(tensor) if rounds.rank == root else tensors.target(tensor, finishes)
            _broadcast.broadcast(rounds, flat, root=root)
            finish(finishes)

        return self._issue("broadcast", body, move, tensors_, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        source, targets = single("allgather", inputs), single("allgather", outputs)
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
            detail=sizes(inputs) if len(inputs) != 1 else None,
        )

        def move(rounds: Rounds) -> None:
            finishes: list[tensors.Finish] = []
            for targets, source in pairs:
                flats = [tensors.target(target, finishes) for target in targets]
                _gather.all_gather(rounds, flats, tensors.source(source))
            sync_if_none(rounds, pairs)
            finish(finishes)

        return self._issue(name, body, move, result, opts or _AllgatherOptions())

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> ShmWork:
        opts = opts or dist.GatherOptions()
        source = single("gather", inputs)
        tensors.check("gather", inputs)
        root = self._root("gather", opts.rootRank)
        targets = self._list_of_root("gather", outputs, root=root, like=source)
        body = fingerprint.take("gather", dtype=source.dtype, numel=source.numel(), root=root)

        def move(rounds: Rounds) -> None:
            finishes: list[tensors.Finish] = []
            flats = [tensors.target(target, finishes) for target in targets]
            _gather.gather(rounds, flats, tensors.source(source), root=root)
            finish(finishes)

        return self._issue("gather", body, move, targets, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> ShmWork:
        opts = opts or dist.ScatterOptions()
        output = single("scatter", outputs)
        tensors.check("scatter", outputs)
        root = self._root("scatter", opts.rootRank)
        sources = self._list_of_root("scatter", inputs, root=root, like=output)
        body = fingerprint.take("scatter", dtype=output.dtype, numel=output.numel(), root=root)

        def move(rounds: Rounds) -> None:
            finishes: list[tensors.Finish] = []
            flat = tensors.target(output, finishes)
            _scatter.scatter(rounds, flat, [tensors.source(source) for source in sources], root=root)
            finish(finishes)

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
            finish(finishes_)
            finish(finishes)

        return self._issue("all_to_all", body, move, result, opts or dist.AllToAllOptions())

    def barrier(self, opts: Any = None) -> ShmWork:
        return self._issue("barrier", fingerprint.take("barrier"), Rounds.sync, [], opts or dist.BarrierOptions())

    def _list_of_root(self, name: str, lists: list[Tensors], *, root: int, like: torch.Tensor) -> Tensors:
        if self._shm_rank != root:
            if lists and lists[0]:
                raise RuntimeError(f"{name}: a list of tensors belongs to the root, rank {root}, only")
            return []
        list_: Tensors = single(name, lists)
        tensors.check_sizes(name, list_, self._shm_size, like=like)
        return list_


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
