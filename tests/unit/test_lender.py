"""Who has the terminal, decided from the ranks' pages: no ranks, and a terminal that is nobody's own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.debugger.lender import Lender
from lockstep.job.page import REQUEST, Cell, Debugging, Pages, Text, encode


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Pages]:
    pages = Pages(tmp_path, 4)
    yield pages
    pages.close()


@pytest.fixture
def terminal() -> Iterator[int]:
    screen, keyboard = pty.openpty()
    yield keyboard
    os.close(screen)
    os.close(keyboard)


def _is(pages: Pages, rank: int, state: Debugging, request: int = 1, *, where: str = "train.py:1 in f") -> None:
    with pages.page(rank) as page:
        encode(page, Text.DEBUGGED_AT, where)
    pages.set(rank, Cell.DEBUGGER, request * REQUEST + state if state else 0)


def _turn(lender: Lender, now: float = 0.0) -> list[str]:
    said = lender.look(now)
    lender.lend()
    return said


def _granted(pages: Pages) -> list[int]:
    return pages.all(Cell.GRANTED)


def test_ranks_have_their_turns_in_the_order_in_which_they_asked(pages: Pages, terminal: int) -> None:
    lender = Lender(pages, range(4), terminal=terminal)
    assert pages.all(Cell.LENDS) == [1, 1, 1, 1]
    assert not lender.is_due(0.0)
    _is(pages, 2, Debugging.ASKS)
    assert lender.is_due(0.0)
    assert _turn(lender) == [
        "rank 2 is at a breakpoint (train.py:1 in f); the others wait. c continues, q ends the job",
    ]
    assert _granted(pages) == [0, 0, 1, 0]
    assert lender.prompting
    _is(pages, 0, Debugging.ASKS)
    assert _turn(lender) == []
    assert _granted(pages) == [0, 0, 1, 0], "one at a time"
    _is(pages, 2, Debugging.EVALUATES)
    assert not lender.prompting
    assert _turn(lender, 100.0) == [], "however long a command takes"
    _is(pages, 2, Debugging.NONE)
    assert len(_turn(lender)) == 1
    assert _granted(pages) == [1, 0, 1, 0]


def test_a_rank_that_runs_on_keeps_its_turn_for_a_moment(pages: Pages, terminal: int) -> None:
    lender = Lender(pages, range(4), terminal=terminal)
    _is(pages, 1, Debugging.ASKS)
    _turn(lender)
    _is(pages, 3, Debugging.ASKS)
    _is(pages, 1, Debugging.RUNS)
    _turn(lender, 10.0)
    assert not lender.is_due(10.1)
    _is(pages, 1, Debugging.ASKS, 2)
    _turn(lender, 10.2)
    assert _granted(pages) == [0, 2, 0, 0]
    _is(pages, 1, Debugging.RUNS, 2)
    _turn(lender, 11.0)
    assert lender.is_due(11.4), "another rank waits, and may be needed"
    _turn(lender, 11.4)
    assert _granted(pages) == [0, 2, 0, 1]
    _is(pages, 1, Debugging.ASKS, 3)
    _turn(lender, 11.5)
    assert _granted(pages) == [0, 2, 0, 1]
    _is(pages, 3, Debugging.NONE)
    assert _turn(lender, 12.0) == [], "it was told of before"
    assert _granted(pages) == [0, 3, 0, 1]


def test_the_first_failure_is_held_and_the_others_are_let_go_after_it(pages: Pages, terminal: int) -> None:
    lender = Lender(pages, range(4), terminal=terminal)
    _is(pages, 1, Debugging.FAILED)
    assert _turn(lender)[0].startswith("rank 1 has failed (train.py:1 in f) and is held there for you")
    _is(pages, 0, Debugging.FAILED)
    _is(pages, 2, Debugging.ASKS)
    _is(pages, 1, Debugging.NONE)
    assert len(_turn(lender)) == 1
    assert _granted(pages) == [-1, 1, 1, 0], "a breakpoint is no failure"
    _is(pages, 3, Debugging.FAILED)
    _turn(lender)
    assert _granted(pages) == [-1, 1, 1, -1]


def test_a_failure_during_a_turn_is_one(pages: Pages, terminal: int) -> None:
    lender = Lender(pages, range(4), terminal=terminal)
    _is(pages, 1, Debugging.ASKS)
    _turn(lender)
    _is(pages, 1, Debugging.RUNS)
    _turn(lender)
    _is(pages, 1, Debugging.FAILED, 2)
    assert _turn(lender)[0].startswith("rank 1 has failed")
    _is(pages, 0, Debugging.FAILED)
    _turn(lender)
    assert _granted(pages) == [0, 2, 0, 0]
    lender.ended(1, 1 << 22)
    _turn(lender)
    assert _granted(pages) == [-1, 2, 0, 0], "the first has ended"


def test_the_terminal_is_as_before_when_nobody_is_in_a_debugger(pages: Pages, terminal: int) -> None:
    lender = Lender(pages, range(4), terminal=terminal)
    before = termios.tcgetattr(terminal)
    _is(pages, 1, Debugging.ASKS)
    _turn(lender)
    lent = termios.tcgetattr(terminal)
    assert lent[6][termios.VSUSP] == b"\0" != before[6][termios.VSUSP], "Ctrl-Z is off"
    lent[3] &= ~termios.ECHO  # as at a prompt
    termios.tcsetattr(terminal, termios.TCSANOW, lent)
    lender.ended(1, 1 << 22)
    assert pages.all(Cell.DEBUGGER) == [0, 0, 0, 0]
    _turn(lender)
    assert termios.tcgetattr(terminal) == before


def test_a_machine_without_a_terminal_tells_of_others(pages: Pages) -> None:
    lender = Lender(pages, range(2), terminal=None)
    assert pages.all(Cell.LENDS) == [0, 0, 0, 0]
    _is(pages, 3, Debugging.PROMPTS)
    _is(pages, 0, Debugging.PROMPTS)  # it reads from a pipe
    assert _turn(lender) == [
        "rank 0 is at a breakpoint (train.py:1 in f); the others wait. c continues, q ends the job",
        "rank 3 is at a breakpoint (train.py:1 in f), on another machine; the others wait. c continues, q ends the job",
    ]
    assert not lender.prompting
    _is(pages, 3, Debugging.EVALUATES)
    assert _turn(lender) == []


_IN_A_SESSION = """
import fcntl, os, subprocess, sys, termios
from lockstep.debugger.lender import Lender, from_the_background
from lockstep.debugger.terminal import LentTerminal
from lockstep.job.page import REQUEST, Cell, Debugging, Pages
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
pages = Pages(sys.argv[1], 1)
{what}
print(os.tcgetpgrp(0) == os.getpgrp())
"""
#: The launcher gives the terminal again to a rank that has left its group and has not said so yet.
_GIVES = """
rank = subprocess.Popen(["sleep", "1000"])
lender = Lender(pages, range(1), terminal=0)
for state in (Debugging.ASKS, Debugging.PROMPTS):
    pages.set(0, Cell.DEBUGGER, REQUEST + state)
    lender.look(0.0)
    lender.lend()
lender.give_again(rank.pid)
rank.kill()
rank.wait()
"""
#: A rank that leaves its group, which gets the terminal again at the last moment.
_LEAVES = """
job = os.getpgrp()
rank = os.fork()
if rank == 0:
    os.setpgid(0, 0)
    lent, leave = LentTerminal(pages, 0), os.setpgid
    lent._terminal, lent._job = os.open("/dev/tty", os.O_RDWR), job
    def give_and_leave(pid, group):
        with from_the_background():
            os.tcsetpgrp(0, os.getpid())
        leave(pid, group)
    os.setpgid = give_and_leave
    lent._leave()
    os._exit(0 if os.getpgrp() == job else 1)
assert os.waitpid(rank, 0)[1] == 0
"""


@pytest.mark.parametrize("what", [_GIVES, _LEAVES], ids=["seen by the launcher", "seen by the rank"])
def test_a_rank_that_leaves_as_it_gets_the_terminal_again_leaves_it_to_the_job(
    what: str, tmp_path: Path, terminal: int
) -> None:
    argv = [sys.executable, "-c", _IN_A_SESSION.format(what=what), str(tmp_path)]
    done = subprocess.run(
        argv, stdin=terminal, capture_output=True, text=True, start_new_session=True, timeout=30, check=False
    )
    assert done.stdout == "True\n", done.stderr
