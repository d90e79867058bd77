"""The folder of a run, wherever it is: on a file system of this machine, or in an object store.

Everything else in this room knows checkpoints by :class:`RunFolder` alone. What a disk and a store have in common is
little: files of checkpoints are written by all ranks, a commit that makes them a checkpoint at one moment, reading of
a range, a list, and removal. How each does it is said where it is done: Note [Commit] in ``disk_folder.py``, Note
[Commit in a store] in ``store_folder.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Protocol

from lockstep._files import StorePath
from lockstep.checkpoint.blocks import TensorPart
from lockstep.checkpoint.disk_folder import DiskFolder
from lockstep.checkpoint.locks import Owner
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.plan import Block, Written
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.checkpoint.stored import Stored

if TYPE_CHECKING:
    from lockstep.checkpoint.store_folder import StoreFolder


class OpenFile(Protocol):
    """A file of a checkpoint, open for reading."""

    @property
    def size(self) -> int:
        """Number of its bytes."""
        ...

    @property
    def owner(self) -> int | None:
        """The user id that owns it; None where files have no owner."""
        ...

    def read(self, into: memoryview, offset: int) -> int:
        """Fill ``into`` from ``offset`` on. Return the number of bytes read, fewer only at the end of the file."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class OpenCheckpoint(Protocol):
    """A checkpoint, open for reading."""

    @property
    def owner(self) -> int | None:
        """The user id that owns it; None where folders have no owner."""
        ...

    def file(self, name: str, manifest: Manifest | None) -> OpenFile:
        """Open a file by its name; ``manifest`` is None for the manifest itself."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class DraftCheckpoint(Protocol):
    """**Rank 0.** A checkpoint that is being written."""

    @property
    def token(self) -> str:
        """What other ranks need to write their part of it."""
        ...

    def stored(self, files: Mapping[str, Sequence[TensorPart]]) -> Stored | None:
        """Return which rank wrote what, for the manifest; None where the files themselves are all there is.

        Args:
            files: the plan's files, each with its parts and their writers.
        """
        ...

    def commit(self, manifest: Manifest) -> PurePath:
        """Make it a checkpoint, at one moment. Return its path.

        Raises:
            CheckpointError, OSError: it is none.
        """
        ...

    def discard(self) -> None:
        """Remove it, unless it is a checkpoint. What can't be removed is left to a later save."""
        ...


class Hold(Protocol):
    """One job's hold on a run's folder."""

    @property
    def token(self) -> str:
        """What other ranks need to see that theirs is the same folder; empty where that shows otherwise."""
        ...

    def check(self) -> None:
        """Make sure that the folder is still this job's.

        Raises:
            CheckpointError: it has another owner by now.
        """
        ...

    def release(self) -> None:
        """Let another job have the folder; a second call does nothing."""
        ...


class RunFolder(Protocol):
    """The folder of a run. Checkpoints are known by their names in it."""

    @property
    def path(self) -> PurePath:
        """Its path."""
        ...

    def resolved(self) -> RunFolder:
        """Return the same folder by a path without links."""
        ...

    def prepare(self) -> int | None:
        """Make it, and test that it is writable. Return the user id that owns new files; None: they have no owner."""
        ...

    def hold(self) -> Hold:
        """Take it for this job. Raises CheckpointError if another has it."""
        ...

    def witness(self, token: str) -> None:
        """Make sure that this rank sees the folder that rank 0 holds. Raises CheckpointError if it does not."""
        ...

    def owner_now(self) -> Owner | None:
        """Return the owner that holds it now, as far as can be known. Takes nothing."""
        ...

    def beat_now(self) -> tuple[str, int] | None:
        """Return what changes as long as the owner gives signs of life; None: there is none, or the system itself tells
        whether it lives (:meth:`owner_now`). Takes nothing."""
        ...

    def exists(self) -> bool:
        """Return whether it is there."""
        ...

    def is_checkpoint(self) -> bool:
        """Return whether it is itself a checkpoint, rather than a run's folder with several."""
        ...

    def checkpoints(self) -> list[PurePath]:
        """List the checkpoints, newest first, complete or damaged."""
        ...

    def leftovers(self) -> list[PurePath]:
        """List what a save is writing or a killed save has left."""
        ...

    def under_way(self) -> set[str]:
        """Return the names of checkpoints that are being written, as far as this can be told; none of them is used for
        another one."""
        ...

    def has_manifest(self, name: str) -> bool:
        """Return whether a checkpoint has a manifest, of whatever content."""
        ...

    def draft(self, step: int, files: Iterable[str]) -> DraftCheckpoint:
        """**Rank 0.** Remove what dead saves have left, and begin a checkpoint with these files."""
        ...

    def write(self, token: str, rank: int, blocks: Iterable[Block]) -> Written:
        """Write a rank's blocks of a draft, safely. Return their digests, and which are out of bounds."""
        ...

    def holding(self, name: str) -> AbstractContextManager[None]:
        """Hold a checkpoint, as far as can be, so that no process removes it meanwhile.

        Raises:
            CheckpointGone: it has just been removed.
        """
        ...

    def open(self, name: str) -> OpenCheckpoint:
        """Open a checkpoint for reading."""
        ...

    def remove(self, name: str) -> bool:
        """Remove a checkpoint, which is never seen half removed. Return False if a process is reading it.

        Raises:
            FileNotFoundError: another process has removed it.
        """
        ...


def run_folder(path: PurePath, on: Storage = POSIX) -> RunFolder:
    """Return the run's folder at a path.

    Args:
        path: of a file system, or a StorePath.
        on: the file system's operations.
    """
    if isinstance(path, StorePath):
        return _in_store(path)
    return DiskFolder(Path(path), on)


def _in_store(path: StorePath) -> StoreFolder:
    from lockstep.checkpoint.store_folder import StoreFolder  # here: who has no store does without fsspec

    return StoreFolder(path)
