"""Forwards that are still to be followed by a backward: how a rank that leaves one out is found.

Note [Left-out backwards]
~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that skips one backward (``if loss.isnan(): continue``) has its next one averaged with the others' present one,
and so on until the end, where the others wait for one that never comes. The number of backwards is the same on all
ranks then, and the number of forwards may differ rightly: a recurrent cell is called as often as a sequence is long.
What differs is the number of forwards since the last averaged backward that no backward has come through. So that is
told with every average, and where it differs all ranks raise: in the label, before any data moves, over a backend that
compares labels, else in flags that are summed with the gradients (on the CPU; to read them on a GPU would wait for it).

Only forwards for training count: in training mode, with gradients, outside ``no_sync`` and ``join``, with an output
through which a backward can come. ``torch.autograd.grad`` through it will do for a backward. A forward that failed does
not count, since a rank may try it again. And a program whose first averaged backward finds such forwards already has
the habit (an agent that plays without ``torch.no_grad``, for as long as its game lasts): its rank says nothing from
then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Forwards:
    """What one replica's forwards leave to be done; see Note [Left-out backwards]."""

    #: Forwards so far.
    begun: int = 0
    #: Numbers of the forwards for training that no backward has come through.
    _waiting: set[int] = field(default_factory=set)
    #: Whether each forward before the first averaged backward was followed by one; None before it.
    _tells: bool | None = None

    def expect(self, number: int) -> None:
        """**Local.** A backward is to come through forward ``number``."""
        self._waiting.add(number)

    def reached(self, number: int) -> None:
        """**Local.** It has come."""
        self._waiting.discard(number)

    def settle(self) -> int:
        """**Local.** An averaged backward has ended: the forwards to tell of that had none since the last one."""
        left_out = len(self._waiting)
        self._waiting.clear()
        if self._tells is None:
            self._tells = left_out == 0
        return left_out if self._tells else 0
