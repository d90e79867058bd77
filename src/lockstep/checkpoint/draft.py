"""A checkpoint that is being written: one folder that all ranks write into, and that becomes whole in one rename.

Note [Commit]
~~~~~~~~~~~~~
A checkpoint is written into ``step-N.tmp-<random>``. Rank 0 makes the folder and the files; every rank writes its
blocks into them (``sharing.py`` says which) and fsyncs each file that it wrote to. When all ranks have said so, the
manifest is written and fsynced, then the folder is fsynced, renamed to ``step-N``, and the parent is fsynced. Up to
the rename there is no checkpoint; after it there is a whole one, and after the last fsync it survives a power cut.
Only then are older ones removed. A checkpoint is never overwritten: a second save at the same step is ``step-N-r2``,
and the first is removed behind it.

A draft's folder is locked (``flock``) by rank 0, so that a later save can tell the leftovers of a dead one from the
work of a living one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.checkpoint import folders
from lockstep.checkpoint.digests import PIECE, digest_of, new_digest
from lockstep.checkpoint.manifest import MANIFEST, MAX_BYTES, FileEntry, Manifest, Part
from lockstep.checkpoint.sharing import cut
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.errors import CheckpointError


class Draft:
    """**Rank 0.** The folder of a checkpoint to be; see Note [Commit].

    Raises:
        OSError: it can't be made.
    """

    def __init__(self, root: Path, step: int, *, on: Storage = POSIX) -> None:
        self._root, self._on = root, on
        self._name = folders.next_name(root, step, on=on)
        self.path = root / folders.draft_name(self._name)
        on.make_folder(self.path)
        try:
            self._folder = on.open_folder(self.path)
        except BaseException:
            on.remove_folder(self.path)
            raise
        try:
            # A file system without locks: leftovers are then not told from living drafts, and none is removed.
            on.lock(self._folder)
        except BaseException:
            self.discard()
            raise

    def create(self, name: str) -> None:
        """**Rank 0.** Make an empty file for ranks to write into."""
        with named(self.path / name):
            self._on.close(self._on.create(self._folder, name))

    def write(self, name: str, content: bytes) -> FileEntry:
        """**Rank 0.** Write a whole file to the disk itself."""
        with named(self.path / name):
            file = self._on.create(self._folder, name)
            try:
                self._on.write(file, content, 0)
                self._on.sync(file)
            finally:
                self._on.close(file)
        whole = memoryview(content)
        digests = tuple(digest_of(whole[start:stop]) for start, stop in cut(0, len(content)))
        return FileEntry.of([Part("", 0, len(content), digests)])

    def commit(self, manifest: Manifest) -> Path:
        """**Rank 0.** Make it a checkpoint, from one moment to the next; its path."""
        content = manifest.to_json()
        if len(content) > MAX_BYTES:
            raise CheckpointError(f"{self.path}: the manifest would have {len(content)} bytes, at most {MAX_BYTES} fit")
        self.write(MANIFEST, content)
        with named(self.path):
            self._on.sync(self._folder)
        whole = self._root / self._name
        self._on.rename(self.path, whole)
        try:
            with named(self._root):
                folders.sync_folder(self._root, on=self._on)
        except OSError:  # a save that fails leaves no checkpoint; if this fails too, it leaves a whole one
            self._on.rename(whole, self.path)
            raise
        self._on.close(self._folder)
        return whole

    def discard(self) -> None:
        """**Rank 0.** Give the draft up. What can't be removed is swept by a later save."""
        try:
            folders.remove_tree(self.path, on=self._on)
        except OSError:
            pass  # the failure that led here is the one to report, and a draft is no checkpoint
        finally:
            self._on.close(self._folder)


def write_blocks(folder: Path, blocks: Iterable[tuple[str, int, memoryview]], *, on: Storage = POSIX) -> list[str]:
    """**Local.** Write blocks into the files of a draft, to the disk itself; their digests.

    Args:
        folder: the draft's.
        blocks: file, offset and content, one file after the other.

    Raises:
        OSError: it could not be written.
    """
    digests: list[str] = []
    with named(folder):
        opened = on.open_folder(folder)
    current, file = "", -1
    try:
        for name, offset, data in blocks:
            with named(folder / name):
                if name != current:
                    file = _finish(file, on)
                    file, current = on.open(opened, name, write=True), name
                digest = new_digest()
                for start in range(0, len(data), PIECE):
                    piece = data[start : start + PIECE]
                    digest.update(piece)
                    on.write(file, piece, offset + start)
                digests.append(digest.hexdigest())
        with named(folder / current):
            file = _finish(file, on)
    finally:
        if file >= 0:
            on.close(file)
        on.close(opened)
    return digests


def _finish(file: int, on: Storage) -> int:
    """Bring a file to the disk and close it, if there is one."""
    if file >= 0:
        on.sync(file)
        on.close(file)
    return -1


@contextmanager
def named(path: Path) -> Iterator[None]:
    """**Local.** Operations on descriptors fail without saying on what: say it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise
