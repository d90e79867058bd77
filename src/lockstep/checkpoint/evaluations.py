"""What evaluations have found of checkpoints: small files beside the checkpoints, on a disk or in a store.

Note [Results beside checkpoints]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An evaluation reads a checkpoint while training goes on, and ends when the checkpoint may be gone and training steps
ahead. So the two share no lock and no file that both write. The evaluator writes ``evaluations/<checkpoint>-<digest>
.json``, one file for each checkpoint, which appears whole. Training reads these files where it looks anyway: a Log at
its next line, retention when it removes checkpoints.

A checkpoint is known by the name of its folder and by its *identity*, the digest of its manifest: a run that goes back
and takes the same steps again makes other checkpoints of the same names. Which of them a run has come from is in its
lineage (``lineage.py``).

The evaluator holds ``evaluations/`` as a run's owner holds the run's folder (Note [Run lock] in ``locks.py``, Note
[Lease] in ``lease.py``): two evaluators would do the same work twice. Training never asks for that lock.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

from lockstep._files import StorePath
from lockstep.checkpoint import folders
from lockstep.checkpoint.disk_folder import named
from lockstep.checkpoint.encoding import DIGEST
from lockstep.checkpoint.object_store import ObjectStore
from lockstep.checkpoint.storage import POSIX, Storage

#: The folder of the results, within that of the run.
FOLDER = "evaluations"
#: What the names of all evaluated numbers begin with: a script may log an "accuracy" of its own.
PREFIX = "eval/"
#: The most times that a checkpoint is tried.
TRIES = 3

_FORMAT = 1
#: The bytes of the largest file. A thousand numbers with names of 200 characters, each of which may take twelve as
#: JSON, are less.
_MAX_BYTES = 4 * 2**20
_NAME = re.compile(r"(step-\d{8,18}(?:-r\d{1,9})?)-([0-9a-f]{32})\.json")


@dataclass(frozen=True)
class Evaluated:
    """What is known of a checkpoint's evaluation."""

    #: The name of the checkpoint's folder, and its identity.
    checkpoint: str
    digest: str
    #: The numbers by their names, which begin with ``eval/``; NaN: the script reported NaN. None: it failed so far.
    numbers: Mapping[str, float] | None
    #: Number of tries so far, and the reason why the last one failed; empty: it did not.
    tries: int
    failure: str
    #: The seconds that the last try took, and when it ended, in seconds since the epoch.
    seconds: float
    time: float

    @property
    def step(self) -> int:
        """The checkpoint's step."""
        return folders.step_of(PurePath(self.checkpoint))

    @property
    def is_final(self) -> bool:
        """Whether it is not tried again."""
        return self.numbers is not None or self.tries >= TRIES

    @property
    def name(self) -> str:
        """The name that tells it from all others; in lines of metrics.jsonl, and of its file without ``.json``."""
        return f"{self.checkpoint}-{self.digest}"

    def to_json(self) -> bytes:
        """Return the content of its file."""
        numbers = None if self.numbers is None else {name: _or_none(value) for name, value in self.numbers.items()}
        return json.dumps({"format": _FORMAT, **vars(self), "numbers": numbers}, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes, *, name: str) -> Evaluated | None:
        """Read back what :meth:`to_json` returned; None if it is something else, or that of another file's name."""
        try:
            fields = json.loads(content)
            if fields.pop("format") != _FORMAT:
                return None
            numbers = fields["numbers"]
            if numbers is not None:
                fields["numbers"] = {key: math.nan if each is None else float(each) for key, each in numbers.items()}
            read = cls(**fields)
            kinds = (type(read.checkpoint), type(read.digest), type(read.tries), type(read.failure))
            fits = kinds == (str, str, int, str) and all(key.startswith(PREFIX) for key in read.numbers or ())
            read = cls(**{**vars(read), "seconds": float(read.seconds), "time": float(read.time)})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return read if fits and f"{read.name}.json" == name and _NAME.fullmatch(name) else None


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _Files(Protocol):
    """A folder of small files."""

    def exists(self) -> bool: ...

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytes | None: ...

    def write(self, name: str, content: bytes) -> None: ...

    def remove(self, name: str) -> None: ...


class Evaluations:
    """The results of a run's evaluations. Each method raises OSError or CheckpointError if the place does not do it.

    Args:
        root: the run's folder.
        on: the file system.
    """

    def __init__(self, root: PurePath, on: Storage = POSIX) -> None:
        #: The path of their folder.
        self.path = root / FOLDER
        self._files: _Files = _InStore(self.path) if isinstance(self.path, StorePath) else _OnDisk(Path(self.path), on)
        #: Name -> what was read, of files that are not written again unless somebody removes them.
        self._final: dict[str, Evaluated] = {}

    def exists(self) -> bool:
        """Return whether anybody evaluates this run, or did."""
        return self._files.exists()

    def all(self) -> list[Evaluated]:
        """Return the results that are there, in order of their steps. Files of others are left alone."""
        names = [name for name in self._files.names() if _NAME.fullmatch(name)]
        # One that was removed may come again with other numbers, from an evaluation that was begun anew.
        self._final = {name: self._final[name] for name in names if name in self._final}
        found = [self._one(name) for name in names]
        results = [each for each in found if each is not None]
        return sorted(results, key=lambda each: folders.age(PurePath(each.checkpoint)))

    def of(self, checkpoints: set[str]) -> list[Evaluated]:
        """Return the results of the checkpoints with these names."""
        names = [name for name in self._files.names() if (match := _NAME.fullmatch(name)) and match[1] in checkpoints]
        return [each for name in names if (each := self._one(name)) is not None]

    def put(self, evaluated: Evaluated) -> None:
        """Write a result, in the place of an earlier one of the same checkpoint."""
        self._final.pop(f"{evaluated.name}.json", None)
        self._files.write(f"{evaluated.name}.json", evaluated.to_json())

    def forget(self, evaluated: Evaluated) -> None:
        """Remove a result, so that its checkpoint is evaluated again."""
        self._final.pop(f"{evaluated.name}.json", None)
        self._files.remove(f"{evaluated.name}.json")

    def read(self, name: str) -> bytes | None:
        """Return the content of another small file there; None: there is none."""
        return self._files.read(name)

    def write(self, name: str, content: bytes) -> None:
        """Write another small file there."""
        self._files.write(name, content)

    def _one(self, name: str) -> Evaluated | None:
        known = self._final.get(name)
        if known is not None:
            return known
        content = self._files.read(name)
        found = None if content is None else Evaluated.from_json(content, name=name)
        if found is not None and found.is_final:
            self._final[name] = found
        return found


def is_identity(text: Any) -> bool:
    """Return whether a value may be a checkpoint's identity."""
    return isinstance(text, str) and DIGEST.fullmatch(text) is not None


class _OnDisk:
    """Files of a folder that the evaluator has made; each is on the disk itself once it is written."""

    def __init__(self, path: Path, on: Storage) -> None:
        self._path, self._on = path, on

    def exists(self) -> bool:
        return self._path.is_dir()

    def names(self) -> list[str]:
        try:
            folder = self._on.open_folder(self._path)
        except FileNotFoundError:
            return []
        try:
            return sorted(self._on.names(folder))
        finally:
            self._on.close(folder)

    def read(self, name: str) -> bytes | None:
        try:
            folder = self._on.open_folder(self._path)
        except FileNotFoundError:
            return None
        try:
            with named(self._path / name):
                file = self._on.open(folder, name)
        except FileNotFoundError:
            return None
        finally:
            self._on.close(folder)
        try:
            with named(self._path / name):
                content = bytearray(min(self._on.size(file), _MAX_BYTES))
                return bytes(content[: self._on.read(file, memoryview(content), 0)])
        finally:
            self._on.close(file)

    def write(self, name: str, content: bytes) -> None:
        temporary = f".{name}.{secrets.token_hex(8)}"
        folder = self._on.open_folder(self._path)
        try:
            with named(self._path / name):  # the user does not know the temporary name
                file = self._on.create(folder, temporary)
                try:
                    self._on.write(file, content, 0)
                    self._on.sync(file)
                finally:
                    self._on.close(file)
            self._on.rename(self._path / temporary, self._path / name)
            self._on.sync(folder)
        except BaseException:
            with suppress(OSError):  # it may have been renamed; the failure that led here is the one to report
                self._on.remove(folder, temporary)
            raise
        finally:
            self._on.close(folder)

    def remove(self, name: str) -> None:
        folder = self._on.open_folder(self._path)
        try:
            self._on.remove(folder, name)
        finally:
            self._on.close(folder)


class _InStore:
    """Objects below an address. An object that is written in the place of another is seen whole, before or after."""

    def __init__(self, path: StorePath) -> None:
        self._scheme, self._key = path.scheme, path.key

    @property
    def _store(self) -> ObjectStore:
        return ObjectStore.opened(self._scheme)  # of this process: Note [Opened where it is used]

    def exists(self) -> bool:
        return bool(self._store.sizes(self._key))

    def names(self) -> list[str]:
        return sorted(name for name in self._store.sizes(self._key) if "/" not in name)

    def read(self, name: str) -> bytes | None:
        try:
            return self._store.get(f"{self._key}/{name}")[:_MAX_BYTES]
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        self._store.put(f"{self._key}/{name}", content)

    def remove(self, name: str) -> None:
        self._store.remove([f"{self._key}/{name}"])
