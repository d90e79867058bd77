"""The few operations on a file system that checkpoints are made of.

Everything that a checkpoint does to a disk goes through :class:`Storage`, so that tests can extend it: record the
operations, replay the disk as a crash would leave it, and make any one of them fail.

Folders and files are opened once and then named by their descriptors: what happens to a path meanwhile (a rename, a
link put in its place) can't lead a reader or a writer elsewhere. No operation follows a link.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

#: The errors with which a file system reports that it has no locks.
NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class NotPlain(OSError):
    """A link, a folder, a device or a pipe stands where a plain file was expected."""


class Storage:
    """A local or shared POSIX file system. Every operation raises OSError if it fails.

    Order and durability are POSIX's: written data may be on the disk or not, in any order, until :meth:`sync` of the
    file; so may names (made, renamed, removed) until :meth:`sync` of the folder that has them.
    """

    def make_folder(self, path: Path) -> None:
        """Make a folder (0700) that is not there yet."""
        os.mkdir(path, 0o700)

    def open_folder(self, path: Path) -> int:
        """Open a folder, which must not be a link. Return its descriptor."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def folders(self, path: Path) -> list[str]:
        """List the folders in ``path`` by name; links do not count."""
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def names(self, folder: int) -> list[str]:
        """List everything in an open folder by name."""
        return os.listdir(folder)

    def create(self, folder: int, name: str) -> int:
        """Make a file (0600) that is not there yet. Return a descriptor to write it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=folder)

    def open(self, folder: int, name: str, *, write: bool = False) -> int:
        """Open an existing plain file. Return its descriptor. Raises NotPlain if it is something else."""
        access = os.O_WRONLY if write else os.O_RDONLY
        try:  # non-blocking, since opening a pipe would wait for its other end
            file = os.open(name, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                what = "a link" if error.errno == errno.ELOOP else "not a plain file"
                raise NotPlain(error.errno, f"{what}, expected a plain file", name) from None
            raise
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise NotPlain(errno.EINVAL, "not a plain file, expected one", name)
        return file

    def size(self, file: int) -> int:
        """Return the length of an open file in bytes."""
        return os.fstat(file).st_size

    def owner(self, opened: int) -> int:
        """Return the user that owns an open file or folder."""
        return os.fstat(opened).st_uid

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        rest = memoryview(data)
        while rest:
            written = os.pwrite(file, rest, offset)
            rest, offset = rest[written:], offset + written

    def read(self, file: int, into: memoryview, offset: int) -> int:
        """Fill ``into`` from ``offset`` on. Return the number of bytes read, fewer only at the end of the file."""
        filled = 0
        while filled < len(into):
            count = os.preadv(file, [into[filled:]], offset + filled)
            if count == 0:
                break
            filled += count
        return filled

    def sync(self, opened: int) -> None:
        """Return once the content of a file, or the names in a folder, are on the disk itself."""
        os.fsync(opened)

    def lock(self, opened: int) -> bool:
        """Lock a file or folder until it is closed; False if another process has it, or there are no locks here."""
        return bool(try_flock(opened, fcntl.LOCK_EX))

    def close(self, opened: int) -> None:
        """Close a descriptor."""
        os.close(opened)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder, atomically."""
        os.rename(old, new)

    def remove(self, folder: int, name: str) -> None:
        """Remove a file from an open folder."""
        os.unlink(name, dir_fd=folder)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)


#: The storage that works on the file system itself.
POSIX = Storage()


def try_flock(fd: int, how: int) -> bool | None:
    """Lock a file or folder until it is closed, without waiting.

    Args:
        fd: its descriptor.
        how: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.

    Returns:
        False if another process has it; None if the file system has no locks.
    """
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS_HERE:
            return None
        raise
    return True
