"""The rank's side of its page: write at every event what the rank is doing.

An event stores one number and reads no clock: the process that reads the page keeps the time. The page is for
the launcher and for people, and decides nothing in the rank. In a process that our launcher did not start, events go
to private memory that is never read, so callers need not ask.

Note [Cold events]
~~~~~~~~~~~~~~~~~~
An event comes once in a step, and what the step computes has meanwhile displaced it from the processor's caches. So it
costs several times what a loop of events suggests, in proportion to the objects that it touches. Hence we keep no
state but the page itself, and marks are made beforehand except for their serial number, which ``count`` adds in C.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator
from itertools import chain, count
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from lockstep import _torch
from lockstep.callsite import frame_of, user_frame, user_frame_and_depth, words
from lockstep.job.files import JobFiles
from lockstep.job.page import ENTERED, PAGE, SERIAL, STACK_SIGNAL, WAITS, Cell, Pages, Phase, Text, encode
from lockstep.job.throughput import StepFlops

_MARK, _STEPS, _SAMPLES, _TOKENS = int(Cell.MARK), int(Cell.STEPS), int(Cell.SAMPLES), int(Cell.TOKENS)
_OPTIMIZER, _COLLECTING = int(Phase.OPTIMIZER), int(Cell.COLLECTING)
_getframe = sys._getframe


def _marks(phase: int, entered: int) -> count[int]:
    return count(SERIAL + entered * ENTERED + phase, SERIAL)


#: Phase -> the marks of its beginning. Sending gradients counts as entering the backward.
_begun = [_marks(phase, Phase.BACKWARD if phase is Phase.REDUCE else phase) for phase in Phase]
#: Phase -> the marks of the user's own code after it.
_over = [_marks(Phase.OWN, phase) for phase in Phase]
#: Serial numbers of all other marks, beyond those that the counters of phases ever reach.
_others = count(SERIAL << 40, SERIAL)


class Flight:
    """This process's page, as its owner writes it.

    Args:
        page: uint8 [PAGE], the memory.
        rank: the page's owner.
        pages: the pages of all ranks; None: this one is alone.
    """

    def __init__(self, page: memoryview, *, rank: int = 0, pages: Pages | None = None) -> None:
        self._page = page
        self._cells = page.cast("q")
        self.rank, self.pages = rank, pages
        #: The nesting depth of the waits under way.
        self._depth = 0
        #: True if optimizer steps are counted; the values that the page gets after each of them.
        self.counts = False
        self._next_steps: Iterator[int] = count(2)
        #: Samples in the batches fetched since the last step.
        self.batch = 0
        #: Tokens that the script has counted since the last step.
        self.tokens = 0
        #: The start of the garbage collection under way (nanoseconds of time.perf_counter_ns).
        self._collecting = 0
        #: The user's code and instruction that called for the last optimizer step, and its distance in frames.
        self._code: CodeType | None = None
        self._instruction = 0
        self._away = 1

    @property
    def cells(self) -> memoryview:
        """The numbers of the page, int64 [PAGE / 8], for another writer in this process, which has cells of its own."""
        return self._cells

    @property
    def phase(self) -> Phase:
        """The phase under way."""
        return Phase(self._cells[_MARK] % ENTERED)

    def enter(self, phase: int) -> None:
        """Record that a phase begins, which ends the one before."""
        self._cells[_MARK] = next(_begun[phase])

    def leave(self, phase: int) -> None:
        """Record that a phase is over; the user's own code follows."""
        self._cells[_MARK] = next(_over[phase])

    def resume(self, phase: int, *, after: int) -> None:
        """Record that a phase continues after ``after``, which was nested in it."""
        self._cells[_MARK] = next(_others) + after * ENTERED + phase

    def count(self) -> None:
        """Begin to count: from now on :meth:`took_step` is called after every optimizer step of this process."""
        self.counts = True
        self._next_steps = count(max(1, self._cells[_STEPS]))
        self._cells[_STEPS] = next(self._next_steps)

    def took_step(self) -> None:
        """Record that an optimizer took a step."""
        self._cells[_STEPS] = next(self._next_steps)
        if self.batch:
            self._cells[_SAMPLES] += self.batch
            self.batch = 0
        if self.tokens:
            self._cells[_TOKENS] += self.tokens
            self.tokens = 0
        try:
            frame = _getframe(self._away)
        except ValueError:  # the stack is less deep than at the last step
            frame = _getframe()
        # The line is nearly always that of the step before; then the frames in between need not be searched.
        if frame.f_lasti != self._instruction or frame.f_code is not self._code:
            self._note_line()
        self._cells[_MARK] = next(_over[_OPTIMIZER])

    @property
    def step(self) -> int:
        """The number of the step under way, from 1: in the whole run if a Checkpointer counts its steps, else in this
        process."""
        return self.run_step or max(1, self._cells[_STEPS])

    @property
    def run_step(self) -> int:
        """The number of the step under way in the whole run, from 1, by a Checkpointer's count; 0: there is no
        count."""
        return self._cells[Cell.RUN_STEPS]

    @property
    def samples(self) -> int:
        """Samples of all steps so far; 0: they are not counted."""
        return self._cells[_SAMPLES]

    def counted_flops(self, step: StepFlops) -> None:
        """Record the FLOPs of one step of this rank."""
        cells = self._cells
        cells[Cell.FLOPS_SAMPLES], cells[Cell.FLOPS_AT_PEAK] = step.samples, round(step.at_peak * 1e12)
        cells[Cell.FLOPS] = step.flops  # last: it says that the others are there

    def at_step(self, step: int) -> None:
        """Record that the whole run is at ``step``, by the count of a Checkpointer."""
        self._cells[Cell.RUN_STEPS] = step + 1

    def collects(self, *, begins: bool) -> None:
        """Record that a pause of Python's garbage collector begins or ends."""
        cells = self._cells
        if begins:
            cells[Cell.COLLECTING], self._collecting = 1, time.perf_counter_ns()
        elif cells[Cell.COLLECTING]:
            cells[Cell.COLLECTED] += (time.perf_counter_ns() - self._collecting) // 1000
            cells[Cell.COLLECTIONS] += 1
            cells[Cell.COLLECTING] = 0

    def collects_youngest(self, *, begins: bool) -> None:
        """Record that a collection of the youngest generation begins or ends, which is not counted as a pause."""
        self._cells[_COLLECTING] = begins

    def listens(self, listening: bool) -> None:
        """Record whether this rank saves and leaves by itself when asked to stop."""
        self._cells[Cell.LISTENS] = int(listening)

    def begin_wait(self, what: str) -> None:
        """Record that this rank waits for others in ``what``; empty: it does not sleep yet, and the page keeps its
        text."""
        if get_ident() in _background:
            return
        self._depth += 1  # (a backend knows more about a wait than its caller: the innermost text counts)
        if what:
            frame = user_frame(_getframe(1))
            at = "" if frame is None or " at " in what else f" at {words(frame.f_code, frame.f_lineno)}"
            call = f"{_calls[0]}: " if _calls and not what.startswith(_calls[0]) else ""
            encode(self._page, Text.WAITS_IN, call + what + at)
        self._cells[_MARK] = next(_others) + self._cells[_MARK] % WAITS + WAITS

    def end_wait(self, *, failed: bool = False) -> None:
        """Record that the wait is over; if it ``failed``, the page keeps showing it until the rank does something
        else."""
        if get_ident() in _background:
            return
        self._depth -= 1
        if self._depth == 0 and not failed:
            self._cells[_MARK] = next(_others) + self._cells[_MARK] % WAITS

    def begin(self, what: str) -> None:
        """Record in a trace only (tracing.py) that ``what`` begins on this thread; :meth:`end` must follow."""

    def end(self) -> None:
        """Record that what began last on this thread is over."""

    def expect(self, reason: str) -> None:
        """Record why this rank expects to be slow; empty: it no longer does."""
        encode(self._page, Text.REASON, reason)

    def _note_line(self) -> None:
        found, away = user_frame_and_depth(_getframe(1))
        if found is not None:
            self._away, self._instruction, self._code = away, found.f_lasti, found.f_code
            encode(self._page, Text.STEPPED_AT, words(found.f_code, found.f_lineno))


#: This process's page, or a private one that is never read, which is cheaper than a check at every event.
current = Flight(memoryview(bytearray(PAGE)))
#: Identifiers of threads that wait for others in the background while the rank continues.
_background: set[int] = set()


def take(folder: str | Path, *, rank: int, world_size: int) -> Flight:
    """Make this process the writer of its rank's page; from now on STACK_SIGNAL asks a thread for its Python stack, and
    a crash in native code leaves those of all threads in the same file."""
    pages = Pages(folder, world_size)
    stack = os.open(JobFiles(folder).stack(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=False)  # see launch/thread_stacks.py
    if not faulthandler.is_enabled():  # PYTHONFAULTHANDLER, or -X, has them written to standard error
        faulthandler.enable(file=stack, all_threads=True)
    if _collects not in gc.callbacks:
        gc.callbacks.append(_collects)
    return use(Flight(pages.page(rank), rank=rank, pages=pages))


def _collects(phase: str, info: dict[str, int]) -> None:
    """Record a collection; Python calls this before and after each. Those of the youngest generation are not counted:
    they come once in some hundred objects and take microseconds."""
    if info["generation"]:
        current.collects(begins=phase == "start")
    else:
        current.collects_youngest(begins=phase == "start")


def is_noting_collection(frame: FrameType | None) -> bool:
    """Return whether ``frame`` or one that it was called from notes a collection: Python drops what is raised there."""
    return frame_of(_collects.__code__, frame) is not None


def use(flight: Flight) -> Flight:
    """Make this the process's page."""
    global current
    current = flight
    return flight


def _leave_to_the_parent() -> None:
    """Detach a forked child (a DataLoader's worker), which has its parent's memory but is not a rank."""
    use(Flight(memoryview(bytearray(PAGE))))
    _background.clear()
    _calls.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def in_background() -> None:
    """Leave this thread's waits out of the page, since they hold up nothing."""
    _background.add(get_ident())


#: The name of the collective call that the script is in, on the thread that trains; at most one.
_calls: list[str] = []


def begin_call(name: str) -> bool:
    """Record that the script has called ``name``, which is for all ranks.

    Return False within another such call and in the background."""
    if _calls or get_ident() in _background:
        return False
    _calls.append(name)
    return True


def present_call() -> str:
    """Return the collective call that the script is in; empty: it is in none, or this is the background."""
    return _calls[0] if _calls and get_ident() not in _background else ""


def end_call() -> None:
    """Record that the collective call has returned."""
    _calls.clear()


class waiting:  # (used as a verb, like contextlib.suppress)
    """A context in which this rank waits for others in ``what``."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        current.begin_wait(self._what)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        current.end_wait(failed=kind is not None)


class phase(ContextDecorator):
    """A context or decorator in which this rank is in the phase ``which``; then the phase before continues."""

    def __init__(self, which: Phase) -> None:
        self._which = which
        self._before = Phase.OWN

    def __enter__(self) -> None:
        self._before = current.phase
        current.enter(self._which)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # otherwise the page keeps showing where the rank failed
            current.resume(self._before, after=self._which)


#: The reasons given to the expect_slow contexts that are open, the innermost last.
_reasons: list[str] = []


class expect_slow(ContextDecorator):  # (used as a verb, like contextlib.suppress)
    """Announce that this rank may keep the others waiting in this block: ``with lockstep.expect_slow("evaluation"):``

    ``lockstep run`` reports a rank that has held up the others for a while (see the guide, "A rank that is late").
    Inside the context it does not report this rank, however long it takes, unless the rank is stopped or dead-locked.
    The time limit of the collective that the others wait in still applies: ``lockstep.init(timeout=…)``. It also
    decorates functions.

    Args:
        reason: the cause of the delay, for messages.

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


_nesting = _torch.nesting
#: True if this process's optimizers are watched; True if torch.compile is.
_watches_optimizers = _watches_compiler = False


def watch_optimizers(optimizers: Any) -> None:
    """Count every optimizer's steps in this process's page from now on. A second call does nothing.

    torch is not imported here: it is handed over, or found where the program has imported it.

    Args:
        optimizers: the module ``torch.optim.optimizer``.
    """
    global _watches_optimizers
    current.count()
    if not _watches_optimizers:
        _watches_optimizers = True
        optimizers.register_optimizer_step_pre_hook(_before_step)
        optimizers.register_optimizer_step_post_hook(_after_step)


def after_each_step(act: Callable[[], bool]) -> None:
    """Call ``act``, beside others, after each optimizer step of this process from now on, until it returns True; from
    then on it costs nothing.

    An attribute of the page's writer stands before the method of its class meanwhile. Another writer that takes its
    place (device.py, tracing.py) takes over its attributes, so this one as well.
    """

    acts: list[Callable[[], bool]] = vars(current).setdefault("_after_steps", [])
    acts.append(act)

    def took_step() -> None:
        type(current).took_step(current)
        acts[:] = [each for each in acts if not each()]
        if not acts:
            del vars(current)["took_step"]

    vars(current)["took_step"] = took_step


def at_steps(act: Callable[[int], int]) -> None:
    """Call ``act`` after the next optimizer step of this process, and then after each step that it names. One function
    in a process.

    The numbers that the page gets after each step come out of an iterator, which is made anew at such a step; those in
    between cost what they do anyway.

    Args:
        act: gets the number of steps that this process has taken, and returns a larger one: when to call it again.
    """
    taken = max(1, current.cells[_STEPS]) - 1
    current._next_steps = chain.from_iterable(_stretches(taken, act))


def _stretches(taken: int, act: Callable[[int], int]) -> Iterator[range]:
    """Yield what the page gets after the steps up to the one at which to act, again and again."""
    first, due = taken + 2, taken + 1
    while True:
        yield range(first, due + 1)
        first, due = due + 1, act(due)


def _before_step(optimizer: Any, *_: object) -> None:
    if not (_nesting[type(optimizer)] and _torch.is_inner_step(optimizer)):
        current.enter(_OPTIMIZER)


def _after_step(optimizer: Any, *_: object) -> None:
    if _nesting[type(optimizer)] and _torch.is_inner_step(optimizer):
        return
    current.took_step()
    if not _watches_compiler:
        _watch_compiler()


def _watch_compiler() -> None:
    """Watch the compiler, after the first step: by then an optimizer has imported it, and until then a rank has a
    minute."""
    global _watches_compiler
    _watches_compiler = True
    callback = _torch.compile_callbacks()
    if callback is None:
        return
    compiling = phase(Phase.COMPILE)
    callback.on_compile_start(lambda *_: compiling.__enter__())
    callback.on_compile_end(lambda *_: compiling.__exit__(None))
