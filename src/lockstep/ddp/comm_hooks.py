"""Comm hooks: the bucket that they see, and two hooks that send half as many bytes.

A hook is ``hook(state, bucket) -> Future[Tensor]``, as in torch. It reduces one bucket's gradients in its own way, the
division by the world size included, and its future holds the result. Hooks written for torch's ``GradBucket`` work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ddp.bucket import Bucket

#: ``hook(state, bucket) -> Future[Tensor]``.
CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


#: Prefixes of the modules whose hooks all hand the same result to all ranks.
_KEEP_EQUAL = (
    "lockstep.",
    *(f"torch.distributed.algorithms.ddp_comm_hooks.{name}_hook" for name in ("default", "powerSGD")),
)


def keeps_equal(hook: CommHook) -> bool:
    """Return whether ``hook`` is known to hand the same gradients to all ranks."""
    return f"{getattr(hook, '__module__', '')}.".startswith(_KEEP_EQUAL)


class GradBucket:
    """A bucket as a comm hook sees it: the methods of :class:`torch.distributed.GradBucket`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._buffer = bucket.values

    def index(self) -> int:
        """Return the bucket's place in the order of reduction."""
        return self._bucket.index

    def is_last(self) -> bool:
        """Return whether this is the last bucket of this backward."""
        return self._bucket.is_last

    def buffer(self) -> Tensor:
        """Return all gradients of the bucket, 1-D, not yet divided by the world size.

        On an accelerator there are zeros between them: each begins at a multiple of 128 bytes.
        """
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor of as many elements in the place of the buffer, for the rest of this hook."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients in the buffer, one view for each parameter, in its shape."""
        if self._buffer is self._bucket.values:
            return list(self._bucket.views)
        pairs = zip(self._bucket.split(self._buffer), self._bucket.params, strict=True)
        return [part.view(param.shape) for part, param in pairs]

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the bucket."""
        return list(self._bucket.params)


def fp16_compress_hook(process_group: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[Tensor]:
    """**Collective.** Average in float16: half the bytes of float32, for gradients that stay within 65504.

    Args:
        process_group: the hook's state: the group to reduce over, or None for the default group.
        bucket: a :class:`~lockstep.ddp.comm_hooks.GradBucket` (lockstep's or torch's).
    """
    return _compressed(torch.float16, process_group, bucket)


def bf16_compress_hook(process_group: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[Tensor]:
    """**Collective.** Average in bfloat16: half the bytes of float32, its full range, and 8 bits of precision.

    Args:
        process_group: the hook's state: the group to reduce over, or None for the default group.
        bucket: a :class:`~lockstep.ddp.comm_hooks.GradBucket` (lockstep's or torch's).
    """
    return _compressed(torch.bfloat16, process_group, bucket)


def _compressed(
    dtype: torch.dtype, process_group: dist.ProcessGroup | None, bucket: Any
) -> torch.futures.Future[Tensor]:
    buffer: Tensor = bucket.buffer()
    small = buffer.to(dtype).div_(dist.get_world_size(process_group))
    future = dist.all_reduce(small, group=process_group, async_op=True).get_future()

    def decompress(done: torch.futures.Future[Any]) -> Tensor:
        done.value()  # raises what the all-reduce raised
        return buffer.copy_(small)

    decompressed: torch.futures.Future[Tensor] = future.then(decompress)
    return decompressed
