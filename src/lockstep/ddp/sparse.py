"""Sparse gradients (of embeddings with ``sparse=True``): gathered from every rank and added up.

Ranks touch different rows, so there is nothing to line up in a flat bucket. Each rank announces how many rows it has,
whether they are finite, and how many items they are the mean of, if the script counts these; then it sends its row
numbers and its rows, padded to the longest. The sum of all is the gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep.comm.waiting import wait_for
from lockstep.ddp.counts import MIXED
from lockstep.ddp.finite import FiniteLook
from lockstep.errors import CollectiveMismatch

#: What a rank says instead of its number of rows if it did not use the parameter at all.
_UNUSED = -1
#: What a rank says instead of its items if it has not counted them, or only some of them.
_UNCOUNTED, _MIXED = -1, -2


class SparseSlot:
    """One parameter with a sparse gradient."""

    def __init__(self, position: int, param: Parameter, name: str, group: dist.ProcessGroup) -> None:
        #: The parameter's position in the reducer's list.
        self.position = position
        #: The parameter, its name, and the ranks that gather.
        self.param, self.name, self.group = param, name, group
        #: Its position, as often as it got a gradient in the backward under way. Always the same list.
        self.arrived: list[int] = []

    def issue(
        self,
        scale: float,
        used: bool,
        finite: FiniteLook | None = None,
        *,
        items: int | None = None,
        is_mixed: bool = False,
    ) -> SparseTransfer:
        """**Collective.** Begin to gather.

        Args:
            scale: what this rank's gradient is multiplied by; 0 discards it.
            used: whether the parameter got a gradient since the last reduction.
            finite: looks at this rank's rows, whether to tell all ranks that they are not finite.
            items: how many items this rank's gradient is of, by which it is scaled; None: they are not counted.
            is_mixed: they were counted for some of what was accumulated only.
        """
        indices, values = self._contribution(scale)
        count = len(indices) if (used and scale != 0) or len(indices) else _UNUSED
        bad = finite is not None and finite.inspect_rows(values, self.name)
        counted = _UNCOUNTED if items is None else _MIXED if is_mixed else items
        return SparseTransfer(self, indices, values, said=(count, int(bad), counted))

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

    def __init__(self, slot: SparseSlot, indices: Tensor, values: Tensor, *, said: tuple[int, int, int]) -> None:
        self._name, self._param, self._group = slot.name, slot.param, slot.group
        self._world_size = dist.get_world_size(slot.group)
        self._indices, self._values = indices, values
        mine = torch.tensor(said, dtype=torch.int64, device=values.device)
        self._announced = [mine]
        self._work: dist.Work | None = None
        if self._world_size > 1:
            self._announced = [torch.zeros_like(mine) for _ in range(self._world_size)]
            self._work = dist.all_gather(self._announced, mine, group=slot.group, async_op=True)

    def is_bad(self) -> bool:
        """**Collective.** Return whether any rank said that its rows are not finite."""
        return any(bad for _, bad, _ in self._announcements())

    def items(self) -> int:
        """**Collective.** Return the items of all ranks, which all count them.

        Raises:
            CollectiveMismatch: some rank does not; on every rank.
        """
        return sum(items for _, _, items in self._announcements())

    def complete(self, *, write: bool, divisor: int = 1) -> bool:
        """**Collective.** Gather the rows and, if ``write``, make their sum, divided by ``divisor``, the gradient.

        Returns:
            Whether any rank used the parameter; if none did, ``grad`` is left alone.

        Raises:
            CollectiveMismatch: some ranks count items and others don't; on every rank.
        """
        counts = [count for count, _, _ in self._announcements()]
        if all(count == _UNUSED for count in counts):
            return False
        if self._world_size > 1:
            gathered = self._gather([max(0, count) for count in counts], self._indices, self._values)
            if write:
                self._param.grad = gathered if divisor == 1 else gathered / divisor
        return True

    def _announcements(self) -> list[list[int]]:
        """Return (rows, whether they are bad, items) of every rank."""
        if self._work is not None:
            wait_for(self._work.wait, self._describe)
            self._work = None
        told: list[list[int]] = [each.tolist() for each in self._announced]
        if any(items < 0 for *_, items in told) and any(items != _UNCOUNTED for *_, items in told):
            raise CollectiveMismatch(f"{self._describe()}: {MIXED}")
        return told

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
