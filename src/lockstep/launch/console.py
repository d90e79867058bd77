"""Print lockstep's own messages, after everything that the ranks wrote, or send them to where they are shown."""

from __future__ import annotations

import json
import os
import sys
from typing import Protocol


class Screen(Protocol):
    """Shows messages where ranks write as well."""

    def show(self, text: str) -> None:
        """Show a message on lines of its own."""
        ...


#: The message that only says that the launchers have found each other.
MET = b'{"met": true}'
#: The descriptor to which messages are written as JSON lines, to be shown elsewhere; None: standard error is used.
_reader: int | None = None
#: The screen that shows messages while ranks write; None: there are no ranks.
_screen: Screen | None = None


def say_on(screen: Screen | None) -> None:
    """Have ``screen`` show messages from now on; None: show them as if nothing else wrote there."""
    global _screen
    _screen = screen


def say_to(fd: int) -> None:
    """Write messages to ``fd`` as JSON lines from now on, for the process that shows several launchers' (hosts.py)."""
    global _reader
    _reader = fd


def say(text: str, *, once: str = "", later: bool = False) -> None:
    """Print one of lockstep's own messages, after everything the ranks wrote.

    Args:
        text: the message.
        once: a name under which the launchers of other machines print this message, too; it is shown once if the
            messages of all are shown in one place. Empty: it is about this machine.
        later: if another machine's launcher sends this message, which knows more, that one is shown instead.
    """
    if _reader is None:
        (show if _screen is None else _screen.show)(f"lockstep: {text}")
    else:
        _send(_reader, json.dumps({"text": text, "once": once, "later": later}).encode() + b"\n")


def show(text: str) -> None:
    """Print a line on standard error; where that is closed, or its reader has gone, print nothing from then on.

    How a job ends must not depend on whether its messages are read.
    """
    if sys.stderr is None:  # closed when Python started; print would take standard output instead
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except BlockingIOError:
        pass  # what has no room on a program's own stream (spawn's) is lost, and later messages are not
    except OSError:
        # Python flushes what is left once more at its end, and would leave with an exit code of its own.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        os.close(nothing)


def met() -> None:
    """Tell the process that shows the messages of several launchers that the launchers have found each other."""
    if _reader is not None:
        _send(_reader, MET + b"\n")


def _send(fd: int, line: bytes) -> None:
    while line:  # a signal may come after a part of it
        line = line[os.write(fd, line) :]
