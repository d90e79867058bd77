"""What tests do with the simulated device: disturb its streams, hold one back, count what a program asks of it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_on() -> bool:
    """Whether this process has simulated devices."""
    return "simulated_bindings" in sys.modules


def is_real(device: torch.device) -> bool:
    """Whether a device is no CPU, and not simulated."""
    return device.type != "cpu" and not is_on()


def _bindings() -> Any:
    return sys.modules["simulated_bindings"]


@dataclass(frozen=True)
class Stress:
    """How uneven the streams are. The same seed gives the same pauses, in microseconds."""

    seed: int = 0
    #: Before each piece of work: at random, up to this.
    jitter: int = 0
    #: Before each on a stream that is not the default one: copies ahead, collectives.
    side: int = 0
    #: Before each on the default stream.
    main: int = 0
    #: A host that waits computes meanwhile, as CUDA's does by default.
    spins: bool = False


#: How uneven the streams are of ranks that tests/harness.py starts; None where that is the rank's own affair.
of_ranks: Stress | None = None


def stress(how: Stress) -> None:
    """Set how uneven all streams of this process are from here on."""
    _bindings().stress(how.seed, how.jitter, how.side, how.main, how.spins)


@dataclass(frozen=True)
class Counts:
    """What the device was asked for."""

    #: Kernels; one for a list of tensors is one.
    launches: int = 0
    #: Copies from the host, to the host, and from device memory to device memory.
    to_device: int = 0
    to_host: int = 0
    on_device: int = 0
    #: How often the host waited, or would have: synchronisations, copies to pageable memory, values, indices.
    waits: int = 0
    collectives: int = 0
    #: Kernels for which the host waits in the simulation only.
    synchronous: int = 0


class Counting:
    """Counts from when it was made."""

    def __init__(self) -> None:
        self._before = _bindings().counts()

    def so_far(self) -> Counts:
        now = _bindings().counts()
        return Counts(**{field.name: now[field.name] - self._before[field.name] for field in fields(Counts)})


def delay(stream: torch.Stream, milliseconds: int) -> None:
    """Let a stream do nothing for this long when it comes there."""
    _bindings().delay(stream.device_index, stream.stream_id, milliseconds)


@contextmanager
def refused_waits() -> Iterator[None]:
    """Make it an error that the host waits for a device, simulated or real."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")  # (of a real one)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def held_back(stream: torch.Stream) -> Iterator[None]:
    """Stop a stream where it is. A host that waits for it meanwhile gets a RuntimeError, on the line where it waits."""
    gate = _bindings().hold_back(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        _bindings().let_go(gate)


@contextmanager
def memory_of(size: int) -> Iterator[None]:
    """Leave every device only so many bytes of memory."""
    _bindings().limit_memory(size)
    try:
        yield
    finally:
        _bindings().limit_memory(16 << 30)
