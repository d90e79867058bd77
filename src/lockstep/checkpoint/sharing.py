"""Which rank writes which bytes. No I/O.

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
class Extent:
    """The bytes of one tensor, or of what is no tensor, in a file."""

    file: str
    #: The tensor's name; empty for a header, or for the whole of a file without tensors.
    name: str
    start: int
    stop: int
    #: Whether every rank holds the same bytes. If not, rank 0 writes its own.
    alike: bool


@dataclass(frozen=True)
class Block:
    """Bytes of a file that one rank writes and that have a digest of their own."""

    extent: Extent
    start: int
    stop: int


def cut(start: int, stop: int) -> list[tuple[int, int]]:
    """**Local.** The blocks of the bytes from ``start`` to ``stop``; none if there are none."""
    return [(begin, min(begin + BLOCK, stop)) for begin in range(start, stop, BLOCK)]


def count_blocks(start: int, stop: int) -> int:
    """**Local.** How many blocks :func:`cut` makes."""
    return -(-(stop - start) // BLOCK)


def blocks(extents: Iterable[Extent]) -> list[Block]:
    """**Local.** All blocks of a checkpoint, in their order."""
    return [Block(extent, *bounds) for extent in extents for bounds in cut(extent.start, extent.stop)]


def divide(extents: Iterable[Extent], *, world_size: int, extra: int = 0) -> list[list[Block]]:
    """**Local.** The blocks that each rank writes, by rank.

    Every rank gets one contiguous run of blocks, such that all ranks write about the same number of bytes in all.

    Args:
        extents: of what every rank holds; the same on every rank.
        world_size: how many ranks share the work.
        extra: bytes that rank 0 writes besides; it gets so much less of these.
    """
    shares: list[list[Block]] = [[] for _ in range(world_size)]
    common = blocks(extents)
    total = sum(block.stop - block.start for block in common)
    first = min(float(total), max(0.0, (total + extra) / world_size - extra)) if world_size > 1 else float(total)
    each = (total - first) / max(1, world_size - 1)
    passed = 0
    for block in common:
        middle = (passed + passed + block.stop - block.start) / 2
        rank = 0 if middle < first or not each else min(world_size - 1, 1 + int((middle - first) / each))
        shares[rank].append(block)
        passed += block.stop - block.start
    return shares
