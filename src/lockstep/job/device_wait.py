"""Tell the launcher that this rank's device has not come to the end of the rank's latest backward.

Note [Waiting for a device]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Over NCCL a rank waits for the others on its device: ``wait()`` of an all-reduce holds the current stream and returns
at once, and the host comes to a stop later, at any line that needs a result (``loss.item()``, a copy, a
synchronisation). It may spin there, so the kernel sees a process that works, and its page says nothing of a wait.

So at the end of each backward one event is recorded in the current stream, behind the waits for all buckets. A thread
looks at the page once a second. Where the page has not changed since the last look, it asks whether the device has
passed that event, which waits for nothing, and if it has not, notes the page's mark in ``Cell.ON_DEVICE``: at this
mark the device was still on its way. The next event of the page makes the note void, without another store in the
step. The launcher takes such a rank as one that waits (``Look.waits``), and a rank whose device has nothing left to do,
and whose page does not change, as the one that holds it up.

A kernel of the rank's own looks the same, so where the devices of *all* ranks are on their way, no rank is late. What
is queued after the latest backward is no wait for others.

PyTorch lets go of the interpreter while a host waits for a device, so the thread runs. In the capture of a graph
nothing is recorded. CUDA may refuse questions about events to other threads meanwhile: the thread asks only while the
page stands still, and not again once it has seen the event passed. A capture that begins before that, and goes on for
seconds without an event of the page, is not protected.
"""

from __future__ import annotations

import os
import threading

from lockstep import knobs
from lockstep.job import flight
from lockstep.job.device import Device, Event
from lockstep.job.page import Cell

#: The longest wait for the end of the thread, in seconds.
_ENDING = 5.0
_MARK, _ON_DEVICE = int(Cell.MARK), int(Cell.ON_DEVICE)


class LatestBackward:
    """The end of this rank's latest backward, as its device comes to it. One thread marks it, another asks.

    Args:
        device: the rank's.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._event: Event = device.event()
        #: True while the event is in a stream and not known to have passed.
        self._open = False

    def mark(self) -> None:
        """Record that a backward has ended; waits for nothing."""
        recorded = self._device.can_record()
        if recorded:
            self._device.record(self._event)
        self._open = recorded

    def is_under_way(self) -> bool:
        """Return whether the device has not come to the latest mark yet; waits for nothing."""
        if self._open and self._event.query():
            self._open = False
        return self._open


class DeviceWatch:
    """A thread that notes in the rank's page whether its device is still in the latest backward.

    Args:
        latest: that backward.
        every: seconds between two looks.
    """

    def __init__(self, latest: LatestBackward, *, every: float) -> None:
        self._latest, self._every = latest, every
        self._seen = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lockstep-device", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for its end, but not for a driver that does not answer."""
        self._ends.set()
        self._thread.join(_ENDING)

    def _watch(self) -> None:
        while not self._ends.wait(self._every):
            self.look()

    def look(self) -> None:
        """Compare the page with the last look, and note where the device is if it has not changed."""
        cells = flight.current.cells
        mark = cells[_MARK]
        if mark == self._seen:
            noted = mark if self._latest.is_under_way() else 0
            if cells[_ON_DEVICE] != noted:
                cells[_ON_DEVICE] = noted
        self._seen = mark


_latest: LatestBackward | None = None
_watch: DeviceWatch | None = None


def begin(device: Device) -> LatestBackward:
    """Note in this process's page where its device is, from now on until :func:`end`; return what is to be marked.

    Args:
        device: the rank's, the same in each call.
    """
    global _latest, _watch
    if _latest is None:
        _latest = LatestBackward(device)
    if _watch is None:
        _watch = DeviceWatch(_latest, every=knobs.times().unmoved)
    return _latest


def end() -> None:
    """End the watch, if there is one."""
    global _watch
    if _watch is not None:
        _watch.close()
        _watch = None


def _leave_to_the_parent() -> None:
    """Forget the watch in a forked child, whose parent has the thread and the device."""
    global _latest, _watch
    _latest = _watch = None


os.register_at_fork(after_in_child=_leave_to_the_parent)
