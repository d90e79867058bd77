"""The manifest of a checkpoint: what it is, and the size and digest of every file in it. No I/O."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.errors import CheckpointCorrupt

MANIFEST = "manifest.json"
MODEL = "model.safetensors"

#: A manifest that is larger is not read.
MAX_BYTES = 16 * 2**20

_FORMAT = 1
# No separator, no leading dot: a name can't leave its folder.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def new_digest() -> hashlib.blake2b:
    """**Local.** The digest of files: BLAKE2b with 32 bytes (100 MB in 0.15 s here, where SHA-256 took 0.25 s)."""
    return hashlib.blake2b(digest_size=32)


@dataclass(frozen=True)
class FileEntry:
    """One file as it was written."""

    size: int
    blake2b: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    #: Optimizer steps taken.
    step: int
    #: The epoch to go on with, and whether some of it is done.
    epoch: int
    in_epoch: bool
    #: Ranks of the job that wrote it.
    world_size: int
    #: When, as ISO 8601 in UTC.
    written: str
    #: Of lockstep, torch and Python.
    versions: dict[str, str]
    #: By name.
    files: dict[str, FileEntry]

    def to_json(self) -> bytes:
        """**Local.** The manifest file, with a digest of itself."""
        body = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**body, "digest": _digest_of(body)}, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes, *, where: str) -> Manifest:
        """**Local.** Read back what :meth:`to_json` wrote.

        Raises:
            CheckpointCorrupt: it is damaged, of a later format, or names files outside its folder.
        """
        try:
            body = json.loads(content)
            digest = body.pop("digest")
            expected = _digest_of(body)
            if digest != expected:
                raise ValueError(f"its digest is {expected[:16]}…, expected {str(digest)[:16]}…")
            if body.pop("format") != _FORMAT:
                raise ValueError("it is of another format; a later lockstep may read it")
            files = {name: _entry(name, entry) for name, entry in body.pop("files").items()}
            manifest = cls(**body, files=files)
            if MODEL not in files:
                raise ValueError(f"it lists no {MODEL}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointCorrupt(f"{where}: not a whole manifest: {error}") from None
        return manifest


def _entry(name: str, entry: Any) -> FileEntry:
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise ValueError(f"{name!r} is no name for a file of a checkpoint")
    read = FileEntry(**entry)
    if type(read.size) is not int or read.size < 0 or not _DIGEST.fullmatch(read.blake2b):
        raise ValueError(f"the entry of {name} is malformed")
    return read


def _digest_of(body: dict[str, Any]) -> str:
    digest = new_digest()
    digest.update(json.dumps(body, sort_keys=True).encode())
    return digest.hexdigest()
