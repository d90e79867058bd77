"""Where an object store has the bytes of a checkpoint's files. No I/O.

Note [Objects of ranks]
~~~~~~~~~~~~~~~~~~~~~~~
An object is written by one process, whole, and can't be written to again; so a file that several ranks write can't be
an object. Each rank's blocks, one after the other in the order of the files, are one run of bytes, which is cut into
objects of :data:`OBJECT` bytes: few requests for a rank, all of them at once if need be, each small enough to be sent
again. The manifest says which rank wrote which blocks; everything else follows from that by counting.

What a multipart upload leaves in a bucket when its writer is killed, unseen and paid for, can't be left here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from lockstep.checkpoint.blocks import TensorPart, cut

#: Bytes of an object, except for the last one of each rank.
OBJECT = 32 * 2**20

_PREFIX = re.compile(r"[0-9a-f]{16}")


class Extent(NamedTuple):
    """Successive bytes of a file that one rank wrote."""

    #: The bounds of the bytes in the file.
    start: int
    stop: int
    rank: int
    #: The position of the first among the rank's bytes.
    offset: int


class ObjectRange(NamedTuple):
    """Successive bytes of an object."""

    object: str
    start: int
    stop: int


@dataclass(frozen=True)
class Stored:
    """The places of a checkpoint's bytes; see Note [Objects of ranks]."""

    #: The term of the owner that wrote it; see Note [Lease] in ``lease.py``.
    term: int
    #: The beginning of the names of its objects, of no other save.
    prefix: str
    #: Bytes of an object, except for the last one of each rank.
    size: int
    #: The files in the order in which ranks write them; of each, the ranks that wrote its blocks, in order: a rank, and
    #: the number of successive blocks.
    files: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, files: Mapping[str, Sequence[TensorPart]], *, prefix: str, term: int) -> Stored:
        """Return the places that follow from a plan.

        Args:
            files: every file with its parts and their writers, in the order in which ranks write them.
            prefix: 16 hexadecimal digits, of this save alone.
            term: that of the owner.
        """
        runs = tuple(
            (
                name,
                tuple((rank, len([*same])) for rank, same in groupby(rank for part in parts for rank in part.writers)),
            )
            for name, parts in files.items()
        )
        return cls(term, prefix, OBJECT, runs)

    def to_json(self) -> dict[str, Any]:
        """Return the places in JSON types."""
        return {**vars(self), "files": [[name, [[*run] for run in runs]] for name, runs in self.files]}

    @classmethod
    def from_json(cls, body: Any, *, files: Mapping[str, Sequence[TensorPart]], world_size: int) -> Stored:
        """Read back what :meth:`to_json` returned.

        Raises:
            ValueError: it does not fit the manifest's files, or names objects outside of the checkpoint.
        """
        if type(body) is not dict or set(body) != {"term", "prefix", "size", "files"}:
            raise ValueError("the places of its bytes are malformed")
        if type(body["term"]) is not int or type(body["size"]) is not int or body["size"] < 1:
            raise ValueError("the places of its bytes are malformed")
        if type(body["prefix"]) is not str or not _PREFIX.fullmatch(body["prefix"]):
            raise ValueError(f"{body['prefix']!r} is not the beginning of its objects' names")
        try:
            runs = tuple((name, tuple((rank, count) for rank, count in each)) for name, each in body["files"])
        except (TypeError, ValueError):
            raise ValueError("the places of its bytes are malformed") from None
        if sorted(name for name, _ in runs if type(name) is str) != sorted(files) or len(runs) != len(files):
            raise ValueError("the places of its bytes are of other files")
        for name, each in runs:
            if not all(type(n) is int and n >= 0 for run in each for n in run) or any(
                run[0] >= world_size for run in each
            ):
                raise ValueError(f"the places of {name} are malformed")
            if sum(count for _, count in each) != sum(len(part.digests) for part in files[name]):
                raise ValueError(f"the places of {name} are of another number of blocks")
        return cls(body["term"], body["prefix"], body["size"], runs)

    def extents(self, files: Mapping[str, Sequence[TensorPart]]) -> dict[str, list[Extent]]:
        """Return the extents of every file, in order, without gaps."""
        passed: dict[int, int] = {}
        found: dict[str, list[Extent]] = {}
        for name, runs in self.files:
            blocks = (bounds for part in files[name] for bounds in cut(part.start, part.stop))
            found[name] = []
            for rank, count in runs:
                bounds = [next(blocks) for _ in range(count)]
                if bounds:
                    start, stop, offset = bounds[0][0], bounds[-1][1], passed.get(rank, 0)
                    found[name].append(Extent(start, stop, rank, offset))
                    passed[rank] = offset + stop - start
        return found

    def objects(self, files: Mapping[str, Sequence[TensorPart]]) -> dict[str, int]:
        """Return every object's name -> its number of bytes."""
        wrote: dict[int, int] = {}
        for extents in self.extents(files).values():
            for one in extents:
                wrote[one.rank] = max(wrote.get(one.rank, 0), one.offset + one.stop - one.start)
        return {
            object_name(self.prefix, rank, number): min(self.size, total - start)
            for rank, total in sorted(wrote.items())
            for number, start in enumerate(range(0, total, self.size))
        }

    def spans(self, rank: int, start: int, stop: int) -> Iterator[ObjectRange]:
        """Yield where some of a rank's bytes are, in order."""
        while start < stop:
            number, inside = divmod(start, self.size)
            length = min(stop - start, self.size - inside)
            yield ObjectRange(object_name(self.prefix, rank, number), inside, inside + length)
            start += length


def object_name(prefix: str, rank: int, number: int) -> str:
    """Return the name of a rank's object."""
    return f"{prefix}-{rank:05d}-{number:05d}"
