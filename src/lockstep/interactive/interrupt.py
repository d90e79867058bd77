"""Interrupt the cell that a rank runs: after a step on which all ranks agree, or where it is.

Note [An interrupt]
~~~~~~~~~~~~~~~~~~~
Ranks that are interrupted wherever they are end their collectives, and one may have taken a step that another has not.
A training loop is interrupted between two steps instead: the ranks agree on one without a collective (Note [Agreeing on
a step] in job/stop.py), all raise KeyboardInterrupt from that optimizer's ``step()``, and hold the same model, the same
optimizer's state and a process group that works. Steps are counted from the cell's beginning, because ranks may have
taken different numbers before. The program that runs the cells (cell.py) falls back on the other way where no step
comes in time.

SIGINT itself asks for nothing here. A kernel that is interrupted sends it to its whole process group, ranks between
cells and loaders' workers included; only what the program asks for through its socket counts. The handler has then to
run in the main thread, whatever that waits in, and the signal is what makes it run.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lockstep.identity import Identity
from lockstep.job import flight
from lockstep.job.page import Cell
from lockstep.job.stop import Action, Agreement, PageBoard, comes_again


class CellInterrupts:
    """The interrupts of this rank's cells. Made in the main thread, which runs them."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        #: True while a cell runs; the number of the last cell.
        self._armed, self._number = False, 0
        #: The cell that is to be interrupted after a step, and the one where it is; 0: none is.
        self._after_step = self._at_once = 0
        #: True while an interrupt has to wait; True if one waits.
        self._is_held = self._waits = False
        self._steps = 0
        self._agreement: Agreement | None = None
        self._listen()
        flight.after_each_step(self._on_step)

    @contextmanager
    def during(self, number: int) -> Iterator[None]:
        """A context in which the cell of this number can be interrupted; KeyboardInterrupt may also come at its end."""
        pages, identity = flight.current.pages, Identity.from_environment()
        assert pages is not None, "a launcher has started this rank"
        board = PageBoard(pages, rank=identity.rank, cell=Cell.INTERRUPT)
        self._agreement = Agreement(board, world_size=identity.world_size, round_=number)
        self._steps, self._number = 0, number
        try:
            self._armed = True
            if self._at_once == number:  # it was asked for before the cell could begin
                raise KeyboardInterrupt
            yield
        finally:
            self._armed = False
            self._listen()  # again: the cell may have set a handler of its own

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which an interrupt waits, to come at its end: what is half done inside would be of no use."""
        if threading.get_ident() != self._thread or self._is_held:
            yield
            return
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._waits:
            self._waits = False
            raise KeyboardInterrupt

    def ask(self, number: int, *, at_once: bool) -> None:
        """Interrupt the cell of this number, if it is under way or still to come; called from another thread."""
        if at_once:
            self._at_once = number
            signal.pthread_kill(self._thread, signal.SIGINT)
        else:
            self._after_step = number

    def _listen(self) -> None:
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._armed and self._at_once == self._number and not comes_again(signum, frame):
            self._at_once = 0  # once for each time that it is asked for
            if not self._is_held:
                raise KeyboardInterrupt
            self._waits = True

    def _on_step(self) -> bool:
        """Act after an optimizer's step. Always returns False: the next one is to be told of, too."""
        if self._armed and self._agreement is not None:
            self._steps += 1
            wanted = Action.STOP if self._after_step == self._number else None
            if self._agreement.due(self._steps, wanted=wanted) is Action.STOP:
                raise KeyboardInterrupt
        return False
