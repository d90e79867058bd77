"""A count of items that was given outside of a loader's loop, and holds until another one is given."""

from __future__ import annotations

from torch.optim import Optimizer

from lockstep import callsite
from lockstep.step.share import Items
from lockstep.step.stepping import alert, quiet, watch_steps


class KeptCount:
    """Warns where a count weighs a backward although an optimizer has stepped since it weighed another one.

    Inside the loop over a sharded loader the next batch ends a count given by ``World.weigh``. Outside of it only
    another call does, so the count of a phase that is long over would go on weighing gradients that it is not meant
    for.

    Args:
        whoami: a description of this rank.
    """

    def __init__(self, whoami: str) -> None:
        self._whoami = whoami
        self._items: Items | None = None
        self._has_stepped = False

    def weighs(self, items: Items) -> None:
        """Note that a backward is weighed by ``items``, which were counted outside of a loader's loop."""
        if items is not self._items:
            self._items, self._has_stepped = items, False
            watch_steps()
            alert(self)
        elif self._has_stepped:
            self._has_stepped = False  # warn only once
            callsite.warn(
                f"{self._whoami}: this backward is weighed by world.weigh({items.count}), a count from before the last "
                "optimizer step: outside of a sharded loader's loop a count holds until the next one. Call "
                "world.weigh before each backward, or reset it with world.share = None"
            )

    def before_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer steps."""
        del optimizer
        self._has_stepped = True
        quiet(self)

    def stop(self) -> None:
        """Stop noting steps."""
        quiet(self)
