"""Memory that a process group reduces in place: the small interface between its users and the backend.

torch's backends have two methods for memory of their own, ``supports_tensor_alloc(device)`` and
``allocate_tensor(size, dtype=, device=)`` (FSDP2 uses NCCL's). A backend that also says ``reduces_in_place`` promises
that an all-reduce of such a tensor, or of the same part of it on every rank, copies nothing in or out. The backend
"shm" does, and uses such memory in two more ways: a sum whose checks are made once, and sums of rows in a given order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lockstep import _torch
from lockstep.comm.looks import SumLook


@dataclass(frozen=True)
class RowOrder:
    """How rows that lie on several ranks are added up."""

    #: The number of elements in a row.
    width: int
    #: The rank and row of each row that counts.
    places: tuple[tuple[int, int], ...]
    #: Positions in ``places``, in order: the second is added to the first. In the end the sum of all is at 0.
    pairs: tuple[tuple[int, int], ...]
    #: (end, factor), in order: the sum's elements from the end before (at first 0) up to ``end`` are multiplied by it.
    factors: tuple[tuple[int, float], ...]


class InPlaceMemory(Protocol):
    """A backend with memory that it reduces in place."""

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """**Collective.** Return a 1-D tensor of ``size`` zeros."""

    def in_place_sum(self, tensor: torch.Tensor, look: SumLook | None = None) -> Callable[[str], None]:
        """Return a **collective** function that adds up all ranks' ``tensor``, which is such memory, and returns when
        it is done. It takes a label (labels.py). What an all-reduce checks in each call is checked once, here.

        Args:
            tensor: as :meth:`allocate_tensor` returned it, or a contiguous part of it.
            look: looks at the sum while it is made, on all ranks or on none.
        """

    def add_rows(self, rows: torch.Tensor, order: RowOrder) -> None:
        """**Collective.** Add up rows that lie in such memory, in order; the result is each rank's first row."""


def in_place_memory(group: dist.ProcessGroup, device: torch.device) -> InPlaceMemory | None:
    """Return the backend of ``group`` for ``device``, if it has memory there that it reduces in place."""
    try:
        backend: Any = _torch.backend_for(group, device)
    except RuntimeError:  # the group serves no tensors of this device
        return None
    if getattr(backend, "reduces_in_place", False) and backend.supports_tensor_alloc(device):
        memory: InPlaceMemory = backend
        return memory
    return None


def add_up(rows: Sequence[torch.Tensor], order: RowOrder, *, start: int) -> None:
    """Add up the same columns of all rows, into the first of them, and multiply.

    Args:
        rows: as ``order.places`` lists them. They are written to.
        order: what is added to what.
        start: the number of their first column.
    """
    for target, source in order.pairs:
        rows[target].add_(rows[source])
    before = 0
    for end, factor in order.factors:
        part = rows[0][max(0, before - start) : max(0, end - start)]
        if factor != 1 and part.numel():
            part.mul_(factor)
        before = end
