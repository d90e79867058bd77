"""Measure a rank's GPU time by phase, and the GPU's memory, without ever waiting for the GPU during training.

Note [Device time]
~~~~~~~~~~~~~~~~~~
A program runs ahead of its GPU: by the host's clock a forward takes as long as it takes to queue it, and whatever waits
for a result first (``loss.item()``) takes the time of all. So in one step of every :data:`EVERY` each event of the page
also records an event of the device in the current stream. They are read once the last of them has passed, which a query
tells without waiting, at the end of a later step. What lies between two of them goes to the phase that the first one
began: what the stream did then, or waited for the host. All other steps pay for a comparison.

Inside the capture of a CUDA graph no event may be recorded, so such a step is left out.

Note [Two clocks]
~~~~~~~~~~~~~~~~~
While a trace is recorded (trace.py), a record of the host is followed by an event of the device in the current stream,
so it also says when the GPU came to what was queued before it. Events tell how long after another event they passed,
and the host's clock says when the first one did: the host waits for it once, when the window opens, and for the last
ones when it closes. What is queued in a CUDA graph's capture has no such time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Protocol

from lockstep.job import flight
from lockstep.job.flight import Flight
from lockstep.job.page import Cell, Phase

#: One step in this many is timed.
EVERY = 16
#: The most timed steps that the GPU has not finished yet; no further one is begun meanwhile.
_UNDER_WAY = 4
_OWN, _BACKWARD = int(Phase.OWN), int(Phase.BACKWARD)
#: The most records of a trace that get a GPU time.
_MOST_MARKS = 1 << 14


class Event(Protocol):
    """An event with a time in a stream; ``torch.Event(enable_timing=True)`` is one."""

    def query(self) -> bool:
        """Return whether the device has reached the event."""

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to a later one; both must have passed."""

    def synchronize(self) -> None:
        """Wait until the device has reached the event."""


class Device(Protocol):
    """The operations needed of a GPU; none of them waits for it."""

    def event(self) -> Event:
        """Make an event."""

    def record(self, event: Event) -> None:
        """Append an event to the current stream."""

    def can_record(self) -> bool:
        """Return whether the current stream takes events now."""

    def memory(self) -> tuple[int, int]:
        """Return the peak bytes allocated to tensors, 0 if they are not counted, and the GPU's capacity in bytes."""


def watch(device: Device, *, backward_ended: Callable[[], None] | None = None) -> None:
    """Record GPU time by phase in this process's page from now on. A second call does nothing.

    Args:
        device: the GPU.
        backward_ended: called after each backward, when all of it is queued; None: no call.
    """
    if not isinstance(flight.current, _OnDevice):
        flight.use(_OnDevice(flight.current, device, backward_ended))


class _OnDevice(Flight):
    """A writer of the page that also records device events in some steps."""

    def __init__(self, before: Flight, device: Device, backward_ended: Callable[[], None] | None) -> None:
        vars(self).update(vars(before))
        self._device = device
        self._backward_ended = backward_ended
        self._steps_seen = 0
        #: The phases begun in the current step, with their events; None: the step is not timed.
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
        if phase == _BACKWARD and self._backward_ended is not None:
            self._backward_ended()

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
        elif self._steps_seen % EVERY == 0 and self._device.can_record():  # a captured graph forbids queries as well
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
        """Add up the steps that the GPU has finished, and write the sums to the page."""
        while self._passing and all(event.query() for _, event in self._passing[0]):
            step = self._passing.popleft()
            for (phase, begun), (_, ended) in pairwise(step):
                self._spent[phase] += begun.elapsed_time(ended)
            self._spare += [event for _, event in step]
        for place, milliseconds in enumerate(self._spent, start=int(Cell.DEVICE_SPENT)):
            self._cells[place] = round(milliseconds * 1e3)
        self._cells[Cell.DEVICE_MEMORY], self._cells[Cell.DEVICE_SIZE] = self._device.memory()


class DeviceClock:
    """The times at which a GPU reached the work queued before each mark; see Note [Two clocks].

    Args:
        device: the GPU.
        first: an event that the GPU has passed.
        at: the latest time at which it passed (nanoseconds, CLOCK_MONOTONIC).
    """

    def __init__(self, device: Device, first: Event, at: int) -> None:
        self._device, self._first, self._at = device, first, at
        self._marks: list[tuple[int, Event]] = []

    @classmethod
    def begin(cls, device: Device) -> DeviceClock | None:
        """Wait for the GPU and return a clock; None: the current stream takes no events."""
        if not device.can_record():
            return None
        event = device.event()
        device.record(event)
        event.synchronize()
        return cls(device, event, time.monotonic_ns())

    def mark(self, place: int) -> None:
        """Mark the work queued so far in the current stream with a number."""
        if len(self._marks) < _MOST_MARKS and self._device.can_record():
            event = self._device.event()
            self._device.record(event)
            self._marks.append((place, event))

    def read(self) -> Iterator[tuple[int, int]]:
        """Wait for the GPU, and yield each mark with the time when it was reached (nanoseconds, CLOCK_MONOTONIC)."""
        for place, event in self._marks:
            event.synchronize()
            yield place, self._at + round(self._first.elapsed_time(event) * 1e6)
