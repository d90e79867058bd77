"""A terminal that is gone: it is known, let go of, and no error to write to."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from lockstep.job import terminal
from lockstep.launch import console
from lockstep.launch.evidence import facts
from tests.launching import LIMIT, wait_for

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
        assert process.wait(LIMIT) == 0
    finally:
        process.kill()
        process.wait(LIMIT)
        os.close(end)
        os.close(told)


_BROKEN = """
import sys
from lockstep.job import terminal
sys.stdin.readline()  # until the reader has gone
print("buffered")
terminal.outlive()
first = sys.stdout
print("later", flush=True)
terminal.outlive()
sys.exit(sys.stdout is not first)
"""


def test_a_program_that_has_lost_its_reader_before_it_is_to_outlive_it() -> None:
    """And that is to outlive it once more, which changes nothing."""
    command = [sys.executable, "-c", _BROKEN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize("stream", [io.TextIOWrapper(io.BytesIO()), io.StringIO(), None])
def test_a_stream_of_the_programs_own_stays(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.outlive()
    assert sys.stdout is stream


def test_a_message_goes_to_whatever_stands_for_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a test of the user's that captures it in memory, for instance."""
    memory = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stderr", memory)
    console.show("a message")
    memory.seek(0)
    assert memory.read() == "a message\n"


_SHOWS = """
from lockstep.job import terminal
from lockstep.launch import console
terminal.outlive()
{show}("x" * 1_000_000)
{show}("the end")
"""


@pytest.mark.parametrize("show", ["print", "console.show"])
def test_what_is_written_waits_for_room_where_another_program_has_turned_waiting_off(show: str) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with subprocess.Popen([sys.executable, "-c", _SHOWS.format(show=show)], stdout=writing, stderr=writing) as process:
        os.close(writing)
        waits = ("poll", "ppoll")
        wait_for(lambda: (now := facts(process.pid)) is None or now.state == "Z" or now.call in waits, "a full pipe")
        with open(reading, "rb") as shown:
            assert shown.read() == b"x" * 1_000_000 + b"\nthe end\n"
    assert process.returncode == 0


_SHOWS_LATER = """
from lockstep.launch import console
console.show("x" * 1_000_000)
print(flush=True)
input()
console.show("later")
"""


def test_a_message_without_room_on_a_programs_own_stream_costs_no_later_one() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    argv = [sys.executable, "-c", _SHOWS_LATER]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writing) as process:
        os.close(writing)
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"\n"
        assert set(os.read(reading, 1 << 20)) == {ord("x")}
        process.stdin.write(b"\n")
        process.stdin.close()
        with open(reading, "rb") as shown:
            assert shown.read().endswith(b"later\n")
    assert process.returncode == 0
