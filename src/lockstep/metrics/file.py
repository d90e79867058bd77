"""metrics.jsonl: one line of JSON for each line of the log; a resumed run keeps the lines up to its checkpoint.

Note [Lines that are void]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A run that resumes from a checkpoint at step c takes the steps after c again, so earlier lines of those steps are
invalid. Every save first writes the values since the last line and forces them to the disk, and the lines that become
due by themselves have increasing steps. So when the checkpoint at step c is complete, all values up to then are in
lines of a step of at most c, and later lines have greater steps: cutting off the lines after c leaves each step once.
(A line that the script asks for after the save, at the same step, stays: a resumed run does not repeat it.) A line that
a kill or a power cut has left incomplete is the last one, and is cut off too.

A run that does not resume starts a file of its own, and an existing file is renamed: a line of a run is removed only if
the run itself writes it again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep import _files
from lockstep.errors import LockstepError

NAME = "metrics.jsonl"

#: The files that this process has open: a process's own locks do not exclude each other.
_open: set[Path] = set()


class LogFile:
    """**Rank 0.** The open file, which belongs to this process until it is closed.

    Args:
        path: the file's path; missing folders are made (0700), the file is 0600.
        after: the step that the run resumes from; None: the run begins.

    Raises:
        LockstepError: another log writes the file, or it is not one of lockstep's; nothing is changed then.
        OSError: it can't be opened.
    """

    def __init__(self, path: Path, *, after: int | None) -> None:
        self.path = path
        #: The bytes that could not be written yet, and the reason; None if none are left.
        self._waiting = b""
        self.failure: str | None = None
        _make_folders(path.parent)
        self._key = path.resolve()
        if self._key in _open:
            raise _taken(path)
        if after is None:
            _set_aside(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(self._fd, path)
            #: The length of the file in bytes, up to the end of the last line.
            self._size = 0 if after is None else _end_of(self._fd, path, after)
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise
        _open.add(self._key)

    def append(self, line: dict[str, Any]) -> None:
        """Write a line after those that could not be written before; :attr:`failure` tells if this fails."""
        self._waiting += json.dumps(line, allow_nan=False).encode() + b"\n"
        self.write()

    def write(self) -> None:
        """Write the lines that could not be written before, if there are any."""
        try:
            while self._waiting:
                written = os.pwrite(self._fd, self._waiting, self._size)
                self._size += written
                self._waiting = self._waiting[written:]
            self.failure = None
        except OSError as error:
            error.filename = str(self.path)
            self.failure = _files.describe(error)

    def sync(self) -> None:
        """Return once all lines are on the disk itself; :attr:`failure` tells if this fails."""
        self.write()
        if self.failure is None:
            try:
                os.fsync(self._fd)
            except OSError as error:
                error.filename = str(self.path)
                self.failure = _files.describe(error)

    def close(self) -> None:
        """Close the file and let others have it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            _open.discard(self._key)


def _make_folders(folder: Path) -> None:
    for each in [*reversed(folder.parents), folder]:
        if not each.is_dir():
            with suppress(FileExistsError):  # if it is a file, opening the log reports it
                each.mkdir(0o700)


def _set_aside(path: Path) -> None:
    """Rename the lines of an earlier run, if there are any: ``metrics-1.jsonl`` and so on."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _lock(fd, path)
        if not os.fstat(fd).st_size:
            return
        number = 1
        while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
            number += 1
        os.rename(path, aside)
    finally:
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    """Lock the file for this process alone: forked workers do not keep the lock when the process is killed."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise _taken(path) from error
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):  # a file system without locks
            raise


def _taken(path: Path) -> LockstepError:
    return LockstepError(
        f"{path} is being written by another lockstep.Log, of this script or of another job: give each a path of its "
        "own, or let the other job end"
    )


def _end_of(fd: int, path: Path, after: int) -> int:
    """Return the bytes of the lines of a step of at most ``after``; see Note [Lines that are void]."""
    end = 0
    with open(fd, "rb", closefd=False) as file:  # (closing another descriptor of the file would release the lock)
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                step = json.loads(line)["step"]
                if type(step) is not int:
                    raise TypeError("no step")
            except (ValueError, TypeError, KeyError) as error:
                raise LockstepError(
                    f"{path}: lockstep.Log has not written line {number}: resume with the file of this run, "
                    "or give lockstep.Log another path"
                ) from error
            if step > after:
                break
            end += len(line)
    return end
