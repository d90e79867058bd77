"""Make tensors of all ranks equal to one rank's: parameters at construction, buffers before a training forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.waiting import wait_for

#: Bytes sent at once: enough to be fast, not so much that the copies fill the memory.
_CHUNK = 64 * 1024 * 1024


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[Tensor], *, group: dist.ProcessGroup, source: int, what: Callable[[], str]
) -> None:
    """**Collective.** Overwrite ``tensors`` with those of rank ``source``, bit by bit, in as few messages as possible.

    Args:
        tensors: dense tensors of any dtype; the same shapes and dtypes on every rank.
        group: the process group.
        source: a rank of that group.
        what: describes the operation, for the error.

    Raises:
        CollectiveTimeout, PeerLost: another rank is late or gone.
    """
    if dist.get_world_size(group) == 1:
        return
    sends = dist.get_rank(group) == source
    for chunk in _chunks(tensors):
        # As bytes: dtypes share a message, and backends that do not know a dtype need not.
        parts = [_bytes_of(tensor) for tensor in chunk]
        message = torch.cat(parts)
        send = lambda message=message: dist.broadcast(message, group_src=source, group=group)  # noqa: E731
        wait_for(send, what, name="sending rank 0's tensors")
        if not sends:
            for tensor, part in zip(chunk, message.split_with_sizes([len(part) for part in parts]), strict=True):
                received = part.clone().view(tensor.dtype).view(tensor.shape)
                # Through .data: autograd may have saved a buffer for backward, and its values there do not matter to
                # anyone (batch statistics are saved apart), so this write must not count as a modification.
                tensor.data.copy_(received)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for on_device in by_device.values():
        chunk: list[Tensor] = []
        size = 0
        for tensor in on_device:
            chunk.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= _CHUNK:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk
