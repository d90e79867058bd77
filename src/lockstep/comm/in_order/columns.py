"""Outputs as columns: the parts that each output has, with one row for each item.

An output is a tree of tuples, lists, dicts, named tuples and dataclasses. Its leaves are tensors and arrays, and lists
of plain values (texts, say), which have one element for each item.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch

from lockstep.text import counted
from lockstep.trees import map_leaves, parts_of, path_text

Kind = Literal["tensor", "array", "plain"]


@dataclass(frozen=True)
class RowKind:
    """What a column's rows are; the same on all ranks."""

    #: The keys that lead to the column in an output.
    path: tuple[str | int, ...]
    kind: Kind
    #: The dtype, and the shape of one row; of plain values uint8, in bytes of JSON.
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def words(self) -> str:
        """Say it in words."""
        where = f"{path_text(self.path)}: " if self.path else ""
        if self.kind == "plain":
            return f"{where}a list of plain values"
        noun = "a tensor" if self.kind == "tensor" else "an array"
        return f"{where}{noun} of {self.dtype} with rows of {list(self.shape)}"

    def dumps(self) -> list[Any]:
        """Return it in JSON types."""
        return [list(self.path), self.kind, str(self.dtype).removeprefix("torch."), list(self.shape)]

    @classmethod
    def loads(cls, told: Sequence[Any]) -> RowKind:
        """Read back what :meth:`dumps` wrote."""
        path, kind, dtype, shape = told
        return cls(tuple(path), kind, getattr(torch, dtype), tuple(shape))


class Column:
    """One part of all outputs of this rank.

    Args:
        kind: what its rows are.
        pieces: the part of each output: dense tensors of any device, one after the other.
    """

    def __init__(self, kind: RowKind, pieces: Sequence[torch.Tensor]) -> None:
        self.kind = kind
        self._pieces = pieces
        self._ends = [*accumulate(map(len, pieces))]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def rows(self, first: int, stop: int) -> torch.Tensor:
        """Return rows, fewer if there are no more, as bytes: uint8, 1-D, on the CPU."""
        found = []
        number = bisect_right(self._ends, first)
        while first < min(stop, len(self)):
            piece, end = self._pieces[number], self._ends[number]
            begin = end - len(piece)
            rows = piece[first - begin : stop - begin].to("cpu").contiguous()
            # (A single row counts as contiguous whatever its strides are; not all dtypes can be concatenated.)
            found.append(rows.as_strided((rows.numel(),), (1,)).view(torch.uint8))
            first, number = end, number + 1
        return torch.cat(found) if found else torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True)
class Outputs:
    """The outputs of one rank."""

    #: One of them, as a pattern for what they become together; None if there is none.
    pattern: Any
    columns: Sequence[Column]


def columns_of(outputs: Sequence[Any], rows: Sequence[int] | None, item: str) -> Outputs:
    """Take outputs apart into columns.

    Args:
        outputs: this rank's, in order.
        rows: the number of rows that each has; None: each is of one item, and becomes one row.
        item: what a row is of, for messages.

    Raises:
        TypeError: an output has a leaf that can't be a column.
        ValueError: outputs differ in their parts, dtypes or shapes, or have another number of rows.
    """
    kinds: list[RowKind] = []
    pieces: list[list[Any]] = []
    for number, output in enumerate(outputs):
        where = f"output {number} (of {len(outputs)}, from 0)"
        here = [_as_rows(path, leaf, where, adds_row=rows is None) for path, leaf in _parts(output)]
        if not number:
            kinds, pieces = [kind for kind, _ in here], [[] for _ in here]
        _compare([kind for kind, _ in here], kinds, where)
        for (kind, piece), held in zip(here, pieces, strict=True):
            if rows is not None and len(piece) != rows[number]:
                raise ValueError(
                    f"World.gather_in_order(): {where}{path_text(kind.path)} has {counted(len(piece), 'row')}: "
                    f"expected {rows[number]}, one for each {item} of its batch. For outputs that are one for each "
                    f"{item} (of any shapes) pass per='sample', with all of them in one list"
                )
            held.append(piece)
    return Outputs(
        outputs[0] if len(outputs) else None,
        [
            Column(kind, held if kind.kind != "plain" else [_encoded(held)])
            for kind, held in zip(kinds, pieces, strict=True)
        ],
    )


def put_together(pattern: Any, values: Sequence[Any]) -> Any:
    """Return a tree like ``pattern`` with these values for its columns, in their order."""
    rest: Iterator[Any] = iter(values)
    return map_leaves(pattern, lambda _: next(rest), _is_plain_list)


def _compare(here: Sequence[RowKind], expected: Sequence[RowKind], where: str) -> None:
    for one, other in zip(here, expected, strict=False):
        if one != other:
            raise ValueError(
                f"World.gather_in_order(): {where} has {one.words()}, where the first has {other.words()}. Outputs of "
                "batches must be alike but for their number of rows. If their shapes differ, make them one output for "
                "each sample, in one list, and pass per='sample'"
            )
    if len(here) != len(expected):
        raise ValueError(
            f"World.gather_in_order(): {where} has {counted(len(here), 'part')}, and the first has {len(expected)}: "
            "outputs must be alike but for their number of rows"
        )


def _parts(output: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    parts = None if _is_plain_list(output) else parts_of(output)
    if parts is None:
        yield path, output
        return
    for key, part in parts.items():
        yield from _parts(part, (*path, key if isinstance(key, int) else str(key)))


def _as_rows(path: tuple[str | int, ...], leaf: Any, where: str, *, adds_row: bool) -> tuple[RowKind, Any]:
    """Return what a leaf's rows are, and the rows: a tensor, or a list of plain values."""
    kind: Kind = "tensor"
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        kind, leaf = "array", torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
        rows = leaf.detach().resolve_conj().resolve_neg()
        if adds_row:
            rows = rows.unsqueeze(0)
        if rows.dim():
            return RowKind(path, kind, rows.dtype, tuple(rows.shape[1:])), rows
    if isinstance(leaf, list) and not adds_row and _is_plain_list(leaf):
        return RowKind(path, "plain", torch.uint8, ()), leaf
    said = (
        f"a tensor of layout {leaf.layout} and shape {tuple(leaf.shape)}"
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
    )
    raise TypeError(
        f"World.gather_in_order(): {where}{path_text(path)} is {said[:200]}: expected a dense tensor or an array of "
        + (
            "numbers, as for any output that goes to a file"
            if adds_row
            else "numbers with one row for each sample, or a list of plain values with one for each"
        )
    )


def _is_plain_list(node: Any) -> bool:
    """Return whether ``node`` is a list of values that JSON has, and so one column: there is no tensor in it."""
    return isinstance(node, list) and all(map(_is_plain, node))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (str, bool, int, float))


# Plain values, and trees of any shapes, as bytes ---------------------------------------------------------------------


def _encoded(lists: Sequence[list[Any]]) -> torch.Tensor:
    return as_bytes(json.dumps([value for each in lists for value in each]).encode())


def as_bytes(data: bytes) -> torch.Tensor:
    """Return a tensor of these bytes: uint8, 1-D."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def trees_to_bytes(trees: Sequence[Any]) -> Column:
    """Return trees of dense tensors, arrays and what JSON can hold, as one column of bytes.

    Raises:
        TypeError: there is something else in one of them.
    """
    tensors: list[torch.Tensor] = []

    def encode(node: Any, where: str) -> list[Any]:
        is_array = isinstance(node, np.ndarray) and node.dtype.kind in "biufc"
        if is_array:
            node = torch.from_numpy(node if node.flags.writeable else node.copy())
        if isinstance(node, torch.Tensor) and node.layout == torch.strided:
            tensors.append(node.detach().resolve_conj().resolve_neg())
            return ["array" if is_array else "tensor", str(node.dtype).removeprefix("torch."), list(node.shape)]
        if _is_plain(node):
            return ["plain", node]
        if isinstance(node, Mapping) and all(isinstance(key, str) for key in node):
            return ["dict", {key: encode(part, f"{where}[{key!r}]") for key, part in node.items()}]
        if isinstance(node, (list, tuple)):
            return ["list", [encode(part, f"{where}[{number}]") for number, part in enumerate(node)]]
        raise TypeError(
            f"World.gather_in_order(): {where} is a {type(node).__name__}: expected dense tensors, arrays of numbers, "
            "and what JSON can hold, in lists, tuples and dicts with keys of str"
        )

    words = json.dumps(
        [encode(tree, f"output {number} (of {len(trees)}, from 0)") for number, tree in enumerate(trees)]
    )
    head = words.encode()
    pieces = [as_bytes(len(head).to_bytes(8, "little") + head)]
    pieces += [each.to("cpu").contiguous().view(-1).view(torch.uint8) for each in tensors if each.numel()]
    return Column(RowKind((), "plain", torch.uint8, ()), pieces)


def bytes_to_trees(data: torch.Tensor) -> list[Any]:
    """Read back what :func:`trees_to_bytes` wrote; tuples are lists, and tensors are views of ``data`` or copies."""
    head = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
    at = head

    def decode(node: Sequence[Any]) -> Any:
        nonlocal at
        kind, value = node[0], node[1]
        if kind in ("tensor", "array"):
            dtype, shape = getattr(torch, value), node[2]
            size = math.prod(shape) * dtype.itemsize
            # (A copy: the bytes need not lie where elements of this size may, and would stay as long as one of them.)
            tensor = data[at : at + size].clone().view(dtype).reshape(shape)
            at += size
            return tensor.numpy() if kind == "array" else tensor
        if kind == "dict":
            return {key: decode(part) for key, part in value.items()}
        return [decode(part) for part in value] if kind == "list" else value

    return [decode(tree) for tree in json.loads(data[8:head].numpy().tobytes())]
