"""What a rank's time goes to on its GPU, and the GPU's memory: read behind the training, never waited for.

Note [Device time]
~~~~~~~~~~~~~~~~~~
A program runs ahead of its GPU: by the host's clock a forward takes as long as it takes to queue it, and whatever waits
for a result first (``loss.item()``) takes the time of all. So in one step of every :data:`EVERY` each event of the page
also records an event of the device in the current stream. They are read once the last of them has passed, which a query
tells without waiting, at the end of a later step. What lies between two of them goes to the phase that the first one
began: what the stream did then, or waited for the host. All other steps pay for a comparison.

Inside the capture of a CUDA graph no event may be recorded, so such a step is left out.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Protocol

from lockstep.job import flight
from lockstep.job.flight import Flight
from lockstep.job.page import Cell, Phase

#: One step of so many is timed.
EVERY = 16
#: Timed steps that have not passed yet, beyond which none is begun.
_UNDER_WAY = 4
_OWN = int(Phase.OWN)


class Event(Protocol):
    """An event with a time in a stream; ``torch.cuda.Event(enable_timing=True)`` is one."""

    def query(self) -> bool:
        """Return whether the device has come to it."""

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from it to a later one; both have passed."""


class Device(Protocol):
    """What is asked of a GPU, none of which waits for it."""

    def event(self) -> Event:
        """Make an event."""

    def record(self, event: Event) -> None:
        """Put an event into the current stream, behind all that is there."""

    def can_record(self) -> bool:
        """Return whether the current stream takes events now."""

    def memory(self) -> tuple[int, int]:
        """Return the most bytes that tensors ever had of it, and how many it has."""


def watch(device: Device) -> None:
    """Have this process's page say from now on what its GPU's time goes to. A second call does nothing."""
    if not isinstance(flight.current, _OnDevice):
        flight.use(_OnDevice(flight.current, device))


class _OnDevice(Flight):
    """Records events of the device as well, in some steps."""

    def __init__(self, before: Flight, device: Device) -> None:
        vars(self).update(vars(before))
        self._device = device
        self._steps_seen = 0
        #: The step that is timed now: the phases that began, with their events; None: this one is not.
        self._timed: list[tuple[int, Event]] | None = None
        self._passing: deque[list[tuple[int, Event]]] = deque()
        self._spare: list[Event] = []
        self._spent = [0.0] * len(Phase)

    def enter(self, phase: int) -> None:
        super().enter(phase)
        if self._timed is not None:
            self._record(phase)

    def leave(self, phase: int) -> None:
        super().leave(phase)
        if self._timed is not None:
            self._record(_OWN)

    def resume(self, phase: int, *, after: int) -> None:
        super().resume(phase, after=after)
        if self._timed is not None:
            self._record(phase)

    def took_step(self) -> None:
        super().took_step()
        self._steps_seen += 1
        if self._timed is not None:
            self._record(_OWN)
            if self._timed is not None:
                self._passing.append(self._timed)
                self._timed = None
        elif self._steps_seen % EVERY == 0:
            self._read()
            if len(self._passing) < _UNDER_WAY:
                self._timed = []
                self._record(_OWN)

    def _record(self, phase: int) -> None:
        timed = self._timed
        assert timed is not None
        if not self._device.can_record():
            self._spare += [event for _, event in timed]
            self._timed = None
            return
        event = self._spare.pop() if self._spare else self._device.event()
        self._device.record(event)
        timed.append((phase, event))

    def _read(self) -> None:
        """Add up the steps that have passed, and have the page say so."""
        while self._passing and all(event.query() for _, event in self._passing[0]):
            step = self._passing.popleft()
            for (phase, begun), (_, ended) in pairwise(step):
                self._spent[phase] += begun.elapsed_time(ended)
            self._spare += [event for _, event in step]
        for place, milliseconds in enumerate(self._spent, start=int(Cell.DEVICE_SPENT)):
            self._cells[place] = round(milliseconds * 1e3)
        self._cells[Cell.DEVICE_MEMORY], self._cells[Cell.DEVICE_SIZE] = self._device.memory()
