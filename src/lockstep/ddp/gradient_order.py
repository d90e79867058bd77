"""The order in which gradients come, learned in the first averaged backward, by which buckets are laid out anew.

Note [Order of gradients]
~~~~~~~~~~~~~~~~~~~~~~~~~
Buckets are sent in one order on all ranks, each when all its gradients have come. Most models use their layers in the
order in which they are registered, so gradients come from the last registered parameter to the first. Where a model
does not (an encoder that is registered after its decoder), a late gradient in the first bucket holds up all others,
and nothing is averaged during backward.

So the first averaged backward, in which nothing is sent before its end (Note [More than one event] in ``portions.py``),
notes in which order the gradients come. All ranks take rank 0's. If buckets in that order could be sent clearly
earlier, they are laid out anew, once, and the averages move there. torch's DistributedDataParallel does so for every
model; where it would gain nothing, the memory for it is better left alone.

A parameter that got no gradient comes first, since nothing waits for it (Note [Absent gradients]). A checkpoint keeps
the order (``step/gradient_order.py``). It is not learned where a comm hook reduces the buckets, since hooks keep memory
by bucket, nor inside ``lockstep.join``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from lockstep import _torch
from lockstep.comm.exchange import all_gather_records

#: A new layout is worth it if it sends a byte earlier, on average, by this fraction of the time in which all gradients
#: come.
_GAIN = 0.02


class GradientOrder:
    """Notes in which order the gradients of a backward come; see Note [Order of gradients].

    Args:
        params: the parameters that are trained; a parameter's position is its index here.
        group: the ranks that hold replicas.
    """

    def __init__(self, params: Sequence[Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        #: Positions in the order in which their gradients came, or portions of them.
        self._came: list[int] = []
        # Hooks on autograd's accumulating nodes: the reducer would take hooks on the parameters for a user's.
        self._nodes = [get_gradient_edge(param).node for param in params]
        self._handles = [node.register_prehook(self._hook(position)) for position, node in enumerate(self._nodes)]

    def _hook(self, position: int) -> Callable[[object], None]:
        append = self._came.append

        @_torch.mark_untraced
        def came(_: object) -> None:
            append(position)

        return came

    def begin(self) -> None:
        """Begin a backward."""
        self._came.clear()

    def close(self) -> None:
        """Look no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def agree(self) -> list[int]:
        """**Collective.** Return all positions in the order in which rank 0's gradients came; look no longer."""
        self.close()
        last = [*dict.fromkeys(reversed(self._came))]  # of several portions, the last one makes a gradient whole
        own = last[::-1] if dist.get_rank(self._group) == 0 else []
        order = [int(position) for position in all_gather_records(own, self._group)[0]]
        there = set(order)
        return [position for position in reversed(range(len(self._nodes))) if position not in there] + order


def is_worth(
    plan: Sequence[Sequence[int]], new: Sequence[Sequence[int]], *, order: Sequence[int], sizes: Sequence[int]
) -> bool:
    """Return whether buckets laid out as ``new`` could be sent clearly earlier than those of ``plan``.

    Args:
        plan: the positions in each bucket, in the order of the buckets.
        new: the same, laid out by ``order``.
        order: positions in the order in which their gradients come.
        sizes: the bytes of each parameter.
    """
    before, after = (_waited(each, order, sizes) for each in (plan, new))
    return before - after > _GAIN * sum(sizes) ** 2


def _waited(plan: Sequence[Sequence[int]], order: Sequence[int], sizes: Sequence[int]) -> int:
    """Return how long the buckets' bytes wait to be sent, in bytes of gradients that come meanwhile."""
    came: dict[int, int] = {}
    passed = 0
    for position in order:
        passed += sizes[position]
        came[position] = passed
    total, sent = 0, 0
    for bucket in plan:
        sent = max(sent, *(came[position] for position in bucket))
        total += sum(sizes[position] * (sent - came[position]) for position in bucket)
    return total
