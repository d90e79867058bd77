"""The manifest of a checkpoint: its position in the run, and the sizes and digests of its files and tensors. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from lockstep.checkpoint.blocks import TensorPart, count_blocks
from lockstep.checkpoint.encoding import DIGEST, digest_of, digest_of_digests, strict_json
from lockstep.checkpoint.folders import MANIFEST
from lockstep.checkpoint.stored import Stored
from lockstep.errors import CheckpointCorrupt, CheckpointError

MODEL = "model.safetensors"

#: The greatest size of a manifest that is read or written: a larger one would be of a checkpoint of 1 TB and more.
MAX_BYTES = 64 * 2**20

_FORMAT = 2
#: The fields of a part in a manifest.
_PART = ("name", "start", "stop", "digests")
# Without a separator and a leading dot, a name can't leave its folder.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True)
class FileEntry:
    """A written file: its size, its digest, and the parts that cover it without gaps, in order."""

    size: int
    #: The digest of the digests of all blocks, in order.
    digest: str
    parts: tuple[TensorPart, ...]

    @classmethod
    def of(cls, parts: Iterable[TensorPart]) -> FileEntry:
        """Return the entry of a file that consists of ``parts``."""
        parts = tuple(parts)
        return cls(parts[-1].stop if parts else 0, digest_of_digests(d for part in parts for d in part.digests), parts)


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint that is stored in it."""

    #: The number of optimizer steps taken.
    step: int
    #: The epoch to resume in, and True if part of it is done.
    epoch: int
    in_epoch: bool
    #: The number of ranks of the job that wrote it.
    world_size: int
    #: The time of writing, as ISO 8601 in UTC.
    written: str
    #: The versions of lockstep, torch and Python, and the machine's properties on which the bits depend
    #: (step/conditions.py), which have no field of their own so that earlier versions can read the manifest.
    versions: dict[str, str]
    #: File name -> its entry.
    files: dict[str, FileEntry]
    #: The metric that it was saved with, for its run to keep the best; None: no metric, or not a finite number.
    metric: float | None = None
    #: The number of the job's round that wrote it, where several machines have met; see Note [Rounds of a job] in
    #: ``locks.py``.
    round: int | None = None
    #: The ranks of each host (World.hosts) if sums are first added within hosts, since bits depend on it; else None.
    hosts: list[list[int]] | None = None
    #: File name -> names of tensors that hold NaN or infinities where finite values belong (Note [Finite] in
    #: ``finite.py``). None: there are none, or a version without this check wrote it.
    not_finite: dict[str, list[str]] | None = None
    #: The ranks whose parameters were seen to differ from rank 0's, which are saved. None: no difference was seen, or a
    #: version without this check wrote it.
    apart: list[int] | None = None
    #: The places where an object store has the bytes; None: they are files.
    stored: Stored | None = None

    @property
    def is_sound(self) -> bool:
        """Whether a run resumes from it by itself: all its values are finite, and those of all ranks."""
        return self.not_finite is None and self.apart is None

    @property
    def identity(self) -> str:
        """The digest that tells this checkpoint from all others, also of the same step; see ``evaluations.py``."""
        return digest_of(self.to_json())

    @property
    def parts(self) -> dict[str, tuple[TensorPart, ...]]:
        """The parts of each file."""
        return {name: entry.parts for name, entry in self.files.items()}

    def to_json(self) -> bytes:
        """Return the manifest file, with a digest of itself."""
        files = {
            name: {**vars(entry), "parts": [{field: getattr(part, field) for field in _PART} for part in entry.parts]}
            for name, entry in self.files.items()
        }
        stored = None if self.stored is None else self.stored.to_json()
        body = {"format": _FORMAT, **vars(self), "files": files, "stored": stored}
        for name in ("round", "hosts", "not_finite", "apart", "stored"):
            if body[name] is None:
                del body[name]  # other jobs' manifests stay as earlier versions wrote and read them
        return json.dumps({**body, "digest": _digest_of(body)}, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes, *, where: str) -> Manifest:
        """Read back what :meth:`to_json` wrote.

        Raises:
            CheckpointCorrupt: the manifest is damaged, of another format, or names files outside its folder.
        """
        try:
            body = strict_json(content)
            digest = body.pop("digest")
            expected = _digest_of(body)
            if body.pop("format") != _FORMAT:
                raise ValueError(f"it is not of format {_FORMAT}, which this lockstep reads; another version may")
            if digest != expected:
                raise ValueError(f"its digest is {expected}, expected {str(digest)[:32]}")
            files = {name: _entry(name, entry) for name, entry in body.pop("files").items()}
            places = body.pop("stored", None)
            manifest = cls(**body, files=files)
            _refuse_nonsense(manifest)
            if places is not None:
                stored = Stored.from_json(places, files=manifest.parts, world_size=manifest.world_size)
                manifest = replace(manifest, stored=stored)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(f"{where}: not a valid manifest: {error}") from None
        return manifest


def manifest_bytes(manifest: Manifest, *, where: str) -> bytes:
    """Return the manifest file that is to be written.

    Raises:
        CheckpointError: it is so large that nobody would read it.
    """
    content = manifest.to_json()
    if len(content) > MAX_BYTES:
        raise CheckpointError(f"{where}: the manifest would have {len(content)} bytes, at most {MAX_BYTES} fit")
    return content


def _refuse_nonsense(manifest: Manifest) -> None:
    for field in ("step", "epoch", "world_size"):
        if type(getattr(manifest, field)) is not int or getattr(manifest, field) < 0:
            raise ValueError(f"{field} is {getattr(manifest, field)!r}")
    if type(manifest.in_epoch) is not bool or type(manifest.written) is not str or type(manifest.versions) is not dict:
        raise ValueError("its fields have wrong types")
    hosts = manifest.hosts
    if hosts is not None and (type(hosts) is not list or any(type(ranks) is not list for ranks in hosts)):
        raise ValueError("its hosts are not lists of ranks")
    named = manifest.not_finite
    if named is not None and not (named and type(named) is dict and all(map(_are_names, named.values()))):
        raise ValueError("what is not finite is not named by file")
    apart = manifest.apart
    if apart is not None and not (apart and type(apart) is list and all(type(rank) is int for rank in apart)):
        raise ValueError("the ranks that differed are not a list of ranks")
    if MODEL not in manifest.files:
        raise ValueError(f"it lists no {MODEL}")


def _are_names(value: Any) -> bool:
    return type(value) is list and bool(value) and all(type(name) is str for name in value)


def _entry(name: str, entry: Any) -> FileEntry:
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise ValueError(f"{name!r} is not a valid name for a file of a checkpoint")
    parts = tuple(_part(name, part) for part in entry["parts"])
    read = FileEntry(entry["size"], entry["digest"], parts)
    end = 0
    for part in parts:
        if part.start != end:
            raise ValueError(f"the parts of {name} leave gaps or overlap at byte {end}")
        end = part.stop
    if len({part.name for part in parts}) != len(parts):
        raise ValueError(f"two parts of {name} have the same name")
    if read != FileEntry.of(parts):
        raise ValueError(f"the size or the digest of {name} is not that of its parts")
    return read


def _part(file: str, part: Any) -> TensorPart:
    read = TensorPart(part["name"], part["start"], part["stop"], tuple(part["digests"]))
    numbers_fit = type(read.start) is int and type(read.stop) is int and 0 <= read.start <= read.stop
    if not numbers_fit or type(read.name) is not str or set(part) != set(_PART):
        raise ValueError(f"a part of {file} is malformed")
    if len(read.digests) != count_blocks(read.start, read.stop) or not all(DIGEST.fullmatch(d) for d in read.digests):
        raise ValueError(f"{file}: the digests of {read.name or 'the header'} are malformed")
    return read


def _digest_of(body: dict[str, Any]) -> str:
    return digest_of(json.dumps(body, sort_keys=True).encode())
