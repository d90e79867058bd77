"""What ranks and launcher print to may go while they run: a terminal whose window is closed or whose connection is
lost, the reader of a pipe.

Note [A dead terminal]
~~~~~~~~~~~~~~~~~~~~~~
When a terminal goes, the kernel sends SIGHUP to the leader of its session, which passes it on or not, and every write
to it fails from then on (EIO). So a rank may find out by a line that it prints, before it has heard of the signal by
which it is to save and leave. What nobody can read any more is no reason to fail: a descriptor of a terminal that is
gone leads to /dev/null from the moment at which that is noticed.

So does a pipe without a reader (``| head``, a pager that was closed). Under ``python`` a write to it raises
BrokenPipeError. That ends a program whose output is its result; it would end a training for the sake of a viewer.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
from typing import Any


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
    """Let the standard streams that are a terminal which has gone lead to nowhere. Return whether there was one."""
    gone = [fd for fd in (0, 1, 2) if is_gone(fd)]
    if gone:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in gone:
            os.dup2(nothing, fd, inheritable=True)
        os.close(nothing)
    return bool(gone)


class _Forgiving(io.FileIO):
    """A standard stream to a terminal, or to a reader, that may go."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nothing, self.fileno(), inheritable=True)  # for what compiled code prints as well
            os.close(nothing)
        except OSError as error:
            if error.errno != errno.EIO or not let_go():
                raise
        return super().write(data)


def outlive() -> None:
    """Let standard output and error outlive whatever reads them, where that is a terminal or a pipe's other end."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != fd or not _may_go(fd):
            continue
        stream.flush()
        raw = _Forgiving(fd, "w", closefd=False)
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


def _may_go(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return os.isatty(fd) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
