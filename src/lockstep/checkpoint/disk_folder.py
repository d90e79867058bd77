"""A run's folder on a file system: each checkpoint is one folder that all ranks write into, published in one rename.

Note [Commit]
~~~~~~~~~~~~~
A checkpoint is written into ``step-N.tmp-<random>``. Rank 0 makes the folder and the files; every rank writes its
blocks into them (``plan.py`` says which) and fsyncs each file that it wrote to. When all ranks have reported that, the
manifest is written and fsynced, then the folder is fsynced, renamed to ``step-N``, and the parent is fsynced. Up to
the rename there is no checkpoint; after it there is a complete one, and after the last fsync it survives a power cut.
Only then are older ones removed. A checkpoint is never overwritten: a second save at the same step is ``step-N-r2``,
and the first is removed after it.

Rank 0 locks a draft's folder (``flock``), so that a later save can tell the leftovers of a dead save from the work of a
living one; and so does a process with the folder of a checkpoint that it removes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path, PurePath

from lockstep.checkpoint import folders
from lockstep.checkpoint.blocks import TensorPart
from lockstep.checkpoint.folders import MANIFEST
from lockstep.checkpoint.locks import Owner, RunLock, owner_of, reading, taken
from lockstep.checkpoint.manifest import Manifest, manifest_bytes
from lockstep.checkpoint.plan import Block, Written
from lockstep.checkpoint.storage import POSIX, Storage


class DiskFolder:
    """See :class:`lockstep.checkpoint.run_folder.RunFolder`."""

    def __init__(self, path: Path, on: Storage = POSIX) -> None:
        self.path, self._on = path, on

    def resolved(self) -> DiskFolder:
        """See the protocol."""
        return DiskFolder(self.path.resolve(), self._on)

    def prepare(self) -> int:
        """See the protocol."""
        return folders.prepare_root(self.path, on=self._on)

    def hold(self) -> RunLock:
        """See the protocol."""
        return RunLock(self.path)

    def witness(self, token: str) -> None:
        """See the protocol. Ranks that see other folders are found where they write or read."""

    def owner_now(self) -> Owner | None:
        """See the protocol."""
        return owner_of(self.path)

    def beat_now(self) -> None:
        """See the protocol: the kernel releases the lock of an owner that has ended."""
        return

    def exists(self) -> bool:
        """See the protocol."""
        return self.path.is_dir()

    def is_checkpoint(self) -> bool:
        """See the protocol."""
        is_named_so = folders.step_in(self.path.name) is not None
        return is_named_so and (not folders.checkpoints(self.path, on=self._on) or (self.path / MANIFEST).exists())

    def checkpoints(self) -> list[PurePath]:
        """See the protocol."""
        return [*folders.checkpoints(self.path, on=self._on)]

    def leftovers(self) -> list[PurePath]:
        """See the protocol."""
        return sorted(path for path in self.path.glob("step-*.tmp-*") if path.is_dir())

    def under_way(self) -> set[str]:
        """See the protocol."""
        return {
            folders.name_of_draft(draft) for draft in folders.drafts(self.path) if folders.is_locked(draft, on=self._on)
        }

    def has_manifest(self, name: str) -> bool:
        """See the protocol."""
        return (self.path / name / MANIFEST).is_file()

    def draft(self, step: int, files: Iterable[str]) -> Draft:
        """See the protocol."""
        folders.sweep(self.path, on=self._on)
        draft = Draft(self.path, step, on=self._on)
        try:
            for name in files:
                draft.create(name)
        except BaseException:
            draft.discard()
            raise
        return draft

    def write(self, token: str, rank: int, blocks: Iterable[Block]) -> Written:  # noqa: ARG002 - all write to the same
        """See the protocol."""
        return write_blocks(self.path / token, blocks, on=self._on)

    def holding(self, name: str) -> AbstractContextManager[None]:
        """See the protocol. See Note [Readers and pruning]."""
        return reading(self.path / name)

    def open(self, name: str) -> _OpenFolder:
        """See the protocol."""
        return _OpenFolder(self._on.open_folder(self.path / name), self._on)

    def remove(self, name: str) -> bool:
        """See the protocol. See Note [Readers and pruning]."""
        folder = self.path / name
        with ExitStack() as undo:
            with taken(folder) as free:
                if free:
                    leftover = undo.enter_context(folders.renamed(folder, on=self._on))
                elif not folder.is_dir():
                    raise FileNotFoundError(errno.ENOENT, "another process has removed it", str(folder))
            if free:  # and the manifest is closed again: over NFS a file that is open stays, under another name
                folders.remove_tree(leftover, on=self._on)
        return free


class _OpenFolder:
    """A checkpoint's folder, by its descriptor."""

    def __init__(self, folder: int, on: Storage) -> None:
        self._folder, self._on = folder, on

    @property
    def owner(self) -> int:
        return self._on.owner(self._folder)

    def file(self, name: str, manifest: Manifest | None) -> OpenDiskFile:  # noqa: ARG002 - the name is enough
        return OpenDiskFile(self._on.open(self._folder, name), self._on)

    def close(self) -> None:
        self._on.close(self._folder)


class OpenDiskFile:
    """A file, by its descriptor."""

    def __init__(self, file: int, on: Storage) -> None:
        self._file, self._on = file, on

    @property
    def size(self) -> int:
        """Number of its bytes."""
        return self._on.size(self._file)

    @property
    def owner(self) -> int:
        """The user id that owns it."""
        return self._on.owner(self._file)

    def read(self, into: memoryview, offset: int) -> int:
        """Fill ``into`` from ``offset`` on. Return the number of bytes read."""
        return self._on.read(self._file, into, offset)

    def close(self) -> None:
        """Close it."""
        self._on.close(self._file)


class Draft:
    """**Rank 0.** The folder of a checkpoint to be; see Note [Commit].

    Raises:
        OSError: it can't be made.
    """

    def __init__(self, root: Path, step: int, *, on: Storage = POSIX) -> None:
        self._root, self._on = root, on
        self._committed = False
        self._name = folders.next_name(root, step, on=on)
        self.path = root / folders.draft_name(self._name)
        on.make_folder(self.path)
        try:
            self._folder = on.open_folder(self.path)
        except BaseException:
            on.remove_folder(self.path)
            raise
        try:
            # Where there are no locks, leftovers can't be told from living drafts, and none is removed.
            on.lock(self._folder)
        except BaseException:
            self.discard()
            raise

    @property
    def token(self) -> str:
        """The name of its folder."""
        return self.path.name

    def stored(self, files: Mapping[str, Sequence[TensorPart]]) -> None:  # noqa: ARG002 - they are files
        """Return None: the files are all there is."""
        return

    def create(self, name: str) -> None:
        """**Rank 0.** Make an empty file for ranks to write into."""
        with named(self.path / name):
            self._on.close(self._on.create(self._folder, name))

    def commit(self, manifest: Manifest) -> Path:
        """**Rank 0.** Publish the draft atomically and return the checkpoint's path."""
        self._write_manifest(manifest_bytes(manifest, where=str(self.path)))
        with named(self.path):
            self._on.sync(self._folder)
        whole = self._root / self._name
        self._on.rename(self.path, whole)
        try:
            with named(self._root):
                folders.sync_folder(self._root, on=self._on)
        except OSError:  # a save that fails leaves no checkpoint; if the rename fails too, it leaves a complete one
            self._on.rename(whole, self.path)
            raise
        self._on.close(self._folder)
        self._committed = True  # from here on no failure may remove it
        return whole

    def _write_manifest(self, content: bytes) -> None:
        with named(self.path / MANIFEST):
            file = self._on.create(self._folder, MANIFEST)
            try:
                self._on.write(file, content, 0)
                self._on.sync(file)
            finally:
                self._on.close(file)

    def discard(self) -> None:
        """**Rank 0.** Give the draft up, unless it is a checkpoint. What can't be removed is swept by a later save."""
        if self._committed:
            return
        try:
            folders.remove_tree(self.path, on=self._on)
        except OSError:
            pass  # the failure that led here is the one to report, and a draft is not a checkpoint
        finally:
            self._on.close(self._folder)


def write_blocks(folder: Path, blocks: Iterable[Block], *, on: Storage = POSIX) -> Written:
    """Write blocks, one file after the other, to the disk itself. Return their digests and which are out of bounds.

    Raises:
        OSError: it could not be written.
    """
    written = Written([], [])
    with named(folder):
        opened = on.open_folder(folder)
    current, file = "", -1
    try:
        for block in blocks:
            with named(folder / block.file):
                if block.file != current:
                    file = _finish(file, on)
                    file, current = on.open(opened, block.file, write=True), block.file
                for start, piece in written.pieces(block):
                    on.write(file, piece, start)
        with named(folder / current):
            file = _finish(file, on)
    finally:
        if file >= 0:
            on.close(file)
        on.close(opened)
    return written


def _finish(file: int, on: Storage) -> int:
    """Bring a file to the disk and close it, if one is open; return the descriptor of none, -1."""
    if file >= 0:
        on.sync(file)
        on.close(file)
    return -1


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Name the file in an error of an operation on a descriptor, which does not name it by itself."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise
