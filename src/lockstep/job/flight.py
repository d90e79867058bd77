"""The rank's side of its page: say at every event what it is doing.

An event stores one number and reads no clock: whoever looks at the page keeps the time. What is written is meant for
the launcher and for people, and decides nothing in the rank. In a process that no launcher of ours started it goes to
memory that nobody reads, so callers need not ask.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from contextlib import ContextDecorator
from pathlib import Path
from threading import get_ident
from types import CodeType
from typing import Any

from lockstep import _torch
from lockstep.callsite import user_frame, user_frame_and_depth, words
from lockstep.job.files import JobFiles
from lockstep.job.page import ENTERED, EVENT, PAGE, STACK_SIGNAL, WAITS, Cell, Pages, Phase, Text, encode

_MARK, _STEPS = int(Cell.MARK), int(Cell.STEPS)
_OWN, _OPTIMIZER = int(Phase.OWN), int(Phase.OPTIMIZER)
_NAMED = ENTERED + 1
_KEPT = 15 * ENTERED
_getframe = sys._getframe


class Flight:
    """This process's page, as its owner writes it.

    Args:
        page: uint8 [PAGE], the memory.
        rank: whose page it is.
        pages: the pages of all ranks; None: this one is alone.
    """

    def __init__(self, page: memoryview, *, rank: int = 0, pages: Pages | None = None) -> None:
        self._page = page
        self._cells = page.cast("q")
        self.rank, self.pages = rank, pages
        #: The parts of the mark: events; phases; whether the rank waits.
        self._events = self._phases = self._waits = 0
        #: How many waits are within each other.
        self._depth = 0
        self._steps = 0
        #: Whether the optimizer's steps are counted.
        self.counts = False
        #: The code and instruction from which the optimizer took its last step, and how many callers away it was.
        self._stepped: tuple[CodeType | None, int] = (None, 0)
        self._away = 1

    @property
    def phase(self) -> Phase:
        """The phase under way."""
        return Phase(self._phases % ENTERED)

    def enter(self, phase: int) -> None:
        """A phase begins, and with it ends the one before."""
        self._phases = phases = phase * _NAMED
        self._events = events = self._events + EVENT
        self._cells[_MARK] = events + phases + self._waits

    def resume(self, phase: int) -> None:
        """Back in a phase: what was inside it is over."""
        self._phases = phases = (self._phases & _KEPT) + phase
        self._events = events = self._events + EVENT
        self._cells[_MARK] = events + phases + self._waits

    def count(self) -> None:
        """From now on :meth:`took_step` is called behind every optimizer step of this process."""
        self.counts = True
        self._cells[_STEPS] = self._steps + 1

    def took_step(self, *_: object) -> None:
        """An optimizer took a step; also as a hook of torch's."""
        self._steps = steps = self._steps + 1
        self._cells[_STEPS] = steps + 1
        self._note_line()
        self.resume(_OWN)

    def at_step(self, step: int) -> None:
        """The whole run is at ``step``, by the count of a Checkpointer."""
        self._cells[Cell.RUN_STEPS] = step + 1

    def listens(self, listening: bool) -> None:
        """Whether this rank saves and leaves by itself when asked to stop."""
        self._cells[Cell.LISTENS] = int(listening)

    def begin_wait(self, what: str) -> None:
        """From now on this rank sleeps until others come, in ``what``."""
        if get_ident() in _background:
            return
        self._depth += 1
        self._waits = WAITS  # (a backend knows more of a wait than who called it: the innermost tells)
        frame = user_frame(_getframe(1))
        at = "" if frame is None or " at " in what else f" at {words(frame.f_code, frame.f_lineno)}"
        encode(self._page, Text.WAITS_IN, what + at)
        self._tell()

    def end_wait(self, *, failed: bool = False) -> None:
        """The others have come; or the wait has ``failed``, and the page goes on telling of it until the rank does
        something else."""
        if get_ident() in _background:
            return
        self._depth -= 1
        if self._depth == 0:
            self._waits = 0
            if not failed:
                self._tell()

    def expect(self, reason: str) -> None:
        """Why this rank expects to be slow; empty if it does not."""
        encode(self._page, Text.REASON, reason)

    def leave(self) -> None:
        """The program is over."""
        self.enter(Phase.LEAVING)

    def _tell(self) -> None:
        self._events += EVENT
        self._cells[_MARK] = self._events + self._phases + self._waits

    def _note_line(self) -> None:
        """Nearly always it is the line of the step before: then no frame between needs to be looked at."""
        try:
            frame = _getframe(self._away)
        except ValueError:  # the stack is not that deep today
            frame = _getframe(1)
        if (frame.f_code, frame.f_lasti) == self._stepped:
            return
        found, away = user_frame_and_depth(_getframe(1))
        if found is not None:
            self._away, self._stepped = 1 + away, (found.f_code, found.f_lasti)
            encode(self._page, Text.STEPPED_AT, words(found.f_code, found.f_lineno))


#: This process's page, or one that nobody reads: cheaper than to ask at every event.
current = Flight(memoryview(bytearray(PAGE)))
#: Threads that wait for others in the background, while the rank goes on.
_background: set[int] = set()


def take(folder: str | Path, *, rank: int, world_size: int) -> Flight:
    """Make this process the writer of its rank's page; from now on STACK_SIGNAL asks it for its Python stacks."""
    pages = Pages(folder, world_size)
    stack = os.open(JobFiles(folder).stack(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    return use(Flight(pages.page(rank), rank=rank, pages=pages))


def use(flight: Flight) -> Flight:
    """Make this the process's page."""
    global current
    current = flight
    return flight


def _leave_to_the_parent() -> None:
    """A forked child (a DataLoader's worker) has its parent's memory and is no rank."""
    use(Flight(memoryview(bytearray(PAGE))))
    _background.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def in_background() -> None:
    """What this thread waits for holds up nothing: leave it out of the page."""
    _background.add(get_ident())


class waiting:  # (used as a verb, like contextlib.suppress)
    """A context: this rank waits for others in ``what``."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        current.begin_wait(self._what)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        current.end_wait(failed=kind is not None)


class phase(ContextDecorator):
    """A context or a decorator: this rank is in ``which``, and then back where it was."""

    def __init__(self, which: Phase) -> None:
        self._which = which
        self._before = Phase.OWN

    def __enter__(self) -> None:
        self._before = current.phase
        current.enter(self._which)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else the page goes on telling where it failed
            current.resume(self._before)


#: The reasons of expect_slow that are in force, the innermost last.
_reasons: list[str] = []


class expect_slow(ContextDecorator):  # (used as a verb, like contextlib.suppress)
    """Say that this rank may keep the others waiting in here: ``with lockstep.expect_slow("evaluation"):``

    ``lockstep run`` reports a rank that has held up the others for a while (see the guide, "A rank that is late").
    In here it reports nothing of this rank, however long it takes, unless the rank is stopped or dead-locked. The time
    limit of the collective that the others wait in holds all the same: ``lockstep.init(timeout=…)``. Also a decorator
    of functions.

    Args:
        reason: what takes long, for people.

    Raises:
        TypeError: ``reason`` is not a text.
        ValueError: ``reason`` is empty.
    """

    def __init__(self, reason: str) -> None:
        if not isinstance(reason, str):
            raise TypeError(f"expect_slow takes a reason in words, not {type(reason).__name__}")
        if not reason.strip():
            raise ValueError('expect_slow takes a reason in words, e.g. expect_slow("evaluation")')
        self._reason = reason

    def __enter__(self) -> None:
        _reasons.append(self._reason)
        current.expect(_reasons[-1])

    def __exit__(self, *_: object) -> None:
        _reasons.pop()
        current.expect(_reasons[-1] if _reasons else "")


#: Whether this process's optimizers are watched, and torch.compile.
_watches_optimizers = _watches_compiler = False


def watch_optimizers(optimizers: Any) -> None:
    """Count every optimizer's steps from now on, and have them in this process's page. A second call does nothing.

    torch is not imported here: it is handed over, or found where the program has imported it.

    Args:
        optimizers: the module ``torch.optim.optimizer``.
    """
    global _watches_optimizers
    current.count()
    if not _watches_optimizers:
        _watches_optimizers = True
        optimizers.register_optimizer_step_pre_hook(lambda *_: current.enter(_OPTIMIZER))
        optimizers.register_optimizer_step_post_hook(_after_step)


def _after_step(*_: object) -> None:
    current.took_step()
    if not _watches_compiler:
        _watch_compiler()


def _watch_compiler() -> None:
    """Behind the first step, because an optimizer has imported the compiler by then; until then a rank has a minute."""
    global _watches_compiler
    _watches_compiler = True
    callback = _torch.compile_callbacks()
    if callback is None:
        return
    compiling = phase(Phase.COMPILE)
    callback.on_compile_start(lambda *_: compiling.__enter__())
    callback.on_compile_end(lambda *_: compiling.__exit__(None))
