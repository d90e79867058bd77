"""Make tensors of all ranks equal to one rank's: parameters at construction, buffers before a training forward.

Note [Layout of a message]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A buffer may have another size on each rank: a table of positions that grows with the longest sequence so far. A backend
need not notice: gloo takes a message that is shorter than expected, and everything after that buffer in the message
would end up shifted. So a message begins with a digest of the shapes and dtypes in it, which a rank compares with its
own; it raises if they differ. (If the message is longer than expected, gloo aborts the process. On a GPU
nothing is compared, since reading the digest would wait for the device.)

Tensors with the largest elements come first, so that each begins at a multiple of its element size: a rank that
receives them takes all tensors of a dtype from the message in one call.
"""

from __future__ import annotations

import hashlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import _torch
from lockstep.comm.waiting import wait_for
from lockstep.ddp.members import Buffers, buffers_of, tensors_of
from lockstep.errors import CollectiveMismatch, LockstepError
from lockstep.step import streams
from lockstep.text import listed

_foreach_copy = _torch.foreach_copy()
_element_size: Callable[[Tensor], int] = operator.attrgetter("dtype.itemsize")
#: Bytes sent at once: enough to be fast, but not enough for the copies to fill the memory.
_CHUNK = 64 * 1024 * 1024
#: Bytes of the digest at the beginning of a message.
_DIGEST = 16


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
        CollectiveMismatch: rank ``source`` sent tensors of other shapes or dtypes; see Note [Layout of a message].
        CollectiveTimeout, PeerLost: another rank is late or gone.
    """
    if dist.get_world_size(group) == 1:
        return
    sends = dist.get_rank(group) == source
    for chunk in _chunks(tensors):
        # Sent as bytes, dtypes share a message, and backends need not know them.
        chunk.sort(key=_element_size, reverse=True)
        layout = tuple([(tensor.shape, tensor.dtype) for tensor in chunk])
        digest = _digest_of(layout) if chunk[0].device.type == "cpu" else _bytes_of(chunk[0])[:0]
        parts = [digest, *map(_bytes_of, chunk)]
        message = torch.cat(parts)
        send = lambda message=message: dist.broadcast(message, group_src=source, group=group)  # noqa: E731
        wait_for(send, what, name="sending rank 0's tensors")
        if not sends:
            theirs, *received = message.split_with_sizes([len(part) for part in parts])
            if len(digest) and not torch.equal(theirs, digest):
                shown = listed([f"{list(shape)} of {dtype}" for shape, dtype in layout], most=10)
                raise CollectiveMismatch(
                    f"{what()}: rank {source} sent tensors of other shapes or dtypes than this rank's ({shown}), "
                    "so nothing was taken. A buffer must have the same size on every rank; one that grows with a "
                    "rank's own data can be a plain attribute instead, or be named in "
                    "model._ddp_params_and_buffers_to_ignore"
                )
            _take(chunk, received)


def _take(tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Overwrite ``tensors`` with the bytes that came for each: by one call for each dtype."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for tensor, part in zip(tensors, parts, strict=True):
        own, theirs = by_dtype.setdefault(tensor.dtype, ([], []))
        # Writing through .data doesn't count as a modification: autograd may have saved a buffer for backward, which
        # does not use its values (batch statistics are saved apart).
        own.append(tensor.data)
        theirs.append(part.view(tensor.dtype).view(tensor.shape))
    for own, theirs in by_dtype.values():
        _foreach_copy(own, theirs)


class ReplicaTensors:
    """Gives all ranks one rank's parameters, buffers or random numbers.

    Args:
        module: the replica's module. It is held weakly.
        group: the ranks that hold replicas.
        sends_buffers: buffers are sent around training forwards.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, *, sends_buffers: bool) -> None:
        self._module, self._group, self._found = weakref.ref(module), group, Buffers(module)
        self._is_alone = dist.get_world_size(group) == 1
        #: True if buffers are sent around training forwards. The user may turn this off for a while.
        self.sends_buffers = sends_buffers

    def module(self) -> nn.Module:
        """Return the module.

        Raises:
            LockstepError: it is gone.
        """
        module = self._module()
        if module is None:
            raise LockstepError("the replicated module no longer exists: keep a reference to it")
        return module

    def buffers(self) -> list[Tensor]:
        """Return the buffers that are to be the same on all ranks."""
        return self._found.current(self.module()) if self.sends_buffers else []

    def send(self, tensors: Iterable[Tensor], source: int, what: str) -> None:
        """**Collective.** Give all ranks the ``tensors`` of rank ``source``; ``what`` says so in errors."""
        rank, world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        say: Callable[[], str] = lambda: f"rank {rank} of {world_size}: {what}"  # noqa: E731
        broadcast_tensors(tensors, group=self._group, source=source, what=say)

    def send_buffers(self, source: int) -> bool:
        """**Collective.** Give all ranks the buffers of rank ``source``; return whether there are any."""
        module = None if self._is_alone else self._module()
        buffers = [] if module is None else self._found.current(module)
        if buffers:
            self.send(buffers, source, "sending the buffers")
        return bool(buffers)

    def send_all(self, *, params: bool) -> None:
        """**Collective.** Give all ranks rank 0's buffers, and its parameters if asked for."""
        module = self.module()
        tensors = tensors_of(module, buffers=True) if params else [buffer for _, buffer in buffers_of(module)]
        self.send(tensors, 0, "sending rank 0's parameters and buffers" if params else "sending the buffers")

    def send_random_numbers(self, source: int) -> None:
        """**Collective.** Give all ranks the common random numbers of rank ``source``; some took fewer steps."""
        common = streams.current.state.to(self.device)
        self.send([common], source, "sending the common random numbers")
        streams.current.state = common.cpu()

    @property
    def device(self) -> torch.device:
        """Return the device of the module's first parameter, or the CPU."""
        module = self._module()
        first = None if module is None else next(module.parameters(), None)
        return torch.device("cpu") if first is None else first.device


@lru_cache(maxsize=64)
def _digest_of(layout: tuple[tuple[torch.Size, torch.dtype], ...]) -> Tensor:
    text = repr([(list(shape), str(dtype)) for shape, dtype in layout])
    return torch.tensor(
        [*hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest()], dtype=torch.uint8, device="cpu"
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
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
