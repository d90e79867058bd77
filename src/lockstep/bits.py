"""The content of tensors: their bytes, whether two are the same, one digest for many of them, and which hold a value.

Note [Two digests]
~~~~~~~~~~~~~~~~~~
On a CPU the digest is XXH3, as fast as the memory is read. On a GPU it is a sum of products: each 4-byte word times an
odd 64-bit factor that depends on its place, modulo 2⁶⁴. Integer sums do not depend on the order, so the digest is the
same on every rank although threads add in any order; and one changed word always changes it, since an odd factor loses
no bit. (In 32 bits the highest bit of a word, the sign of a float, would reach only the highest bit of the product, and
tensors whose signs differ would often have the same sum.) The digest stays on the device: nothing waits for it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch
import xxhash
from torch import Tensor
from torch.nn.parameter import is_lazy

#: The number of 4-byte words that are summed at once on a device; each has a factor in a table.
GROUP = 4 * 2**20
#: splitmix64's constants, from which the factors of the places on a GPU are made.
_GOLDEN, _MIX = -0x61C8864680B583EB, -0x40A7B892E31B1A47
_MASK = (1 << 64) - 1

# Python and torch have no comparison of bits that costs as little for the many small tensors of a model.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def octets(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of ``tensor`` in the order in which ``like`` is stored, as bytes: uint8, 1-D."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    return tensor.permute(order).contiguous().view(-1).view(torch.uint8)  # copied only if the tensor has gaps


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors on the CPU, of one shape and dtype, hold the same bits; the second has no gaps."""
    if one.stride() == other.stride() and not one.is_conj() and not one.is_neg():
        return bool(_memcmp(one.data_ptr(), other.data_ptr(), other.nbytes) == 0)
    return torch.equal(octets(one, other), octets(other, other))


def hexdigest(values: Tensor, most: int | None = None) -> str:
    """Return a digest of the first ``most`` bytes of a tensor's elements, or of all; waits for its device."""
    if values.layout != torch.strided:
        values = values.coalesce()
        return hexdigest(values.indices(), most) + hexdigest(values.values(), most)
    flat = values.detach().resolve_conj().resolve_neg().reshape(-1)
    start = flat if most is None else flat[: max(1, most // values.element_size())]
    if not len(start):
        return xxhash.xxh3_64_hexdigest(b"")
    start = start.contiguous().cpu()
    # (No tensor can be resized of which NumPy has had the memory, and observers of quantization resize theirs.)
    return xxhash.xxh3_64_hexdigest(chars(start.nbytes).from_address(start.data_ptr()))


def on_cpu(found: Iterable[tuple[Tensor, int, int]], salt: int) -> int:
    """Return the digest of bytes on CPUs: 64 bits, unsigned; see Note [Two digests].

    Args:
        found: tensors without gaps, each with its first byte and the one after the last.
        salt: makes digests of equal bytes differ.
    """
    state = xxhash.xxh3_64(seed=salt)
    for value, start, stop in found:
        # (NumPy takes four times as long. The tensor is alive, has this size and has no gaps.)
        state.update(chars(stop - start).from_address(value.data_ptr() + start))
    return state.intdigest()


def on_device(found: Iterable[tuple[Tensor, int, int]], salt: int, device: torch.device) -> Tensor:
    """Return the digest of bytes on ``device`` (0-dim, int64), and leave it there; see Note [Two digests].

    Args:
        found: tensors without gaps, each with its first byte and the one after the last.
        salt: makes digests of equal bytes differ.
        device: the device that computes the digest.
    """
    words = [_words(*each) for each in found]
    total = torch.full((), struct.unpack("<q", struct.pack("<Q", salt & _MASK))[0], device=device, dtype=torch.int64)
    if not words:
        return total
    flat = words[0] if len(words) == 1 else torch.cat(words)  # a large tensor comes alone, and is not copied
    for index, chunk in enumerate(flat.split(GROUP)):
        factors = _factors(device, _at_least(chunk.numel()))[: chunk.numel()]
        total = total + (2 * index + 1) * (chunk * factors).sum()
    return total


def digest(found: Iterable[tuple[Tensor, int, int]], salt: int, device: torch.device) -> int | Tensor:
    """Return the digest of bytes on ``device``: as :func:`on_cpu` on a CPU, as :func:`on_device` elsewhere."""
    return on_cpu(found, salt) if device.type == "cpu" else on_device(found, salt, device)


def unsigned(digest: int | Tensor) -> int:
    """Return a digest as a number of 64 bits, wherever it was computed; waits for its device."""
    return int(digest) & _MASK


def with_any(test: Callable[[Tensor], Tensor], tensors: Iterable[tuple[str, Tensor]]) -> frozenset[str]:
    """Return the names of the tensors of which ``test`` finds some element, with one copy from each device.

    Args:
        test: returns for each element whether it is found, such as ``torch.isnan``.
        tensors: with their names. Whole numbers are left out, and so are tensors without elements in memory (lazy ones,
            those on "meta") and those that are not strided.
    """
    asked: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        if is_lazy(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        if tensor.is_meta or tensor.layout is not torch.strided:
            continue
        real = tensor.detach()
        if real.dtype.itemsize == 1:  # torch can't test all of these dtypes
            real = real.half()
        asked.setdefault(tensor.device, []).append((name, test(real).any()))
    return frozenset(
        name
        for those in asked.values()
        for (name, _), found in zip(those, torch.stack([one for _, one in those]).tolist(), strict=True)
        if found
    )


def packed(sizes: Sequence[int]) -> list[list[int]]:
    """Return the positions of neighbours that share a digest on a device: as many as fill :data:`GROUP`.

    Args:
        sizes: the sizes of the tensors, in words.
    """
    groups: list[list[int]] = []
    filled = GROUP
    for i, size in enumerate(sizes):
        if filled + size > GROUP:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += size
    return groups


@lru_cache(maxsize=4096)
def chars(count: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return the type of so many bytes. Memory that its ``from_address`` shows must stay while it is read."""
    return ctypes.c_char * count


@torch.no_grad()
def _words(value: Tensor, start: int, stop: int) -> Tensor:
    """Return bytes of a tensor without gaps as int32, 1-D: 4-byte words, or single bytes if they don't fit."""
    flat = value.detach().resolve_conj().as_strided((value.numel(),), (1,), value.storage_offset())
    data = flat.view(torch.uint8)[start:stop]
    if len(data) % 4:
        return data.to(torch.int32)
    return (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)


@lru_cache(maxsize=16)
def _factors(device: torch.device, count: int) -> Tensor:
    """Return the odd factors, one for each place: int64 [count]."""
    numbers = (torch.arange(count, device=device, dtype=torch.int64) + 1) * _GOLDEN
    numbers = (numbers ^ (numbers >> 30)) * _MIX
    return (numbers ^ (numbers >> 27)) | 1


def _at_least(count: int) -> int:
    """Round up to a power of two, so that few tables of factors are kept."""
    return 1 << max(10, (count - 1).bit_length())
