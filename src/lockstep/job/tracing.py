"""The rank's side of a trace: for some steps its page is written by a class that records every event with a clock.

Outside of these steps it costs nothing: the object that writes the page is another one (see :func:`arm`), and whatever
else records events, of collectives for instance, is told when the window opens and when it closes (:class:`Eye`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from lockstep._files import describe
from lockstep.job import flight
from lockstep.job.device import Device
from lockstep.job.flight import Flight
from lockstep.job.page import Cell, Phase
from lockstep.job.trace import EventKind, EventWriter

_PHASE, _STEP, _OWN = int(EventKind.PHASE), int(EventKind.STEP), int(Phase.OWN)
_STEPS = int(Cell.STEPS)


_AnyFlight = TypeVar("_AnyFlight", bound=Flight)
_Layer = TypeVar("_Layer", bound="_Traced")


class Eye(Protocol):
    """A source of events for a trace while its window is open."""

    #: True if it records only in traces that a user has asked for.
    on_demand: bool

    def open(self, recorder: EventWriter) -> None:
        """Record from now on."""

    def close(self) -> None:
        """Record nothing more, and cost nothing more. Called in a process that was forked meanwhile as well."""


_eyes: list[Eye] = []
#: The writer of the current recording, to which an exported profile belongs; None: nothing is recorded.
_recorder: EventWriter | None = None
#: The GPU that the rank computes on.
_device: Device | None = None
#: The job's folder and this rank, once a window was opened; see :func:`place`.
_place: tuple[Path, int] | None = None


def look_with(eye: Eye) -> None:
    """Have ``eye`` record events for traces from now on."""
    _eyes.append(eye)
    if _recorder is not None and _sees(eye):
        eye.open(_recorder)


def watch(device: Device) -> None:
    """Add this GPU's own times to traces from now on; see Note [Two clocks] in device.py."""
    global _device
    _device = device
    if _recorder is not None:
        _recorder.follow(device)


def place() -> tuple[Path, int] | None:
    """Return the job's folder and this process's rank, if its window was opened; else None."""
    return _place


def arm(folder: str | Path, *, rank: int, steps: int, first: int, on_demand: bool = True) -> None:
    """Trace the ``steps`` optimizer steps of this process that follow the ``first`` ones, as far as it takes them.

    Where there is no room for the events it records nothing; if a user has asked for them, it says so when the window
    opens.

    Args:
        folder: the job's.
        rank: this process's rank.
        steps: how many steps are traced.
        first: how many steps come before them.
        on_demand: whether a user has asked for the trace; if not, an :class:`Eye` that is on demand records nothing.
    """
    global _asked
    _asked = _Window(first, first + steps, Path(folder), rank, on_demand)
    settle()


def settle() -> None:
    """Continue the trace that is armed or under way with the page's present writer, after that was replaced."""
    if _asked is None or isinstance(flight.current, _Traced):
        return
    armed = _layered(_Armed, flight.current)
    if _recorder is not None:
        flight.use(_layered(_Recording, flight.current))
    elif armed.steps_taken >= _asked.opens_at:
        armed.open()
    else:
        flight.use(armed)


class _Window(NamedTuple):
    """What is to be traced."""

    opens_at: int
    closes_at: int
    folder: Path
    rank: int
    on_demand: bool


_asked: _Window | None = None


def _sees(eye: Eye) -> bool:
    return _asked is not None and (_asked.on_demand or not eye.on_demand)


def _layered(layer: type[_Layer], before: Flight) -> _Layer:
    """Return a writer of the page that adds what ``layer`` does to ``before``, and takes over its state."""
    below = before.below if isinstance(before, _Traced) else type(before)
    made = type(layer.__name__, (layer, below), {"below": below})
    return _continued(made, before)


def _continued(kind: type[_AnyFlight], before: Flight) -> _AnyFlight:
    made = kind.__new__(kind)
    vars(made).update(vars(before))
    return made


class _Traced(Flight):
    """The common part of both layers."""

    #: The class that writes the page without events.
    below: type[Flight]

    @property
    def steps_taken(self) -> int:
        """Optimizer steps since the ranks were started."""
        return max(0, self._cells[_STEPS] - 1)


class _Armed(_Traced):
    """Counts the steps until the window opens."""

    def took_step(self) -> None:
        super().took_step()
        assert _asked is not None
        if self.steps_taken >= _asked.opens_at:
            self.open()

    def open(self) -> None:
        """Record from now on."""
        global _recorder, _place, _asked
        assert _asked is not None
        folder, rank = _asked.folder, _asked.rank
        try:
            recorder = EventWriter(folder, rank=rank, steps=_asked.closes_at - _asked.opens_at)
        except OSError as error:
            if _asked.on_demand:  # else `lockstep runs plan` says that there is no trace
                print(f"lockstep: rank {rank} can't be traced: {describe(error)}", file=sys.stderr)
            _asked = None
            flight.use(_continued(self.below, self))
            return
        _recorder, _place = recorder, (folder, rank)
        if _device is not None:
            _recorder.follow(_device)
        _recorder.open(steps=self.steps_taken)
        _recorder.add(_PHASE, 0, self.phase)
        flight.use(_layered(_Recording, self))
        for eye in _eyes:
            if _sees(eye):
                eye.open(_recorder)


#: Name of a wait that has occurred -> its number.
_waits: dict[str, int] = {}


class _Recording(_Traced):
    """Records each event, beside what the page says of it."""

    def enter(self, phase: int) -> None:
        super().enter(phase)
        if _recorder is not None:
            _recorder.add(_PHASE, 0, phase)

    def leave(self, phase: int) -> None:
        super().leave(phase)
        if _recorder is not None:
            _recorder.add(_PHASE, 0, _OWN)

    def resume(self, phase: int, *, after: int) -> None:
        super().resume(phase, after=after)
        if _recorder is not None:
            _recorder.add(_PHASE, 0, phase)

    def took_step(self) -> None:
        super().took_step()
        if _recorder is not None and _asked is not None:
            _recorder.add(_PHASE, 0, _OWN)
            _recorder.add(_STEP, 0, self.steps_taken)
            if self.steps_taken >= _asked.closes_at:
                self._close(_recorder)

    def begin_wait(self, what: str) -> None:
        super().begin_wait(what)
        if "#" in what:  # a collective has a record of its own, and its text differs each time
            what = ""
        if _recorder is not None:
            name = _waits.get(what)
            if name is None:
                name = _waits[what] = _recorder.name(f"wait: {what}" if what else "wait", "wait")
            _recorder.begin(name)

    def end_wait(self, *, failed: bool = False) -> None:
        self.end()
        super().end_wait(failed=failed)

    def begin(self, what: str) -> None:
        if _recorder is not None:
            _recorder.begin(_recorder.name(what, "lockstep"))

    def end(self) -> None:
        if _recorder is not None:
            _recorder.end()

    def _close(self, recorder: EventWriter) -> None:
        global _recorder, _asked
        for eye in _eyes:
            eye.close()
        recorder.close()
        _waits.clear()
        _recorder = _asked = None
        flight.use(_continued(self.below, self))


def _leave_to_the_parent() -> None:
    """Record nothing in a forked child, which has its parent's memory but is not the rank whose events these are."""
    global _recorder, _place, _asked
    if _recorder is not None:
        for eye in _eyes:
            eye.close()
    _recorder = _place = _asked = None


os.register_at_fork(after_in_child=_leave_to_the_parent)
