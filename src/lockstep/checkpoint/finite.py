"""Detect values in a checkpoint that are not finite, in the bytes on their way to the disk.

Note [Finite]
~~~~~~~~~~~~~
A parameter that is NaN stays NaN, and so does a running statistic (0.9 * NaN + ...), with which a model computes only
NaN in evaluation though its loss in training is fine. A run that has got there saves a model that is lost, and would go
on doing so until retention has removed the last sound checkpoint. So each rank checks the blocks that it writes, while
they are in the processor's cache for their digest, and the manifest names the tensors that are not finite.

The check covers values from which training can't recover: the parameters and buffers of the model and of modules in
``extra``, the state of the optimizers, and that of LocalSteps. It leaves out all else in ``extra``.

Some infinities are intended, and only NaN counts there: those of a parameter that had some when the Checkpointer was
made or when it restored the run (logits that forbid a transition), those of buffers that are not running statistics by
their names (masks for attention, the smallest value seen), and those of single numbers in an optimizer's state ("the
smallest loss so far"). And a frozen parameter or a buffer that held NaN when the Checkpointer was made (a table with a
row that is never read) is not checked as long as it is frozen: training has not caused the NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.bits import with_any
from lockstep.text import listed

#: Returns, by a tensor's name in its file, whether infinities are meant in tensors of its kind (only NaN counts there);
#: None: it need not be finite.
Judge = Callable[[str], bool | None]

#: The bits of plus infinity. A value whose bits without the sign are larger is NaN.
_INFINITY: dict[torch.dtype, int] = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e5m2: 0x7C,
}
#: The largest bits that are not NaN, of dtypes without infinities.
_LARGEST: dict[torch.dtype, int] = {torch.float8_e4m3fn: 0x7E}


@dataclass(frozen=True)
class Bound:
    """The largest allowed bits, without the sign, of a tensor's elements."""

    #: Bytes of an element.
    width: int
    largest: int

    @classmethod
    def of(cls, dtype: torch.dtype, *, infinities: bool = False) -> Bound | None:
        """Return the bound of finite values, or, with ``infinities``, of all but NaN; None if there are no others."""
        if dtype in _LARGEST:
            return cls(dtype.itemsize, _LARGEST[dtype])
        if dtype not in _INFINITY:
            return None
        return cls(dtype.itemsize, _INFINITY[dtype] - (not infinities))

    def holds(self, content: memoryview) -> bool:
        """Return whether no element is beyond the bound.

        Args:
            content: the bytes of some elements, at least one.
        """
        bits = np.frombuffer(content, dtype=f"u{self.width}")
        # Two maxima need no memory: the signed one covers positive elements, the unsigned one negative ones.
        sign = 1 << (8 * self.width - 1)
        return int(bits.view(f"i{self.width}").max()) <= self.largest and int(bits.max()) <= self.largest + sign


@dataclass(frozen=True)
class Meant:
    """The tensors that need not be finite, by their names in their files."""

    #: Names of tensors that hold infinities on purpose: only NaN counts there.
    infinite: frozenset[str] = frozenset()
    #: Names of frozen tensors that held NaN before any training: nothing counts there.
    nan: frozenset[str] = frozenset()

    def bounds(self, judged: Mapping[str, bool]) -> dict[str, bool]:
        """Return the names to check, each with True if its infinities are intended.

        Args:
            judged: name -> whether infinities are intended in all tensors of its kind.
        """
        return {name: of_all or name in self.infinite for name, of_all in judged.items() if name not in self.nan}


#: All tensors should be finite.
NOTHING_MEANT = Meant()


def is_statistic(buffer: str) -> bool:
    """Return whether a buffer is a running statistic, by its name: those of torch's norm layers begin like that."""
    return buffer.rpartition(".")[2].startswith("running_")


def infinite(tensors: Iterable[tuple[str, torch.Tensor]]) -> frozenset[str]:
    """Return the names of tensors that hold an infinity, with one copy from each device."""
    return with_any(torch.isinf, tensors)


def frozen_nan(tensors: Iterable[tuple[str, torch.Tensor]]) -> frozenset[str]:
    """Return the names of tensors that take no gradient and hold NaN, with one copy from each device."""
    return with_any(torch.isnan, ((name, tensor) for name, tensor in tensors if not tensor.requires_grad))


def in_words(not_finite: Mapping[str, Any], *, most: int = 6) -> str:
    """Return the names of non-finite tensors as a list in words.

    Args:
        not_finite: file name -> names of its tensors, as a manifest has them.
        most: the most names to list, the model's first.
    """
    names = [
        name for file in sorted(not_finite, key=lambda file: file != "model.safetensors") for name in not_finite[file]
    ]
    return listed(names, most=most)
