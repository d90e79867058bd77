"""One backward, from its begin to the averages: what the parts of the reducer tell each other about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Cycle:
    """The backward that is under way, or the last one."""

    #: Whether gradients are averaged in it; if not, they accumulate locally.
    sync: bool
    #: This rank's gradients count this much; see Note [Exact mean]. 0 discards them.
    weight: float
    #: What the sum over ranks is divided by.
    divisor: int
    #: Copies of gradients, by position, that are put back if nobody used the parameter.
    kept: dict[int, Tensor]
    #: This backward's own gradients count nothing, so one that is gone at the end is no mistake.
    discards: bool
    #: Forwards since the last averaged backward that had none, and how far this rank is, to be compared with the
    #: others; see Note [Left-out backwards].
    left_out: int = 0
    place: int = 0
    #: Index of the bucket to launch next; see Note [Launch order].
    next: int = 0
    #: Events that a bucket had seen when it was launched, by index.
    counted: dict[int, int] = field(default_factory=dict)
    #: Slots for which this rank had no gradient, by index.
    missing: dict[int, list[int]] = field(default_factory=dict)
    #: What waits for a bucket that was sent, and what then returns a comm hook's result; by index.
    waits: dict[int, Callable[[], object]] = field(default_factory=dict)
    results: dict[int, Callable[[], object]] = field(default_factory=dict)
    #: Whether the gradients were bad and all ranks leave this step out; see :class:`~lockstep.ddp.finite.FiniteCheck`.
    skipped: bool = False
    #: The comm hook's latest future.
    in_hook: torch.futures.Future[Any] | None = None

    def take_wait(self, index: int) -> Callable[[], object] | None:
        """**Local.** What waits for bucket ``index``, once: whether it fails or not, it is over then."""
        return self.waits.pop(index, None)
