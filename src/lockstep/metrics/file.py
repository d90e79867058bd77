"""metrics.jsonl: one line of JSON for each line of the log; a resumed run keeps the lines up to its checkpoint.

Note [Lines that are void]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A run that resumes from a checkpoint at step c takes the steps after c again, so earlier lines of those steps are
invalid. Every save first writes the values since the last line and forces them to the disk, and the lines that become
due by themselves have increasing steps. So when the checkpoint at step c is complete, all values up to then are in
lines of a step of at most c, and later lines have greater steps: cutting off the lines after c leaves each step once.
(A line that the script asks for after the save, at the same step, stays: a resumed run does not repeat it.) A line that
a kill or a power cut has left incomplete is the last one, and is cut off too.

A checkpoint that was made from the side is no such save: no line is written for it, since that needs the ranks' loops.
Values since the last line whose steps are in it are lost (a process alone writes them as it ends), and lines that the
script asked for between its moment and the stop are written again.

A run that does not resume starts a file of its own, and an existing file is renamed: a line of a run is removed only if
the run itself writes it again.

Note [Lines of evaluations]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
What ``lockstep evaluate`` finds of the checkpoint at step c comes when training is past c, so its line stands behind
lines of greater steps. It names its result (``"evaluation"``), which lies beside the checkpoints. So a line that a
resumed run has cut off, though its step is at most c, is taken from there again, and none is taken twice. A checkpoint
that is evaluated anew (the results were removed) has a result of the same name and a later time, and a line of its own.

Whoever holds the file's lock writes: a log as long as it is open, and where no job trains, the evaluator, for a moment
(:func:`add_lines`). A log that begins in that moment waits for it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import _files, knobs
from lockstep.errors import LockstepError

NAME = "metrics.jsonl"
#: The key of a line that names the result from which the line was made.
EVALUATION = "evaluation"

#: Seconds between two attempts to lock a file.
_PAUSE = 0.01
#: The files that this process has open: a process's own locks do not exclude each other.
_open: set[Path] = set()


@dataclass(frozen=True)
class _KeptLines:
    """The lines that a file has and that stay."""

    #: The bytes up to the end of the last one.
    size: int = 0
    #: The results that have a line among them (:func:`result_key`).
    evaluations: frozenset[tuple[str, float]] = frozenset()
    #: True if all of them are of results.
    only_evaluations: bool = True


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
        with suppress(FileExistsError):  # if it is a file, opening the log reports it
            _files.make_folders(path.parent)
        self._key = path.resolve()
        if self._key in _open:
            raise _taken(path)
        if after is None:
            _set_aside(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(self._fd, path)
            kept = _KeptLines() if after is None else _lines_to_keep(self._fd, path, after)
            #: The length of the file in bytes, up to the end of the last line.
            self._size = kept.size
            #: The results of evaluations that have a line (:func:`result_key`).
            self.evaluations = set(kept.evaluations)
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise
        _open.add(self._key)

    def append(self, line: dict[str, Any]) -> None:
        """Write a line after those that could not be written before; :attr:`failure` tells if this fails."""
        if EVALUATION in line:
            self.evaluations.add(result_key(line[EVALUATION], line["time"]))
        self._waiting += json.dumps(line, allow_nan=False).encode() + b"\n"
        self.write()

    def write(self) -> None:
        """Write the lines that could not be written before, if there are any."""
        try:
            if self._waiting:
                self._take_again()
            while self._waiting:
                written = os.pwrite(self._fd, self._waiting, self._size)
                self._size += written
                self._waiting = self._waiting[written:]
            self.failure = None
        except OSError as error:
            error.filename = str(self.path)
            self.failure = _files.describe(error)
        except LockstepError as error:
            self.failure = str(error)

    def _take_again(self) -> None:
        """Take the lock again, which the user's program loses where it copies the file or uploads it: the kernel
        drops a process's locks when it closes any descriptor of the file.

        Raises:
            LockstepError: another process has the file.
        """
        if not _try_lock(self._fd):
            raise _taken(self.path)
        if os.fstat(self._fd).st_size <= self._size:
            return
        with suppress(LockstepError):  # what nobody of lockstep's has written is written over
            kept = _lines_to_keep(self._fd, self.path, math.inf)  # with those that were added meanwhile
            self._size = max(self._size, kept.size)
            self.evaluations |= kept.evaluations

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
    deadline = time.monotonic() + knobs.times().log_lock
    while not _try_lock(fd):
        if time.monotonic() > deadline:
            raise _taken(path)
        time.sleep(_PAUSE)


def _try_lock(fd: int) -> bool:
    """Lock the file, or do without where the file system has no locks. Return False if another process has it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
            raise
    return True


def _taken(path: Path) -> LockstepError:
    return LockstepError(
        f"{path} is being written by another lockstep.Log, of this script or of another job: give each a path of its "
        "own, or let the other job end"
    )


def _lines_to_keep(fd: int, path: Path, after: float) -> _KeptLines:
    """Return the lines up to the first one of a step greater than ``after``; see Note [Lines that are void]."""
    end = 0
    evaluations: set[tuple[str, float]] = set()
    count = 0
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", closefd=False) as file:  # (closing another descriptor of the file would release the lock)
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                told = json.loads(line)
                step = told["step"]
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
            count = number
            if isinstance(told.get(EVALUATION), str) and isinstance(told.get("time"), (int, float)):
                evaluations.add(result_key(told[EVALUATION], told["time"]))
    return _KeptLines(end, frozenset(evaluations), len(evaluations) == count)


# Lines of evaluations, where no log is open.


def result_key(name: str, time: float) -> tuple[str, float]:
    """Return what tells a result from all others, and from one that its checkpoint had before.

    Args:
        name: that of the result.
        time: when the evaluation ended, in seconds since the epoch.
    """
    return name, round(time, 3)


def evaluation_line(name: str, *, step: int, time: float, numbers: Mapping[str, float]) -> dict[str, Any]:
    """Return the line of a result: its numbers at the checkpoint's step. NaN is null, and counted, as in other lines.

    Args:
        name: that of the result.
        step: the checkpoint's.
        time: when the evaluation ended, in seconds since the epoch.
        numbers: by their names.
    """
    values = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
    odd = {key: 1 for key, value in values.items() if value is None}
    line = {"step": step, "time": round(time, 3), **values, EVALUATION: name}
    return line | ({"nonfinite": odd} if odd else {})


def add_lines(path: Path, lines: Sequence[dict[str, Any]]) -> int | None:
    """Add the lines of results that have none yet, and force them to the disk. Return their number; None: a log is
    open, which takes them itself.

    A line that a kill has left incomplete is cut off. A file that has nothing but lines of results (the script has no
    log) loses those that are not among ``lines``, since nobody else would remove them after a resumed run.

    Args:
        path: the file's path; it is made (0600) if there are lines to write. Its folder must be there.
        lines: those of all results that count, in order.

    Raises:
        LockstepError: lockstep has not written the file.
        OSError: it can't be written.
    """
    if not lines and not path.exists():
        return 0
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _try_lock(fd):
            return None
        kept = _lines_to_keep(fd, path, math.inf)
        wanted = {result_key(line[EVALUATION], line["time"]): line for line in lines}
        if kept.only_evaluations and not kept.evaluations <= wanted.keys():
            kept = _KeptLines()
        new = [line for key, line in wanted.items() if key not in kept.evaluations]
        content = b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in new)
        os.ftruncate(fd, kept.size)
        _files.append_whole(fd, content, end=kept.size)
        os.fsync(fd)
        return len(new)
    finally:
        os.close(fd)
