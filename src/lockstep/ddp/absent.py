"""The parameters to which a backward will bring no gradient, so that nothing waits for one.

Note [Absent gradients]
~~~~~~~~~~~~~~~~~~~~~~~
A bucket is sent when all its gradients have come, and those after it wait for it. So a parameter that a backward does
not use (the head of another task, the half of a GAN that is not trained now) would hold everything up until the end,
where no computation is left to overlap with. autograd knows from the start which parameters it will reach. Each
question costs a microsecond, so only those are asked about that an averaged backward has left out before.

Under re-entrant activation checkpointing the parameters of a segment get their gradients from a nested backward, and
the outer one, which is asked, does not reach them. If the first averaged backward brings such a gradient, or a later
one does where none was expected, no parameter counts as absent from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from lockstep.ddp.hooks import accumulates


class AbsentGradients:
    """Predicts which gradients will not come; see Note [Absent gradients].

    Args:
        params: the parameters that are trained; a parameter's position is its index here.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._nodes = [get_gradient_edge(param).node for param in params]
        #: Positions that some averaged backward has left out; None before the first.
        self._left_out: set[int] | None = None
        #: Positions that the averaged backward under way does not reach, among those asked about.
        self._unreached: set[int] = set()
        self._are_nested = False

    def expect(self) -> set[int]:
        """Return the positions of the parameters that will get no gradient; called inside an averaged backward."""
        if self._are_nested:
            return set()
        asked = range(len(self._nodes)) if self._left_out is None else self._left_out
        self._unreached = {position for position in asked if not accumulates(self._nodes[position : position + 1])}
        return set() if self._left_out is None else self._unreached

    def learn(self, arrived: Iterable[int], missing: Sequence[int]) -> None:
        """End an averaged backward.

        Args:
            arrived: positions of the parameters that got a gradient.
            missing: positions of those that got none.
        """
        if self._unreached and not self._unreached.isdisjoint(arrived):
            self._are_nested = True
        self._left_out, self._unreached = (self._left_out or set()).union(missing), set()
