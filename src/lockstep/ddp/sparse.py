"""Sparse gradients (of embeddings with ``sparse=True``): gathered from every rank and added up.

Ranks touch different rows, so there is nothing to line up in a flat bucket. Each rank sends how many rows it has, then
its row numbers and its rows, padded to the longest; the sum of all is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep.comm.waiting import wait_for

#: What a rank says instead of its number of rows if it did not use the parameter at all.
_UNUSED = -1


class SparseSlot:
    """One parameter with a sparse gradient."""

    def __init__(self, position: int, param: Parameter, name: str, group: dist.ProcessGroup) -> None:
        #: The parameter's position in the reducer's list.
        self.position = position
        self._param, self._name, self._group = param, name, group
        self._world_size = dist.get_world_size(group)

    def launch(self, scale: float, used: bool) -> Callable[[bool], bool]:
        """**Collective.** Begin to gather; returns a function that completes it.

        Args:
            scale: what this rank's gradient is multiplied by; 0 discards it.
            used: whether the parameter got a gradient since the last reduction.

        The returned function takes whether to write the average into ``grad``, and returns whether any rank used the
        parameter; if none did, ``grad`` is left alone.
        """
        indices, values = self._contribution(scale)
        if self._world_size == 1:
            return lambda _: used
        count = len(indices) if (used and scale != 0) or len(indices) else _UNUSED
        counts = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(self._world_size)]
        mine = torch.tensor([count], dtype=torch.int64, device=values.device)
        work = dist.all_gather(counts, mine, group=self._group, async_op=True)

        def complete(write: bool) -> bool:
            wait_for(work.wait, self._describe)
            rows = [int(each) for each in counts]
            if all(each == _UNUSED for each in rows):
                return False
            gathered = self._gather([max(0, each) for each in rows], indices, values)
            if write:
                self._param.grad = gathered
            return True

        return complete

    def _contribution(self, scale: float) -> tuple[Tensor, Tensor]:
        """Row numbers (1-D) and rows (rows x the parameter's trailing shape) of this rank's gradient."""
        grad = self._param.grad
        if grad is None or scale == 0:
            rows = self._param.new_zeros((0, *self._param.shape[1:]))
            return torch.zeros(0, dtype=torch.int64, device=rows.device), rows
        if grad.layout == torch.strided:  # the weight is used elsewhere as well, densely
            grad = grad.to_sparse(1)
        grad = grad.coalesce()
        return grad.indices()[0], grad.values() * scale

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
