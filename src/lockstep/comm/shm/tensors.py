"""Between the tensors that callers pass and the flat ones that collectives move."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

#: Run after a collective: puts the result where the caller wants it.
Finish = Callable[[], None]


def is_flat(tensor: torch.Tensor) -> bool:
    """True if the tensor's elements lie in memory one after another, as they are."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def source(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a 1-d contiguous tensor, to be read: the same memory where possible.

    ``.data``: as with every other backend, autograd does not see what a collective does, and a parameter may be passed.
    """
    tensor = tensor.data
    if is_flat(tensor):
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1)


def target(tensor: torch.Tensor, finishes: list[Finish]) -> torch.Tensor:
    """A 1-d contiguous tensor to be written; what brings it into ``tensor`` is added to ``finishes`` if needed.

    It holds the tensor's elements, so that it can be combined in place.
    """
    tensor = tensor.data
    if not tensor.is_inference() and is_flat(tensor):
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    flat = tensor.clone().view(-1) if is_flat(tensor) else tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    finishes.append(lambda: _restore(tensor, flat))
    return flat


def _restore(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    # Tensors made in inference mode may be written in inference mode only.
    with torch.inference_mode(tensor.is_inference()):
        tensor.copy_(flat.view(tensor.shape))


def check(name: str, tensors: Sequence[torch.Tensor], *, dtype: torch.dtype | None = None) -> None:
    """**Local.** Refuse what this backend can't move, as torch's own backends do.

    Raises:
        NotImplementedError: a kind of tensor that no backend for the CPU takes here.
        RuntimeError: a tensor of another device, or of another dtype than the rest.
    """
    for tensor in tensors:
        if tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized and dtype is None:
            continue
        if tensor.device.type != "cpu":
            raise RuntimeError(
                f'{name}: the backend "shm" moves CPU tensors, this one is on {tensor.device}; '
                'for GPUs use "nccl" (lockstep.init does by itself)'
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise NotImplementedError(
                f'{name}: the backend "shm" moves dense tensors here, not {tensor.layout} of {tensor.dtype}; '
                "a sparse COO tensor can be all-reduced with SUM, anything else: to_dense() first"
            )
        if dtype is not None and tensor.dtype is not dtype:
            raise RuntimeError(f"{name}: tensors of one dtype expected, got {dtype} and {tensor.dtype}")


def check_sizes(name: str, tensors: Sequence[torch.Tensor], count: int, *, like: torch.Tensor) -> None:
    """**Local.** Refuse a list that is not ``count`` tensors of the size of ``like``, with RuntimeError."""
    if len(tensors) != count:
        raise RuntimeError(f"{name}: expected a list of {count} tensors, one per rank, got {len(tensors)}")
    for index, tensor in enumerate(tensors):
        if tensor.numel() != like.numel():
            raise RuntimeError(
                f"{name}: tensor {index} of the list has {tensor.numel()} elements (shape {tuple(tensor.shape)}), "
                f"expected {like.numel()} (shape {tuple(like.shape)})"
            )
    check(name, tensors, dtype=like.dtype)
