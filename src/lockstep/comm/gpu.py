"""A rank's GPU, as the rank's page asks for it; see Note [Device time] in job/device.py."""

from __future__ import annotations

from typing import cast

import torch

from lockstep.job.device import Event


class Gpu:
    """A :class:`lockstep.job.device.Device` of CUDA.

    Args:
        device: which, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def event(self) -> Event:
        return cast("Event", torch.cuda.Event(enable_timing=True))  # its elapsed_time() takes torch's own events only

    def record(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.record(torch.cuda.current_stream(self._device))

    def can_record(self) -> bool:
        return not torch.cuda.is_current_stream_capturing()

    def memory(self) -> tuple[int, int]:
        size = torch.cuda.get_device_properties(self._device).total_memory
        return torch.cuda.max_memory_allocated(self._device), size
