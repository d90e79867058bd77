"""Folders of checkpoints on a POSIX file system: drafts that become whole in one rename, and readers that check.

Note [Commit]
~~~~~~~~~~~~~
A checkpoint is written into ``step-N.tmp-<random>``: each file is fsynced, then the manifest is written and fsynced,
then the folder is fsynced, renamed to ``step-N``, and the parent is fsynced. Up to the rename there is no checkpoint;
after it there is a whole one, and after the last fsync it survives a power cut. Only then are older ones removed. A
checkpoint is never overwritten: a second save at the same step is ``step-N-r2``, and the first is removed behind it.

A draft's folder is locked (``flock``) by the process that writes it, so that a later save can tell the leftovers of a
dead one from the work of a living one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from lockstep.checkpoint.manifest import MANIFEST, MAX_BYTES, FileEntry, Manifest, new_digest
from lockstep.errors import CheckpointCorrupt

_WHOLE = re.compile(r"step-(\d{8,})(?:-r(\d+))?")
_DRAFT = re.compile(_WHOLE.pattern + r"\.tmp-[0-9a-f]{16}")
_CHUNK = 8 * 2**20


def prepare_root(root: Path) -> None:
    """**Local.** Make the folder of a run, and prove that it can be written.

    Raises:
        OSError: it can't.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    probe = root / f".probe-{secrets.token_hex(8)}"
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    probe.unlink()


def checkpoints(root: Path) -> list[Path]:
    """**Local.** The folders of checkpoints in ``root``, newest first, whether whole or damaged."""
    found = [path for path in _subfolders(root) if _WHOLE.fullmatch(path.name)]
    return sorted(found, key=_age, reverse=True)


def step_of(folder: Path) -> int:
    """**Local.** The step in the name of a checkpoint's folder."""
    return _age(folder)[0]


def _age(folder: Path) -> tuple[int, int]:
    matched = _WHOLE.fullmatch(folder.name)
    if matched is None:
        raise ValueError(f"{folder.name} is no name of a checkpoint")
    return int(matched[1]), int(matched[2] or 1)


def _subfolders(root: Path) -> list[Path]:
    with os.scandir(root) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


class Draft:
    """A checkpoint that is being written; see Note [Commit]."""

    def __init__(self, root: Path, step: int) -> None:
        self._root = root
        taken = [_age(folder)[1] for folder in checkpoints(root) if step_of(folder) == step]
        self._name = f"step-{step:08d}" + (f"-r{max(taken) + 1}" if taken else "")
        self.path = root / f"{self._name}.tmp-{secrets.token_hex(8)}"
        self.path.mkdir(mode=0o700)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.files: dict[str, FileEntry] = {}
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # a file system without locks: leftovers are then not told apart, so none is removed
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """**Local.** Write one file to the disk itself, and note its size and digest."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        digest, size = new_digest(), 0
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=self._fd), "wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
        self.files[name] = FileEntry(size, digest.hexdigest())

    def commit(self, manifest: Manifest) -> Path:
        """**Local.** Make it a checkpoint, from one moment to the next; its path."""
        self.write(MANIFEST, [manifest.to_json()])
        os.fsync(self._fd)
        whole = self._root / self._name
        os.rename(self.path, whole)
        self.path = whole
        _fsync_folder(self._root)
        os.close(self._fd)
        return whole

    def discard(self) -> None:
        """**Local.** Give the draft up."""
        os.close(self._fd)
        shutil.rmtree(self.path, ignore_errors=True)


def remove(folder: Path) -> None:
    """**Local.** Remove a checkpoint: renamed to a leftover first, so that it is never seen half removed."""
    leftover = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(8)}")
    os.rename(folder, leftover)
    shutil.rmtree(leftover)


def sweep(root: Path) -> None:
    """**Local.** Remove what dead saves left behind: drafts of this user, in this folder, that no one is writing."""
    for leftover in _subfolders(root):
        if not _DRAFT.fullmatch(leftover.name) or leftover.lstat().st_uid != os.geteuid():
            continue
        fd = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # a living save holds it, or there are no locks here
        else:
            shutil.rmtree(leftover)
        finally:
            os.close(fd)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def verify(folder: Path, *, only: Iterable[str] | None = None) -> Manifest:
    """**Local.** The manifest of a checkpoint, once its files proved to be what it says.

    Args:
        folder: the checkpoint's folder.
        only: the files to check, where they are in the manifest. None: all.

    Raises:
        CheckpointCorrupt: a file is missing, is no plain file, or has another size or digest; or the manifest is
            damaged. The message says which, what was expected and what was found.
    """
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointCorrupt(f"{folder}: can't be opened ({error.strerror})") from error
    try:
        with _open_plain(folder, MANIFEST, folder_fd) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise CheckpointCorrupt(f"{folder / MANIFEST}: larger than {MAX_BYTES} bytes, so it is no manifest")
        manifest = Manifest.from_json(content, where=str(folder / MANIFEST))
        wanted = manifest.files if only is None else [name for name in only if name in manifest.files]
        for name in wanted:
            _verify_file(folder, name, manifest.files[name], folder_fd)
        return manifest
    finally:
        os.close(folder_fd)


def _verify_file(folder: Path, name: str, expected: FileEntry, folder_fd: int) -> None:
    with _open_plain(folder, name, folder_fd) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.size:
            raise CheckpointCorrupt(f"{folder / name}: {size} bytes found, {expected.size} expected")
        digest = new_digest()
        while piece := file.read(_CHUNK):
            digest.update(piece)
    if digest.hexdigest() != expected.blake2b:
        raise CheckpointCorrupt(
            f"{folder / name}: its content has changed: digest {digest.hexdigest()[:16]}… found, "
            f"{expected.blake2b[:16]}… expected"
        )


def _open_plain(folder: Path, name: str, folder_fd: int) -> BinaryIO:
    """A file of the folder, which must be a plain one: no link to elsewhere, no device, no pipe to wait on."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    except OSError as error:
        why = "a link, expected a plain file" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointCorrupt(f"{folder / name}: {why}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointCorrupt(f"{folder / name}: not a plain file")
    return os.fdopen(fd, "rb")
