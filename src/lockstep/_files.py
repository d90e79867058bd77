"""Paths that users give; files that are written completely or not at all; explanations of file errors."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.errors import LockstepError

_ADVICE = {
    errno.ENOSPC: "the disk is full: free space, or choose another folder",
    errno.EDQUOT: "the disk quota is used up: free space, or choose another folder",
    errno.EFBIG: "the file is larger than this file system or this user's limits allow (ulimit -f)",
    errno.EACCES: "this user may not write there: change the permissions, or choose another folder",
    errno.EPERM: "this user may not write there: change the permissions, or choose another folder",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EIO: "the disk or the network to it fails: look at the kernel's log, and choose another folder",
    errno.EMFILE: "too many open files in this process: raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENOTDIR: "part of the path is a file, not a folder: choose another folder",
    errno.EEXIST: "the path is a file, not a folder: choose another folder",
}


#: Matches the beginning of a URL, also after pathlib has merged its two slashes, or of a Windows path (C:\\).
_NO_PATH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/|[A-Za-z]:\\")


class NoLocalPath(LockstepError, ValueError):
    """A URL or a Windows path was given where a local path is needed."""

    code = "no-local-path"


def local_path(given: str | os.PathLike[str], what: str) -> Path:
    """Return a path that a user gave; all such paths are checked here.

    ``s3://bucket/run`` is a valid name for a folder below the current one, but is never meant so: files saved there
    would be lost with the machine. Nor is ``~/run`` meant as a folder named ``~``: it is below the home folder, also
    where no shell has put that in its place (in Python, or in ``--log-dir=~/logs``).

    Args:
        given: the path.
        what: the name of the argument or option, for the message.

    Raises:
        NoLocalPath: it is a URL or a Windows path.
    """
    text = os.fspath(given)
    found = _NO_PATH.match(text)
    if found is None:
        return Path(os.path.expanduser(text))
    if found[1] is not None and found[1].lower() == "file":
        raise NoLocalPath(f"{what}={text}: expected a path, not a URL: give {text[5:].replace('//', '', 1)} itself")
    kind = "a path of Windows" if found[1] is None or len(found[1]) == 1 else "a URL"
    raise NoLocalPath(
        f"{what}={text}: this is {kind}, but lockstep reads and writes this only on file systems of this machine: give "
        "the path of a folder or file there, such as where the storage is mounted; only a Checkpointer's folder can be "
        "in a store"
    )


class StorePath(PurePosixPath):
    """An address in an object store, ``s3://bucket/run``: a path, none of whose operations look at a disk."""

    def __str__(self) -> str:
        """Return the address, which pathlib keeps with one slash in the place of two."""
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest}"

    @property
    def scheme(self) -> str:
        """What stands before the colon: the kind of store."""
        return self.parts[0].removesuffix(":")

    @property
    def key(self) -> str:
        """What follows the slashes: the bucket or container, and the place in it."""
        return "/".join(self.parts[1:])


def run_path(given: str | os.PathLike[str], what: str) -> Path | StorePath:
    """Return the path of checkpoints that a user gave: a local path, or an address in an object store.

    Args:
        given: the path or the address.
        what: the name of the argument or option, for the message.

    Raises:
        NoLocalPath: it is a Windows path, a URL of a file, or an address that names no bucket or goes up by ``..``.
    """
    text = os.fspath(given)
    found = _NO_PATH.match(text)
    if found is None or found[1] is None or len(found[1]) == 1 or found[1].lower() == "file":
        return local_path(given, what)
    scheme, rest = found[1].lower(), text[found.end() :].lstrip("/")
    path = StorePath(f"{scheme}:/{rest}")
    if not path.key or ".." in path.parts:
        raise NoLocalPath(f"{what}={text}: expected a bucket and a place in it: s3://bucket/run")
    return path


def redirected(home: Path, path: str | os.PathLike[str]) -> Path:
    """Return the path below ``home`` that stands for ``path``, as :func:`redirect` has it."""
    return home / os.path.abspath(os.path.expanduser(path)).lstrip("/")


def redirect(cls: Any, name: str, home: Path) -> None:
    """Have instances of ``cls`` write below ``home`` what they would write at the path that they are given.

    Args:
        cls: the class.
        name: the name of its first argument, the path; a value that is no path is left alone.
        home: a folder.
    """
    begin = cls.__init__

    @functools.wraps(begin)
    def init(self: Any, *args: Any, **options: Any) -> None:
        place = args[0] if args else options.get(name)
        if isinstance(place, (str, os.PathLike)):
            moved = redirected(home, place)
            moved.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if args:
                args = (moved, *args[1:])
            else:
                options[name] = moved
        begin(self, *args, **options)

    cls.__init__ = init


def make_folders(folder: Path) -> None:
    """Make a folder, and those above it that are missing, each for its owner alone (0700).

    Raises:
        FileExistsError: one of them is a file.
    """
    for each in [*reversed(folder.parents), folder]:
        if not each.is_dir():
            each.mkdir(0o700, exist_ok=True)


def write_whole(path: str | Path, data: str | bytes, *, like: os.stat_result | None = None) -> None:
    """Write a small file atomically: a reader sees either the previous content or all of the new one.

    The bytes are not forced to the disk: this is for processes that read each other's files, not for data that must
    survive a power loss.

    Args:
        path: the file.
        data: its new content.
        like: the status of a file whose mode and owner it gets; None: 0600.
    """
    content = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    temporary = f"{path}.tmp-{os.getpid()}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        error.filename = os.fspath(path)  # the user does not know the temporary name
        raise
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            if like is not None:
                os.fchown(fd, like.st_uid, like.st_gid)
                os.fchmod(fd, stat.S_IMODE(like.st_mode))
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):  # the folder was removed meanwhile
            os.unlink(temporary)
        raise


def append_whole(fd: int, data: bytes, *, end: int) -> None:
    """Write ``data`` at the end of a file, all of it or none: what a full disk takes of it is cut off again, so that
    later data does not follow a part.

    Args:
        fd: the file's descriptor, not opened for appending. Nobody else writes to it meanwhile.
        data: what is written.
        end: where the file ends.

    Raises:
        OSError: it can't be written.
    """
    written = 0
    try:
        while written < len(data):
            written += os.pwrite(fd, data[written:], end + written)
    except OSError:
        os.ftruncate(fd, end)
        raise


#: What to say where :func:`is_nowhere`.
NOWHERE = "the folder in which this process runs has been removed: change to one that exists (cd)"


def is_nowhere() -> bool:
    """Return whether the folder in which this process runs has been removed. Relative paths lead nowhere then, and
    torch does not find its own libraries."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def describe(error: Exception) -> str:
    """Return a message for an error: for a file error what went wrong and what to do, otherwise its type and text."""
    if isinstance(error, OSError) and error.errno is not None:
        advice = _ADVICE.get(error.errno)
        where = f"{os.fspath(error.filename)}: " if isinstance(error.filename, (str, os.PathLike)) else ""
        if error.errno == errno.ENOENT and not os.path.isabs(where) and is_nowhere():
            return NOWHERE
        return f"{where}{os.strerror(error.errno)}" + (f"; {advice}" if advice else "")
    return f"{type(error).__name__}: {error}"
