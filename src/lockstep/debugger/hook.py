"""``breakpoint()`` on a rank, the error in whose frame it is held, and the end that ``q`` brings.

Other debuggers are left alone: one that ``PYTHONBREAKPOINT`` names, or that has put itself into ``sys.breakpointhook``,
is called as under ``python``.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from lockstep.debugger.terminal import Console, LentTerminal, OwnInput, reads_nothing
from lockstep.errors import NoTerminal
from lockstep.job.page import Cell, Debugging, Pages

if TYPE_CHECKING:
    from lockstep.debugger.prompt import RankPdb

_VARIABLE = "PYTHONBREAKPOINT"
#: Values of the variable that stand for Python's own debugger.
_OWN = ("", "pdb.set_trace")

_debugger: RankDebugger | None = None


class RankDebugger:
    """The debugger of one rank.

    Args:
        pages: of all ranks.
        rank: this one.
    """

    def __init__(self, pages: Pages, rank: int) -> None:
        self._pages, self._rank = pages, rank
        self._process = os.getpid()
        self._console: Console | None = None
        self._pdb: RankPdb | None = None

    def stop_at(self, frame: FrameType, header: str | None) -> None:
        """Stop the program at a breakpoint.

        Raises:
            NoTerminal: no user could give a command.
        """
        from lockstep.debugger.prompt import RankPdb, line_of

        if self._pdb is not None and self._pdb.prompts:
            self._pdb.message(f"(passed over a breakpoint at {line_of(frame)}, in what you had evaluated)")
            return
        where = line_of(frame)
        console = self._find(where)
        if not console.take(where):
            raise NoTerminal(
                f"rank {self._rank} is at a breakpoint ({where}), and its terminal is gone: start the job again from "
                "another"
            )
        try:
            self._pdb = self._pdb or RankPdb(console, self._rank)
            if header is not None:
                print(header)
        finally:
            console.give_back(runs_on=True)
        self._pdb.set_trace(frame)  # (nothing may be called from here on: it would be traced)

    def over(self) -> None:
        """End stepping."""
        if self._pdb is not None and self._process == os.getpid():
            sys.settrace(None)
            if self._console is not None and not self._pdb.quitting:
                self._console.give_back(runs_on=False)

    def hold(self, error: BaseException) -> None:
        """Prompt in the frame of the error that ends this rank, if it is the first rank to fail.

        A rank that fails later still has its error to tell: a SIGTERM ends its wait for the terminal, not the rank.
        """
        from lockstep.debugger.prompt import RankPdb, line_of_error

        if self._process != os.getpid() or not self._pages.get(self._rank, Cell.LENDS):
            return
        given = self._console
        console = given if isinstance(given, LentTerminal) else LentTerminal(self._pages, self._rank)
        told_to_stop: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda signum, _: told_to_stop.append(signum))
        if console.take(line_of_error(error), failed=True, unless=lambda: told_to_stop):
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
            if told_to_stop:  # as it got the terminal
                os.kill(os.getpid(), signal.SIGTERM)
            RankPdb(console, self._rank).post_mortem(error)

    def note_quit(self, where: str) -> None:
        """Tell the launcher that the user has ended the job, unless that is done."""
        is_told = Debugging.of(self._pages.get(self._rank, Cell.DEBUGGER)) is Debugging.QUIT
        if not is_told and self._process == os.getpid():
            (self._console or OwnInput(self._pages, self._rank)).quits(where)

    @property
    def has_quit(self) -> bool:
        """Whether its user has given the command ``q``."""
        return self._pdb is not None and self._pdb.quitting

    def _find(self, where: str) -> Console:
        if self._process != os.getpid():
            raise NoTerminal(
                f"a process that rank {self._rank} started is at a breakpoint ({where}), and only the rank itself can "
                "have the terminal. For a DataLoader's worker set num_workers=0"
            )
        if self._console is None:
            if self._pages.get(self._rank, Cell.LENDS):
                self._console = LentTerminal(self._pages, self._rank)
            elif reads_nothing():
                raise NoTerminal(
                    f"rank {self._rank} is at a breakpoint ({where}), and there is no terminal for its debugger: the "
                    "standard input of the process that started the ranks is not one. Start the job from a terminal "
                    "(ssh -t, srun --pty, docker run -it), or set PYTHONBREAKPOINT=0 to skip all breakpoints"
                )
            else:
                self._console = OwnInput(self._pages, self._rank)
        return self._console


def install(pages: Pages, rank: int) -> None:
    """Have ``breakpoint()`` stop this rank, unless another debugger was put there before.

    Args:
        pages: of all ranks.
        rank: this one.
    """
    global _debugger
    _debugger = RankDebugger(pages, rank)
    given = os.environ.get(_VARIABLE, "")
    # One that is named already looks for its caller's frame, so no frame of ours may be in between.
    if sys.breakpointhook is sys.__breakpointhook__ and (given in (*_OWN, "0") or sys.flags.ignore_environment):
        sys.breakpointhook = _on_breakpoint


def _on_breakpoint(*args: Any, header: str | None = None, **more: Any) -> Any:
    named = "" if sys.flags.ignore_environment else os.environ.get(_VARIABLE, "")
    if named not in _OWN or args or more or _debugger is None:
        keywords = more if header is None else {**more, "header": header}
        return sys.__breakpointhook__(*args, **keywords)
    _debugger.stop_at(sys._getframe(1), header)
    return None


def over() -> None:
    """End stepping, since the program is over, and the code that follows is not the user's."""
    if _debugger is not None:
        _debugger.over()


def hold(error: BaseException) -> None:
    """Hold this rank in the frame of an error, for a user who looks at it; returns when that is done."""
    if _debugger is not None:
        _debugger.hold(error)


def quit_at(error: BaseException) -> str | None:
    """Return the line at which a user has ended the program by a debugger's ``q``, and make sure that the launcher
    knows.

    Returns:
        None: it ends by another error, or by a debugger of the program's own that had no terminal.
    """
    bdb = sys.modules.get("bdb")  # else no debugger was here
    if bdb is None or not isinstance(error, bdb.BdbQuit):
        return None
    if (_debugger is None or not _debugger.has_quit) and reads_nothing():
        return None
    from lockstep.debugger.prompt import line_of_error

    where = line_of_error(error)
    if _debugger is not None:
        _debugger.note_quit(where)
    return where
