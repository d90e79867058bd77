"""Add up over the ranks in a given order: the sum of the same numbers has the same bits, whoever holds which of them.

Note [Rows]
~~~~~~~~~~~
An all-reduce adds up one tensor of each rank, in an order that depends on how many ranks there are. Here each rank has
some rows, or none, and says what is to be added to what (Note [One tree] in ``step/tree_sum.py``). Every rank owns a
part of the columns. In memory that the ranks share it adds up its columns in place. Elsewhere each rank sends every
other rank the columns that it owns, and gets back their sums: as many bytes as an all-reduce moves, if every rank has
one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.exchange import issue_gather
from lockstep.comm.labels import labelled
from lockstep.comm.memory import RowOrder, add_up, in_place_memory
from lockstep.comm.waiting import wait_for

#: The most elements of one rank's rows that are sent at once.
_MOST = 1 << 20
_NAME = "averaging gradients"


class Rows:
    """Rows of numbers on each rank of a group, to be added up in order.

    **Collective** to construct.

    Args:
        group: the ranks.
        width: elements of a row.
        count: rows that a rank may have; at least one.
        dtype: the numbers' dtype.
        device: the numbers' device.
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
        #: This rank's rows (count, width).
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
        """Send the columns part by part: the next part is on its way while one is added up."""
        counts = [sum(place[0] == rank for place in order.places) for rank in range(self._world_size)]
        step = max(1, _MOST // max(counts))
        parts = [_Part(self, order, start, min(self._width, start + step)) for start in range(0, self._width, step)]
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            if part is parts[0]:
                part.hand_out(counts)
            if following is not None:
                following.hand_out(counts)
            part.add_up(what)
        for part in parts:
            part.take(what)


class _Part:
    """Some of the columns on their way: to the ranks that add them up, and back."""

    def __init__(self, rows: Rows, order: RowOrder, start: int, stop: int) -> None:
        self._of, self._order, self._start, self._stop = rows, order, start, stop
        #: The number of columns that each rank adds up.
        self._width = -(-(stop - start) // rows._world_size)
        self._received = self._whole = rows.rows[:0]
        self._work: Any = None

    def hand_out(self, counts: Sequence[int]) -> None:
        """**Collective.** Begin to send each rank its columns of this rank's rows."""
        rows, width = self._of, self._width
        size, mine = rows._world_size, counts[rows._rank]
        padded = rows.rows.new_zeros(mine, size * width)
        padded[:, : self._stop - self._start] = rows.rows[:mine, self._start : self._stop]
        message = padded.view(mine, size, width).transpose(0, 1).reshape(-1)
        self._received = rows.rows.new_empty(len(self._order.places), width)
        splits = [count * width for count in counts], [mine * width] * size
        flat = self._received.view(-1)
        self._work = dist.all_to_all_single(flat, message, *splits, group=rows._group, async_op=True), message

    def add_up(self, what: Callable[[], str]) -> None:
        """**Collective.** Add up what has come, and begin to send the sums to all ranks."""
        self._wait(what)
        rows, width = self._of, self._width
        sums = [*self._received]
        add_up(sums, self._order, start=self._start + rows._rank * width)
        self._whole = rows.rows.new_empty(rows._world_size, width)
        self._work = issue_gather(self._whole, sums[0], rows._group), sums[0]

    def take(self, what: Callable[[], str]) -> None:
        """Put the sums that have come back into the first row."""
        self._wait(what)
        self._of.rows[0, self._start : self._stop] = self._whole.view(-1)[: self._stop - self._start]

    def _wait(self, what: Callable[[], str]) -> None:
        work, message = self._work
        wait_for(work.wait, what, name=_NAME)
        del message  # it had to stay until now
        self._work = None
