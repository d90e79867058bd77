"""Tensors whose memory all ranks of a group can reach, so that reducing them copies nothing in or out.

``allocate_tensor`` is collective: each rank makes its own segment, publishes where it is, and maps those of all
others. The tensors look ordinary; an all-reduce recognises them by their address and works in place: each rank combines
the part that it owns over all ranks' memory, and writes the result into all ranks' memory.

Note [Lifetime of shared tensors]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The group does not keep a tensor alive. Its memory is a mapping that nothing but the tensor's storage refers to, and
the group holds a weak reference to that. When the last tensor on it is gone, this rank lets go of the other ranks'
memory for the same allocation too, at its next all-reduce. The kernel frees each rank's part when every rank has let
go, or has ended. A rank that keeps using its tensor while another has dropped its own gets a mismatch at its next
all-reduce, as it should.

A storage may end in any thread, or during a garbage collection. So the function that is called then only appends a
number to a deque; and an address counts only as long as the memory there lives, since the system reuses addresses.

A forked child has this memory too, and shares it: a child that writes to a gradient writes to its parent's.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass

import torch

from lockstep.comm.group.engine import Engine, SharedPart
from lockstep.comm.group.fingerprint import encoded
from lockstep.comm.shm.segment import Memory, Offer, Segment
from lockstep.errors import RendezvousError

#: Bytes of a rank's record of its memory.
_RECORD = 1024
#: Room before the tensor for the segment's identity; keeps the data on a page boundary.
_HEAD = 4096
#: The most parts of allocations whose views are kept, since the same buckets come again in every step.
_KEPT_VIEWS = 256


@dataclass(frozen=True)
class _Allocation:
    number: int
    #: Addresses of the first byte of this rank's own memory and of the first byte after it.
    start: int
    end: int
    #: The other ranks' memory, as bytes; None for this rank's own, which belongs to the caller.
    others: tuple[torch.Tensor | None, ...]
    #: This rank's own memory, see Note [Lifetime of shared tensors].
    memory: weakref.ref[Memory]


class SharedTensors:
    """The allocations of one group. They are made in the group's turn only, and looked up from any thread."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._made = 0
        self.allocations: list[_Allocation] = []
        self._parts: dict[tuple[int, int, torch.dtype], SharedPart] = {}
        self._lock = threading.RLock()  # (a signal handler may destroy the group while its thread has it)
        #: Numbers of allocations whose memory is gone; see Note [Lifetime of shared tensors].
        self._ended: deque[int] = deque()

    def allocate(self, engine: Engine, count: int, dtype: torch.dtype) -> torch.Tensor:
        """**Collective.** Make a 1-d tensor of ``count`` zeros, in memory that the group's ranks share.

        Raises:
            RendezvousError: some rank has no memory, or can't map another's.
        """
        nbytes = count * dtype.itemsize
        segment, others, number = self._share(engine, _HEAD + max(1, nbytes))
        mine = segment.bytes[_HEAD : _HEAD + nbytes]
        start = mine.data_ptr()
        self._made = number + 1
        allocation = _Allocation(
            number,
            start,
            start + nbytes,
            tuple(None if other is None else other[_HEAD : _HEAD + nbytes] for other in others),
            weakref.ref(segment.release(), lambda _, ended=self._ended: ended.append(number)),  # type: ignore[misc]
        )
        with self._lock:
            self._forget_ended()
            self.allocations.append(allocation)
        with torch.inference_mode(False):  # (see _find)
            return mine.view(dtype)

    def _share(self, engine: Engine, nbytes: int) -> tuple[Segment, list[torch.Tensor | None], int]:
        """**Collective.** Make this rank's memory and map the others', all as bytes; None for this rank's own. Return
        the allocation's number, too.

        It is the next of the rank that has made most: one that was interrupted at the end of an allocation has not
        counted it, and a group that begins anew has all ranks' memory still.
        """
        offer: Offer | None = None
        said: str | None = None
        try:
            try:
                segment, offer = Segment.create(nbytes, chunk=0)
            except RendezvousError as error:
                said = f"rank {self._rank}: {error}"
            # (A refusal is told in the second exchange; here it is enough that there is nothing to map.)
            said_first = _exchange(engine, "" if offer is None else offer.dumps(), self._made)
            number = max(made for made, _ in said_first)
            offers = [Offer.loads(text) for _, text in said_first if text]
            others: list[torch.Tensor | None] = []
            if len(offers) == engine.size:
                try:
                    others = [
                        None if rank == self._rank else Segment.open(theirs).bytes for rank, theirs in enumerate(offers)
                    ]
                except RendezvousError as error:
                    said = f"rank {self._rank}: {error}"
            refusals = [text for _, text in _exchange(engine, said or "") if text]
        finally:
            if offer is not None:
                os.close(offer.descriptor)
        if refusals:
            raise RendezvousError("\n".join(refusals))
        return segment, others, number

    def find(self, flat: torch.Tensor) -> SharedPart | None:
        """Return the part of an allocation that ``flat`` is, or None if it lies elsewhere.

        Every rank must pass the same part of the same allocation; number and offset belong in the fingerprint.
        """
        address = flat.data_ptr()
        key = (address, flat.numel(), flat.dtype)
        with self._lock:
            if self._ended:
                self._forget_ended()
            part = self._parts.get(key)
            if part is None or part.memory() is None:
                part = self._find(address, flat.numel() * flat.dtype.itemsize, flat.dtype)
                if part is not None:
                    if len(self._parts) >= _KEPT_VIEWS:
                        self._parts.clear()
                    self._parts[key] = part
        return part

    def close(self) -> None:
        """Forget the allocations: the memory of each goes with the last tensor on it."""
        with self._lock:
            self.allocations.clear()
            self._parts.clear()

    def _find(self, address: int, nbytes: int, dtype: torch.dtype) -> SharedPart | None:
        for allocation in self.allocations:
            if allocation.start <= address < allocation.end and allocation.memory() is not None:
                offset = address - allocation.start
                if offset % dtype.itemsize or address + nbytes > allocation.end:
                    return None
                # These are kept: views of another dtype that inference mode makes could be written in that mode only.
                with torch.inference_mode(False):
                    views = [
                        None if other is None else other[offset : offset + nbytes].view(dtype)
                        for other in allocation.others
                    ]
                return SharedPart(allocation.number, offset, tuple(views), allocation.memory)
        return None

    def _forget_ended(self) -> None:
        ended = set()
        while self._ended:
            ended.add(self._ended.popleft())
        self.allocations = [each for each in self.allocations if each.number not in ended]
        self._parts = {key: part for key, part in self._parts.items() if part.number not in ended}


def _exchange(engine: Engine, text: str, number: int = 0) -> list[tuple[int, str]]:
    """**Collective.** Return every rank's number and short text (the rest is cut off), in order of rank."""
    content = encoded(text, _RECORD)
    records = engine.gather_numbers([number, len(content), *content.ljust(_RECORD, b"\0")])
    return [(theirs, bytes(record[:length]).decode(errors="replace")) for theirs, length, *record in records]
