"""Signals as requests, and the step at which the ranks do together what was asked for: save, or save and leave.

Note [Agreeing on a step]
~~~~~~~~~~~~~~~~~~~~~~~~~
A boundary is the moment between two steps. The first time a rank with a request in hand is at a boundary with s
optimizer steps done, it proposes s + 2 where all ranks can read it. At each boundary every rank reads all proposals;
the ranks act at the first boundary at which their own count of steps is at least the smallest number proposed.

They act at the same boundary, because the all-reduce of the gradients keeps them within one step of each other: the
rank X that proposes at s takes part in the reduction of step s + 1 only afterwards, so whoever has finished step
s + 1 can read the proposal, and nobody has done more than that when it is written. Nobody, therefore, has passed a
boundary with s + 2 steps without having seen it. Two proposals differ only if neither writer could see the other's,
that is, if both were written before either rank contributed to the next step; then both are there for everyone in time,
and the smallest counts. (One step would do for ranks that reduce in every step; the second is for those that count a
step which they did not reduce in, such as the second of two optimizers.)

An agreement on saving is followed by the next round, whose number all ranks know, for they have all saved as often.
Saving is collective, so nobody writes a proposal of the next round over that of this one before all have acted.
A rank that sees any proposal drops a request for the same action: it is what it would have asked for.

A world of one acts at this very boundary.

Ranks that train apart between rounds count rounds instead of steps, with a lead of their own: Note [Rounds and
agreements] in ``step/local_training.py``.
"""

from __future__ import annotations

import _thread
import atexit
import enum
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import current_process, popen_fork, util
from types import FrameType
from typing import Any, Protocol

from lockstep import knobs
from lockstep.callsite import frame_of
from lockstep.errors import PeerLost
from lockstep.job import flight, terminal
from lockstep.job.files import JobFiles
from lockstep.job.page import Cell, Pages
from lockstep.job.stop_signals import one_request

#: Steps between a request and the act.
LEAD = 2
_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SAVE = signal.SIGUSR1
#: Seconds until a signal is sent again.
_MOMENT = 0.001
#: The code in which multiprocessing forks a worker.
_LAUNCH = popen_fork.Popen._launch.__code__  # type: ignore[attr-defined]  # (private)
#: The signals that a terminal sends to all processes that it controls.
_FROM_THE_TERMINAL = (signal.SIGINT, signal.SIGHUP)


class Action(enum.IntEnum):
    """What the ranks do together at a step; at the same step, the first goes before the others."""

    STOP = 0
    SAVE = 1


@dataclass(frozen=True, order=True)
class Proposal:
    """Do ``action`` at the first boundary with at least ``step`` optimizer steps done."""

    step: int
    action: Action


class Board(Protocol):
    """Proposals by round, the first round being 1. Ranks read the same smallest proposal once all have been written."""

    def propose(self, round_: int, proposal: Proposal) -> None:
        """Write this rank's proposal, once a round."""

    def smallest(self, round_: int) -> Proposal | None:
        """Return the smallest proposal of the round so far."""


class PageBoard:
    """The board on one host: a number in each rank's page; see Note [One writer a page]. Reading takes a few hundred
    nanoseconds."""

    _STEPS = 1 << 40
    _ACTIONS = len(Action)

    def __init__(self, pages: Pages, *, rank: int, cell: Cell = Cell.PROPOSAL) -> None:
        self._pages = pages
        self._rank = rank
        self._cell = cell

    def propose(self, round_: int, proposal: Proposal) -> None:
        """See :class:`Board`."""
        number = (round_ * self._STEPS + proposal.step) * self._ACTIONS + proposal.action
        self._pages.set(self._rank, self._cell, number)

    def smallest(self, round_: int) -> Proposal | None:
        """See :class:`Board`."""
        first, last = (number * self._STEPS * self._ACTIONS for number in (round_, round_ + 1))
        numbers = [number for number in self._pages.all(self._cell) if first <= number < last]
        if not numbers:
            return None
        number = min(numbers)
        return Proposal(step=number // self._ACTIONS % self._STEPS, action=Action(number % self._ACTIONS))


class KeyValueStore(Protocol):
    """The methods that are needed of a process group's store."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...


class StoreBoard:
    """The board on several hosts, or under another launcher: a key of the process group's store, looked up once a step.
    The first proposal of a round is the only one."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        #: The round that was looked at last; its key, which is asked for in each step.
        self._looked_at, self._keys = 0, [""]

    def propose(self, round_: int, proposal: Proposal) -> None:
        """See :class:`Board`."""
        try:
            self._store.compare_set(self._key(round_), "", f"{proposal.step} {proposal.action:d}")
        except RuntimeError as error:
            raise _is_gone(error) from error

    def smallest(self, round_: int) -> Proposal | None:
        """See :class:`Board`."""
        if round_ != self._looked_at:
            self._looked_at, self._keys = round_, [self._key(round_)]
        try:
            if not self._store.check(self._keys):
                return None
            step, action = self._store.get(*self._keys).decode().split()
        except RuntimeError as error:
            raise _is_gone(error) from error
        return Proposal(step=int(step), action=Action(int(action)))

    @staticmethod
    def _key(round_: int) -> str:
        return f"lockstep/agreement/{round_}"


def _is_gone(error: RuntimeError) -> PeerLost:
    """Return the error to raise where a store does not answer."""
    return PeerLost(
        f"rank {flight.current.rank}: the store that the ranks met at is gone, most likely with the machine, the "
        f"launcher or the rank that served it: look there for the cause. torch says: {error}"
    )


class Agreement:
    """One rank's view of what the ranks are going to do. See Note [Agreeing on a step]."""

    def __init__(self, board: Board, *, world_size: int, lead: int | None = None, round_: int = 1) -> None:
        """Begin with a round, the first one unless ``round_`` says otherwise.

        Args:
            lead: by how much the count at a boundary must grow between a proposal and the act; None: as it must where
                ranks reduce in every step.
        """
        self._board = board
        if lead is None:
            lead = LEAD if world_size > 1 else 0
        self._lead = lead
        self._round = round_

    def due(self, step: int, *, wanted: Action | None) -> Action | None:
        """Return what to do at this boundary, if anything; the same on all ranks.

        Args:
            step: optimizer steps that this rank has done, or whatever else the ranks count alike.
            wanted: what this rank was asked for.
        """
        proposal = self._board.smallest(self._round)
        if proposal is None and wanted is not None:
            self._board.propose(self._round, Proposal(step + self._lead, wanted))
            proposal = self._board.smallest(self._round)
        if proposal is None or step < proposal.step:
            return None
        self._round += 1
        return proposal.action

    def ask(self, step: int, *, wanted: Action | None) -> Action | None:
        """Propose what this rank wants, unless something is proposed already, and return what is. Nothing is done here.

        Args:
            step, wanted: as for :meth:`due`.
        """
        if wanted is not None and self.pending() is None:
            self._board.propose(self._round, Proposal(step + self._lead, wanted))
        return self.pending()

    def pending(self) -> Action | None:
        """Return what has been proposed and is not done yet."""
        proposal = self._board.smallest(self._round)
        return None if proposal is None else proposal.action


def interrupt_once(signum: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once: a Ctrl-C can come twice, from the terminal and passed on, or from ``timeout``.

    The second would hit the clean-up that the first one started. (SIG_IGN would be inherited by programs started from
    here on; a function is not.)
    """
    if comes_again(signum, frame):
        return
    signal.signal(signal.SIGINT, lambda _signum, _frame: None)
    raise KeyboardInterrupt


def comes_again(signum: int, frame: FrameType | None) -> bool:
    """Return True if what a signal's handler raises would be lost where it was called; the signal then comes again.

    That is where lockstep notes a garbage collection. While modules are imported this is often the first Python code
    that runs after a signal, since compiled code collects as well.

    Args:
        signum, frame: the handler's arguments.
    """
    if not flight.is_noting_collection(frame):
        return False
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        time.sleep(_MOMENT)  # until the collection is over; if it is not, this is done again
        signal.pthread_kill(main, signum)

    # Not by a Thread: the collection may have begun where the module threading holds its lock.
    _thread.start_new_thread(send, ())
    return True


class Requests:
    """The requests that signals have made of this process since :meth:`listen`.

    SIGTERM, SIGINT and SIGHUP (the terminal has gone) ask it to save and leave, SIGUSR1 to save. Signals that the
    program handles itself, or that are ignored (nohup, a shell's ``&``), are left alone; but SIGUSR1 is a request also
    where it is ignored, which it is from :meth:`close` on: one that was sent a moment earlier must not end the process.
    """

    def __init__(self) -> None:
        #: The signal that asked to leave, or None.
        self.stop: signal.Signals | None = None
        self.save = False
        #: True while signals are requests.
        self.listening = False
        #: True while the request to leave is being carried out.
        self.leaving = False
        #: Leaves the run, which has been saved from the side; None: it has not been.
        self.saved: Callable[[], None] | None = None
        #: When the last signal that asks to leave came, on the monotonic clock.
        self._last_stop = 0.0
        #: Signals that the thread has noticed before their handlers were called, and the other way round: each comes to
        #: both, in either order, and is one request.
        self._noticed: set[int] = set()
        self._called: set[int] = set()
        #: True if this was closed where no handlers can be set.
        self._is_closed = False
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    @property
    def wanted(self) -> Action | None:
        """The most urgent request."""
        if self.stop is not None:
            return Action.STOP
        return Action.SAVE if self.save else None

    def listen(self) -> None:
        """Take signals as requests from now on. Does nothing outside the main thread, which alone can set handlers."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        terminal.outlive()  # a line may find out that it has gone before SIGHUP comes: Note [A dead terminal]
        self._noticed.clear()
        self._called.clear()
        for signum in (*_STOP, _SAVE):
            owner = _owner(signum)
            if owner is not None and owner._is_closed:
                owner.close()
            before = signal.getsignal(signum)
            is_ignored = signum == _SAVE and before == signal.SIG_IGN
            if is_ignored or before in (signal.SIG_DFL, signal.default_int_handler, interrupt_once):
                self._before[signum] = signal.SIG_IGN if signum == _SAVE else before
                signal.signal(signum, self._on_signal)
        # Not documented, but what multiprocessing's own modules and torch use to act in a forked worker.
        util.register_after_fork(self, _spare_daemons)
        atexit.unregister(_ignore_saves)
        atexit.register(_ignore_saves)
        self._tell_launcher()

    def noticed(self, signum: int) -> None:
        """Take a signal for a request although the main thread, in compiled code, has not called its handler yet.

        One whose handler the program has replaced meanwhile is none.
        """
        if signum not in self._before or signal.getsignal(signum) != self._on_signal or self._of_a_failed_job():
            return
        if signum in self._called:
            self._called.discard(signum)
            return
        if signum == _SAVE:
            self._noticed.add(signum)
            self.save = True
            return
        if signum == signal.SIGHUP:
            terminal.let_go()
        if self.stop is None:
            self._noticed.add(signum)
            self._asks_to_leave(signal.Signals(signum))

    def tell_main(self) -> bool:
        """Make the main thread call :attr:`saved` where it is. Return False if none of its signals is ours any more."""
        ours = [signum for signum in self._before if signal.getsignal(signum) == self._on_signal]
        main = threading.main_thread().ident
        if not ours or main is None:
            return False
        signal.pthread_kill(main, ours[0])
        return True

    def leave(self) -> None:
        """Note that leaving has begun: further signals are ignored, also once the interpreter has no handlers left."""
        self.leaving = True
        if threading.current_thread() is threading.main_thread():
            for signum in self._before:
                signal.signal(signum, signal.SIG_IGN)

    def close(self) -> None:
        """Restore the earlier signal handlers, but ignore SIGUSR1."""
        if not self._before or self.leaving or self._process != os.getpid():
            return
        if threading.current_thread() is not threading.main_thread():
            # A finalizer calls this, and only the main thread may change what signals do: it does at the next one.
            self._is_closed = True
            return
        self._is_closed = False
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._on_signal:  # otherwise the program has set its own handler meanwhile
                signal.signal(signum, before)
        self._before.clear()
        self._tell_launcher()

    def _tell_launcher(self) -> None:
        self.listening = bool(self._before)
        flight.current.listens(any(signum in self._before for signum in _STOP))

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child has this function too, and none of the steps
            if signum not in _FROM_THE_TERMINAL or not _becomes_daemon(frame):
                _as_by_default(signum, frame)
        elif self._is_closed:
            self.close()
            os.kill(self._process, signum)
        elif self.saved is not None:
            self.saved()
        elif signum == _SAVE:
            self.save = self._is_new(signum) or self.save
        else:
            self._on_stop(signal.Signals(signum), frame)

    def _on_stop(self, signum: signal.Signals, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            terminal.let_go()
        if self._of_a_failed_job():
            _as_by_default(signum, frame)
        elif self._is_new(signum) and not self._asks_to_leave(signum) and knobs.job_dir() is None:
            _as_by_default(signum, frame)  # a second request, which under a launcher is for that to carry out

    def _asks_to_leave(self, signum: signal.Signals) -> bool:
        """Note a request to leave. Return False if it is a second one."""
        now = time.monotonic()
        after, self._last_stop = now - self._last_stop, now
        one = signum if self.stop is None else one_request(self.stop, signum, after=after)
        self.stop = one or self.stop
        return one is not None

    def _is_new(self, signum: int) -> bool:
        """Return whether the thread has not noticed a signal before its handler is called."""
        if signum in self._noticed:
            self._noticed.discard(signum)
            return False
        self._called.add(signum)
        return True

    def _of_a_failed_job(self) -> bool:
        folder = knobs.job_dir()
        return folder is not None and JobFiles(folder).has_failed


def _owner(signum: int) -> Requests | None:
    """Return those who take a signal for a request to this process; None: nobody does."""
    owner = getattr(signal.getsignal(signum), "__self__", None)
    return owner if isinstance(owner, Requests) else None


def _ignore_saves() -> None:
    """Ignore SIGUSR1 where it is still a request as the program ends: Python resets all handlers next, and one that
    was sent a moment earlier must not end a process that has done its work."""
    if _owner(_SAVE) is not None:
        signal.signal(_SAVE, signal.SIG_IGN)


def _as_by_default(signum: int, frame: FrameType | None) -> None:
    if signum == signal.SIGINT:
        interrupt_once(signum, frame)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _spare_daemons(requests: Requests) -> None:
    """Ignore the signals that a terminal sends to all (SIGINT, SIGHUP) in a worker that multiprocessing forked: its
    rank still needs it."""
    if requests.listening and current_process().daemon:
        for signum in _FROM_THE_TERMINAL:
            signal.signal(signum, signal.SIG_IGN)


def _becomes_daemon(frame: FrameType | None) -> bool:
    """Return whether multiprocessing has just forked this process, and is about to make it a daemon."""
    launching = frame_of(_LAUNCH, frame)
    return launching is not None and bool(launching.f_locals["process_obj"].daemon)


@contextmanager
def spared() -> Iterator[None]:
    """Keep the signals that a terminal sends to all from processes that are started in this context, if they are
    requests to this process, which gets them afterwards."""
    asked_by = [signum for signum in _FROM_THE_TERMINAL if _owner(signum) is not None]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, asked_by)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
