"""At which step the ranks save, or save and leave together, after a signal that reaches each at another moment.

Note [Agreeing on a step]
~~~~~~~~~~~~~~~~~~~~~~~~~
A boundary is the moment between two steps. The first time a rank with a request in hand is at a boundary with s
optimizer steps done, it proposes s + 2 where all ranks can read it. At each boundary every rank reads all proposals;
the ranks act at the first boundary at which their own count of steps is at least the smallest number proposed.

They act at the same boundary, because the all-reduce of the gradients keeps them within one step of each other: the
rank X that proposes at s takes part in the reduction of step s + 1 only afterwards, so whoever has finished step
s + 1 can read the proposal, and nobody has done more than that when it is written. Nobody, therefore, has passed a
boundary with s + 2 steps without having seen it. Two proposals differ only if neither writer could see the other's,
that is, if both were written before either rank contributed to the next step; then both are there for everyone in time,
and the smallest counts. (One step would do for ranks that reduce in every step; the second is for those that count a
step which they did not reduce in, such as the second of two optimizers.)

An agreement on saving is followed by the next round, whose number all ranks know, for they have all saved as often.
Saving is collective, so nobody writes a proposal of the next round over that of this one before all have acted.
A rank that sees any proposal drops a request of the same kind: it is what it would have asked for.

A world of one acts at this very boundary.
"""

from __future__ import annotations

from lockstep.agreement.board import Board, Kind, Proposal

#: Steps between a request and the act.
LEAD = 2


class Agreement:
    """One rank's view of what the ranks are going to do. See Note [Agreeing on a step]."""

    def __init__(self, board: Board, *, world_size: int) -> None:
        self._board = board
        self._lead = LEAD if world_size > 1 else 0
        self._round = 1

    def due(self, step: int, *, wanted: Kind | None) -> Kind | None:
        """**Local.** What to do at this boundary, if anything; the same on all ranks.

        Args:
            step: optimizer steps that this rank has done.
            wanted: what this rank was asked for.
        """
        proposal = self._board.smallest(self._round)
        if proposal is None and wanted is not None:
            self._board.propose(self._round, Proposal(step + self._lead, wanted))
            proposal = self._board.smallest(self._round)
        if proposal is None or step < proposal.step:
            return None
        self._round += 1
        return proposal.kind

    def pending(self) -> Kind | None:
        """**Local.** What has been proposed and is not done yet."""
        proposal = self._board.smallest(self._round)
        return None if proposal is None else proposal.kind
