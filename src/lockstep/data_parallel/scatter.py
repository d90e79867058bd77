"""Cut the inputs of a forward into one set for each replica, on its device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lockstep.trees import is_packed, moved, parts_of, path_text, rebuilt, to_device


@dataclass(frozen=True)
class Piece:
    """One replica's part of the batch."""

    #: The replica, counted in the order of ``device_ids``.
    replica: int
    #: Index of the first sample.
    start: int
    #: Number of samples.
    size: int


def cut(batch: int, replicas: int, chunk_sizes: Sequence[int] | None = None) -> list[Piece]:
    """Return the pieces of a batch, in order of replica; a small batch uses fewer replicas, and always the first.

    Without ``chunk_sizes`` the pieces are those of :func:`torch.chunk`. With them, a batch of as many samples as they
    sum to is cut as they say, and any other in the same proportion.
    """
    if chunk_sizes is None:
        step = max(1, -(-batch // replicas))
        bounds = [min(batch, step * index) for index in range(replicas + 1)]
    else:
        total = sum(chunk_sizes)
        bounds = [0, *(-(-batch * upto // total) for upto in accumulate(chunk_sizes))]
    pieces = [Piece(index, bounds[index], bounds[index + 1] - bounds[index]) for index in range(replicas)]
    return [piece for piece in pieces if piece.size or (piece.replica == 0 and batch == 0)]


def checked_chunk_sizes(given: Sequence[int] | None, replicas: int) -> tuple[int, ...] | None:
    """Return ``chunk_sizes`` as a tuple.

    Raises:
        ValueError: there is not one for each replica, or one is not a positive whole number.
    """
    if given is None:
        return None
    sizes = tuple(given)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"chunk_sizes={list(sizes)!r}: expected whole numbers from 1 up, the samples of each replica")
    if len(sizes) != replicas:
        raise ValueError(f"chunk_sizes={list(sizes)!r} has {len(sizes)} entries for {replicas} replicas")
    return sizes


def batch_size(tree: Any, dim: int) -> int | None:
    """Return the number of samples that the tensors in ``tree`` hold, or None if there is nothing to cut.

    Along ``dim`` all tensors must agree; one of size 1 is for all samples, and so is a tensor without dimensions.

    Raises:
        ValueError: they do not agree; the shapes are shown.
    """
    sizes = {path: _size_along(leaf, dim) for path, leaf in _leaves(tree)}
    found = {size for size in sizes.values() if size is not None}
    if len(found) > 1:
        found.discard(1)
    if len(found) > 1:
        shapes = ", ".join(
            f"input{path_text(path)}: {_described(leaf)}" for path, leaf in _leaves(tree) if sizes[path] is not None
        )
        raise ValueError(
            f"the inputs differ in their number of samples along dim={dim}: {shapes}. Pass the dim that holds the "
            "samples to DataParallel; a tensor that belongs to all samples can be a buffer of the module, or have "
            f"size 1 along dim {dim}"
        )
    return found.pop() if found else None


def scatter(
    tree: Any, devices: Sequence[torch.device], dim: int, chunk_sizes: Sequence[int] | None
) -> tuple[list[Any], list[Piece]]:
    """Return ``tree`` cut along ``dim``: for each replica that gets samples, its inputs on its device.

    Everything that is not a tensor is handed to all replicas, as it is. Where there is no tensor to cut, the first
    replica gets all. Gradients flow back to the tensors. A lone replica gets the tree as it is, on its device.
    """
    if len(devices) == 1:
        return [to_device(tree, devices[0])], [Piece(0, 0, 1)]
    batch = batch_size(tree, dim)
    pieces = [Piece(0, 0, 1)] if batch is None else cut(batch, len(devices), chunk_sizes)
    targets = [devices[piece.replica] for piece in pieces]
    return _scatter(tree, _Cutter(dim, batch, pieces, targets)), pieces


class _Cutter:
    def __init__(self, dim: int, batch: int | None, pieces: list[Piece], targets: list[torch.device]) -> None:
        self.dim, self.batch, self.pieces, self.targets = dim, batch, pieces, targets

    def tensor(self, tensor: Tensor) -> list[Any]:
        dim = self._dim_of(tensor)
        if dim is None:
            return [moved(tensor, target) for target in self.targets]
        if torch.is_grad_enabled() and tensor.requires_grad:
            # A split takes one cat in the backward. Chunks on the same device are cloned, because replicas may change
            # their inputs in place, which they must not do to views of one tensor from several threads.
            chunks = tensor.split([piece.size for piece in self.pieces], dim)
            return [
                chunk.clone() if chunk.device == target else moved(chunk, target)
                for chunk, target in zip(chunks, self.targets, strict=True)
            ]
        # Each piece is detached by itself, so that autograd sees no common base either.
        return [
            moved(tensor.detach().narrow(dim, piece.start, piece.size), target)
            for piece, target in zip(self.pieces, self.targets, strict=True)
        ]

    def packed(self, packed: PackedSequence) -> list[Any]:
        padded, lengths = pad_packed_sequence(packed, batch_first=True)
        results = []
        for piece, target in zip(self.pieces, self.targets, strict=True):
            own = lengths.narrow(0, piece.start, piece.size)
            steps = moved(padded.narrow(0, piece.start, piece.size)[:, : int(own.max())], target)
            results.append(
                pack_padded_sequence(steps, own, batch_first=True, enforce_sorted=packed.sorted_indices is None)
            )
        return results

    def _dim_of(self, tensor: Tensor) -> int | None:
        if _size_along(tensor, self.dim) is not None:
            dim = self.dim % tensor.dim()
            return None if tensor.shape[dim] == 1 and self.batch != 1 else dim
        if tensor.dim() == 0 or self.batch is None:
            return None
        fits = [dim for dim, size in enumerate(tensor.shape) if size == self.batch]
        if len(fits) != 1:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} has no dim {self.dim} to be cut along, and "
                f"{'several' if fits else 'none'} of its dimensions have the {self.batch} samples of the other inputs"
            )
        return fits[0]


def _scatter(tree: Any, cutter: _Cutter) -> list[Any]:
    if isinstance(tree, Tensor):
        return cutter.tensor(tree)
    if is_packed(tree):
        return cutter.packed(tree)
    parts = parts_of(tree)
    if not parts:
        return [tree for _ in cutter.targets]
    scattered = {key: _scatter(part, cutter) for key, part in parts.items()}
    return [rebuilt(tree, {key: each[i] for key, each in scattered.items()}) for i in range(len(cutter.targets))]


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, Tensor) or is_packed(tree):
        yield path, tree
        return
    for key, part in (parts_of(tree) or {}).items():
        yield from _leaves(part, (*path, key))


def _size_along(leaf: Any, dim: int) -> int | None:
    if is_packed(leaf):
        return int(leaf.batch_sizes[0])
    if leaf.is_nested or leaf.layout != torch.strided:
        kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
        raise ValueError(
            f"a {kind} tensor among the inputs can't be cut: pass a dense one (padded, with the lengths beside it, or "
            "packed), or make it a buffer of the module if it belongs to all samples"
        )
    return int(leaf.shape[dim]) if -leaf.dim() <= dim < leaf.dim() else None


def _described(leaf: Any) -> str:
    if is_packed(leaf):
        return f"{int(leaf.batch_sizes[0])} packed sequences"
    return str(tuple(leaf.shape))
