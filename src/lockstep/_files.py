"""Write a file completely or not at all, and say why one could not be written."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

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
