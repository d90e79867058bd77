"""Python's debugger on one rank of several."""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from lockstep import callsite, knobs, tracebacks
from lockstep.debugger.terminal import Console
from lockstep.errors import NoTerminal
from lockstep.job.page import Debugging

#: Modules that are never stepped into (to stop where a stream is written to would write to it again), and those into
#: which only a user steps who wants to see all frames.
_OURS, _LIBRARY = ("lockstep.debugger.*", "lockstep.launch.*", "lockstep.job.*"), ("lockstep.*",)
#: The prefixes of modules whose frames are below every program.
_RUNNERS = "lockstep.launch."
#: Python's own modules in which a ``q`` ends.
_DEBUGGERS = ("bdb", "pdb")


class RankPdb(pdb.Pdb):
    """Python's debugger, which prompts where and when its console lets it, and says on which rank.

    To be made while the console is taken: readline asks the terminal for its size when it is imported.

    Args:
        console: where it prompts.
        rank: this one.
    """

    def __init__(self, console: Console, rank: int) -> None:
        skipped = _OURS if knobs.full_traceback() else _LIBRARY
        super().__init__(skip=skipped, nosigint=True)  # after c, a Ctrl-C is the job's
        self.prompt = f"(Pdb, rank {rank}) "
        self._console = console
        #: True while it has the console.
        self.prompts = False
        self._dies = False

    def post_mortem(self, error: BaseException) -> None:
        """Show where an error came from, and prompt in its innermost frame; the console is taken."""
        self._dies = True
        self.reset()
        with self._given(line_of_error(error)):
            self.message(tracebacks.text(error))
            self.interaction(None, error if sys.version_info >= (3, 13) else error.__traceback__)

    # pdb's own methods, each called where it stops -------------------------------------------------------------------

    def user_call(self, frame: FrameType, argument_list: Any) -> None:
        if self.stop_here(frame):
            with self._taken(frame):
                super().user_call(frame, argument_list)

    def user_line(self, frame: FrameType) -> None:
        with self._taken(frame):
            super().user_line(frame)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        with self._taken(frame):
            super().user_return(frame, return_value)

    def user_exception(self, frame: FrameType, exc_info: Any) -> None:
        with self._taken(frame):
            super().user_exception(frame, exc_info)

    def interaction(self, frame: FrameType | None, *args: Any) -> None:
        with contextlib.nullcontext() if frame is None else self._taken(frame):
            super().interaction(frame, *args)

    def precmd(self, line: str) -> str:
        self._console.says(Debugging.EVALUATES)
        return super().precmd(line)

    def postcmd(self, stop: bool, line: str) -> bool:
        if not stop:
            self._console.says(Debugging.PROMPTS)
        return super().postcmd(stop, line)

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the frames of the program, without the launcher's below it, and the place of the present one."""
        stack, place = super().get_stack(f, t)
        ours = [i for i, (frame, _) in enumerate(stack) if str(frame.f_globals.get("__name__")).startswith(_RUNNERS)]
        first = ours[-1] + 1 if ours and ours[-1] < place else 0
        return stack[first:], place - first

    @contextlib.contextmanager
    def _taken(self, frame: FrameType) -> Iterator[None]:
        if self.prompts:
            yield
        elif not self._console.take(where := line_of(frame)):
            raise NoTerminal(f"a debugger stops at {where}, and its terminal is gone: start the job again from another")
        else:
            with self._given(where):
                yield

    @contextlib.contextmanager
    def _given(self, where: str) -> Iterator[None]:
        """Use the console, which is taken, and give it back.

        Args:
            where: the line at which the program is.
        """
        before, self.prompts = (self.stdin, self.stdout), True
        self.stdin, self.stdout = sys.stdin, sys.stdout
        try:
            yield
        finally:
            self.stdin, self.stdout = before
            self.prompts = False
            goes_on = self.stoplineno == -1  # what set_continue() leaves there
            self._console.give_back(runs_on=not (self._dies or self.quitting or goes_on))
            if self.quitting and not self._dies:
                self._console.quits(where)


def line_of(frame: FrameType, line: int | None = None) -> str:
    """Return a line in words, short enough for a page: ``train.py:12 in step``."""
    file = os.path.basename(frame.f_code.co_filename)
    return f"{file}:{frame.f_lineno if line is None else line} in {frame.f_code.co_name}"


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user's program from which an error came; empty: it came from none."""
    found, tb = "", error.__traceback__
    while tb is not None:
        frame = tb.tb_frame
        if not callsite.is_library(frame.f_code.co_filename) and frame.f_globals.get("__name__") not in _DEBUGGERS:
            found = line_of(frame, tb.tb_lineno)
        tb = tb.tb_next
    return found
