"""The few operations on a file system that checkpoints are made of, and their POSIX implementation.

Everything that a checkpoint does to a disk goes through :class:`Storage`, so that tests can record the operations,
replay the disk as a crash would leave it, and make any one of them fail.

Folders and files are opened once and then named by their descriptors: what happens to a path meanwhile (a rename, a
link put in its place) can't lead a reader or a writer elsewhere. No operation follows a link.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Protocol

from lockstep.checkpoint.locks import try_flock


class NotPlain(OSError):
    """A link, a folder, a device or a pipe stands where a plain file was expected."""


class Storage(Protocol):
    """What a checkpoint asks of a file system. Every operation raises OSError if it fails.

    Order and durability are POSIX's: what was written may be on the disk or not, in any order, until :meth:`sync` of
    the file; names (made, renamed, removed) until :meth:`sync` of the folder that has them.
    """

    def make_folder(self, path: Path) -> None:
        """Make a folder (0700) that is not there yet."""
        ...

    def open_folder(self, path: Path) -> int:
        """A descriptor of a folder, which must not be a link."""
        ...

    def folders(self, path: Path) -> list[str]:
        """The names of the folders in ``path``; links are none."""
        ...

    def names(self, folder: int) -> list[str]:
        """The names of everything in an open folder."""
        ...

    def create(self, folder: int, name: str) -> int:
        """A descriptor to write a new file (0600)."""
        ...

    def open(self, folder: int, name: str, *, write: bool = False) -> int:
        """A descriptor of a plain file that is there. Raises NotPlain if it is something else."""
        ...

    def size(self, file: int) -> int:
        """The length of an open file in bytes."""
        ...

    def owner(self, opened: int) -> int:
        """The user whom an open file or folder belongs to."""
        ...

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        ...

    def read(self, file: int, into: memoryview, offset: int) -> int:
        """Fill ``into`` from ``offset`` on; the bytes read, fewer only at the end of the file."""
        ...

    def sync(self, opened: int) -> None:
        """Return once the content of a file, or the names in a folder, are on the disk itself."""
        ...

    def lock(self, opened: int) -> bool:
        """Lock a file or folder until it is closed; False if somebody else has it, or there are no locks here."""
        ...

    def close(self, opened: int) -> None:
        """Close a descriptor."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder, atomically."""
        ...

    def remove(self, folder: int, name: str) -> None:
        """Remove a file from an open folder."""
        ...

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        ...


class PosixStorage:
    """A local or shared POSIX file system."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, 0o700)

    def open_folder(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def folders(self, path: Path) -> list[str]:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def names(self, folder: int) -> list[str]:
        return os.listdir(folder)

    def create(self, folder: int, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=folder)

    def open(self, folder: int, name: str, *, write: bool = False) -> int:
        access = os.O_WRONLY if write else os.O_RDONLY
        try:  # non-blocking: opening a pipe would wait for its other end
            file = os.open(name, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                what = "a link" if error.errno == errno.ELOOP else "no plain file"
                raise NotPlain(error.errno, f"{what}, expected a plain file", name) from None
            raise
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise NotPlain(errno.EINVAL, "no plain file, expected a plain file", name)
        return file

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def owner(self, opened: int) -> int:
        return os.fstat(opened).st_uid

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(file, rest, offset)
            rest, offset = rest[written:], offset + written

    def read(self, file: int, into: memoryview, offset: int) -> int:
        filled = 0
        while filled < len(into):
            count = os.preadv(file, [into[filled:]], offset + filled)
            if count == 0:
                break
            filled += count
        return filled

    def sync(self, opened: int) -> None:
        os.fsync(opened)

    def lock(self, opened: int) -> bool:
        return bool(try_flock(opened, fcntl.LOCK_EX))

    def close(self, opened: int) -> None:
        os.close(opened)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, folder: int, name: str) -> None:
        os.unlink(name, dir_fd=folder)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


#: The file system itself.
POSIX: Storage = PosixStorage()
