"""metrics.jsonl: one line of JSON for each line of the log, of which a resumed run keeps those up to its checkpoint.

Note [Lines that are void]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A run that resumes from a checkpoint at step c takes the steps after c again, so what an earlier life wrote of those is
void. Every save first writes what has been logged since the last line and forces it to the disk, and the lines that
become due by themselves have greater and greater steps. So when the checkpoint at step c is complete, all values up to
then are in lines of a step of at most c, and what becomes due later has a greater one: cutting off the lines after c
leaves each step once. (A line that the script asks for after the save, at the same step, stays: what a loop does after
a save is not done again.) A line that a kill or a power cut has left incomplete is the last one, and is cut off too.

A run that resumes from nothing starts a file of its own, and what is there is renamed: no line of a run is ever removed
that the run itself does not write again.
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

#: The files of this process, which its own locks do not keep apart.
_open: set[Path] = set()


class LogFile:
    """**Rank 0.** The open file. It belongs to this process until it is closed.

    Args:
        path: where it is; folders that are not there are made (0700), the file is 0600.
        after: the step that the run resumes from; None: it begins.

    Raises:
        LockstepError: another process writes it, or it is none of lockstep's; nothing is changed then.
        OSError: it can't be opened.
    """

    def __init__(self, path: Path, *, after: int | None) -> None:
        self.path = path
        #: What could not be written yet, and why, if something could not.
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
            #: Bytes of lines.
            self._size = 0 if after is None else _end_of(self._fd, path, after)
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise
        _open.add(self._key)

    def append(self, line: dict[str, Any]) -> None:
        """Write a line, after those that could not be written before; :attr:`failure` says if it can't be."""
        self._waiting += json.dumps(line, allow_nan=False).encode() + b"\n"
        self.write()

    def write(self) -> None:
        """Try again what could not be written."""
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
        """Return once all lines are on the disk itself; :attr:`failure` says if they can't be."""
        self.write()
        if self.failure is None:
            try:
                os.fsync(self._fd)
            except OSError as error:
                error.filename = str(self.path)
                self.failure = _files.describe(error)

    def close(self) -> None:
        """Give the file up."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            _open.discard(self._key)


def _make_folders(folder: Path) -> None:
    for each in [*reversed(folder.parents), folder]:
        if not each.is_dir():
            with suppress(FileExistsError):  # opening the file says so if it is none
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
    """Take the file for this process alone: workers that it forks do not keep it when it is killed."""
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
    with open(fd, "rb", closefd=False) as file:  # (to close another descriptor of the file would give up the lock)
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                step = json.loads(line)["step"]
                if type(step) is not int:
                    raise TypeError("no step")
            except (ValueError, TypeError, KeyError) as error:
                raise LockstepError(
                    f"{path}: line {number} is none that lockstep.Log has written: resume with the file of this run, "
                    "or give lockstep.Log another path"
                ) from error
            if step > after:
                break
            end += len(line)
    return end
