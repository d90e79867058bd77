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
not count, since a rank may try it again.

And forwards may rightly have no backward: those of an agent that plays without ``torch.no_grad``, or the second forward
of a step whose batch has no targets for it. So a rank tells only of what looks like a whole step without its backward,
with a whole step after it: the forwards left out come before all others, and both they and the others are as many as
belonged to some earlier backward at least. A rank that leaves others out, or any before its first averaged backward,
has the habit, and says nothing from then on.
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
    #: Numbers of all forwards for training since the last averaged backward, in order.
    _expected: list[int] = field(default_factory=list)
    #: The fewest forwards for training that came with an averaged backward; None before the first.
    _fewest: int | None = None
    #: Whether forwards were left out that were no whole step's.
    _has_habit: bool = False

    def expect(self, number: int) -> None:
        """**Local.** A backward is to come through forward ``number``."""
        self._waiting.add(number)
        self._expected.append(number)

    def reached(self, number: int) -> None:
        """**Local.** It has come."""
        self._waiting.discard(number)

    def settle(self) -> int:
        """**Local.** An averaged backward has ended: the forwards to tell of that had none since the last one."""
        left_out, expected = len(self._waiting), len(self._expected)
        if left_out and not self._is_whole_step(left_out):
            self._has_habit = True
        if expected:
            self._fewest = expected if self._fewest is None else min(self._fewest, expected)
        self._waiting.clear()
        self._expected.clear()
        return 0 if self._has_habit else left_out

    def _is_whole_step(self, left_out: int) -> bool:
        """Whether what was left out looks like a step before this backward's own; see Note [Left-out backwards]."""
        return (
            self._fewest is not None
            and self._fewest <= left_out <= len(self._expected) - self._fewest
            and self._waiting.issubset(self._expected[:left_out])
        )
