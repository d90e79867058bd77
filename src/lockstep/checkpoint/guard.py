"""Readers hold a checkpoint, so that nobody removes it under them.

Note [Readers and pruning]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Whoever reads a checkpoint holds a shared lock (``flock``) on its manifest; whoever removes one takes that lock
exclusively first, without waiting, and leaves the checkpoint to the next pruning if it can't have it. The lock belongs
to the file and not to its name, so between opening the manifest and locking it the folder may have been renamed away:
a reader looks once more whether the name still leads to the file that it holds, and else says
:class:`CheckpointGone`. After that look nothing can be removed before the reader lets go. The kernel lets go for a
reader that dies.

The manifest is locked and not the folder, because only files can be locked from several hosts over NFS, and because a
folder's own lock says that somebody writes it (Note [Commit]).
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.checkpoint.manifest import MANIFEST
from lockstep.errors import CheckpointError

_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class CheckpointGone(CheckpointError):
    """A checkpoint was removed between being listed and being opened."""


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """**Local.** Within the block nobody removes this checkpoint. See Note [Readers and pruning].

    One without a manifest that can be opened is damaged, and held by nothing: the reader will find that out.

    Raises:
        CheckpointGone: it has just been removed, or there was none.
    """
    fd = _open_manifest(folder, os.O_RDONLY)
    if fd is None:
        if not folder.is_dir():
            raise _gone(folder)
        yield
        return
    try:
        if not _lock(fd, fcntl.LOCK_SH) or not _still_there(fd, folder):
            raise _gone(folder)
        yield
    finally:
        os.close(fd)


@contextmanager
def taken(folder: Path) -> Iterator[bool]:
    """**Local.** Whether this process may remove the checkpoint, within the block: nobody reads it then.

    Raises:
        OSError: its manifest can't be opened for writing.
    """
    fd = _open_manifest(folder, os.O_RDWR)  # over NFS an exclusive lock needs a file that is open for writing
    if fd is None:
        yield folder.is_dir()
        return
    try:
        yield _lock(fd, fcntl.LOCK_EX) and _still_there(fd, folder)
    finally:
        os.close(fd)


def _gone(folder: Path) -> CheckpointGone:
    return CheckpointGone(f"{folder}: this checkpoint has just been removed; look for a newer one")


def _open_manifest(folder: Path, mode: int) -> int | None:
    """None: there is none, or something else in its place."""
    try:
        return os.open(folder / MANIFEST, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO):
            return None
        if mode == os.O_RDONLY and error.errno in (errno.EACCES, errno.EPERM):
            return None  # reading it will fail with words of its own
        raise


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
    return True


def _still_there(fd: int, folder: Path) -> bool:
    held = os.fstat(fd)
    try:
        named = (folder / MANIFEST).lstat()
    except FileNotFoundError:
        return False
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)
