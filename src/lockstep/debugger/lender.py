"""Lend the terminal to one rank after the other, each while it is in a debugger; the launcher's side.

Note [A turn at the terminal]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank at a breakpoint writes into its page what it wants (``DEBUGGER``: a state, and the number of its request), and
waits until the launcher has written the same number beside it (``GRANTED``; minus the number: it gets none). The
launcher looks there as often as at the ranks' marks. It grants one request at a time, in the order in which they came,
after it has said who is at a breakpoint and where.

The rank gets the terminal itself, not a copy that the launcher would pass on: it leaves the job's process group for one
of its own and makes that the foreground group. So everything works as for any program: keys, history, the window's
size, and a Ctrl-C that reaches this rank and no other. Nothing has to be put back if the launcher is killed; a shell
takes its terminal back when its job ends. Had all ranks stayed in one group, a Ctrl-C at the prompt would have ended
the job.

While a rank runs on to its next line (``n``) it keeps its turn, unless another rank asks for the terminal and the
first does not prompt again soon: it may be in a collective to which the other has to come. For each prompt a rank asks
anew, so that a turn can be taken away at any moment in between.

A rank that dies at its prompt leaves a terminal whose foreground group is gone, without echo. The launcher notes the
terminal's modes before it lends it, and puts them and its own group back. Ctrl-Z is off meanwhile: it would stop the
rank alone, and the shell, which waits for the launcher, would not hear of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from collections.abc import Iterator
from typing import Any

from lockstep.job.page import REQUEST, Cell, Debugging, Pages

#: Seconds that a rank which runs on to its next prompt keeps the terminal when another asks for it.
_SWITCH = 0.3
#: The states in which a rank asks.
_ASKING = (Debugging.ASKS, Debugging.FAILED)
#: The states of a rank that has what it asked for, or that needs not ask.
_AT_WORK = (Debugging.PROMPTS, Debugging.EVALUATES)
#: The place of the special characters among a terminal's attributes.
_CHARACTERS = 6


def find_terminal() -> int | None:
    """Return this process's standard input if it is the terminal of its session, which can be lent; None: it is not."""
    try:
        os.tcgetpgrp(0)
    except OSError:
        return None
    return 0


@contextlib.contextmanager
def from_the_background() -> Iterator[None]:
    """Let this thread change the terminal although it is not in the foreground group."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Lender:
    """Lends the terminal to ranks of this machine. See Note [A turn at the terminal].

    Args:
        pages: of all ranks of the job.
        ranks: those of this machine.
        terminal: its descriptor; None: there is none, and requests are refused.
    """

    def __init__(self, pages: Pages, ranks: range, *, terminal: int | None) -> None:
        self._pages, self._ranks, self._terminal = pages, ranks, terminal
        self._seen = [0] * pages.count
        #: Ranks that ask, the first to ask first.
        self._asking: dict[int, Debugging] = {}
        #: The rank that has its turn, and the time since which it runs on; None: none has, it does not.
        self._holder: int | None = None
        self._runs_since: float | None = None
        #: The rank whose turn is next, once the user has been told; None: none's.
        self._next: int | None = None
        #: The first rank that an error would have ended, and whether its user has seen enough.
        self._failed: int | None = None
        self._failed_is_over = False
        #: Ranks and lines that the user has been told of.
        self._told: set[tuple[int, str, bool]] = set()
        #: The rank at which a user has ended the job, and its line; None: no user has.
        self.quit_by: tuple[int, str] | None = None
        #: The terminal's modes before it was lent; None: it is not lent.
        self._modes: list[Any] | None = None
        for rank in ranks:
            pages.set(rank, Cell.LENDS, int(terminal is not None))

    @property
    def prompting(self) -> bool:
        """Whether a rank waits for a command on the terminal, which a message would garble."""
        return self._holder is not None and self._state(self._holder) in (*_ASKING, Debugging.PROMPTS)

    def is_due(self, now: float) -> bool:
        """Return whether :meth:`look` has something to do; takes a microsecond."""
        return self._pages.all(Cell.DEBUGGER) != self._seen or self._is_to_switch(now)

    def look(self, now: float) -> list[str]:
        """See what the ranks want, and return what to tell the user before :meth:`lend`."""
        numbers = self._pages.all(Cell.DEBUGGER)
        changed = [rank for rank, number in enumerate(numbers) if number != self._seen[rank]]
        self._seen = numbers
        said: list[str] = []
        for rank in changed:
            state = Debugging.of(numbers[rank])
            if rank not in self._ranks or (state in _AT_WORK and rank != self._holder):
                said += self._tell(rank, state)
            elif state in _ASKING:
                self._asking[rank] = state
            else:
                self._asking.pop(rank, None)
            if state is Debugging.QUIT and rank in self._ranks and self.quit_by is None:
                self.quit_by = rank, self._pages.look(rank).debugged_at
            if rank == self._failed and state is Debugging.NONE:
                self._failed_is_over = True
        self._see_holder(now)
        self._refuse()
        if self._holder is None:
            self._next = next((rank for rank, state in self._asking.items() if self._may_ask(rank, state)), None)
            if self._next is not None:
                said += self._tell(self._next, self._asking[self._next])
            elif self._modes is not None and not any(numbers[self._ranks.start : self._ranks.stop]):
                self._restore()
        return said

    def lend(self) -> None:
        """Give the rank its turn that :meth:`look` has found, if it has found one, and let those leave that have quit.

        A job in the background is stopped by that, as by any use of the terminal, until it is brought to the front.
        """
        for each in self._ranks:
            if Debugging.of(self._seen[each]) is Debugging.QUIT:
                self._pages.set(each, Cell.GRANTED, -self._request(each))
        rank, self._next = self._next, None
        if rank is None:
            return
        if self._modes is None and not self._note_modes():
            self._answer(rank, -1)
            return
        if self._asking[rank] is Debugging.FAILED:
            self._failed = rank
        self._holder = rank
        self._answer(rank, 1)

    def ended(self, rank: int, pid: int | None) -> None:
        """Take the terminal back from a rank that has ended, whatever it was doing.

        Args:
            rank: the rank that asked.
            pid: the process that it was.
        """
        self._pages.set(rank, Cell.DEBUGGER, 0)
        if self._modes is not None and pid is not None:
            with contextlib.suppress(OSError), from_the_background():  # (the terminal may be gone as well)
                if os.tcgetpgrp(0) == pid:
                    os.tcsetpgrp(0, os.getpgrp())

    def give_again(self, pid: int | None) -> None:
        """Give the terminal to the rank that has its turn once more, if the shell has given it to the job meanwhile.

        The job was stopped, and brought to the front; the rank may have stopped as it read from the background.

        Args:
            pid: the process of the rank that has its turn.
        """
        holder = self._holder
        if pid is None or holder is None or self._state(holder) not in _AT_WORK:
            return
        with contextlib.suppress(OSError):  # (the terminal may be gone, or the rank)
            if os.tcgetpgrp(0) == os.getpgrp():
                os.tcsetpgrp(0, pid)
                if os.getpgid(pid) != pid:  # it has left its group, too soon to see that the terminal is there again
                    with from_the_background():
                        os.tcsetpgrp(0, os.getpgrp())
                os.kill(pid, signal.SIGCONT)

    @property
    def holder(self) -> int | None:
        """The rank that has its turn."""
        return self._holder

    def close(self) -> None:
        """Take the terminal back from whoever has it."""
        if self._modes is not None:
            with contextlib.suppress(OSError), from_the_background():  # (it may be gone)
                os.tcsetpgrp(0, os.getpgrp())
            self._restore()

    def _state(self, rank: int) -> Debugging:
        return Debugging.of(self._pages.get(rank, Cell.DEBUGGER))

    def _see_holder(self, now: float) -> None:
        """End the holder's turn where it is over, or go on with it."""
        if self._holder is None:
            return
        state = Debugging.of(self._seen[self._holder])
        if state is not Debugging.RUNS:
            self._runs_since = None
        elif self._runs_since is None:
            self._runs_since = now
        asks = state in _ASKING and self._pages.get(self._holder, Cell.GRANTED) != self._request(self._holder)
        if state in (Debugging.NONE, Debugging.QUIT) or self._is_to_switch(now) or (asks and state is Debugging.FAILED):
            self._holder, self._runs_since = None, None
        elif asks:
            self._answer(self._holder, 1)

    def _is_to_switch(self, now: float) -> bool:
        runs, others = self._runs_since, self._asking.keys() - {self._holder}
        return runs is not None and bool(others) and now - runs >= _SWITCH

    def _may_ask(self, rank: int, state: Debugging) -> bool:
        return state is not Debugging.FAILED or self._failed in (None, rank)

    def _refuse(self) -> None:
        """Let ranks go whose error is not the first, once the first has been looked at."""
        if self._failed_is_over:
            for rank in [rank for rank, state in self._asking.items() if state is Debugging.FAILED]:
                self._answer(rank, -1)

    def _request(self, rank: int) -> int:
        return self._seen[rank] // REQUEST

    def _answer(self, rank: int, sign: int) -> None:
        del self._asking[rank]
        self._pages.set(rank, Cell.GRANTED, sign * self._request(rank))

    def _tell(self, rank: int, state: Debugging) -> list[str]:
        where = self._pages.look(rank).debugged_at
        about = rank, where, state is Debugging.FAILED
        if state in (Debugging.NONE, Debugging.QUIT) or about in self._told:
            return []
        self._told.add(about)
        if state is Debugging.FAILED:
            return [f"rank {rank} has failed ({where}) and is held there for you; q ends the job as without --pdb"]
        elsewhere = "" if rank in self._ranks else ", on another machine"
        return [f"rank {rank} is at a breakpoint ({where}){elsewhere}; the others wait. c continues, q ends the job"]

    def _note_modes(self) -> bool:
        """Note the terminal's modes, and turn Ctrl-Z off. Return False if the job can't be brought to the front."""
        assert self._terminal is not None, "a rank asks only if there is one"
        try:
            modes = termios.tcgetattr(self._terminal)
            without = [*modes]
            without[_CHARACTERS] = [*modes[_CHARACTERS]]
            without[_CHARACTERS][termios.VSUSP] = b"\0"
            termios.tcsetattr(self._terminal, termios.TCSANOW, without)
        except termios.error:  # its shell is gone, or the terminal itself
            return False
        self._modes = modes
        return True

    def _restore(self) -> None:
        """Give the terminal the modes that it had."""
        assert self._modes is not None, "it was lent"
        assert self._terminal is not None, "there is one"
        with contextlib.suppress(termios.error), from_the_background():  # (it may be gone)
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._modes)
        self._modes = None
