"""Tensors whose memory all ranks of a group can reach, so that reducing them copies nothing in or out.

``allocate_tensor`` is collective: each rank makes a segment of its own, publishes where it is, and maps those of all
others. The tensors look ordinary; an all-reduce recognises them by their address and works in place: each rank combines
the part that it owns over all ranks' memory, and writes the result into all ranks' memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.comm.shm.collectives.gather import all_gather
from lockstep.comm.shm.rounds import Rounds
from lockstep.comm.shm.segment import Offer, Segment
from lockstep.errors import RendezvousError

_OFFER_BYTES = 512
_LENGTH = struct.Struct("<q")
#: Room before the tensor for the segment's identity; keeps the data on a page boundary.
_HEAD = 4096


@dataclass(frozen=True)
class SharedTensor:
    """One allocation, on one rank: the ranks' memory for it, in order of rank, as 1-d tensors of its dtype."""

    number: int
    views: tuple[torch.Tensor, ...]


class SharedTensors:
    """The allocations of one group. Used in the group's turn only."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._allocations: list[SharedTensor] = []
        self._ranges: list[tuple[int, int, SharedTensor]] = []

    def __bool__(self) -> bool:
        return bool(self._allocations)

    def allocate(self, rounds: Rounds, count: int, dtype: torch.dtype) -> torch.Tensor:
        """**Collective.** A 1-d tensor of ``count`` zeros, in memory that the group's ranks share.

        Raises:
            RendezvousError: some rank has no memory, or can't map another's.
        """
        size = _HEAD + max(1, count * dtype.itemsize)
        segment, offer = Segment.create(size, chunk=0)
        try:
            offers = self._exchange(rounds, offer)
            failed: str | None = None
            segments = []
            for rank, each in enumerate(offers):
                try:
                    segments.append(segment if rank == self._rank else Segment.open(each))
                except RendezvousError as error:
                    failed = f"rank {self._rank}: {error}"
                    break
            outcomes = self._agree(rounds, failed is not None)
        finally:
            os.close(offer.descriptor)
        if any(outcomes):
            bad = [rank for rank, outcome in enumerate(outcomes) if outcome]
            raise RendezvousError(failed or f"rank(s) {bad} could not map the memory that the others share")
        views = tuple(each.bytes[_HEAD : _HEAD + count * dtype.itemsize].view(dtype) for each in segments)
        allocation = SharedTensor(len(self._allocations), views)
        self._allocations.append(allocation)
        start = views[self._rank].data_ptr()
        self._ranges.append((start, start + count * dtype.itemsize, allocation))
        return views[self._rank]

    def find(self, flat: torch.Tensor) -> tuple[int, int, list[torch.Tensor]] | None:
        """**Local.** If ``flat`` lies in an allocation: its number, the offset in it, and the ranks' views of the same.

        Every rank must pass the same part of the same allocation; number and offset belong in the fingerprint.
        """
        address = flat.data_ptr()
        for start, end, allocation in self._ranges:
            if start <= address < end:
                mine = allocation.views[self._rank]
                offset = (address - start) // flat.dtype.itemsize
                if mine.dtype is not flat.dtype or offset + flat.numel() > mine.numel():
                    return None
                return allocation.number, offset, [view[offset : offset + flat.numel()] for view in allocation.views]
        return None

    def close(self) -> None:
        """**Local.** Forget them: the memory of each goes with the last tensor on it."""
        self._allocations.clear()
        self._ranges.clear()

    def _exchange(self, rounds: Rounds, offer: Offer) -> list[Offer]:
        text = offer.dumps().encode()
        record = bytearray(_OFFER_BYTES)
        _LENGTH.pack_into(record, 0, len(text))
        record[_LENGTH.size : _LENGTH.size + len(text)] = text
        outputs = _gather_bytes(rounds, torch.frombuffer(record, dtype=torch.uint8))
        return [Offer.loads(each[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(each)[0]]) for each in outputs]

    @staticmethod
    def _agree(rounds: Rounds, failed: bool) -> list[bool]:
        return [bool(each[0]) for each in _gather_bytes(rounds, torch.tensor([failed], dtype=torch.uint8))]


def _gather_bytes(rounds: Rounds, mine: torch.Tensor) -> Sequence[bytes]:
    outputs = [torch.empty_like(mine) for _ in range(rounds.size)]
    all_gather(rounds, outputs, mine)
    return [bytes(output.tolist()) for output in outputs]
