"""The devices of the replicas: named in any of torch's ways, checked, and compared in memory and speed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep import accelerator, callsite
from lockstep.errors import LockstepError
from lockstep.identity import Identity
from lockstep.text import as_size, joined

Device = int | str | torch.device

#: Fraction of another device's memory or speed below which a device is warned about, as in torch.
_BALANCED = 0.75


def all_devices() -> list[torch.device]:
    """Return every accelerator that this process sees; none on a machine without, and not MPS, of which there is one
    only: torch's class leaves a module as it is there, too."""
    return [] if accelerator.kind() == "mps" else accelerator.devices()


def resolve_devices(given: Sequence[Device] | None) -> list[torch.device]:
    """Return the devices that ``device_ids`` names; all accelerators if None.

    Raises:
        ValueError: the list is empty, names a device that is not there, names an accelerator twice, or mixes kinds.
    """
    if given is None:
        return all_devices()
    if isinstance(given, (str, torch.device)) or not len(given):
        raise ValueError(
            f"device_ids={given!r}: expected a list with one device for each replica, as in [0, 1] or ['cpu', 'cpu']"
        )
    devices = [as_device(device) for device in given]
    if len({device.type for device in devices}) > 1:
        raise ValueError(f"device_ids={list(given)!r}: the replicas must be on devices of one kind")
    if devices[0].type != "cpu":
        twice = sorted({str(device) for device in devices if devices.count(device) > 1})
        if twice:
            raise ValueError(
                f"device_ids={list(given)!r} names {', '.join(twice)} more than once: only 'cpu' may repeat"
            )
        _refuse_absent(devices, given)
    return devices


def as_device(device: Device) -> torch.device:
    """Return the device; an index means the accelerator of that number, and -1 the CPU, as in torch."""
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(f"expected a device (0, 'cuda:0', 'cpu' or a torch.device), not {device!r}")
    if isinstance(device, int):
        if device == -1:
            return torch.device("cpu")
        kind = accelerator.kind()
        if kind is None:
            raise ValueError(
                f"device {device} was asked for, but there is no accelerator on this machine: leave device_ids out to "
                "run the module as it is, or pass ['cpu', 'cpu'] for replicas on the CPU"
            )
        return torch.device(kind, device)
    return accelerator.with_index(torch.device(device))


def _refuse_absent(devices: Sequence[torch.device], given: Sequence[Device]) -> None:
    present = {str(device) for device in all_devices()}
    absent = sorted({str(device) for device in devices} - present)
    if absent:
        there = ", ".join(sorted(present)) or "no accelerator at all"
        raise ValueError(f"device_ids={list(given)!r}: there is no {', '.join(absent)}; this process sees {there}")


def refuse_shared(devices: Sequence[torch.device], identity: Identity) -> None:
    """Refuse that each of several ranks on one machine takes all devices, which can't be meant.

    Raises:
        ValueError: this is one of several ranks here, and there are devices that all would take.
    """
    if devices and identity.local_world_size > 1:
        raise ValueError(
            f"rank {identity.rank} is one of {identity.local_world_size} on this machine, and each would put replicas "
            f"on all of its {len(devices)} accelerators: give each rank its own, DataParallel(module, "
            "device_ids=[...]), or leave DataParallel out (lockstep.replicate drives one device in each rank)"
        )


def refuse_misplaced(named: Iterable[tuple[str, Tensor]], expected: torch.device) -> None:
    """Check that every parameter and buffer is on the first device.

    Raises:
        LockstepError: one is not; it is named.
    """
    for name, tensor in named:
        if tensor.device != expected:
            raise LockstepError(
                f"'{name}' is on {tensor.device}, but the module must have its parameters and buffers on "
                f"{expected} (device_ids[0]): call module.to('{expected}') before the forward, or put "
                f"{tensor.device} first in device_ids"
            )


@dataclass(frozen=True)
class Capacity:
    """The capacity of a device."""

    #: Memory in bytes.
    memory: int
    processors: int
    #: Clock rate in kHz; 1 if it is unknown.
    clock: int = 1

    @property
    def speed(self) -> int:
        """Return the cycles of all processors per millisecond: torch has no better measure before a device has run."""
        return self.processors * self.clock

    def __str__(self) -> str:
        clock = f" at {self.clock / 1e6:.2f} GHz" if self.clock > 1 else ""
        return f"{as_size(self.memory)}, {self.processors} multiprocessors{clock}"


def capacity_of(device: torch.device) -> Capacity | None:
    """Return the capacity of an accelerator; None for the CPU and where torch does not tell memory and processors."""
    found = None if device.type == "cpu" else accelerator.properties(device)
    memory, processors = getattr(found, "total_memory", 0), getattr(found, "multi_processor_count", 0)
    return Capacity(memory, processors, getattr(found, "clock_rate", 1)) if memory and processors else None


def suggest_split(capacities: Sequence[Capacity]) -> tuple[int, ...] | None:
    """Return per cent of the batch for each device, or None where all are about equal.

    A device's part is the smaller of its part of the memory and its part of the speed, so that neither is overtaxed;
    parts are then scaled to sum to 100.
    """
    most_memory = max(capacity.memory for capacity in capacities)
    most_speed = max(capacity.speed for capacity in capacities)
    parts = [min(each.memory / most_memory, each.speed / most_speed) for each in capacities]
    if min(parts) >= _BALANCED:
        return None
    percents = [max(1, round(100 * part / sum(parts))) for part in parts]
    percents[percents.index(max(percents))] += 100 - sum(percents)
    return tuple(percents)


def imbalance(devices: Sequence[torch.device], capacities: Sequence[Capacity]) -> str | None:
    """Return a warning if one device has under 75 % of another's memory or speed, else None."""
    split = suggest_split(capacities)
    if split is None:
        return None
    memory, speed = [each.memory for each in capacities], [each.speed for each in capacities]
    unequal = [word for word, each in (("memory", memory), ("speed", speed)) if min(each) < _BALANCED * max(each)]
    described = "; ".join(f"{device}: {each}" for device, each in zip(devices, capacities, strict=True))
    return (
        f"the devices are unequal in {joined(unequal)} ({described}), and the smallest sets the pace: pass "
        f"chunk_sizes={list(split)} to give each its part of a batch, or leave the smallest out of device_ids"
    )


def warn_imbalance(devices: Sequence[torch.device], chunk_sizes: Sequence[int] | None) -> None:
    """Warn of unequal devices, unless a split was given."""
    if chunk_sizes is not None or len(devices) < 2:
        return
    capacities = [capacity for device in devices if (capacity := capacity_of(device)) is not None]
    if len(capacities) < len(devices):
        return  # there is nothing to compare
    text = imbalance(devices, capacities)
    if text is not None:
        callsite.warn(text)
