"""The replicas' copies of parameters and buffers: kept from forward to forward, renewed where the original changed.

Note [When a copy is stale]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A copy is stale when the original is another tensor object than the one it was made from, when its version counter has
moved (optimizers, ``load_state_dict``, edits in place), or when it lies in another memory (``.data = ...``,
``module.to(...)``). An address may be given out again, so the memory is known by a weak reference to its storage.
Two things move none of these, edits in place through ``.data`` and the batch statistics: where all else is still, the
contents are compared (Note [Same bits]). Buffers of modules in training mode are copied without a look, as torch does.

A stale parameter is overwritten in place, so that memory does not grow; its version counter moves, and a backward
through an older forward is the error that it is without replicas. Where contents alone told of the change, the counter
does not move, as it does not for the original. Stale buffers get new memory, because an older forward of a batch norm
may still need the ones it has seen.

Note [Same bits]
~~~~~~~~~~~~~~~~
An edit in place through ``.data`` leaves no trace: torch gives ``p.data`` a version counter of its own. And the batch
statistics are updated inside a kernel, which counts no version either. So where nothing else tells of a change, the
contents are compared. On the CPU that is exact. Between devices nothing is sent but a digest of 64 bits for each 16 MiB
(Note [Two digests] in ``bits.py``). A single changed word always changes it; any other change goes unnoticed with a
probability of about 2^-32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep import _torch, bits
from lockstep.trees import dense_parts, moved

#: Tensors of fewer bytes travel to another device together.
_SMALL = 2**20


@dataclass(frozen=True)
class Copies:
    """The counts of copies from the original module to its replicas since the wrapper was made."""

    #: Number of forwards that used replicas.
    forwards: int = 0
    #: Number of forwards that copied anything.
    refreshes: int = 0
    #: Number of parameters and buffers copied, once for each replica that got one.
    tensors: int = 0
    #: Their total size in bytes.
    bytes: int = 0


@dataclass
class _Made:
    """A copy, and the state of the original when it was made."""

    copy: Tensor
    version: int | None
    #: The original's memory and layout; see :func:`_memory_of`.
    memory: tuple[Any, ...]
    #: References to the storages of its dense parts. While there is one, no other storage gets the address.
    storages: list[StorageWeakRef]
    #: The copy's own version counter: a replica may have changed it in its forward.
    copy_version: int


class Slot:
    """One parameter or buffer, and its copies."""

    def __init__(self, source: Tensor, replicas: int, *, is_buffer: bool) -> None:
        self.source, self.is_buffer = source, is_buffer
        #: True if a module that holds this is in training mode.
        self.training = False
        self._made: list[_Made | None] = [None] * replicas
        #: The copies as autograd knows them, from the last forward that recorded a graph.
        self.lent: list[Tensor | None] = [None] * replicas

    def copy(self, replica: int) -> Tensor:
        """Return the copy of a replica that was renewed before."""
        made = self._made[replica]
        if made is None:
            raise AssertionError(f"replica {replica} has no copy yet")  # a mistake in this package
        return made.copy

    def is_stale(self, replica: int) -> bool:
        """Return whether the copy must be renewed, as far as is known without reading it."""
        made = self._made[replica]
        if made is None or (self.is_buffer and self.training):
            return True
        return (
            made.version is None
            or made.version != _version(self.source)
            or made.memory != _memory_of(self.source)
            or made.copy_version != made.copy._version
        )

    def destination(self, replica: int, device: torch.device, *, quietly: bool) -> Tensor:
        """Return the memory that the copy goes to; see Note [When a copy is stale]."""
        made = self._made[replica]
        if self.source.layout != torch.strided:
            self.lent[replica] = None
            return self.source.detach().to(device, copy=True)  # its parts may be of another size each time
        if made is None or self.is_buffer or made.memory != _memory_of(self.source):
            self.lent[replica] = None
            return torch.empty_like(self.source, device=device, requires_grad=False)
        return made.copy.data if quietly else made.copy

    def note(self, replica: int, destination: Tensor) -> None:
        """Record the copy that was made."""
        made = self._made[replica]
        kept = made.copy if made is not None and _memory_of(made.copy) == _memory_of(destination) else destination
        storages = [StorageWeakRef(part.untyped_storage()) for part in dense_parts(self.source)]
        self._made[replica] = _Made(kept, _version(self.source), _memory_of(self.source), storages, kept._version)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the memory of a tensor, and its layout there."""
    if tensor.layout == torch.strided:
        return _torch.storage_of(tensor), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    return tensor.layout, tensor.shape, *(_memory_of(part) for part in dense_parts(tensor))


def _bytes(tensor: Tensor) -> int:
    return sum(part.nbytes for part in dense_parts(tensor))


class Copier:
    """Renews copies and counts them."""

    def __init__(self, devices: Sequence[torch.device], *, check_contents: bool) -> None:
        self._devices = devices
        self._check_contents = check_contents
        self.count = Copies()

    def renew(self, slots: Sequence[Slot], replicas: Sequence[int]) -> None:
        """Bring the copies of these replicas up to date."""
        tensors = size = 0
        # Copies made in inference mode could never be trained on.
        with torch.inference_mode(False), torch.no_grad():
            for replica in replicas:
                stale = [slot for slot in slots if slot.is_stale(replica)]
                renewed = {id(slot) for slot in stale}
                fresh = [slot for slot in slots if id(slot) not in renewed]
                edited = self._edited(fresh, replica)
                self._copy(stale, replica, quietly=False)
                self._copy(edited, replica, quietly=True)
                tensors += len(stale) + len(edited)
                size += sum(_bytes(slot.source) for slot in (*stale, *edited))
        was = self.count
        self.count = Copies(was.forwards + 1, was.refreshes + bool(tensors), was.tensors + tensors, was.bytes + size)

    def _edited(self, fresh: Sequence[Slot], replica: int) -> list[Slot]:
        chosen = [slot for slot in fresh if self._check_contents or slot.is_buffer]
        pairs, slots = [], []
        for slot in chosen:
            for pair in zip(dense_parts(slot.source), dense_parts(slot.copy(replica)), strict=True):
                pairs.append(pair)
                slots.append(slot)
        return list({id(slots[i]): slots[i] for i in changed(pairs)}.values())

    def _copy(self, slots: Sequence[Slot], replica: int, *, quietly: bool) -> None:
        device = self._devices[replica]
        targets = [slot.destination(replica, device, quietly=quietly) for slot in slots]
        sources = [slot.source.detach() for slot in slots]
        transfer(sources, targets)
        for slot, target in zip(slots, targets, strict=True):
            slot.note(replica, target)


def transfer(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source to its target; small ones between devices travel in one piece for each dtype."""
    together: dict[torch.dtype, list[int]] = {}
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source.layout != torch.strided:
            continue  # it came with its destination
        if source.device != target.device and source.nbytes < _SMALL:
            together.setdefault(source.dtype, []).append(i)
        else:
            target.copy_(source, non_blocking=not target.is_cpu)
    for positions in together.values():
        send_together([sources[i] for i in positions], [targets[i] for i in positions])


def send_together(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source to its target, all in one piece: of one dtype, from one device to one device."""
    flat = torch.cat([source.reshape(-1) for source in sources]).to(targets[0].device)
    for target, part in zip(targets, flat.split([source.numel() for source in sources]), strict=True):
        target.copy_(part.view(target.shape))


def changed(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    """Return the positions of pairs whose tensors differ.

    The tensors of a pair have the same shape and dtype, and the second has no gaps. The function waits for devices
    other than the CPU, and may name a pair that does not differ, beside one that does.
    """
    if not pairs:
        return []
    if all(one.device.type == "cpu" and other.device.type == "cpu" for one, other in pairs):
        return [i for i, (one, other) in enumerate(pairs) if not bits.same(one, other)]
    groups = bits.packed([one.nbytes // 4 + 1 for one, _ in pairs])
    ours = _digests([[pairs[i] for i in group] for group in groups])
    theirs = _digests([[(pairs[i][1], pairs[i][1]) for i in group] for group in groups])
    home = theirs.device if ours.is_cpu else ours.device  # (a copy to the host would have to be waited for)
    differs = moved(ours, home) != moved(theirs, home)
    differing = [group for group, is_other in enumerate(differs.tolist()) if is_other]
    return [i for group in differing for i in groups[group]]


def _digests(groups: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> Tensor:
    """Return one number of 64 bits for each group of tensors, on their device; see Note [Same bits].

    The second tensor of each pair has the same shape, and gives the order in which the first is read.
    """
    ordered = [[bits.octets(*each) for each in group] for group in groups]
    return torch.stack([bits.on_device([(each, 0, each.nbytes) for each in one], 0, one[0].device) for one in ordered])
