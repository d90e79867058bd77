"""Add up over the ranks in a given order: the sum of the same numbers has the same bits, whoever holds which of them.

Note [Rows]
~~~~~~~~~~~
An all-reduce adds up one tensor of each rank, in an order that depends on how many ranks there are. Here each rank has
some rows, or none, and says what is to be added to what (Note [One tree] in ``slices.py``). Every rank owns a part of
the columns. In memory that the ranks share it adds up its columns where they are. Elsewhere each rank sends each
other one that one's columns of its rows, and gets back what becomes of them: as many bytes as an all-reduce moves, if
every rank has one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.labels import labelled
from lockstep.comm.memory import RowOrder, add_up, in_place_memory
from lockstep.comm.waiting import wait_for

#: Elements of one rank's rows that are sent at once.
_MOST = 1 << 24
_NAME = "averaging gradients"


class Rows:
    """Rows of numbers on each rank of a group, to be added up in order.

    **Collective** to construct.

    Args:
        group: the ranks.
        width: elements of a row.
        count: rows that a rank may have; at least one.
        dtype: of the numbers.
        device: where they are.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, width: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._group, self._width = group, width
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._memory = in_place_memory(group, device)
        if self._memory is None:
            self._flat = torch.zeros(count * width, dtype=dtype, device=device)
        else:
            self._flat = self._memory.allocate_tensor(count * width, dtype=dtype, device=device)
        #: This rank's. (count, width)
        self.rows = self._flat.view(count, width)

    @torch.no_grad()
    def add_up(self, order: RowOrder, what: Callable[[], str]) -> Tensor:
        """**Collective.** Return the sum, multiplied as ``order`` says: 1-d, until the rows are written to again.

        Args:
            order: the same on all ranks. A rank's rows are the first ones of :attr:`rows`.
            what: describes the operation, for the error.

        Raises:
            CollectiveMismatch: the ranks are at different places.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        with labelled("the sum over slices"):
            if self._memory is not None:
                memory = self._memory
                wait_for(lambda: memory.add_rows(self._flat, order), what, name=None)
            else:
                self._send(order, what)
        return self.rows[0]

    def _send(self, order: RowOrder, what: Callable[[], str]) -> None:
        counts = [sum(place[0] == rank for place in order.places) for rank in range(self._world_size)]
        step = max(1, _MOST // max(counts))
        for start in range(0, self._width, step):
            self._send_columns(order, counts, start, min(self._width, start + step), what)

    def _send_columns(
        self, order: RowOrder, counts: Sequence[int], start: int, stop: int, what: Callable[[], str]
    ) -> None:
        size, mine = self._world_size, counts[self._rank]
        part = -(-(stop - start) // size)
        padded = self._flat.new_zeros(mine, size * part)
        padded[:, : stop - start] = self.rows[:mine, start:stop]
        message = padded.view(mine, size, part).transpose(0, 1).reshape(-1)
        received = self._flat.new_empty(len(order.places) * part)
        splits = [count * part for count in counts], [mine * part] * size
        wait_for(lambda: dist.all_to_all_single(received, message, *splits, group=self._group), what, name=_NAME)
        rows = [*received.view(len(order.places), part)]
        add_up(rows, order, start=start + self._rank * part)
        whole = self._flat.new_empty(size * part)
        parts = [*whole.view(size, part)]
        wait_for(lambda: dist.all_gather(parts, rows[0], group=self._group), what, name=_NAME)
        self.rows[0, start:stop] = whole[: stop - start]
