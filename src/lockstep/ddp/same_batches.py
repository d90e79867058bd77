"""The first batches, compared over the ranks: a loader that nobody has sharded gives all of them the same.

Note [A loader that nobody sharded]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A script that is started on several ranks with a plain DataLoader trains on the same batches everywhere, since all ranks
are seeded alike: N ranks compute what one would, N times. Losses fall, replicas are equal, no rank waits, so nothing
else tells. So each rank takes a digest of what the model is given in each of the first steps, and all are compared.

Equal inputs alone prove no mistake. A batch that is the same in each step (the whole data set as one batch, a batch to
be overfitted, a made-up one in a test) may well be the same on all ranks, and a loader that should have been sharded
gives another one each time. So it is said only where the batches of all these steps differ from one another and each is
the same on all ranks, bit by bit. A batch that a sharded loader has handed out is never suspected, and nor is anything
where a rank can't tell: it has seen no tensor, or an object that it can't look into. Whoever feeds all ranks alike on
purpose, because the model itself divides its inputs or adds noise of its own to them, says ``same_batches=True``. It
is a warning in any case: the averages are right, and only time is lost.

One digest of all these steps travels in the flags of the last bucket, once, as those of Note [Replicas compared] do: a
bit that is 0 on one rank and 1 on another shows on all of them. One flag more says that a rank can't tell. Then the
rider leaves. The flags are read when the next forward begins, where a warning points to the line that feeds the model,
and no later step knows of any of it. On a GPU digests stay on the device, and nothing waits.

Large tensors are sampled: blocks spread over all of it, a MiB together. Replicas that train apart between rounds have
no buckets, and are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import combinations, islice
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from lockstep import _torch, accelerator, bits, callsite
from lockstep.ddp.bucket import Bucket
from lockstep.ddp.digest import BITS, fold
from lockstep.ddp.hooks import MOST_PARTS, Forward, tensors_in
from lockstep.ddp.rider import BackwardState
from lockstep.trees import dense_parts, leaves, moved

#: Averaged backwards whose batches are compared.
STEPS = 3
#: Number of flags in the last bucket.
FLAGS = 2 * BITS + 1
#: Bytes of a tensor that are looked at, and of the blocks that they come in.
_MOST_BYTES, _BLOCK = 1 << 20, 4096
_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, np.generic)
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class InputLook(Protocol):
    """Looks at what the model is given in forwards that a backward may come through."""

    def forward_begins(self, forward: Forward, inputs: Any) -> None:
        """Look at the inputs of a forward.

        Args:
            forward: its state.
            inputs: a tree of all its arguments.
        """
        ...


class SameBatches:
    """A rider that warns where all ranks train on the same batches; see Note [A loader that nobody sharded].

    Args:
        group: the ranks that hold replicas.
        looks: the list of those who look at inputs, in which it stays while it looks.
    """

    def __init__(self, group: dist.ProcessGroup, looks: list[InputLook]) -> None:
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._looks = looks
        looks.append(self)
        #: True if this rank can't tell, and so no rank shall.
        self._is_unsure = False
        #: The digests of the inputs since the last averaged backward, of 32 bits each: tensors where inputs are on a
        #: device. Those of each step before.
        self._inputs: list[int | Tensor] = []
        self._steps: list[list[int | Tensor]] = []
        self._has_sent = False
        #: True when nothing is left to be sent, in the same step on all ranks.
        self.is_over = False
        #: The device of the flags, and the flags of all ranks on their way to the host.
        self._device = accelerator.CPU
        self._unread: accelerator.HostCopy | None = None

    # Looking --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward_begins(self, forward: Forward, inputs: Any) -> None:
        """See :class:`InputLook`."""
        if self._has_sent:
            self._looks.remove(self)
            if self._unread is not None and not _captures(self._device):
                self._judge(self._unread.read().tolist())
            return
        if self._is_unsure or forward.batch:  # the latter: a sharded loader has handed it out
            self._is_unsure = True
            return
        has_tensors = False
        for leaf in islice(leaves(inputs), MOST_PARTS):
            if isinstance(leaf, _PLAIN):
                self._inputs.append(xxhash.xxh3_64_intdigest(repr(leaf).encode()) & ((1 << BITS) - 1))
                continue
            for tensor in _tensors_of(leaf):
                if tensor is None or _captures(tensor.device):
                    self._is_unsure = True
                    return
                self._inputs.append(_digest(tensor))
                has_tensors = True
        # (Forwards may come without end before a backward does, as those of an agent that plays.)
        self._is_unsure |= not has_tensors or len(self._inputs) > MOST_PARTS

    # With the gradients: see Rider -----------------------------------------------------------------------------------

    def width(self, parameters: int, *, is_last: bool) -> int:  # noqa: ARG002  (as the protocol has it)
        """See :class:`~lockstep.ddp.rider.Rider`."""
        return FLAGS if is_last else 0

    def write(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> None:  # noqa: ARG002
        """See :class:`~lockstep.ddp.rider.Rider`."""
        if self._has_sent:
            return
        self._is_unsure |= not self._inputs
        self._steps.append(self._inputs)
        self._inputs = []
        if len(self._steps) < STEPS:
            return
        self._has_sent = True
        if self._is_unsure or _captures(flags.device):
            flags[-1] = 1
        else:
            flags.copy_(_flags_of(self._steps, flags), non_blocking=not flags.is_cpu)
        self._steps = []

    def read(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> None:  # noqa: ARG002
        """See :class:`~lockstep.ddp.rider.Rider`."""
        if not self._has_sent:
            return
        self._device = flags.device
        if not _captures(flags.device):
            self._unread = accelerator.HostCopy((flags.detach().abs() > 0).to(torch.uint8))
        self.is_over = True
        sending.leave(self)

    def alone(self, sending: BackwardState) -> None:
        """See :class:`~lockstep.ddp.rider.Rider`: nothing is told without a bucket."""

    def _judge(self, found: list[int]) -> None:
        """**Rank 0.** Warn if all ranks have written the same digest, and none that it can't tell."""
        ones, zeros, unsure = found[:BITS], found[BITS : 2 * BITS], found[-1]
        is_same = not unsure and all(one != zero for one, zero in zip(ones, zeros, strict=True))
        if is_same and self._rank == 0:
            callsite.warn(
                f"rank 0 of {self._world_size}: in each of the first {STEPS} steps all {self._world_size} ranks have "
                "given the model the same inputs, bit by bit: the data are not divided among the ranks, so that each "
                "batch is computed on all of them. Divide them: loader = lockstep.shard(loader), whose batch_size is "
                "that of all ranks together, or lockstep.DistributedSampler in the DataLoader; what a script draws "
                "itself needs another seed on each rank. If it is meant so, say it: lockstep.replicate(model, "
                "same_batches=True)"
            )


def _captures(device: torch.device) -> bool:
    """Return whether a graph of work on ``device`` is being captured, in which nothing may be read or looked at."""
    if device.type == "cpu":
        return False
    test = accelerator.capture_test([device])
    return test is not None and test()


def _tensors_of(leaf: Any) -> Iterator[Tensor | None]:
    """Yield the dense tensors that make up a leaf of the inputs; None: it holds something that can't be compared."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        yield torch.from_numpy(np.array(leaf))
        return
    found = [leaf] if isinstance(leaf, Tensor) else [*tensors_in(leaf)]
    if not found:
        yield None
    for tensor in found:
        is_odd = tensor.is_meta or tensor.is_quantized or _torch.is_made_of_tensors(tensor)
        if is_odd or (tensor.layout != torch.strided and tensor.layout not in _SPARSE):
            yield None
        else:
            yield from dense_parts(tensor)


def _digest(tensor: Tensor) -> int | Tensor:
    """Return a digest of 32 bits of a dense tensor, a large one sampled: a number on CPUs, a tensor elsewhere."""
    salt = xxhash.xxh3_64_intdigest(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    octets = bits.octets(tensor, tensor)
    if len(octets) > _MOST_BYTES:
        blocks = octets[: len(octets) // _BLOCK * _BLOCK].view(-1, _BLOCK)
        octets = blocks[:: -(-len(octets) // _MOST_BYTES)].reshape(-1)
    if not len(octets):
        return fold(salt)
    return fold(bits.digest([(octets, 0, len(octets))], salt, tensor.device))


def _flags_of(steps: list[list[int | Tensor]], like: Tensor) -> Tensor:
    """Return this rank's flags for its digests by step, on the device of ``like`` if one of them is on a device."""
    numbers = [reduce(_both, [_beside(each, like) for each in step]) for step in steps]
    whole = reduce(_both, numbers)
    repeats = reduce(lambda one, other: one | other, (one == other for one, other in combinations(numbers, 2)))
    positions = torch.arange(BITS, device=whole.device if isinstance(whole, Tensor) else like.device)
    ones = (
        (whole >> positions) & 1 if isinstance(whole, Tensor) else (torch.full_like(positions, whole) >> positions) & 1
    )
    unsure = repeats.reshape(1) if isinstance(repeats, Tensor) else torch.full_like(positions[:1], int(repeats))
    return torch.cat([ones, 1 - ones, unsure.to(ones.dtype)]).to(like.dtype)


def _both(one: int | Tensor, other: int | Tensor) -> int | Tensor:
    """Return one digest for both, which depends on their order."""
    return (one * 31 + other) & ((1 << BITS) - 1)


def _beside(digest: int | Tensor, like: Tensor) -> int | Tensor:
    return moved(digest, like.device) if isinstance(digest, Tensor) else digest
