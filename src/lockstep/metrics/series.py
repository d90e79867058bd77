"""The numbers logged under one key since the last line, and the summary of them that a rank sends to the others.

Note [Read at a line]
~~~~~~~~~~~~~~~~~~~~~
A number on a GPU must not be read when it is logged: the CPU would wait until the GPU has computed it. So a tensor is
copied on its device, one small kernel in the stream's order (the script may write to it again in the next step), and
the copies are stacked there from time to time. They are read when a line is due, all of a key at once. Adding
them up on the device instead would take three kernels for each number (its weight, whether it is finite, the sum), and
would use the order and precision of the device. Numbers that are read one by one are added in float64, rounded once
(``math.fsum``), and those that are not finite are counted apart: one NaN in fifty steps does not spoil the mean of the
others.

A weight on a GPU (``samples=``) is copied and read in the same way, by itself.

A number in the CPU's own memory is there when the call that made it has returned. Reading it waits for nothing, and
takes a tenth of the time of a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch

#: The number of copies that are stacked at once, to keep few objects with few calls of stack.
_STACKED = 256
#: The greatest product of a number and its weight that counts as finite: sums of greater ones might overflow.
_MOST = 1e280
#: Dtypes whose values are read unconverted; others (float8, booleans) are copied as float64, which holds them exactly.
_READ_AS_IT_IS = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}
_FLOATS, _STRIDED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}, torch.strided
#: The quantized dtypes that this version of torch has, and None.
_QUANTIZED = {getattr(torch, name, None) for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")}
#: True if numbers in the CPU's memory are read at once; tests turn it off to simulate other devices.
_READS_AT_HAND = True


#: The number of samples that a value is the mean of; a tensor: it is read at a line.
Weight = float | torch.Tensor


def weight_of(samples: object) -> Weight:
    """Return the weight that a script has given, without waiting for a device: a number, or a copy on the device.

    Raises:
        ValueError: it is not one real number of 0 or more.
    """
    if isinstance(samples, torch.Tensor):
        if samples.numel() != 1 or not readable(samples):
            raise ValueError(f"samples={_described(samples)}: expected one number, 0 or more")
        if not (samples.is_cpu and _READS_AT_HAND):
            return samples.detach().clone().reshape(())
        samples = samples.item()
    elif isinstance(samples, np.generic):
        samples = samples.item()
    return _checked(samples)


def _checked(samples: object) -> float:
    if not isinstance(samples, (int, float)) or not 0 <= samples < math.inf:
        raise ValueError(f"samples={samples!r}: expected a number, 0 or more")
    return samples


def _described(tensor: torch.Tensor) -> str:
    return f"<tensor of shape {list(tensor.shape)}, {tensor.dtype}, on {tensor.device}>"


def _read(weight: Weight) -> float:
    """Return a weight, waiting for its device."""
    return _checked(weight.item()) if isinstance(weight, torch.Tensor) else weight


def readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds real numbers, without reading them. (Called in each step.)"""
    dtype = tensor.dtype
    is_real = not dtype.is_complex and dtype not in _QUANTIZED
    return is_real and tensor.layout is torch.strided and not tensor.is_meta


@dataclass(frozen=True)
class SeriesSummary:
    """A summary of the numbers of one key, of one rank or of all."""

    #: The sum of the weights of the finite numbers.
    weight: float
    #: The weighted sum, the least and the greatest of the finite numbers; 0 if ``weight`` is 0.
    total: float
    least: float
    greatest: float
    #: The number of values that were infinite, NaN or too large to be added; the other fields leave them out.
    nonfinite: int
    #: The step of the first such value; None if there was none, or the step is not known.
    since: int | None = None

    def to_json(self) -> list[float]:
        """Return the summary in JSON types."""
        return list(astuple(self))

    @classmethod
    def from_json(cls, record: Sequence[Any]) -> SeriesSummary:
        """Read back what :meth:`to_json` returned."""
        return cls(*record)

    @property
    def value(self) -> float | None:
        """The value for a line: the mean, or None if no finite number counts.

        If all numbers are the same, it is that number, to the bit and of its type: the mean of learning rates of 0.1,
        weighted, is 0.1, and that of epochs an int.
        """
        if not self.weight:
            return None
        return self.least if self.least == self.greatest else self.total / self.weight


def summary_of(numbers: Iterable[tuple[float, float]]) -> SeriesSummary:
    """Summarise pairs of a number and its weight. A number of weight 0 does not count, even if it is NaN."""
    counting = [(number, weight, number * weight) for number, weight in numbers if weight]
    finite = [each for each in counting if abs(each[2]) <= _MOST]  # NaN fails this comparison
    nonfinite = len(counting) - len(finite)
    if not finite:
        return SeriesSummary(0.0, 0.0, 0.0, 0.0, nonfinite)
    values, weights, products = zip(*finite, strict=True)
    return SeriesSummary(math.fsum(weights), math.fsum(products), min(values), max(values), nonfinite)


def merged(summaries: Iterable[SeriesSummary]) -> SeriesSummary:
    """Merge the summaries of several ranks."""
    summaries = list(summaries)
    counting = [each for each in summaries if each.weight]
    nonfinite = sum(each.nonfinite for each in summaries)
    since = min((each.since for each in summaries if each.since is not None), default=None)
    if not counting:
        return SeriesSummary(0.0, 0.0, 0.0, 0.0, nonfinite, since)
    return SeriesSummary(
        math.fsum(each.weight for each in counting),
        math.fsum(each.total for each in counting),
        min(each.least for each in counting),
        max(each.greatest for each in counting),
        nonfinite,
        since,
    )


class Numbers:
    """The numbers of one key since the last line. See Note [Read at a line]."""

    def __init__(self) -> None:
        #: Numbers from the CPU's memory, with their weights and steps.
        self._plain: list[tuple[float, Weight, int]] = []
        #: Copies of tensors of one dtype on one device, the stacks of earlier copies, and the weights and steps of all.
        self._copies: list[torch.Tensor] = []
        self._stacks: list[torch.Tensor] = []
        self._weights: list[tuple[Weight, int]] = []

    def add(self, number: float, weight: Weight, step: int = 0) -> None:
        """Add a number."""
        self._plain.append((number, weight, step))

    def add_at_hand(self, value: object, weight: Weight, step: int = 0) -> bool:
        """Add a value of the usual kinds: a float, or a tensor of one in the CPU's memory. Return whether it was added.

        (A step evicts the log from the caches, so this method does all that nearly every call needs.)
        """
        kind = type(value)
        if kind is torch.Tensor:
            tensor: torch.Tensor = value  # type: ignore[assignment]  # its type says so
            if not (tensor.is_cpu and tensor.dtype in _FLOATS and tensor.layout is _STRIDED and _READS_AT_HAND):
                return False
            if tensor.dim() and tensor.numel() != 1:
                return False
            value = tensor.item()
        elif kind is not float:
            return False
        self._plain.append((value, weight, step))  # type: ignore[arg-type]  # a float by now
        return True

    def add_tensor(self, tensor: torch.Tensor, weight: Weight, step: int = 0) -> None:
        """Add the current value of ``tensor``, which has one element, without waiting for its device."""
        if tensor.is_cpu and _READS_AT_HAND:
            number = tensor.item()
            self._plain.append((int(number) if number is True or number is False else number, weight, step))
            return
        copies = self._copies
        if copies and (len(copies) == _STACKED or copies[0].dtype != tensor.dtype or copies[0].device != tensor.device):
            self._stack()
            copies = self._copies
        copy = tensor.detach().clone() if tensor.dtype in _READ_AS_IT_IS else tensor.detach().to(torch.float64)
        copies.append(copy if copy.dim() == 0 else copy.reshape(()))
        self._weights.append((weight, step))

    def extend(self, other: Numbers) -> None:
        """Add all numbers of ``other``, which must not be used afterwards."""
        other._stack()
        self._stack()
        self._plain += other._plain
        self._stacks += other._stacks
        self._weights += other._weights

    def _stack(self) -> None:
        if self._copies:
            self._stacks.append(torch.stack(self._copies))
            self._copies = []

    def take(self) -> SeriesSummary:
        """Return a summary of all numbers, waiting for their devices, and begin anew."""
        self._stack()
        read = [number for stack in self._stacks for number in stack.tolist()]
        late = ((number, *rest) for number, rest in zip(read, self._weights, strict=True))
        numbers = [(number, _read(weight), step) for number, weight, step in (*self._plain, *late)]
        self._plain, self._stacks, self._weights = [], [], []
        summary = summary_of((number, weight) for number, weight, _ in numbers)
        if not summary.nonfinite:
            return summary
        since = min(step for number, weight, step in numbers if weight and not abs(number * weight) <= _MOST)
        return replace(summary, since=since)

    def __len__(self) -> int:
        return len(self._plain) + len(self._weights)
