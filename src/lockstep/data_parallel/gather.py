"""Put the replicas' outputs together, along the dimension that holds the samples.

Note [Which dimension]
~~~~~~~~~~~~~~~~~~~~~~
Where ``output_dim`` is not given, the dimension of the samples is read off the sizes: it has as many entries on each
replica as that replica had samples, and all other dimensions are the same on all replicas. If one dimension fits, that
is it. If several do (4 samples each, 4 classes), the dimension that an earlier batch of other sizes has shown for the
same output is taken; if there was none, it is an error, because a guess that is right today and wrong for another batch
size is worse. If none fits, no dimension holds the samples, and only the author knows what is meant.

An ``output_dim`` that is given for one output holds, whatever the sizes are: views may be stacked on samples. One
number for a whole tree of outputs is less certain, so it is an error too if it contradicts the sizes of one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lockstep.text import joined
from lockstep.trees import is_packed, parts_of, path_text, rebuilt

#: The dimension of the samples in an output; a tree of these follows the tree of outputs.
OutputDim = int | Literal["mean"] | None | Sequence[Any] | Mapping[Any, Any]


def checked_output_dim(given: OutputDim) -> OutputDim:
    """Return ``output_dim`` as it is.

    Raises:
        ValueError: it, or an entry of it, is none of an int, ``"mean"``, None or a tree of these.
    """
    if given is None or given == "mean" or (isinstance(given, int) and not isinstance(given, bool)):
        return given
    entries = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else None
    if entries is None:
        raise ValueError(f"output_dim={given!r}: expected an int, 'mean', None, or a list, tuple or dict of these")
    for entry in entries:
        checked_output_dim(entry)
    return given


def fitting_dims(shapes: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[int]:
    """Return the dimensions that can hold the samples: see Note [Which dimension]."""
    first = shapes[0]
    if any(len(shape) != len(first) for shape in shapes):
        return []
    return [
        dim
        for dim in range(len(first))
        if all(shape[dim] == size for shape, size in zip(shapes, sizes, strict=True)) and _agree(shapes, dim)
    ]


def weighted_mean(values: Sequence[Tensor], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return the mean over all samples, of tensors that are means over each replica's samples."""
    if len(values) == 1:
        return values[0].to(device)
    total = sum(sizes)
    parts = [value.to(device) * (size / total) for value, size in zip(values, sizes, strict=True)]
    return torch.stack(parts).sum(0)


class Gatherer:
    """Gathers outputs, and remembers what their sizes have shown.

    Args:
        output_dim: see :class:`DataParallel`.
        what: the word for an output, in errors.
        remedy: the remedy if the sizes don't tell the dimension; None: to pass ``output_dim``.
    """

    def __init__(self, output_dim: OutputDim, *, what: str = "output", remedy: str | None = None) -> None:
        self._output_dim, self._what, self._remedy = output_dim, what, remedy
        #: Path and number of dimensions of an output -> the dimension that its sizes have shown.
        self._shown: dict[tuple[Any, ...], int] = {}

    def gather(self, outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
        """Return one output from the replicas' outputs, on ``device``; ``sizes`` are the replicas' samples.

        Raises:
            ValueError: the replicas' outputs can't be put together; shapes and remedy are shown.
        """
        return self._gather(list(outputs), _Parts(list(sizes), device), (), self._output_dim)

    def _gather(self, outputs: list[Any], parts: _Parts, path: tuple[Any, ...], dim: Any) -> Any:
        first = outputs[0]
        if all(isinstance(output, Tensor) for output in outputs):
            return self._tensors(outputs, parts, path, dim)
        if all(is_packed(output) for output in outputs):
            return _packed(outputs, parts.device)
        kinds = sorted({type(output).__name__ for output in outputs})
        children = [parts_of(output) for output in outputs]
        if children[0] is None or any(each is None for each in children):
            return _same_object(outputs, kinds, self._name(path))
        keys = [list(each or {}) for each in children]
        if len(kinds) > 1 or any(set(each) != set(keys[0]) for each in keys):
            raise ValueError(
                f"the replicas' outputs differ at {self._name(path)}: "
                + "; ".join(
                    f"replica {i} gave a {type(o).__name__} with {k}"
                    for i, (o, k) in enumerate(zip(outputs, keys, strict=True))
                )
                + ". Let the module return the same structure for any batch, or pass gather=False"
            )
        return rebuilt(
            first,
            {
                key: self._gather([(each or {})[key] for each in children], parts, (*path, key), _child(dim, key, path))
                for key in keys[0]
            },
        )

    def _tensors(self, outputs: list[Tensor], parts: _Parts, path: tuple[Any, ...], dim: Any) -> Tensor:
        if all(output.dim() == 0 for output in outputs):
            if dim == "mean":
                return weighted_mean(outputs, parts.sizes, parts.device)
            return torch.stack([output.to(parts.device) for output in outputs])
        if isinstance(dim, (Mapping, Sequence)) and dim != "mean":
            raise ValueError(f"output_dim has {dim!r} for {self._name(path)}, which is a tensor: expected an int")
        if isinstance(dim, int):
            if path and dim is self._output_dim and len(outputs) > 1:
                self._refuse_contradiction(outputs, parts, path, dim)
            return self._along(outputs, parts.device, path, dim)
        if len(outputs) == 1:
            fits = fitting_dims([outputs[0].shape], parts.sizes)
            if len(fits) == 1:
                self._shown[(path, outputs[0].dim())] = fits[0]
            return outputs[0].to(parts.device)
        return self._along(outputs, parts.device, path, self._read(outputs, parts, path))

    def _read(self, outputs: list[Tensor], parts: _Parts, path: tuple[Any, ...]) -> int:
        """Return the dimension of the samples, by Note [Which dimension]."""
        fits = fitting_dims([output.shape for output in outputs], parts.sizes)
        key = (path, outputs[0].dim())
        if len(fits) == 1:
            self._shown[key] = fits[0]
            return fits[0]
        if self._shown.get(key) in fits:
            return self._shown[key]
        shapes = parts.described(outputs)
        if fits:
            remedy = self._remedy or f"Say which: DataParallel(..., output_dim={fits[0]})"
            raise ValueError(
                f"{self._name(path)}: the samples can be along dimension {joined(fits, 'or')}: {shapes}. {remedy}"
            )
        remedy = self._remedy or (
            "To concatenate them anyway, say along which dimension: DataParallel(..., output_dim=0), or "
            "output_dim=(0, 1, ...) with one entry for each output; or pass gather=False to get the replicas' outputs "
            "as they are"
        )
        raise ValueError(f"{self._name(path)}: no dimension holds the samples: {shapes}. {remedy}")

    def _refuse_contradiction(self, outputs: list[Tensor], parts: _Parts, path: tuple[Any, ...], dim: int) -> None:
        """Refuse one ``output_dim`` for several outputs where the sizes of one of them contradict it."""
        fits = fitting_dims([output.shape for output in outputs], parts.sizes)
        if fits and dim % outputs[0].dim() not in fits:
            raise ValueError(
                f"output_dim={dim} was given for all outputs, but the samples of {self._name(path)} are along "
                f"dimension {joined(fits, 'or')}: {parts.described(outputs)}. Give each output its own: "
                "DataParallel(..., output_dim=(0, 1, ...)), or a dict, that follows the outputs"
            )

    def _along(self, outputs: list[Tensor], device: torch.device, path: tuple[Any, ...], dim: int) -> Tensor:
        shapes = [tuple(output.shape) for output in outputs]
        fits = all(-len(shape) <= dim < len(shape) for shape in shapes) and len({len(shape) for shape in shapes}) == 1
        if not fits or not _agree(shapes, dim % len(shapes[0])):
            raise ValueError(
                f"{self._name(path)} can't be concatenated along output_dim={dim}: the replicas gave "
                f"{', '.join(map(str, shapes))}. Everywhere else the shapes must be equal: pad to one size, name "
                "another output_dim (a tuple or dict that follows the outputs gives each its own), or pass gather=False"
            )
        return torch.cat([output.to(device) for output in outputs], dim)

    def _name(self, path: tuple[Any, ...]) -> str:
        return f"{self._what}{path_text(path)}"


@dataclass(frozen=True)
class _Parts:
    """The parts of a batch that the outputs belong to."""

    #: Number of samples of each replica.
    sizes: list[int]
    #: The device that the outputs go to.
    device: torch.device

    def described(self, outputs: Sequence[Tensor]) -> str:
        return ", ".join(
            f"replica {i} had {size} samples and gave {tuple(output.shape)}"
            for i, (size, output) in enumerate(zip(self.sizes, outputs, strict=True))
        )


def _agree(shapes: Sequence[Sequence[int]], dim: int) -> bool:
    """Return whether the shapes are equal but for ``dim``."""
    rests = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    return len(rests) == 1


def _child(dim: Any, key: Any, path: tuple[Any, ...]) -> Any:
    """Return the ``output_dim`` of one part of the outputs."""
    if isinstance(dim, Mapping):
        return dim.get(key)
    if isinstance(dim, Sequence) and not isinstance(dim, str):
        if isinstance(key, int) and key < len(dim):
            return dim[key]
        raise ValueError(f"output_dim={dim!r} has no entry for output{path_text((*path, key))}")
    return dim


def _same_object(outputs: list[Any], kinds: list[str], name: str) -> Any:
    first = outputs[0]
    if len(kinds) == 1 and all(output is first or _equal(output, first) for output in outputs):
        return first
    raise ValueError(
        f"the replicas' outputs differ at {name}: {', '.join(repr(output)[:80] for output in outputs)}. "
        "What is not a tensor must be the same on all replicas: return a tensor, or pass gather=False"
    )


def _equal(one: Any, other: Any) -> bool:
    same = one == other
    return getattr(same, "ndim", 0) == 0 and bool(same)


def _packed(outputs: list[PackedSequence], device: torch.device) -> PackedSequence:
    unpacked = [pad_packed_sequence(output, batch_first=True) for output in outputs]
    longest = max(padded.shape[1] for padded, _ in unpacked)
    rows = []
    for padded, _ in unpacked:
        missing = longest - padded.shape[1]
        filler = padded.new_zeros(padded.shape[0], missing, *padded.shape[2:])
        rows.append(torch.cat([padded, filler], 1).to(device))
    lengths = torch.cat([each for _, each in unpacked])
    in_order = outputs[0].sorted_indices is None and bool((lengths[:-1] >= lengths[1:]).all())
    return pack_padded_sequence(torch.cat(rows), lengths, batch_first=True, enforce_sorted=in_order)
