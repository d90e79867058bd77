"""Outlive what ranks and launcher print to: a terminal whose window is closed or whose connection is lost, the reader
of a pipe.

Note [A dead terminal]
~~~~~~~~~~~~~~~~~~~~~~
When a terminal goes, the kernel sends SIGHUP to the leader of its session, which passes it on or not, and every write
to it fails from then on (EIO). So a rank may find out by a line that it prints, before it gets the signal by which it
is to save and leave. Output that can't be read any more is not a reason to fail: a descriptor of a terminal that is
gone leads to /dev/null from the moment at which that is noticed. (So it is for a rank of lockstep's launcher from its
start, and for one that python or another launcher has started from when it takes SIGHUP for a request.)

So does a pipe without a reader (``| head``, a pager that was closed). Under ``python`` a write to it raises
BrokenPipeError. That ends a program whose output is its result; it would end a training for the sake of a viewer.

And so does a rank's log that can't grow: the disk is full, or the file has reached the user's limit (``ulimit -f``).
The rank tells the launcher, which reports it. A file to which the user redirects the output is as under ``python``.

A program that has the same terminal may make it one that does not block, for all. When it is full a write under
``python`` then fails, after a part. Here it waits for room, as it would have without that program.

Note [Begun lines]
~~~~~~~~~~~~~~~~~~
The launcher has messages of its own, and a line of a rank may not be ended where one of them comes: a progress bar, a
question. Each message begins a line, so the launcher has to know whether the last line was ended. It has seen what it
relays. A rank that has the terminal itself says so in its page: a number that grows with each write to where messages
go, odd if a line is begun. So a line that the launcher has ended is not ended again. Where all output goes to a file,
the last byte there tells. (What compiled code prints past Python is not known, except in a file.)

Note [A prompt is left alone]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
While a rank of this machine waits for a command in its debugger, what another one prints to the terminal would come
into the middle of what is typed. So a print waits: until the command is given, and no longer, since a command may wait
for this rank. (A rank that dies at its prompt prompts no longer, as soon as the launcher has noticed.)
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import stat
import sys
import time
from typing import Any

from lockstep._files import describe
from lockstep.job import notes
from lockstep.job.page import REQUEST, Cell, Debugging, Pages

#: The errors of a file that can't grow.
_FULL = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT)
#: Escape sequences at the end of output that leave the cursor where it is: colours, a shown or hidden cursor.
_STYLES = re.compile(rb"(\x1b\[[0-9;?]*[hlm])+\Z")
#: Bytes at the end of the output that are looked at.
_END = 64
#: Seconds between two looks whether another rank still prompts.
_PAUSE = 0.02
#: Seconds for which a reader may take nothing, where a write would not wait by itself, before it counts as gone.
_READER = 600.0

#: The cell of this rank's page for Note [Begun lines] (int64 [1]), and the descriptors that it concerns; None: this is
#: not a rank that a launcher started.
_lines: tuple[memoryview, frozenset[int]] | None = None
#: The states of the other ranks of this machine in debuggers (int64 [count] each); see Note [A prompt is left alone].
_debuggers: tuple[memoryview, ...] = ()


def note_lines(pages: Pages, rank: int, *, beside: range) -> None:
    """Note in a page from now on whether this process has begun a line where the launcher's messages go, see Note
    [Begun lines], and let other ranks prompt undisturbed, see Note [A prompt is left alone].

    Args:
        pages: of all ranks.
        rank: this one.
        beside: the ranks of this machine.
    """
    global _lines, _debuggers
    cell = pages.page(rank).cast("q")[Cell.LINES : Cell.LINES + 1]
    _lines = cell, frozenset((1, 2) if os.path.sameopenfile(1, 2) else (2,))
    column = pages.column(Cell.DEBUGGER)
    _debuggers = column[beside.start : rank], column[rank + 1 : beside.stop]


def _is_prompting() -> bool:
    return any(number % REQUEST == Debugging.PROMPTS for ranks in _debuggers for number in ranks.tolist())


def _note(fd: int, data: Any) -> None:
    if _lines is None or fd not in _lines[1]:
        return
    end = bytes(memoryview(data).cast("B")[-_END:])
    end = end if end.endswith(b"\n") else _STYLES.sub(b"", end)
    if end:
        cell = _lines[0]
        cell[0] = (cell[0] | 1) + (1 if end.endswith(b"\n") else 2)


def is_gone(fd: int) -> bool:
    """Return whether a descriptor is that of a terminal which has been hung up."""
    try:
        if not stat.S_ISCHR(os.fstat(fd).st_mode):
            return False
    except OSError:
        return False
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def let_go() -> bool:
    """Point the standard streams that are a terminal which has gone at /dev/null. Return whether there was one."""
    gone = [fd for fd in (0, 1, 2) if is_gone(fd)]
    if gone:
        _lead_to_nowhere(gone)
    return bool(gone)


def _lead_to_nowhere(fds: list[int]) -> None:
    """Point descriptors at /dev/null: what compiled code prints goes through them as well."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in fds:
        os.dup2(nothing, fd, inheritable=True)
    os.close(nothing)


class _Forgiving(io.FileIO):
    """A standard stream to a terminal, to a reader that may go, or to the log of a rank."""

    def __init__(self, fd: int, *, rank: int | None) -> None:
        super().__init__(fd, "w", closefd=False)
        self._rank = rank

    def write(self, data: Any, /) -> int:
        if _note is None:  # the interpreter has taken this module apart; __del__ methods and hooks still write
            return super().write(data)
        if _debuggers and _is_prompting() and not _is_file(self.fileno()):
            while _is_prompting():
                time.sleep(_PAUSE)
        try:
            written = self._write(data)
        except OSError as error:
            if not _has_gone(self.fileno(), error, rank=self._rank):
                raise
            return super().write(data)
        _note(self.fileno(), data)
        return written

    def _write(self, data: Any) -> int:
        """Write a part of ``data`` at least, also where that does not wait for room by itself."""
        limit = float("inf")
        while (written := super().write(data)) is None:
            poll, now = select.poll(), time.monotonic()
            limit = min(limit, now + _READER)
            if now >= limit:
                raise BrokenPipeError(f"nothing was read for {_READER:g} s")
            poll.register(self.fileno(), select.POLLOUT)
            poll.poll(1000 * (limit - now))
        return written


def _has_gone(fd: int, error: OSError, *, rank: int | None) -> bool:
    """Return whether an error of a write says that what a standard stream leads to is gone, or can't grow. Then it
    leads to /dev/null from now on.

    Args:
        fd: 1 or 2.
        error: of the write.
        rank: as for :func:`outlive`.
    """
    if isinstance(error, BrokenPipeError):
        _lead_to_nowhere([fd])
    elif error.errno in _FULL and rank is not None and _is_file(fd):
        notes.tell(notes.UNWRITTEN, rank=rank, why=describe(error))
        _lead_to_nowhere([fd for fd in (1, 2) if _is_file(fd)])
    elif error.errno == errno.EIO:
        let_go()  # it does nothing if a signal's handler has done so in between
    else:
        return False
    return True


def forgiving(fd: int, *, errors: str) -> io.TextIOWrapper:
    """Return a text stream to a descriptor, in UTF-8, that outlives what it leads to; the descriptor stays open.

    Args:
        fd: 1 or 2.
        errors: what becomes of text that can't be encoded, as for :func:`open`.
    """
    return io.TextIOWrapper(
        io.BufferedWriter(_Forgiving(fd, rank=None)), encoding="utf-8", errors=errors, line_buffering=True
    )


def outlive(*, rank: int | None = None) -> None:
    """Let standard output and error outlive their reader, where that is a terminal or a pipe's other end. Does nothing
    the second time, and to streams that the program has put in their place.

    Args:
        rank: the rank that this process is, if a file there is its log, which it outlives as well; None: it is not.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if not _is_pythons_own(stream, fd) or not (_may_go(fd) or (rank is not None and _is_file(fd))):
            continue
        try:
            stream.flush()
        except OSError as error:
            if not _has_gone(fd, error, rank=rank):
                raise
            stream.flush()
        raw = _Forgiving(fd, rank=rank)
        raw.name = stream.buffer.raw.name if isinstance(stream.buffer, io.BufferedWriter) else stream.name
        forgiving = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        vars(forgiving)["mode"] = "w"  # as Python's own has it
        setattr(sys, name, forgiving)
        setattr(sys, f"__{name}__", forgiving)


def _is_pythons_own(stream: Any, fd: int) -> bool:
    """Return whether a standard stream is the one to ``fd`` that Python has made."""
    if type(stream) is not io.TextIOWrapper or stream.closed:
        return False
    try:
        return stream.fileno() == fd and not isinstance(getattr(stream.buffer, "raw", None), _Forgiving)
    except OSError:  # it is in memory
        return False


def _is_file(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


def _may_go(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return os.isatty(fd) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
