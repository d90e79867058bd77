"""Whether two tensors hold the same bits, read where they are.

An edit in place through ``.data`` leaves no trace: torch gives ``p.data`` a version counter of its own. And the batch
statistics are updated inside a kernel, which counts no version either. So where nothing else tells of a change, the
contents are compared. On the CPU that is exact. Between devices nothing is sent but a fingerprint of 64 bits for each
16 MiB: the bits, as int32, times odd random factors, summed in int64. A single changed word always changes it; any
other change goes unnoticed with a probability of about 2^-32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

#: Words of 32 bits in a group that has one fingerprint.
_GROUP = 4 * 2**20


def bits_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of ``tensor`` in the order in which ``like`` is stored, as integers as wide as fit."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    octets = tensor.permute(order).contiguous().view(-1).view(torch.uint8)  # copied only if it has gaps
    wide = next((each for each in (torch.int64, torch.int32) if octets.numel() % each.itemsize == 0), torch.uint8)
    if octets.storage_offset() % wide.itemsize:
        octets = octets.clone()  # a part of a larger tensor, and not on a boundary of words
    return octets.view(wide)


def changed(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    """Return the positions of pairs whose tensors differ.

    The tensors of a pair have one shape and dtype, and the second has no gaps. Waits for the devices, where these are
    no CPUs. May name a pair that does not differ, beside one that does.
    """
    if not pairs:
        return []
    if all(one.device.type == "cpu" and other.device.type == "cpu" for one, other in pairs):
        return [i for i, (one, other) in enumerate(pairs) if not _same_memory(one, other)]
    groups = _groups([one.nbytes // 4 + 1 for one, _ in pairs])
    ours = fingerprints([[pairs[i] for i in group] for group in groups])
    theirs = fingerprints([[(pairs[i][1], pairs[i][1]) for i in group] for group in groups])
    differing = torch.nonzero(ours.cpu() != theirs.cpu()).flatten().tolist()
    return [i for group in differing for i in groups[group]]


# Python and torch have no comparison of bits that costs as little for the many small tensors of a model.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors on the CPU hold the same bits; the second has no gaps."""
    if one.stride() == other.stride() and not one.is_conj() and not one.is_neg():
        return bool(_memcmp(one.data_ptr(), other.data_ptr(), other.nbytes) == 0)
    return torch.equal(bits_of(one, other), bits_of(other, other))


def fingerprints(groups: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> Tensor:
    """Return one number of 64 bits for each group of tensors, on their device; see the module's text.

    With each tensor comes one of the same shape, in whose order it is read.
    """
    return torch.stack([_fingerprint(group) for group in groups])


def _fingerprint(tensors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    parts = [_words(bits_of(*each)) for each in tensors]
    words = parts[0] if len(parts) == 1 else torch.cat(parts)  # a large tensor is alone, and read where it is
    total = words.new_zeros((), dtype=torch.int64)
    for place, chunk in enumerate(words.split(_GROUP)):
        factors = _factors(words.device)[: chunk.numel()]
        total = total + (2 * place + 1) * (chunk * factors).sum(dtype=torch.int64)
    return total


def _words(bits: Tensor) -> Tensor:
    return bits.to(torch.int32) if bits.dtype == torch.uint8 else bits.view(torch.int32)


_known_factors: dict[torch.device, Tensor] = {}


def _factors(device: torch.device) -> Tensor:
    """Odd numbers, int64, the same on every device: an odd factor loses no bit of what it multiplies.

    In 32 bits the highest bit of a word, the sign of a float, would reach only the highest bit of the product, and
    tensors whose signs differ would often have the same sum.
    """
    factors = _known_factors.get(device)
    if factors is None:
        generator = torch.Generator().manual_seed(0x10C857E9)
        drawn = torch.randint(-(2**31), 2**31, (_GROUP,), generator=generator, dtype=torch.int64)
        factors = _known_factors[device] = (drawn | 1).to(device)
    return factors


def _groups(words: Sequence[int]) -> list[list[int]]:
    """Neighbouring tensors, together until they fill a group."""
    groups: list[list[int]] = []
    filled = _GROUP
    for i, size in enumerate(words):
        if filled + size > _GROUP:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += size
    return groups
