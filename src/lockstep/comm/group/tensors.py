"""Turn the tensors that callers pass into the flat ones that collectives move, and back.

``source`` and ``target`` give the same memory where possible. Where that can't be, ``target`` gives a copy, and
``restore`` brings it back into the caller's tensor afterwards.

``.data``: as with every other backend, autograd does not see what a collective does, and a parameter may be passed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def is_flat(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's elements lie in memory one after another, as they are."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def source(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a 1-d contiguous tensor, to be read."""
    tensor = tensor.data
    if is_flat(tensor):
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1)


def target(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a 1-d contiguous tensor, to be read and written; :func:`restore` must follow."""
    if tensor.is_inference():  # it may be written in inference mode only
        return source(tensor).clone()
    return source(tensor)


def restore(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Bring what was written to ``flat``, the :func:`target` of ``tensor``, into the tensor, if it lies elsewhere."""
    if flat.data_ptr() != tensor.data_ptr():
        with torch.inference_mode(tensor.is_inference()):
            tensor.data.copy_(flat.view(tensor.shape))


def check(name: str, tensors: Sequence[torch.Tensor], *, dtype: torch.dtype | None = None) -> None:
    """Refuse what the engines can't move, as torch's own backends do.

    Raises:
        NotImplementedError: a kind of tensor that no backend for the CPU takes here.
        RuntimeError: a tensor of another device, or of another dtype than the rest.
    """
    for tensor in tensors:
        if tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized and dtype is None:
            continue
        if tensor.device.type != "cpu":
            raise RuntimeError(
                f"{name}: lockstep's backends move CPU tensors, this one is on {tensor.device}; "
                'for GPUs use "nccl" (lockstep.init does by itself)'
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise NotImplementedError(
                f"{name}: lockstep's backends move dense tensors here, not {tensor.layout} of {tensor.dtype}; "
                "a sparse COO tensor can be all-reduced with SUM, anything else: to_dense() first"
            )
        if dtype is not None and tensor.dtype is not dtype:
            raise RuntimeError(f"{name}: tensors of one dtype expected, got {dtype} and {tensor.dtype}")


def check_sizes(name: str, tensors: Sequence[torch.Tensor], count: int, *, like: torch.Tensor) -> None:
    """Refuse a list that is not ``count`` tensors of the size and dtype of ``like``, with RuntimeError."""
    if len(tensors) != count:
        raise RuntimeError(f"{name}: expected a list of {count} tensors, one per rank, got {len(tensors)}")
    for index, tensor in enumerate(tensors):
        if tensor.numel() != like.numel():
            raise RuntimeError(
                f"{name}: tensor {index} of the list has {tensor.numel()} elements (shape {tuple(tensor.shape)}), "
                f"expected {like.numel()} (shape {tuple(like.shape)})"
            )
    check(name, tensors, dtype=like.dtype)


def part(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the range of ``count`` elements that ``rank`` owns; the ranks' ranges cover all, in order of rank.

    Bounds are multiples of 64 elements where possible, so that two ranks rarely write one cache line.
    """
    step = -(-count // world_size)
    step = -(-step // 64) * 64
    return min(count, rank * step), min(count, (rank + 1) * step)
