"""The collectives: how each moves through rounds (Note [Rounds] in rounds.py).

They work on *flat* tensors, one-dimensional and contiguous (tensors.py makes them), in chunks of what fits into one
stage, and know nothing of torch's API. Each must call ``sync()`` at least once, also for no elements: the first round
carries the fingerprint.

What each costs a rank, in bytes, for n of them on W ranks:

==================  =========================================================================================
all_reduce          small: n written, W n read
                    two ranks: n written, 2 n read and n written to combine
                    else: n copied in, n read and n/W written to combine (in the cache), n copied out
SharedSum           n read, n written (W parts of n/W each way)
add_rows_shared     as much for each row that counts, all ranks' rows together
reduce              n written; W n read by the root
reduce_scatter      W n written, W n read
broadcast           n written by the root, n read by each other rank
gather              n written; (W - 1) n read by each rank that receives
scatter             W n written by the root, n read by each rank
all_to_all          what it sends written, what it receives read
==================  =========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.comm.group.reduction import Reduction
from lockstep.comm.group.tensors import part
from lockstep.comm.looks import SumLook
from lockstep.comm.memory import RowOrder, add_up
from lockstep.comm.shm.rounds import Rounds, Small
from lockstep.comm.shm.semaphore import copy

Tensors = Sequence[torch.Tensor]

#: Bytes of a piece of memory that lies in all ranks: the result is copied to the other ranks while it is in the
#: first-level or second-level cache.
_PIECE = 128 * 1024


# --- combined elements -----------------------------------------------------------------------------------------------


def all_reduce(rounds: Rounds, flat: torch.Tensor, reduction: Reduction) -> None:
    """Combine ``flat`` over all ranks, in place. Its dtype is ``reduction.dtype``."""
    small = rounds.small(reduction.dtype, flat.numel())
    if small is not None:
        stages = small.views[rounds.buffer]
        reduction.load(flat, stages[rounds.rank])
        rounds.sync()
        reduction.over(stages, flat)
    elif rounds.size == 2 and reduction.exact:
        _each_for_itself(rounds, flat, reduction)
    else:
        _by_parts(rounds, flat, reduction)


def all_reduce_small(rounds: Rounds, address: int, small: Small, reduction: Reduction) -> None:
    """Combine the elements at ``address`` over all ranks, in place.

    One stage, and little enough that combining costs less than a second round: each rank stages its elements; one
    round; each combines all ranks' stages for itself. At such sizes most of the time goes into calls of torch's, so
    there is one only, for the sum; elements are copied as bytes.
    """
    buffer = rounds.buffer
    copy(small.own[buffer], address, small.nbytes)
    rounds.sync()
    reduction.over(small.views[buffer], small.result)
    copy(address, small.result_address, small.nbytes)


def _each_for_itself(rounds: Rounds, flat: torch.Tensor, reduction: Reduction) -> None:
    """Two ranks, sums and products: one round per chunk.

    To combine one's own part only would save half a read, and cost a copy and more rounds. IEEE sums and products are
    the same bits in whatever loop they are computed; a minimum of zeros of either sign is not, so that goes by parts.
    """
    step = rounds.capacity(reduction.dtype)
    for start in range(0, flat.numel(), step):
        chunk = flat[start : start + step]
        stages = [stage[: chunk.numel()] for stage in rounds.stages(reduction.dtype)]
        reduction.load(chunk, stages[rounds.rank])
        rounds.sync()
        reduction.over(stages, chunk)


def _by_parts(rounds: Rounds, flat: torch.Tensor, reduction: Reduction) -> None:
    """Of each chunk every rank combines the part that it owns, into rank 0's stage; the next round hands it over.

    So one round per chunk, and one more. Chunk k is copied out in the round that brings chunk k + 1 in (Note [Rounds]
    says why the stages allow it).
    """
    dtype = reduction.dtype
    step = rounds.capacity(dtype)
    result: tuple[torch.Tensor, torch.Tensor] | None = None
    for start in range(0, flat.numel(), step):
        chunk = flat[start : start + step]
        stages = rounds.stages(dtype)
        length = chunk.numel()
        reduction.load(chunk, stages[rounds.rank][:length])
        rounds.sync()
        first, end = part(length, rounds.rank, rounds.size)
        if first < end:
            own = [stage[first:end] for stage in stages]
            reduction.over(own, own[0])
        if result is not None:
            result[0].copy_(result[1])
        result = chunk, stages[0][:length]
    rounds.sync()
    if result is not None:
        result[0].copy_(result[1])


class SharedSum:
    """**Collective** to call. Combines one tensor's memory on all ranks element by element, into each of them.

    Nothing is copied in or out. One round says that every rank's elements are there (and compares fingerprints); each
    rank combines the part that it owns, piece by piece within the cache, and writes the result into every rank's
    memory; one round says that all parts are.

    Args:
        rounds: the group's.
        views: the memory on each rank, in order of rank.
        reduction: how to combine it.
        look: looks at each piece of the sum while it is in the cache; on all ranks, or on none.
    """

    def __init__(self, rounds: Rounds, views: Tensors, reduction: Reduction, look: SumLook | None = None) -> None:
        self._rounds, self._reduction, self._look = rounds, reduction, look
        first, end = part(views[0].numel(), rounds.rank, rounds.size)
        step = _PIECE // reduction.dtype.itemsize
        #: Where each piece begins, and its memory by rank.
        self._pieces = [
            (start, [view[start : min(end, start + step)] for view in views]) for start in range(first, end, step)
        ]

    def __call__(self, _: object = None) -> None:
        """Combine what is there now."""
        rounds, reduction, look = self._rounds, self._reduction, self._look
        rounds.sync()
        for start, pieces in self._pieces:
            if reduction.factor != 1:
                for piece in pieces:
                    piece.mul_(reduction.factor)
            reduction.over(pieces, pieces[0])
            if look is not None:
                look.at(pieces, start)
            for piece in pieces[1:]:
                piece.copy_(pieces[0])
        if look is None:
            rounds.sync()
        else:
            look.is_suspicious = rounds.sync_with(look.is_suspicious)


def add_rows_shared(rounds: Rounds, views: Tensors, order: RowOrder) -> None:
    """Add up the rows in ``views`` (one tensor's memory on each rank) in order, into the first row of each of them.

    As :class:`SharedSum`: each rank adds up its own part of the columns, piece by piece within the cache.
    """
    rounds.sync()
    first, end = part(order.width, rounds.rank, rounds.size)
    step = _PIECE // views[0].dtype.itemsize
    for start in range(first, end, step):
        stop = min(end, start + step)
        pieces = [views[rank][row * order.width + start : row * order.width + stop] for rank, row in order.places]
        add_up(pieces, order, start=start)
        for rank, view in enumerate(views):
            if order.places[0] != (rank, 0):
                view[start:stop].copy_(pieces[0])
    rounds.sync()


def reduce(rounds: Rounds, flat: torch.Tensor, reduction: Reduction, *, root: int) -> None:
    """Combine ``flat`` over all ranks into that of ``root``; the others keep theirs."""
    step = rounds.capacity(reduction.dtype)
    for start in range(0, max(1, flat.numel()), step):
        chunk = flat[start : start + step]
        stages = rounds.stages(reduction.dtype)
        length = chunk.numel()
        reduction.load(chunk, stages[rounds.rank][:length])
        rounds.sync()
        if rounds.rank == root:
            reduction.over([stage[:length] for stage in stages], chunk)


def reduce_scatter(rounds: Rounds, flat: torch.Tensor, inputs: Tensors, reduction: Reduction) -> None:
    """Combine every rank's ``inputs[r]`` into the ``flat`` of rank r. The dtype of all is ``reduction.dtype``.

    Each rank's stage is divided among the ranks; per round each rank combines its pieces of 1/W of a stage.
    """
    step = rounds.capacity(reduction.dtype) // rounds.size
    own = rounds.rank * step
    for start in range(0, max(1, flat.numel()), step):
        chunk = flat[start : start + step]
        length = chunk.numel()
        stages = rounds.stages(reduction.dtype)
        for rank, source in enumerate(inputs):
            reduction.load(source[start : start + step], stages[rounds.rank][rank * step : rank * step + length])
        rounds.sync()
        reduction.over([stage[own : own + length] for stage in stages], chunk)


# --- elements as they are --------------------------------------------------------------------------------------------


def broadcast(rounds: Rounds, flat: torch.Tensor, *, root: int) -> None:
    """Give every rank the elements of the root's ``flat``, in place.

    The root runs up to two chunks ahead of the slowest rank.
    """
    step = rounds.capacity(flat.dtype)
    for start in range(0, max(1, flat.numel()), step):
        chunk = flat[start : start + step]
        stage = rounds.stages(flat.dtype)[root][: chunk.numel()]
        if rounds.rank == root:
            stage.copy_(chunk)
        rounds.sync()
        if rounds.rank != root:
            chunk.copy_(stage)


def gather(rounds: Rounds, outputs: Tensors, flat: torch.Tensor, *, longest: int | None = None) -> None:
    """Put each rank's ``flat`` into ``outputs[rank]``; a rank that receives nothing passes no outputs.

    Args:
        longest: the largest number of elements of any rank, the same number everywhere; None: all have as many.
    """
    step = rounds.capacity(flat.dtype)
    for start in range(0, max(1, flat.numel() if longest is None else longest), step):
        chunk = flat[start : start + step]
        stages = rounds.stages(flat.dtype)
        stages[rounds.rank][: chunk.numel()].copy_(chunk)
        rounds.sync()
        for output, stage in zip(outputs, stages, strict=False):
            target = output[start : start + step]
            target.copy_(stage[: target.numel()])


def scatter(rounds: Rounds, flat: torch.Tensor, inputs: Tensors, *, root: int) -> None:
    """Put the root's ``inputs[rank]`` into each rank's ``flat``; elsewhere ``inputs`` is empty.

    The root's stage is divided among the ranks; per round each gets a piece of 1/W of a stage.
    """
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


def all_to_all(rounds: Rounds, outputs: Tensors, inputs: Tensors, *, longest: int) -> None:
    """Put each rank's ``inputs[r]`` into ``outputs[rank]`` of rank r. All are of one dtype; sizes may differ.

    Each rank's stage is divided among the ranks, and per round every pair moves a piece of 1/W of a stage.

    Args:
        longest: the largest number of elements that any rank sends to another, the same number everywhere.
    """
    size, rank = rounds.size, rounds.rank
    step = rounds.capacity(inputs[0].dtype) // size
    for start in range(0, longest, step):
        stages = rounds.stages(inputs[0].dtype)
        for target, tensor in enumerate(inputs):
            piece = tensor[start : start + step]
            stages[rank][target * step : target * step + piece.numel()].copy_(piece)
        rounds.sync()
        for source, tensor in enumerate(outputs):
            piece = tensor[start : start + step]
            piece.copy_(stages[source][rank * step : rank * step + piece.numel()])
