"""Sparse gradients (of embeddings with ``sparse=True``): gathered from every rank and added up.

Ranks touch different rows, so there is nothing to line up in a flat bucket. Each rank announces how many rows it has,
and whether they are finite; then it sends its row numbers and its rows, padded to the longest. The sum of all is the
gradient.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep.comm.waiting import wait_for
from lockstep.trees import moved

#: Sent instead of the number of rows by a rank that did not use the parameter at all.
_UNUSED = -1


class RowLook(Protocol):
    """The interface of a check of sparse gradients' rows, which lie in no bucket."""

    def inspect_rows(self, rows: Tensor, name: str) -> bool:
        """Look at the rows that this rank is about to send; return whether to flag them."""
        ...

    def note_flagged_rows(self) -> None:
        """Note that some rank has flagged its rows; called on all ranks."""
        ...


class SparseSlot:
    """One parameter with a sparse gradient.

    Args:
        position: the parameter's position in the reducer's list.
        param: the parameter.
        name: the parameter's name.
        group: the ranks that gather.
        look: decides whether to tell all ranks that this rank's rows are not finite; None: no check.
    """

    def __init__(
        self, position: int, param: Parameter, name: str, group: dist.ProcessGroup, look: RowLook | None = None
    ) -> None:
        #: The parameter's position in the reducer's list.
        self.position = position
        #: The parameter, its name, the ranks that gather, and the check of its rows.
        self.param, self.name, self.group, self.look = param, name, group, look
        #: The position, once for each gradient that came in the backward under way. Always the same list.
        self.arrived: list[int] = []

    def issue(self, scale: float, used: bool) -> SparseTransfer:
        """**Collective.** Begin to gather.

        Args:
            scale: the factor of this rank's gradient; 0 discards it.
            used: whether the parameter got a gradient since the last reduction.
        """
        indices, values = self._contribution(scale)
        count = len(indices) if (used and scale != 0) or len(indices) else _UNUSED
        bad = self.look is not None and self.look.inspect_rows(values, self.name)
        return SparseTransfer(self, indices, values, said=(count, int(bad)))

    def _contribution(self, scale: float) -> tuple[Tensor, Tensor]:
        """Return row numbers (1-D) and rows (rows x the parameter's trailing shape) of this rank's gradient."""
        grad = self.param.grad
        if grad is None or scale == 0:
            rows = self.param.new_zeros((0, *self.param.shape[1:]))
            return torch.zeros(0, dtype=torch.int64, device=rows.device), rows
        if grad.layout == torch.strided:  # the weight is used elsewhere as well, densely
            grad = grad.to_sparse(1)
        grad = grad.coalesce()
        return grad.indices()[0], grad.values() * scale


class SparseTransfer:
    """One reduction of one sparse gradient, under way."""

    def __init__(self, slot: SparseSlot, indices: Tensor, values: Tensor, *, said: tuple[int, int]) -> None:
        self._name, self._param, self._group, self._look = slot.name, slot.param, slot.group, slot.look
        self._world_size = dist.get_world_size(slot.group)
        self._indices, self._values = indices, values
        # (To an accelerator so few bytes are copied at once: nothing waits for it.)
        mine = moved(torch.tensor(said, dtype=torch.int64, device="cpu"), values.device)
        #: What each rank said: int64 [world size, 2], read at once since each read waits for a device.
        self._announced = mine.view(1, -1)
        self._work: dist.Work | None = None
        self._counts: list[int] | None = None
        if self._world_size > 1:
            self._announced = mine.new_empty(self._world_size, len(said))
            self._work = dist.all_gather([*self._announced.unbind()], mine, group=slot.group, async_op=True)

    def hear(self) -> list[int]:
        """**Collective.** Return the number of rows of each rank, and note it if any rank has flagged its own."""
        if self._counts is None:
            if self._work is not None:
                wait_for(self._work.wait, self._describe)
            told = self._announced.tolist()
            if self._look is not None and any(bad for _, bad in told):
                self._look.note_flagged_rows()
            self._counts = [count for count, _ in told]
        return self._counts

    def complete(self, *, write: bool) -> bool:
        """**Collective.** Gather the rows and, if ``write``, make their sum the gradient.

        Returns:
            Whether any rank used the parameter; if none did, ``grad`` is left alone.
        """
        counts = self.hear()
        if all(count == _UNUSED for count in counts):
            return False
        if self._world_size > 1:
            gathered = self._gather([max(0, count) for count in counts], self._indices, self._values)
            if write:
                self._param.grad = gathered
        return True

    def _gather(self, rows: list[int], indices: Tensor, values: Tensor) -> Tensor:
        longest, trailing = max(rows), self._param.shape[1:]
        padded_indices = indices.new_zeros(longest)
        padded_indices[: len(indices)] = indices
        padded_values = values.new_zeros((longest, *trailing))
        padded_values[: len(values)] = values
        all_indices = [torch.empty_like(padded_indices) for _ in rows]
        all_values = [torch.empty_like(padded_values) for _ in rows]
        if longest:
            first = dist.all_gather(all_indices, padded_indices, group=self._group, async_op=True)
            second = dist.all_gather(all_values, padded_values, group=self._group, async_op=True)
            wait_for(first.wait, self._describe)
            wait_for(second.wait, self._describe)
        kept_indices = torch.cat([part[:count] for part, count in zip(all_indices, rows, strict=True)])
        kept_values = torch.cat([part[:count] for part, count in zip(all_values, rows, strict=True)])
        # The rows come from gradients that torch made; saying so ends its warning that nothing checks them.
        summed = torch.sparse_coo_tensor(
            kept_indices.unsqueeze(0), kept_values, self._param.shape, check_invariants=False
        )
        return summed.coalesce()

    def _describe(self) -> str:
        rank = dist.get_rank(self._group)
        return f"rank {rank} of {self._world_size}: gathering the sparse gradient of '{self._name}'"
