"""A terminal that is gone: it is known, let go of, and no error to write to."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from lockstep.job import terminal

_WRITES = """
import os, sys
from lockstep.job import terminal
terminal.outlive()
print("before", flush=True)
os.read(int(sys.argv[1]), 1)  # until the terminal is closed
let_go = terminal.let_go
if sys.argv[3] == "handled":  # between the failed write and what it does about it, the handler of SIGHUP runs
    terminal.let_go = lambda: let_go() and let_go()
print("after", flush=True)
print("error", file=sys.stderr, flush=True)
os.write(1, b"what C writes")
os.write(int(sys.argv[2]), f"{os.ttyname(1) if os.isatty(1) else os.readlink('/proc/self/fd/1')}".encode())
"""


def test_only_a_terminal_whose_other_end_is_closed_is_gone() -> None:
    ours, theirs = pty.openpty()
    reading, writing = os.pipe()
    try:
        assert not terminal.is_gone(theirs)
        os.close(ours)
        assert terminal.is_gone(theirs)
        os.close(reading)
        assert not terminal.is_gone(writing), "a pipe is something else"
        with open(os.devnull) as nothing:
            assert not terminal.is_gone(nothing.fileno())
    finally:
        os.close(theirs)
        os.close(writing)


@pytest.mark.parametrize("signal", ["unheard", "handled"])
def test_a_program_writes_on_when_its_terminal_has_gone(signal: str) -> None:
    ours, theirs = pty.openpty()
    until, end = os.pipe()
    told, tells = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITES, str(until), str(tells), signal],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        pass_fds=(until, tells),
        start_new_session=True,
    )
    try:
        for fd in (theirs, until, tells):
            os.close(fd)
        said = b""
        while not said.endswith(b"\n"):  # a terminal hands a line over in pieces
            said += os.read(ours, 100)
        assert said == b"before\r\n"
        os.close(ours)
        os.write(end, b"x")
        assert os.read(told, 100) == b"/dev/null"
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(20)
        os.close(end)
        os.close(told)
