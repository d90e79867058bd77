"""The mean training loss, exactly over the pictures of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import lockstep


class Losses:
    """Adds up the losses of all ranks on the device: those since the last row of a table, and those of the epoch.

    Every rank has the same sums after each step, so a checkpoint of any step has all of them: also one that is saved
    between two rows because the run is asked to stop.
    """

    def __init__(self, world: lockstep.World, device: torch.device) -> None:
        self._world = world
        #: The sum of losses and the number of pictures, of all ranks: float64 [2], on the device.
        self._row = torch.zeros(2, dtype=torch.float64, device=device)
        self._epoch = torch.zeros_like(self._row)
        #: The number of batches since the last row.
        self.batches = 0

    def add(self, loss: Tensor, pictures: float) -> None:
        """**Collective.** Add a mean over so many pictures of this rank. Does not wait for a GPU."""
        mine = torch.zeros_like(self._row)
        if pictures:  # the mean over none is NaN
            mine[0] = loss.detach().to(mine.device) * pictures
            mine[1] = pictures
        everyones = self._world.all_reduce(mine)
        self._row += everyones
        self._epoch += everyones
        self.batches += 1

    def row(self) -> tuple[float, int]:
        """Return the mean since the last row, and of how many pictures (0: no mean); the next row begins with none."""
        found = _mean(self._row)
        self._row.zero_()
        self.batches = 0
        return found

    def epoch(self) -> tuple[float, int]:
        """Return the same of the epoch; the next epoch begins with none."""
        found = _mean(self._epoch)
        self._epoch.zero_()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far; the same on every rank."""
        return {"row": self._row.tolist(), "epoch": self._epoch.tolist(), "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume within an epoch, also between two rows."""
        for sums, saved in ((self._row, state["row"]), (self._epoch, state["epoch"])):
            sums.copy_(torch.tensor(saved, dtype=sums.dtype))
        self.batches = int(state["batches"])


def _mean(sums: Tensor) -> tuple[float, int]:
    total, pictures = sums.tolist()
    return (total / pictures if pictures else float("nan")), int(pictures)
