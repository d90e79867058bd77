"""The mean training loss, exactly over the pictures of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import lockstep


class Losses:
    """Adds up losses on the device and asks the other ranks only now and then.

    Its state is the epoch's sum over all ranks up to the last :meth:`window`, so that a run resumed within an epoch
    still knows the epoch's mean.
    """

    def __init__(self, world: lockstep.World, device: torch.device) -> None:
        self._world = world
        #: This rank's sum of losses and number of pictures since the last window: float64 [2], on the device.
        self._mine = torch.zeros(2, dtype=torch.float64, device=device)
        self._epoch = (0.0, 0)

    def add(self, loss: Tensor, pictures: float) -> None:
        """A mean over so many pictures of this rank. Does not wait for the device."""
        if pictures:  # the mean over none is NaN
            self._mine[0] += loss.detach().to(self._mine.device) * pictures
            self._mine[1] += pictures

    def window(self) -> tuple[float, int]:
        """**Collective.** Return the mean since the last call, over all ranks, and of how many pictures (0: no
        mean)."""
        total, count = self._world.all_reduce(self._mine).tolist()
        self._mine.zero_()
        self._epoch = (self._epoch[0] + total, self._epoch[1] + int(count))
        return (total / count if count else float("nan")), int(count)

    def epoch(self) -> tuple[float, int]:
        """Return the same of the epoch up to the last window; the next epoch begins with nothing."""
        total, count = self._epoch
        self._epoch = (0.0, 0)
        return (total / count if count else float("nan")), count

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch so far."""
        return {"sum": self._epoch[0], "pictures": self._epoch[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume within an epoch."""
        self._epoch = (float(state["sum"]), int(state["pictures"]))
