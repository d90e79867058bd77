"""What a sampler draws from, compared between the ranks where rank 0 draws for all.

Note [Samplers that change]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Rank 0 alone asks a sampler for its samples, so what other ranks change in theirs is never read. That is right if the
script changes all of them alike, or rank 0's alone. It is a loss if each rank writes there what it has found for its
own share (``sampler.weights[index] = loss``): of W ranks' updates those of one count, and the steps look as usual.

So where an epoch is drawn, each rank adds to what it tells anyway digests of the tensors, arrays and lists of numbers
in its sampler's attributes, and which of them have changed since the epoch before. Drawing itself may change a sampler,
but rank 0's alone. So a warning is due where one has changed on another rank and is now unlike rank 0's.

The dataset's length is told as well. One that has changed and is not the same everywhere is an error: an index that
rank 0 has drawn then means another sample on each rank, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lockstep import callsite
from lockstep.comm.world import World
from lockstep.data.contents import fingerprint, length_of_dataset
from lockstep.data.seeding import parts_of_sampler
from lockstep.errors import CollectiveMismatch
from lockstep.step.lengths import OTHER_LENGTHS
from lockstep.text import which_ranks

#: The name under which the dataset's length is told.
_LENGTH = "length"


class SamplerWatch:
    """Compares the ranks' samplers at the beginning of each epoch; see Note [Samplers that change].

    Args:
        sampler: the user's.
        dataset: that which it draws samples of.
        world: the ranks.
    """

    def __init__(self, sampler: Any, dataset: Any, world: World) -> None:
        self._sampler, self._dataset, self._world = sampler, dataset, world
        self._has_warned = False
        self._before = self._read()

    def look(self) -> dict[str, Any]:
        """Return what this rank tells the others before an epoch is drawn: by its name, what each part of the sampler
        is now, and whether it has changed since the last look."""
        before, self._before = self._before, self._read()
        return {name: [now, now != before.get(name)] for name, now in self._before.items()}

    def compare(self, told: Sequence[dict[str, Any]], *, epoch: int) -> None:
        """Warn, on rank 0, of changes that are lost.

        Args:
            told: what :meth:`look` has returned on each rank.
            epoch: the one that begins.

        Raises:
            CollectiveMismatch: the datasets have become unlike; on every rank.
        """
        lengths = [each[_LENGTH] for each in told if _LENGTH in each]
        if any(changed for _, changed in lengths) and any(length != lengths[0][0] for length, _ in lengths):
            listed = ", ".join(f"rank {rank}: {length}" for rank, (length, _) in enumerate(lengths))
            raise CollectiveMismatch(
                f"rank {self._world.rank} of {self._world.world_size}, epoch {epoch}: the length of the dataset was "
                f"the same on every rank, and is not any more ({listed}). {OTHER_LENGTHS}"
            )
        for name, (mine, _) in told[0].items():
            ranks = [rank for rank, each in enumerate(told) if name in each and each[name][1] and each[name][0] != mine]
            if ranks and name != _LENGTH and self._world.is_main and not self._has_warned:
                self._has_warned = True
                callsite.warn(
                    f"{name} was changed on {which_ranks(ranks)} and is not the same as on rank 0, which draws epoch "
                    f"{epoch} for all ranks: the changes on the others count for nothing. If each rank changes it by "
                    "what its own share of a batch has shown (losses, say), exchange that first, and change it alike "
                    "on every rank: `for indices, losses in world.gather([indices.tolist(), losses.tolist()]): …`"
                )

    def _read(self) -> dict[str, Any]:
        """Return digests of what the sampler draws from, by their names; empty if there is nobody to compare with."""
        if self._world.world_size == 1:
            return {}
        found: dict[str, Any] = {_LENGTH: length_of_dataset(self._dataset)}
        for number, part in enumerate(parts_of_sampler(self._sampler)):
            for name, value in getattr(part, "__dict__", {}).items():
                if (numbers := _numbers_in(value)) is not None:
                    within = f" within it ({number})" if number else ""
                    found[f"{name} of the sampler {type(part).__name__}{within}"] = fingerprint(numbers)
        return found


def _numbers_in(value: object) -> torch.Tensor | np.ndarray[Any, Any] | None:
    """Return a tensor, an array or a list of numbers as what has a digest; None: it is nothing of that kind."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value
    if isinstance(value, (list, tuple)) and value and all(type(each) in (int, float) for each in value):
        return np.asarray(value)
    return None
