"""Paths that users give; files that are written completely or not at all, and why one could not be written."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

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


#: How a URL begins, also after pathlib has made one slash of two, and a path of Windows (C:\\).
_NO_PATH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/|[A-Za-z]:\\")


class NoLocalPath(LockstepError, ValueError):
    """A URL, or a path of Windows, was given where files are read or written."""


def local_path(given: str | os.PathLike[str], what: str) -> Path:
    """Return a path that a user gave; every one of them comes through here.

    ``s3://bucket/run`` is a valid name for a folder below the current one, which is never meant: what was saved there
    would be lost with the machine.

    Args:
        given: the path.
        what: which argument or option it is, for the message.

    Raises:
        NoLocalPath: it is a URL or a path of Windows.
    """
    text = os.fspath(given)
    found = _NO_PATH.match(text)
    if found is None:
        return Path(given)
    if found[1] is not None and found[1].lower() == "file":
        raise NoLocalPath(f"{what}={text}: expected a path, not a URL: give {text[5:].replace('//', '', 1)} itself")
    kind = "a path of Windows" if found[1] is None or len(found[1]) == 1 else "a URL"
    raise NoLocalPath(
        f"{what}={text}: this is {kind}, and lockstep reads and writes the file systems of this machine alone: give "
        "the path of a folder or file there, such as where the storage is mounted"
    )


def write_whole(path: str | Path, data: str | bytes) -> None:
    """Write a small file (0600) so that whoever opens it, at any moment, finds all of it or what was there before.

    Its bytes are not forced to the disk: this is for processes that read each other's files, not for what has to
    survive a loss of power.
    """
    content = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    temporary = f"{path}.tmp-{os.getpid()}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        error.filename = os.fspath(path)  # nobody has named the other one
        raise
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):  # the folder was removed meanwhile
            os.unlink(temporary)
        raise


def describe(error: Exception) -> str:
    """Say what went wrong with a file and what to do about it; of another error, what it is."""
    if isinstance(error, OSError) and error.errno is not None:
        advice = _ADVICE.get(error.errno)
        where = f"{os.fspath(error.filename)}: " if isinstance(error.filename, (str, os.PathLike)) else ""
        return f"{where}{os.strerror(error.errno)}" + (f"; {advice}" if advice else "")
    return f"{type(error).__name__}: {error}"
