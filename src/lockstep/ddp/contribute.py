"""What this rank puts into a bucket.

Note [Unused parameters]
~~~~~~~~~~~~~~~~~~~~~~~~
A parameter without an event in this backward, and in the unsynchronised ones before it, is unused on this rank. It
sends its ``grad`` as it stands, or zeros, since what it holds already is the same on all ranks, and says "unused" in
Note [Bucket layout]'s flags. A rank reads the flags after the reduction only if it has an unused parameter itself. If
another rank used the parameter it gets the average, else its ``grad`` stays as it was, bit by bit, None included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.ddp.bucket import Bucket
from lockstep.ddp.cycle import Cycle
from lockstep.errors import LockstepError

#: Factors kept as tensors; ever new shares must not fill the memory.
_MOST_SCALES = 64


class Contributor:
    """Fills buckets with this rank's gradients."""

    def __init__(self, names: Sequence[str], whoami: Callable[[], str]) -> None:
        self._names, self._whoami = list(names), whoami
        self._scales: dict[tuple[float, torch.dtype], Tensor] = {}

    def fill(self, bucket: Bucket, cycle: Cycle, missing: Sequence[int], scale: Tensor | None) -> list[int]:
        """**Local.** Put this rank's contribution into ``bucket``.

        Args:
            missing: slots that got no gradient in this backward; see :func:`find_missing`.
            scale: from :meth:`scale`.

        Returns:
            All slots without a gradient of this rank.
        """
        bucket.reset_flags(cycle.place)
        grads = [param.grad for param in bucket.params]
        absent = list(missing)
        for slot, grad in enumerate(grads):
            if grad is None and slot not in missing:
                absent.append(slot)  # discarded, or Note [Taken gradients]
        if cycle.weight == 0:
            _keep_views(bucket, cycle, range(len(bucket)))
            bucket.values.zero_()
            absent = list(range(len(bucket)))
        elif absent or bucket.packed:
            _keep_views(bucket, cycle, absent)
            bucket.pack_some(grads, scale)
        else:
            self._pack(bucket, [grad for grad in grads if grad is not None], scale)
        if absent:
            bucket.used[absent] = 0
        return absent

    def scale(self, bucket: Bucket, factor: float) -> Tensor | None:
        """**Local.** ``factor``, which gradients are multiplied by on their way into ``bucket``; None for 1."""
        if factor == 1:
            return None
        dtype = torch.float64 if bucket.flat.dtype in (torch.float64, torch.complex128) else torch.float32
        scale = self._scales.get((factor, dtype))
        if scale is None:
            if len(self._scales) > _MOST_SCALES:
                self._scales.clear()
            scale = self._scales[factor, dtype] = torch.tensor(factor, dtype=dtype)
        return scale

    def _pack(self, bucket: Bucket, grads: list[Tensor], scale: Tensor | None) -> None:
        try:
            bucket.pack(grads, scale)
        except RuntimeError as error:
            for position, grad in zip(bucket.positions, grads, strict=True):
                if grad.layout != torch.strided:
                    raise LockstepError(
                        f"{self._whoami()}: parameter '{self._names[position]}' got a sparse gradient, but it is not "
                        "the weight of an nn.Embedding or nn.EmbeddingBag with sparse=True, so it was planned as a "
                        "dense one: use such a module, or make the gradient dense"
                    ) from error
            raise


def find_missing(bucket: Bucket, arrived: Sequence[int], pending: set[int]) -> list[int]:
    """**Local.** The slots of ``bucket`` without a gradient; see Note [Unused parameters].

    Args:
        arrived: positions that got one in this backward.
        pending: positions that got one in unsynchronised backwards before it.
    """
    present = set(arrived)
    if len(present) == len(bucket):
        return []
    return [
        slot
        for slot, position in enumerate(bucket.positions)
        if position not in present and (position not in pending or bucket.params[slot].grad is None)
    ]


def _keep_views(bucket: Bucket, cycle: Cycle, slots: Sequence[int]) -> None:
    """Copy the gradients that the reduction is about to overwrite but that may have to stay."""
    for slot in slots:
        grad, position = bucket.params[slot].grad, bucket.positions[slot]
        if grad is bucket.views[slot] and position not in cycle.kept:
            cycle.kept[position] = grad.clone()
