"""Ranks that stay alive between cells: the class on which ``%%ranks`` is built, for programs without IPython."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar

from lockstep.errors import LaunchError
from lockstep.interactive.cell import RunningCell
from lockstep.interactive.output import CellFigure, CellText
from lockstep.interactive.pool import RankPool

Entered = TypeVar("Entered", bound="InteractiveRanks")


class InteractiveRanks:
    """Start ranks that stay alive, and run cells on all of them: Python text, in one namespace for each rank.

    ::

        with lockstep.InteractiveRanks(2) as ranks:
            ranks.run("import torch, lockstep; world = lockstep.init()")
            total = ranks.run("world.all_reduce(world.rank)")  # the value of the last line, from rank 0

    The ranks are forked from a fresh process, as those of :func:`lockstep.spawn`, so it does not matter what this
    process has done with GPUs or threads. ``lockstep.init()`` in a cell gives each rank its device. The ranks end with
    this process, however it ends. ``%%ranks`` in a notebook (``%load_ext lockstep``) is built on this class. Use it
    from one thread at a time.

    Args:
        nprocs: the number of ranks.

    Raises:
        ValueError: ``nprocs`` is less than 1, or the ranks can't be bound to cores as ``LOCKSTEP_BIND`` says.
        LaunchError: the ranks could not be started.
        EnvironmentMismatch: ``MASTER_PORT`` is not a port.
    """

    def __init__(self, nprocs: int) -> None:
        if nprocs < 1:
            raise ValueError(f"nprocs={nprocs}: expected at least 1")
        self._number = 0
        self._cell: RunningCell | None = None
        self._pool, self._pid = RankPool(nprocs), os.getpid()
        atexit.register(self.close)

    def __enter__(self: Entered) -> Entered:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()

    @property
    def nprocs(self) -> int:
        """The number of ranks."""
        return len(self._pool.ranks)

    @property
    def is_alive(self) -> bool:
        """Whether the ranks can run a cell: none has died, and they were not closed."""
        if not self._pool.is_dead and (self._cell is None or self._cell.is_over):
            self._pool.turn(time.monotonic())
        return not self._pool.is_dead

    def pids(self) -> list[int]:
        """Return the process ids of the ranks that run, in order of rank."""
        return [pid for pid in self._pool.pids().values() if pid is not None]

    def run(self, source: str) -> Any:
        """Run a cell on all ranks. The output of rank 0 appears here as it comes; Ctrl-C interrupts the ranks.

        Args:
            source: Python code, as at the top of a module. Names that it binds exist in the next cell.

        Returns:
            the value of the last line on rank 0, or None if that is not an expression, or ends with a semicolon.
            Tensors arrive as copies, on the CPU. A value that can't be sent is replaced by a
            :class:`~lockstep.interactive.cell.RemoteValue`, which is shown as rank 0 shows the value.

        Raises:
            CellFailed: an exception has ended the cell on some rank; all ranks stay alive. Those that waited for that
                rank in a collective were freed.
            CellInterrupted: the cell was interrupted (a KeyboardInterrupt); the ranks stay alive.
            RankFailed: a rank has died, or did not stop when it was interrupted; all ranks have ended.
            LaunchError: the ranks could not be started, or have ended before.
        """
        cell = self.begin(source)
        for each in follow(cell):
            show(each)
        return cell.result()

    def begin(self, source: str) -> RunningCell:
        """Begin a cell on all ranks, and return it: for callers that show its output in their own way.

        Args:
            source: as for :meth:`run`.

        Raises:
            LaunchError: the ranks have ended.
        """
        if self._cell is not None and not self._cell.is_over:  # its caller has not waited for its end
            self._cell.interrupt()
            while not self._cell.is_over:
                self._cell.turn()
        if not self.is_alive:
            raise self.ended()
        self._number += 1
        self._cell = RunningCell(self._pool, self._number, source)
        with _interrupted_by_signal(self._cell):  # on all ranks or none
            self._cell.start()
        return self._cell

    def ended(self) -> LaunchError:
        """Return why the ranks have ended: the error that names the first rank to end, or that they were closed."""
        return self._pool.ended()

    def close(self) -> None:
        """End the ranks. They exit like programs that have ended; those that have not left after some seconds are
        killed. A second call does nothing, nor does one in a fork of the program, whose ranks these are not."""
        if os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        self._pool.close()


def follow(cell: RunningCell) -> Iterator[CellText | CellFigure | str]:
    """Yield the ranks' output and lockstep's messages until the cell is over; SIGINT interrupts it meanwhile."""
    with _interrupted_by_signal(cell):
        while not cell.is_over:
            yield from cell.turn()


def show(each: CellText | CellFigure | str) -> None:
    """Print rank 0's output and lockstep's messages on this process's streams."""
    if isinstance(each, CellFigure):
        each = f"lockstep: rank {each.rank} has drawn a figure, which a notebook shows; save it with savefig() here"
    if isinstance(each, str):
        print(each, file=sys.stderr, flush=True)
    elif each.rank == 0:
        print(each.text, end="", file=sys.stdout if each.stream == 1 else sys.stderr, flush=True)


@contextmanager
def _interrupted_by_signal(cell: RunningCell) -> Iterator[None]:
    """A context in which SIGINT interrupts the cell, and raises nothing in this process: what ranks have said would be
    lost. Only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        cell.interrupt()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
