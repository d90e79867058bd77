"""The memory of a copy that is written beside training.

Note [Chunks]
~~~~~~~~~~~~~
torch's allocator of page-locked memory rounds each piece up to a power of two (9 GB to 16) and keeps what it has given
out. So a copy lies in chunks of such a size, of which the last alone is rounded up, and a copy that is larger than
those before adds some to those that are there. No block of a file lies in two chunks: what is written needs no other
copy.
"""

from __future__ import annotations

import torch

from lockstep.checkpoint.blocks import BLOCK

#: Bytes of a chunk at most, a power of two: page-locking so many takes a tenth of a second.
CHUNK = 256 * 2**20


class Chunks:
    """Memory of the host that is handed out in order, and anew after :meth:`rewind`; see Note [Chunks].

    Args:
        pinned: whether it is page-locked, so that a device can copy to it while this process goes on.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        #: uint8, CPU, one dimension.
        self._chunks: list[torch.Tensor] = []
        self._index, self._used = 0, 0

    def rewind(self) -> None:
        """Take back all that was handed out."""
        self._index, self._used = 0, 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all chunks."""
        return sum(map(len, self._chunks))

    @property
    def index(self) -> int:
        """Return the number of the chunk in which the last piece lies."""
        return self._index

    def take(self, most: int, *, left: int) -> torch.Tensor:
        """Return the next piece (uint8, CPU, one dimension).

        Args:
            most: the bytes that are wanted, at least 1. The piece has as many, or fewer: a multiple of ``BLOCK``.
            left: the bytes that will be wanted in all, these included.
        """
        while True:
            if self._index == len(self._chunks):
                size = min(CHUNK, left)
                self._chunks.append(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned))
            room = len(self._chunks[self._index]) - self._used
            length = most if most <= room else room // BLOCK * BLOCK
            if length:
                self._used += length
                return self._chunks[self._index][self._used - length : self._used]
            self._index, self._used = self._index + 1, 0
