"""The rank's side of a trace: for some steps its page is written by a class that records every event with a clock.

Outside of these steps nothing of it is on the way: the object that writes the page is another one (see :func:`arm`),
and what else a trace sees, collectives for instance, is told when the window opens and when it closes (:class:`Eye`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, TypeVar

from lockstep.job import flight
from lockstep.job.flight import Flight
from lockstep.job.page import Cell, Phase
from lockstep.job.trace import Kind, Recorder

_PHASE, _STEP, _OWN = int(Kind.PHASE), int(Kind.STEP), int(Phase.OWN)
_STEPS = int(Cell.STEPS)


_Kind = TypeVar("_Kind", bound="_Armed")


class Eye(Protocol):
    """Something that a trace sees by, while its window is open."""

    def open(self, recorder: Recorder) -> None:
        """Record from now on."""

    def close(self) -> None:
        """Leave everything as it was before :meth:`open`. Also called in a process that was forked meanwhile."""


_eyes: list[Eye] = []
#: What this process records at the moment, and where a profile that is exported belongs; None: nothing.
_recorder: Recorder | None = None
#: The job's folder and this rank, once a window was opened; see :func:`place`.
_place: tuple[Path, int] | None = None


def look_with(eye: Eye) -> None:
    """Have a trace see by ``eye`` from now on."""
    _eyes.append(eye)
    if _recorder is not None:
        eye.open(_recorder)


def place() -> tuple[Path, int] | None:
    """Return the job's folder and this process's rank, if its window was opened; else None."""
    return _place


def arm(folder: str | Path, *, rank: int, steps: int, first: int) -> None:
    """Trace this process's ``steps`` optimizer steps that follow the ``first`` ones, or what it does of that.

    Raises:
        OSError: there is no room for the events.
    """
    recorder = Recorder(folder, rank=rank, steps=steps)
    armed = _Armed.of(flight.current)
    armed.recorder, armed.opens_at, armed.closes_at = recorder, first, first + steps
    armed.home = Path(folder), rank
    flight.use(armed)
    if armed.steps_taken >= first:
        armed.open()


class _Armed(Flight):
    """Counts the steps until the window opens."""

    recorder: Recorder
    opens_at: int
    closes_at: int
    home: tuple[Path, int]

    @classmethod
    def of(cls: type[_Kind], before: Flight) -> _Kind:
        """Return one that continues where ``before`` is."""
        made = cls.__new__(cls)
        vars(made).update(vars(before))
        return made

    @property
    def steps_taken(self) -> int:
        """Optimizer steps since the ranks were started."""
        return max(0, self._cells[_STEPS] - 1)

    def took_step(self) -> None:
        super().took_step()
        if self.steps_taken >= self.opens_at:
            self.open()

    def open(self) -> None:
        """Record from now on."""
        global _recorder, _place
        recording = _Recording.of(self)
        recording.waits = {}
        _recorder, _place = self.recorder, self.home
        recording.recorder.open(steps=self.steps_taken)
        recording.recorder.add(_PHASE, 0, self.phase)
        flight.use(recording)
        for eye in _eyes:
            eye.open(self.recorder)


class _Recording(_Armed):
    """Records each event, beside what the page says of it."""

    #: The names of waits that were met.
    waits: dict[str, int]

    def enter(self, phase: int) -> None:
        super().enter(phase)
        self.recorder.add(_PHASE, 0, phase)

    def leave(self, phase: int) -> None:
        super().leave(phase)
        self.recorder.add(_PHASE, 0, _OWN)

    def resume(self, phase: int, *, after: int) -> None:
        super().resume(phase, after=after)
        self.recorder.add(_PHASE, 0, phase)

    def took_step(self) -> None:
        Flight.took_step(self)
        self.recorder.add(_PHASE, 0, _OWN)
        self.recorder.add(_STEP, 0, self.steps_taken)
        if self.steps_taken >= self.closes_at:
            self._close()

    def begin_wait(self, what: str) -> None:
        super().begin_wait(what)
        if "#" in what:  # of a collective its own record says which it is, and this is another text each time
            what = ""
        name = self.waits.get(what)
        if name is None:
            name = self.waits[what] = self.recorder.name(f"wait: {what}" if what else "wait", "wait")
        self.recorder.begin(name)

    def end_wait(self, *, failed: bool = False) -> None:
        self.recorder.end()
        super().end_wait(failed=failed)

    def begin(self, what: str) -> None:
        self.recorder.begin(self.recorder.name(what, "lockstep"))

    def end(self) -> None:
        self.recorder.end()

    def _close(self) -> None:
        global _recorder
        for eye in _eyes:
            eye.close()
        self.recorder.close()
        _recorder = None
        after = Flight.__new__(Flight)
        ours = {*_Armed.__annotations__, *_Recording.__annotations__}
        vars(after).update({name: value for name, value in vars(self).items() if name not in ours})
        flight.use(after)


def _leave_to_the_parent() -> None:
    """A forked child has its parent's memory, but is not the rank whose events these are."""
    global _recorder, _place
    if _recorder is not None:
        for eye in _eyes:
            eye.close()
    _recorder = _place = None


os.register_at_fork(after_in_child=_leave_to_the_parent)
