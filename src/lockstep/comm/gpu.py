"""A rank's accelerator, as the rank's page asks for it; see Note [Device time] in job/device.py."""

from __future__ import annotations

from typing import cast

import torch

from lockstep import accelerator
from lockstep.job.device import Event


class Gpu:
    """A :class:`lockstep.job.device.Device` of any kind whose events have times (``accelerator.has_times``).

    Args:
        device: which, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captures = accelerator.capture_test([device])
        self._peak = accelerator.peak_memory(device)
        self._size = accelerator.memory_size(device)

    def event(self) -> Event:
        # Its elapsed_time() takes only events of its own kind.
        return cast("Event", accelerator.new_event(self._device, timed=True))

    def record(self, event: Event) -> None:
        assert isinstance(event, torch.Event)
        event.record(accelerator.current_stream(self._device))

    def can_record(self) -> bool:
        return self._captures is None or not self._captures()

    def memory(self) -> tuple[int, int]:
        return 0 if self._peak is None else self._peak(), self._size
