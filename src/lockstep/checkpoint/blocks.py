"""The blocks into which the bytes of files are cut, and the ranks that write them. No I/O.

A checkpoint's bytes are cut into blocks: each tensor by itself, a large one every :data:`BLOCK` bytes. The cuts do not
depend on the number of ranks, and each block has a digest of its own, so that the folder is byte for byte the same
whichever rank wrote what.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Bytes of a block: large enough that a digest of 16 bytes for each is nothing, small enough to divide evenly.
BLOCK = 4 * 2**20


@dataclass(frozen=True)
class TensorPart:
    """The bytes of a tensor or a header in a file, or of a whole file without tensors."""

    #: The tensor's name; empty for a header or a whole file.
    name: str
    #: The position of the first byte in the file, and of the one after the last.
    start: int
    stop: int
    #: The digest of each block, in order, once it has been written.
    digests: tuple[str, ...] = ()
    #: The rank that writes each block, in order, in a plan; empty until that is decided, and in a manifest.
    writers: tuple[int, ...] = ()

    def written_by(self, rank: int) -> TensorPart:
        """Return the same part, all of it to be written by one rank."""
        writers = (rank,) * count_blocks(self.start, self.stop)
        return TensorPart(self.name, self.start, self.stop, self.digests, writers)

    def run_of(self, rank: int) -> tuple[int, int]:
        """Return the bounds of the consecutive blocks that a rank writes; empty if there are none."""
        count = self.writers.count(rank)
        start = self.start + BLOCK * self.writers.index(rank) if count else self.stop
        return start, min(start + BLOCK * count, self.stop)


def cut(start: int, stop: int) -> list[tuple[int, int]]:
    """Return the bounds of the blocks from ``start`` to ``stop``; none if there are no bytes."""
    return [(begin, min(begin + BLOCK, stop)) for begin in range(start, stop, BLOCK)]


def count_blocks(start: int, stop: int) -> int:
    """Count the blocks that :func:`cut` makes."""
    return -(-(stop - start) // BLOCK)


def divide(parts: Iterable[TensorPart], *, world_size: int, extra: int = 0) -> list[TensorPart]:
    """Decide which rank writes each block: each rank a run of them, and all ranks about the same number of bytes.

    Args:
        parts: the parts, the same on every rank; those without writers are divided.
        world_size: the number of ranks that share the work.
        extra: the number of other bytes that rank 0 writes; it gets that much less of these.

    Returns:
        The same parts, all with their writers.
    """
    parts = list(parts)
    total = sum(part.stop - part.start for part in parts if not part.writers)
    first = min(float(total), max(0.0, (total + extra) / world_size - extra)) if world_size > 1 else float(total)
    each = (total - first) / max(1, world_size - 1)
    divided, passed = [], 0
    for part in parts:
        if part.writers:
            divided.append(part)
            continue
        writers = []
        for start, stop in cut(part.start, part.stop):
            middle = (passed + passed + stop - start) / 2
            writers.append(0 if middle < first or not each else min(world_size - 1, 1 + int((middle - first) / each)))
            passed += stop - start
        divided.append(TensorPart(part.name, part.start, part.stop, part.digests, tuple(writers)))
    return divided
