"""The rank's side: keep this process's page up to date.

Everything here does nothing in a process that no watcher looks at, so callers need not ask. What is written is meant
for people and for no decision of the rank's own.

Note [Short steps]
~~~~~~~~~~~~~~~~~~
To read the clock, look up the program's line and write all numbers takes some microseconds in the midst of a training
step, which has better use for the caches. That is nothing beside a step of 20 ms, and too much for one of a
millisecond. So after a step shorter than 20 ms that was recorded in full, the next 48 are noted in short: an event
stores its phase, and one that begins a phase counts itself, so that the page still shows where the rank is and that it
lives; lines and the times at which phases began are of a second ago at most. That the ranks' gradients are being sent
is left out: until backward ends this is backward, and a rank that waits in it says so. The time that these steps took
together is divided among the phases as in the step before them. A rank that has to sleep for others has time for the
full record again.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
from contextlib import ContextDecorator
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from types import CodeType, FrameType

from lockstep import knobs
from lockstep.caller import user_frame, user_frame_and_depth, words
from lockstep.recorder import layout
from lockstep.recorder.layout import PAGE, Phase

#: The file of a job's pages, and those that a rank's Python stacks go to.
FILE = "recorder"
STACK = "stack-{rank}"
#: Where the watcher leaves what it has said of a rank that is late now.
REPORT = "late"
#: Asks a rank for its stacks. Not SIGUSR1 or SIGUSR2, which are the user's; far from the ends of the range, which
#: libraries take first.
STACK_SIGNAL = signal.SIGRTMIN + 11
#: Nanoseconds between two times that the sums are brought up to date.
_PUBLISH = 200_000_000

#: See Note [Short steps]: nanoseconds of a step that is short, how many are noted in short, and how many events.
_SHORT = 20_000_000
_SHORT_STEPS = 48
_SHORT_EVENTS = 64

_getframe = sys._getframe
_PHASE, _ENTERED, _STEPS, _EVENT = layout.PHASE_CELL, layout.ENTERED_CELL, layout.STEPS_CELL, layout.SHORT_CELL
_pack = layout.NUMBERS.pack_into
_WAIT, _OWN = int(Phase.WAIT), int(Phase.OWN)


class Recorder:
    """This process's page, as its owner writes it."""

    def __init__(self, memory: memoryview) -> None:
        self._page = memory
        #: The same memory, as whole numbers.
        self._cells = memory[:PAGE].cast("Q")
        self._events = 0
        self._phase = self._entered = int(Phase.START)
        self._since = monotonic_ns()
        self._steps = 0
        #: When the wait under way began, and how many waits are within each other.
        self._waiting_since = 0
        self._depth = 0
        #: The text, line and code of the wait that the page tells of.
        self._wait: tuple[str, int, CodeType | None] = ("", 0, None)
        self._sums = [0] * len(Phase)
        #: Of Note [Short steps]: whether events are noted in short (public: what only a full record needs may be left
        #: out meanwhile), and for how many steps more.
        self.short = False
        self._short_left = 0
        #: When the step began that is recorded in full (0: none is), the sums then, and what such a step took.
        self._whole_since = 0
        self._sums_then = self._sums
        self._profile = self._sums
        self._took = 1
        self._published = self._since
        #: The line that stands in the page for each phase.
        self._codes: list[CodeType | None] = [None] * len(Phase)
        self._lines = [0] * len(Phase)
        #: How many callers away it was: nearly always it is there again, and no frame between needs to be looked at.
        self._depths = [1] * len(Phase)
        self._write()

    @property
    def phase(self) -> int:
        """The phase under way."""
        return self._cells[_PHASE]

    def enter(self, phase: int) -> None:
        """**Local.** A phase begins, and with it ends the one before."""
        if self.short:
            cells = self._cells
            cells[_PHASE] = cells[_ENTERED] = phase
            cells[_EVENT] = noted = cells[_EVENT] + 1
            if not noted % _SHORT_EVENTS:
                self._bring_up_to_date()
            return
        now = monotonic_ns()
        self._sums[self._phase] += now - self._since
        try:
            frame = _getframe(self._depths[phase])
        except ValueError:  # the stack is not that deep today
            frame = None
        if frame is None or frame.f_code is not self._codes[phase]:
            self._find_place(phase, _getframe(1))
        elif frame.f_lineno != self._lines[phase]:
            self._note_place(phase, frame.f_code, frame.f_lineno)
        self._phase = self._entered = phase
        self._since = now
        self._events = events = self._events + 1
        _pack(self._page, 0, events, phase, phase, now, self._steps, self._waiting_since, 0, events)

    def resume(self, phase: int) -> None:
        """**Local.** Back in a phase whose line is known: what was inside it is over."""
        if self.short:
            self._cells[_PHASE] = phase
            return
        now = monotonic_ns()
        self._sums[self._phase] += now - self._since
        self._phase, self._since = phase, now
        self._events = events = self._events + 1
        _pack(self._page, 0, events, phase, self._entered, now, self._steps, self._waiting_since, 0, events)
        if now - self._published > _PUBLISH:
            self.publish()

    def took_step(self) -> None:
        """**Local.** An optimizer took a step."""
        self._steps += 1
        if self.short:
            self._short_left = left = self._short_left - 1
            if left:
                cells = self._cells
                cells[_PHASE], cells[_STEPS] = _OWN, self._steps
                cells[_EVENT] += 1
                return
            self.record_in_full()
        self.resume(_OWN)
        self._end_step()

    def _end_step(self) -> None:
        """See Note [Short steps]."""
        now = self._since
        if self._whole_since and 0 < now - self._whole_since < _SHORT:
            self._took = now - self._whole_since
            self._profile = [after - before for after, before in zip(self._sums, self._sums_then, strict=True)]
            self.short, self._short_left = True, _SHORT_STEPS
        self._whole_since, self._sums_then = now, list(self._sums)

    def record_in_full(self) -> None:
        """**Local.** From now on, until a short step has been recorded from its beginning to its end."""
        if self.short:
            now = monotonic_ns()
            passed = now - self._since
            self._sums = [
                each + passed * part // self._took for each, part in zip(self._sums, self._profile, strict=True)
            ]
            self.short, self._since, self._phase = False, now, self._cells[_PHASE]
            self._entered = self._cells[_ENTERED]
        self._whole_since = 0

    def _bring_up_to_date(self) -> None:
        """In a long row of events without a step, as in an evaluation: when the phase began is not to be too old."""
        self._events = events = self._events + 1
        now, cells = monotonic_ns(), self._cells
        _pack(self._page, 0, events, cells[_PHASE], cells[_ENTERED], now, self._steps, 0, 0, events)

    def leave(self) -> None:
        """**Local.** The program is over."""
        self.record_in_full()
        self.publish()
        self.enter(Phase.LEAVING)

    def begin_wait(self, what: str) -> None:
        """**Local.** From now on this rank sleeps until others come, in ``what``."""
        if get_ident() in _background:
            return
        self.record_in_full()
        self._depth += 1
        self._note_wait(what)
        if self._depth > 1:  # a backend knows more of a wait than who called it
            self._write()
            return
        now = monotonic_ns()
        self._sums[self._phase] += now - self._since
        self._since, self._waiting_since = now, now
        self._write()

    def end_wait(self, *, failed: bool = False) -> None:
        """**Local.** The others have come; or the wait has ``failed``, and the page goes on telling of it until the
        rank does something else."""
        if get_ident() in _background:
            return
        self._depth -= 1
        if self._depth == 0:
            now = monotonic_ns()
            self._sums[_WAIT] += now - self._waiting_since
            self._since, self._waiting_since = now, 0
            if not failed:
                self._write()

    def expect(self, text: str) -> None:
        """**Local.** Why this rank expects to be slow; empty if it does not."""
        self._page[layout.REASON_AT : layout.REASON_AT + layout.WORDS] = layout.encode(text, layout.WORDS)

    def publish(self) -> None:
        """**Local.** Bring the sums of seconds up to date."""
        self._published = monotonic_ns()
        layout.SUMS.pack_into(self._page, layout.SUMS_AT, *(each / 1e9 for each in self._sums))

    def detach(self) -> None:
        """**Local.** Write into memory that nobody reads from now on: this is a forked child."""
        self._page = memoryview(bytearray(PAGE))
        self._cells = self._page.cast("Q")

    def _find_place(self, phase: int, caller: FrameType) -> None:
        frame, away = user_frame_and_depth(caller)
        if frame is not None:  # else this is a thread of autograd's, and what is known stands
            self._depths[phase] = 1 + away
            self._note_place(phase, frame.f_code, frame.f_lineno)

    def _note_place(self, phase: int, code: CodeType, line: int) -> None:
        self._codes[phase], self._lines[phase] = code, line
        start = layout.place_at(phase)
        self._page[start : start + layout.PLACE] = layout.encode(words(code, line), layout.PLACE)

    def _note_wait(self, what: str) -> None:
        frame = user_frame(_getframe(2))
        wait = (what, 0, None) if frame is None else (what, frame.f_lineno, frame.f_code)
        if wait != self._wait:
            self._wait = wait
            at = "" if frame is None or " at " in what else f" at {words(frame.f_code, frame.f_lineno)}"
            self._page[layout.WAITS_IN_AT : layout.REASON_AT] = layout.encode(what + at, layout.WORDS)

    def _write(self) -> None:
        self._events = events = self._events + 1
        numbers = self._phase, self._entered, self._since, self._steps, self._waiting_since
        _pack(self._page, 0, events, *numbers, 0, events)


#: A page that nobody reads, for processes that have no watcher: cheaper than to ask at every event.
_nobody = Recorder(memoryview(bytearray(PAGE)))
#: This process's page, or one that nobody reads.
current = _nobody
#: The events of a training step, of this process's page: bound once, for each call within a step costs cold caches.
enter, resume, took_step = _nobody.enter, _nobody.resume, _nobody.took_step
#: Threads that wait for others in the background, while the rank goes on.
_background: set[int] = set()


def in_background() -> None:
    """**Local.** What this thread waits for holds up nothing: leave it out of the page."""
    _background.add(get_ident())


def take(folder: str | Path, *, rank: int, local_rank: int) -> None:
    """**Local.** Make this process the writer of its rank's page; does nothing if the job's folder has no pages.

    Its Python stacks can be asked for from now on, by STACK_SIGNAL.
    """
    try:
        fd = os.open(Path(folder) / FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        memory = mmap.mmap(fd, (local_rank + 1) * PAGE)
    finally:
        os.close(fd)
    use(Recorder(memoryview(memory)[local_rank * PAGE :]))
    stack = os.open(
        Path(folder) / STACK.format(rank=rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)


def use(recorder: Recorder) -> None:
    """**Local.** Make this the process's page."""
    global current, enter, resume, took_step
    current = recorder
    enter, resume, took_step = recorder.enter, recorder.resume, recorder.took_step


def _leave_to_the_parent() -> None:
    """A forked child (a DataLoader's worker) has its parent's memory and is no rank."""
    if current is not _nobody:
        current.detach()
    _background.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)


class waiting:  # (used as a verb, like contextlib.suppress)
    """**Local.** A context: this rank waits for others in ``what``."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        current.begin_wait(self._what)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        current.end_wait(failed=kind is not None)


class phase(ContextDecorator):
    """**Local.** A context or a decorator: this rank is in ``which``, and then back where it was."""

    def __init__(self, which: Phase) -> None:
        self._which = which
        self._before = int(Phase.OWN)

    def __enter__(self) -> None:
        self._before = current.phase
        current.record_in_full()
        current.enter(self._which)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else the page goes on telling where it failed
            current.resume(self._before)


def told() -> str:
    """**Local.** What the watcher has said of a rank that holds up the others now, with a line break before it, or an
    empty text. For errors of those that waited for it."""
    folder = knobs.job_dir()
    if folder is None:
        return ""
    try:
        return "\n" + (Path(folder) / REPORT).read_text()
    except OSError:
        return ""
