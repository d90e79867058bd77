"""Models whose ranks train apart between rounds: what a checkpoint has to know of them.

``ddp`` makes such replicas and ``checkpoint`` saves them, and neither knows the other. They meet here: a model that is
trained by :class:`lockstep.LocalSteps` is entered under its module.

Note [Rounds and agreements]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks that train apart are not within a step of each other, so Note [Agreeing on a step] in ``job/stop.py`` can't hold
in steps. It holds in rounds: all ranks count the exchanges that they have begun, at the same points of the program.

- Without overlap nobody ends exchange k before everybody has begun it. What a rank proposes with k - 1 exchanges behind
  it, everybody reads with k behind them: a lead of one round.
- With overlap a rank begins exchange k + 1 after it has the result of exchange k, for which everybody must have begun
  exchange k. What a rank proposes with k - 1 begun is read by everybody who has begun k + 1: a lead of two rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn


class LocalTraining(Protocol):
    """A model whose ranks take steps of their own between rounds."""

    #: The optimizer that takes the ranks' average progress for a gradient; the same state on all ranks.
    outer: torch.optim.Optimizer

    @property
    def rounds(self) -> int:
        """Exchanges begun; the same on all ranks at the same point of the program."""
        ...

    @property
    def lead(self) -> int:
        """Rounds between a proposal and the act; see Note [Rounds and agreements]."""
        ...

    def between_steps(self) -> None:
        """**Collective** if a round's steps are done: end it here, where no step is half done."""
        ...

    def finish_round(self) -> None:
        """**Collective.** End the round under way, so that all ranks hold the same parameters and buffers."""
        ...

    def common_state(self) -> dict[str, Any]:
        """Return what all ranks hold alike besides the model and the outer optimizer; after :meth:`finish_round`."""
        ...

    def own_state(self) -> dict[str, Any]:
        """Return what this rank holds alone; of the same names, shapes and dtypes on all ranks."""
        ...

    def load_state(self, common: Mapping[str, Any], owns: Sequence[Mapping[str, Any]]) -> None:
        """Resume: the model and the outer optimizer are loaded already.

        Args:
            common: what :meth:`common_state` returned; empty if the checkpoint has none.
            owns: what :meth:`own_state` returned on each of the ranks that saved, which may be more or fewer than now.
        """
        ...


#: Module that the ranks train apart -> its training.
trained_apart: WeakKeyDictionary[nn.Module, LocalTraining] = WeakKeyDictionary()


def enter(module: nn.Module, training: LocalTraining) -> None:
    """Note that the ranks train ``module`` apart."""
    trained_apart[module] = training


def leave(module: nn.Module) -> None:
    """Note that they do so no longer."""
    trained_apart.pop(module, None)


def local_training_of(*modules: nn.Module) -> LocalTraining | None:
    """Return how the ranks train the first of ``modules`` that they train apart; None if there is no such module."""
    return next((found for module in modules if (found := trained_apart.get(module)) is not None), None)
