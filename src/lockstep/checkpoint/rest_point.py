"""A point of rest: what a checkpoint of one moment needs besides what only optimizers change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from lockstep.checkpoint.noted import Noted, OptionGroup
from lockstep.checkpoint.rng import Generators
from lockstep.checkpoint.state import Moment, Tally


class LoaderPosition(Protocol):
    """A loader's position at one moment."""

    @property
    def state(self) -> Callable[[], dict[str, Any]]:
        """Returns the loader's state of that moment."""
        ...


class RestPoint(NamedTuple):
    """What a checkpoint of one moment needs besides what only optimizers change; see Note [Points of rest]."""

    counts: Tally
    #: The steps of all optimizers that had begun.
    begun: int
    #: True if the epoch is done, by the user's word; None: the user did not say.
    epoch_done: bool | None
    #: The position of the loader; None: there is no loader.
    loader: LoaderPosition | None
    scheduler: dict[str, Any] | None
    #: The groups of each of the run's optimizers.
    groups: list[list[OptionGroup]]
    #: What the extra objects held that are neither modules nor optimizers, by their names.
    extra: dict[str, Noted]
    #: What the modules' state dicts had besides parameters and buffers, by their owners.
    beside: dict[str, Noted]
    #: The state of the loss scale; None: no losses are scaled.
    loss_scale: dict[str, Any] | None
    generators: Generators
    #: Reached when the device is done with all that was queued before; None: there is no device.
    queued: torch.Event | None

    @property
    def moment(self) -> Moment:
        """The place at which a run resumes that is saved as it was then."""
        return self.counts.moment(self.loader, epoch_done=self.epoch_done, metric=None)
