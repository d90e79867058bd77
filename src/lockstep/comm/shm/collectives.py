"""The verbs of engines whose ranks share memory: how each moves through rounds (Note [Rounds] in rounds.py).

They work on *flat* tensors, one-dimensional and contiguous (group/tensors.py makes them), in chunks of what fits into
one stage, and know nothing of torch's API. Each must call ``sync()`` at least once, also for no elements: the first
round carries the fingerprint.

What each costs a rank, in bytes, for n of them on W ranks:

==================  =========================================================================================
all_reduce          small: n written, W n read
                    two ranks: n written, 2 n read and n written to combine
                    else: n copied in, n read and n/W written to combine (in the cache), n copied out
shared all_reduce   n read, n written (W parts of n/W each way)
add_rows            as much for each row that counts, all ranks' rows together
reduce              n written; W n read by the root
reduce_scatter      W n written, W n read
broadcast           n written by the root, n read by each other rank
gather              n written; (W - 1) n read by each rank that receives
scatter             W n written by the root, n read by each rank
all_to_all          what it sends written, what it receives read
==================  =========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lockstep.comm.group import tensors
from lockstep.comm.group.engine import Engine, SharedPart, Tensors
from lockstep.comm.group.reduction import Reduction
from lockstep.comm.group.tensors import part as own_part
from lockstep.comm.looks import SumLook
from lockstep.comm.memory import RowOrder, add_up
from lockstep.comm.shm.rounds import Rounds
from lockstep.comm.shm.semaphore import copy

#: Tensor classes without behaviour of their own.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: Bytes of a piece of shared memory that is combined at a time: small enough for the result to be copied to the other
#: ranks while it is in the first-level or second-level cache.
_PIECE = 128 * 1024


class SharedSum:
    """**Collective** to call. Combines one tensor's memory on all ranks element by element, into each of them.

    Nothing is copied in or out. One round says that every rank's elements are there (and compares fingerprints); each
    rank combines the part that it owns, piece by piece within the cache, and writes the result into every rank's
    memory; one round says that all parts are.

    Args:
        rounds: the group's.
        views: the memory on each rank, in order of rank.
        how: how to combine it.
        look: looks at each piece of the sum while it is in the cache; on all ranks, or on none.
    """

    def __init__(self, rounds: Rounds, views: Tensors, how: Reduction, look: SumLook | None = None) -> None:
        self._rounds, self._how, self._look = rounds, how, look
        first, end = own_part(views[0].numel(), rounds.rank, rounds.size)
        step = _PIECE // how.dtype.itemsize
        #: For each piece, its offset and its memory by rank.
        self._pieces = [
            (start, [view[start : min(end, start + step)] for view in views]) for start in range(first, end, step)
        ]

    def __call__(self, _: object = None) -> None:
        """**Collective.** Combine the memory's present elements."""
        rounds, how, look = self._rounds, self._how, self._look
        rounds.sync()
        for start, pieces in self._pieces:
            if how.factor != 1:
                for piece in pieces:
                    piece.mul_(how.factor)
            how.over(pieces, pieces[0])
            if look is not None:
                look.at(pieces, start)
            for piece in pieces[1:]:
                piece.copy_(pieces[0])
        if look is None:
            rounds.sync()
        else:
            look.is_suspicious = rounds.sync_with(look.is_suspicious)


class VerbsInRounds(Engine):
    """The verbs of an engine whose ranks share memory."""

    _rounds: Rounds

    # --- combined elements --------------------------------------------------------------------------------------------

    def all_reduce(self, flat: torch.Tensor, how: Reduction) -> None:
        """See :class:`Engine`."""
        rounds = self._rounds
        small = rounds.small(how.dtype, flat.numel())
        if small is not None:
            stages = small.views[rounds.buffer]
            how.load(flat, stages[rounds.rank])
            rounds.sync()
            how.over(stages, flat)
        elif rounds.size == 2 and how.exact:
            self._each_for_itself(flat, how)
        else:
            self._by_parts(flat, how)

    def all_reduce_tensor(self, tensor: torch.Tensor, how: Reduction, part: SharedPart | None) -> None:
        """See :class:`Engine`. Nothing is copied for a part of shared memory.

        A small tensor fits into one stage, and combining it costs less than a second round: each rank stages its
        elements, and after one round combines all ranks' stages for itself. At such sizes most of the time goes into
        calls of torch, so only the sum is one; elements are copied as bytes.
        """
        if part is not None:
            SharedSum(self._rounds, _views(tensor, how, part), how)()
            return
        rounds = self._rounds
        small = rounds.small(how.dtype, tensor.numel()) if how.factor == 1 else None
        if small is None or tensor.__class__ not in _PLAIN or not tensors.is_flat(tensor):
            super().all_reduce_tensor(tensor, how, part)
            return
        buffer, address = rounds.buffer, tensor.data_ptr()
        copy(small.own[buffer], address, small.nbytes)
        rounds.sync()
        how.over(small.views[buffer], small.result)
        copy(address, small.result_address, small.nbytes)

    def _each_for_itself(self, flat: torch.Tensor, how: Reduction) -> None:
        """Combine sums and products of two ranks, in one round per chunk: each rank combines everything.

        To combine only a part would save half a read, and cost a copy and more rounds. IEEE sums and products have the
        same bits in whichever loop they are computed; a minimum of zeros of either sign has not, so it goes by parts.
        """
        rounds = self._rounds
        step = rounds.capacity(how.dtype)
        for start in range(0, flat.numel(), step):
            chunk = flat[start : start + step]
            stages = [stage[: chunk.numel()] for stage in rounds.stages(how.dtype)]
            how.load(chunk, stages[rounds.rank])
            rounds.sync()
            how.over(stages, chunk)

    def _by_parts(self, flat: torch.Tensor, how: Reduction) -> None:
        """Combine by parts: each rank its own part of a chunk, into rank 0's stage; the next round hands it over.

        That takes one round per chunk, and one more. Chunk k is copied out in the round that brings chunk k + 1 in
        (Note [Rounds] says why the stages allow it).
        """
        rounds = self._rounds
        dtype = how.dtype
        step = rounds.capacity(dtype)
        result: tuple[torch.Tensor, torch.Tensor] | None = None
        for start in range(0, flat.numel(), step):
            chunk = flat[start : start + step]
            stages = rounds.stages(dtype)
            length = chunk.numel()
            how.load(chunk, stages[rounds.rank][:length])
            rounds.sync()
            first, end = own_part(length, rounds.rank, rounds.size)
            if first < end:
                own = [stage[first:end] for stage in stages]
                how.over(own, own[0])
            if result is not None:
                result[0].copy_(result[1])
            result = chunk, stages[0][:length]
        rounds.sync()
        if result is not None:
            result[0].copy_(result[1])

    def in_place_sum(
        self, tensor: torch.Tensor, how: Reduction, part: SharedPart, look: SumLook | None
    ) -> Callable[[Engine], None]:
        """See :class:`Engine`."""
        return SharedSum(self._rounds, _views(tensor, how, part), how, look)

    def add_rows(self, rows: torch.Tensor, order: RowOrder, part: SharedPart) -> None:
        """See :class:`Engine`. Each rank adds up its own part of the columns, piece by piece within the cache."""
        views = part.views(tensors.source(rows))
        rounds = self._rounds
        rounds.sync()
        first, end = own_part(order.width, rounds.rank, rounds.size)
        step = _PIECE // views[0].dtype.itemsize
        for start in range(first, end, step):
            stop = min(end, start + step)
            pieces = [views[rank][row * order.width + start : row * order.width + stop] for rank, row in order.places]
            add_up(pieces, order, start=start)
            for rank, view in enumerate(views):
                if order.places[0] != (rank, 0):
                    view[start:stop].copy_(pieces[0])
        rounds.sync()

    def reduce(self, flat: torch.Tensor, how: Reduction, *, root: int) -> None:
        """See :class:`Engine`."""
        rounds = self._rounds
        step = rounds.capacity(how.dtype)
        for start in range(0, max(1, flat.numel()), step):
            chunk = flat[start : start + step]
            stages = rounds.stages(how.dtype)
            length = chunk.numel()
            how.load(chunk, stages[rounds.rank][:length])
            rounds.sync()
            if rounds.rank == root:
                how.over([stage[:length] for stage in stages], chunk)

    def reduce_scatter(self, flat: torch.Tensor, inputs: Tensors, how: Reduction) -> None:
        """See :class:`Engine`. Each rank's stage is divided among the ranks; per round each combines its pieces."""
        rounds = self._rounds
        step = rounds.capacity(how.dtype) // rounds.size
        own = rounds.rank * step
        for start in range(0, max(1, flat.numel()), step):
            chunk = flat[start : start + step]
            length = chunk.numel()
            stages = rounds.stages(how.dtype)
            for rank, source in enumerate(inputs):
                how.load(source[start : start + step], stages[rounds.rank][rank * step : rank * step + length])
            rounds.sync()
            how.over([stage[own : own + length] for stage in stages], chunk)

    def barrier(self) -> None:
        """See :class:`Engine`."""
        self._rounds.sync()

    # --- elements as they are -----------------------------------------------------------------------------------------

    def broadcast(self, flat: torch.Tensor, *, root: int) -> None:
        """See :class:`Engine`. The root runs up to two chunks ahead of the slowest rank."""
        rounds = self._rounds
        step = rounds.capacity(flat.dtype)
        for start in range(0, max(1, flat.numel()), step):
            chunk = flat[start : start + step]
            stage = rounds.stages(flat.dtype)[root][: chunk.numel()]
            if rounds.rank == root:
                stage.copy_(chunk)
            rounds.sync()
            if rounds.rank != root:
                chunk.copy_(stage)

    def gather(
        self,
        outputs: Tensors,
        flat: torch.Tensor,
        *,
        root: int | None = None,  # noqa: ARG002
        longest: int | None = None,
    ) -> None:
        """See :class:`Engine`. A rank with ``outputs`` receives: any rank may read what every rank stages."""
        rounds = self._rounds
        step = rounds.capacity(flat.dtype)
        for start in range(0, max(1, flat.numel() if longest is None else longest), step):
            chunk = flat[start : start + step]
            stages = rounds.stages(flat.dtype)
            stages[rounds.rank][: chunk.numel()].copy_(chunk)
            rounds.sync()
            for output, stage in zip(outputs, stages, strict=False):
                target = output[start : start + step]
                target.copy_(stage[: target.numel()])

    def scatter(self, flat: torch.Tensor, inputs: Tensors, *, root: int) -> None:
        """See :class:`Engine`. The root's stage is divided among the ranks; per round each gets a piece."""
        rounds = self._rounds
        step = rounds.capacity(flat.dtype) // rounds.size
        own = rounds.rank * step
        for start in range(0, max(1, flat.numel()), step):
            chunk = flat[start : start + step]
            length = chunk.numel()
            stage = rounds.stages(flat.dtype)[root]
            for rank, source in enumerate(inputs):
                stage[rank * step : rank * step + length].copy_(source[start : start + step])
            rounds.sync()
            chunk.copy_(stage[own : own + length])

    def all_to_all(self, outputs: Tensors, inputs: Tensors, sizes: Sequence[Sequence[int]]) -> None:
        """See :class:`Engine`. Each rank's stage is divided among the ranks; per round every pair moves a piece."""
        rounds = self._rounds
        size, rank = rounds.size, rounds.rank
        step = rounds.capacity(inputs[0].dtype) // size
        for start in range(0, max(map(max, sizes)), step):
            stages = rounds.stages(inputs[0].dtype)
            for target, tensor in enumerate(inputs):
                piece = tensor[start : start + step]
                stages[rank][target * step : target * step + piece.numel()].copy_(piece)
            rounds.sync()
            for source, tensor in enumerate(outputs):
                piece = tensor[start : start + step]
                piece.copy_(stages[source][rank * step : rank * step + piece.numel()])


def _views(tensor: torch.Tensor, how: Reduction, part: SharedPart) -> list[torch.Tensor]:
    """Return all ranks' memory of a shared tensor, in order of rank, as what is reduced."""
    views = part.views(tensors.source(tensor))
    if views[0].dtype is how.dtype:
        return views
    with torch.inference_mode(False):  # (an in_place_sum keeps them, see SharedTensors._find)
        return [view.view(how.dtype) for view in views]
