"""Where a run is: its step, its epoch, and whether it is in the middle of that."""

from __future__ import annotations

import weakref

import torch

from lockstep.checkpoint.manifest import Manifest
from lockstep.job import flight


class Position:
    """A run's place in its training, as this rank counts it."""

    def __init__(self) -> None:
        #: Optimizer steps taken.
        self.step = 0
        #: The step of the newest checkpoint that this run has written or gone on from.
        self.last_saved: int | None = None
        #: The epoch to go on with, between epochs; within the body of epochs(), the one under way.
        self.epoch = 0
        #: Whether the body of epochs() is running.
        self.in_body = False

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        """**Local.** Count the optimizer's steps, for as long as someone has this."""
        weak = weakref.ref(self)

        def took_step(*_: object) -> None:
            alive = weak()
            if alive is not None:
                alive.step += 1
                alive._tell()

        optimizer.register_step_post_hook(took_step)

    def to_go_on_with(self, loader: object, epoch_done: bool | None) -> tuple[int, bool]:
        """**Local.** The epoch that a run resumed from here goes on with, and whether some of it is done.

        Args:
            loader: the training loader, which may know.
            epoch_done: what the user says of it; None: nothing.
        """
        in_epoch = bool(getattr(loader, "in_epoch", False)) if epoch_done is None else not epoch_done
        if self.in_body:
            return (self.epoch, True) if in_epoch else (self.epoch + 1, False)
        epoch = getattr(loader, "epoch", None)  # the user counts epochs; a sharded loader knows which one it is in
        return (epoch if isinstance(epoch, int) else self.epoch), in_epoch

    def go_on_from(self, manifest: Manifest) -> None:
        """**Local.** The run is where this checkpoint was made."""
        self.step = self.last_saved = manifest.step
        self.epoch = manifest.epoch
        self._tell()

    def _tell(self) -> None:
        """The launcher compares failures by their steps. Steps that a user counts are not told: they may be saves."""
        flight.current.at_step(self.step)
