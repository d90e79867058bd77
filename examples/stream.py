"""The samples of a dataset as a stream: read in the order in which they come, and shuffled within a buffer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

#: Samples among which the next one is chosen.
_BUFFER = 256


class Stream(IterableDataset[Any]):
    """What can only be read from its beginning to its end, as a file on a server is; each epoch in another order.

    Args:
        dataset: the samples, with a length; each is fetched once in an epoch, in order of index.
        seed: of the orders.
    """

    def __init__(self, dataset: Any, *, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass in the order of this epoch. The sharded loader calls it."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        draw = random.Random(f"{self._seed} {self._epoch}")
        buffer: list[Any] = []
        for index in range(len(self._dataset)):
            sample = self._dataset[index]
            if len(buffer) < _BUFFER:
                buffer.append(sample)
                continue
            place = draw.randrange(_BUFFER)
            chosen, buffer[place] = buffer[place], sample
            yield chosen
        draw.shuffle(buffer)
        yield from buffer
