"""Gather the ranks' outputs on rank 0, a window at a time, and put each row in its place.

Rank 0 holds the result, or writes it to a file, and one window of each rank besides. What goes wrong on it is kept
until all windows have passed, so that no other rank waits for it, and is then raised on all ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from lockstep import _files
from lockstep.comm.exchange import group_device
from lockstep.comm.in_order.columns import (
    Column,
    Outputs,
    RowKind,
    bytes_to_trees,
    columns_of,
    put_together,
    trees_to_bytes,
)
from lockstep.comm.in_order.files import RowFile, refuse_unwritable
from lockstep.comm.in_order.places import (
    Counts,
    HandedOut,
    Indices,
    handed_out_by,
    places_by_index,
    places_of,
    refuse_unfit,
)
from lockstep.comm.peers import Members, OverGroup
from lockstep.comm.together import together
from lockstep.comm.waiting import wait_for
from lockstep.errors import LockstepError
from lockstep.text import counted

Per = Literal["batch", "sample"]
Result = TypeVar("Result")

_CALL = "World.gather_in_order()"
#: The dtype of an item's index, among the rows.
_INDEX = RowKind((), "tensor", torch.int64, ())
#: Bytes of a rank's rows that travel at once.
WINDOW = 2**24


class Receiver(Protocol):
    """Takes what all ranks send, on rank 0."""

    def take(self, column: int, rank: int, first: int, data: torch.Tensor) -> None:
        """Take some rows of a rank.

        Args:
            column: the number of the column.
            rank: whose they are.
            first: the number of the first of them, among the rank's rows of this column.
            data: their bytes: uint8, 1-D, on the CPU.
        """
        ...

    def result(self) -> Any:
        """Return the outputs of all ranks in order, now that all rows have come."""
        ...

    def close(self) -> None:
        """Give back what is held, whether or not there was a result."""
        ...


class _Given(NamedTuple):
    """What one rank has, and asks for."""

    handed: HandedOut
    outputs: Outputs
    #: What each output belongs to: a sample or a batch.
    per: Per
    #: The file to write; None: the result is in memory.
    path: Path | None

    def dumps(self) -> dict[str, Any]:
        """Return in JSON types what the other ranks must know."""
        handed, columns = self.handed, self.outputs.columns
        return {
            "source": handed.source,
            "item": handed.item,
            "runs": handed.counts.runs,
            "total": handed.total,
            "unfinished": handed.unfinished,
            "per": self.per,
            "to": "memory" if self.path is None else self.path.suffix,
            "kinds": [column.kind.dumps() for column in columns],
            "lengths": [len(column) for column in columns],
        }


def gather_in_order(
    world: Members, outputs: object, source: object, *, per: Per | None, path: str | os.PathLike[str] | None
) -> Any:
    """**Collective.** See :meth:`lockstep.World.gather_in_order`."""
    given, told = together(OverGroup(world), lambda: _read(outputs, source, per, path), _Given.dumps, what=_CALL)
    refuse_unfit(told)
    kinds = _common_kinds(told)
    # A rank without outputs does not know their parts.
    columns = given.outputs.columns or [Column(kind, []) for kind in kinds]
    lengths = [[each["lengths"][number] if each["lengths"] else 0 for each in told] for number in range(len(kinds))]

    counts, indices = [Counts(each["runs"]) for each in told], None
    if given.handed.indices is not None:  # on all ranks, or on none
        items = [each.items for each in counts]
        indices = _send(world, [Column(_INDEX, [given.handed.indices])], [items], lambda: IndicesOfRanks(items))

    def open_receiver() -> Receiver:
        places = places_of(counts, given.handed.order) if indices is None else places_by_index(indices)
        if given.per == "sample" and given.path is None:
            return Trees(lengths[0], places)
        return Table(given.outputs.pattern, kinds, lengths, places, given.path)

    return _send(world, columns, lengths, open_receiver)


def _read(outputs: object, source: object, per: Per | None, path: str | os.PathLike[str] | None) -> _Given:
    handed = handed_out_by(source)
    if per not in (None, "batch", "sample"):
        raise ValueError(f"{_CALL}: per={per!r}: expected 'batch' or 'sample'")
    if per == "batch" and handed.batches is None:
        raise ValueError(
            f"{_CALL}: per='batch', but {handed.source} hands out one {handed.item} at a time: give one output for each"
        )
    batches = None if per == "sample" else handed.batches
    listed = _as_list(outputs, handed, in_batches=batches is not None)
    if path is None and batches is None:
        return _Given(handed, Outputs([], [trees_to_bytes(listed)]), "sample", None)
    found = columns_of(listed, batches, handed.item)
    file = None if path is None else _files.local_path(path, "path")
    if file is not None:
        refuse_unwritable(file, [column.kind for column in found.columns])
    return _Given(handed, found, "sample" if batches is None else "batch", file)


def _send(
    world: Members, columns: Sequence[Column], lengths: Sequence[Sequence[int]], open_receiver: Callable[[], Receiver]
) -> Any:
    """**Collective.** Send all columns to rank 0. Return the result there, and None on the others."""
    is_main, failure = world.rank == 0, _Failure()
    receiver = together(OverGroup(world), lambda: open_receiver() if is_main else None, lambda _: None, what=_CALL)[0]
    try:
        for number, column in enumerate(columns):
            for rank, first, data in _windows(column, lengths[number], world):
                assert receiver is not None  # only rank 0 gets windows
                failure.keep(partial(receiver.take, number, rank, first, data))

        def finish() -> Any:
            failure.say()
            return None if receiver is None else receiver.result()

        return together(OverGroup(world), finish, lambda _: None, what=_CALL)[0]
    finally:
        if receiver is not None:
            receiver.close()


def _windows(column: Column, lengths: Sequence[int], world: Members) -> Iterator[tuple[int, int, torch.Tensor]]:
    """**Collective.** Send a column to rank 0. Yield there for each window and rank the rank, its first row and bytes.

    Args:
        column: this rank's rows.
        lengths: the number of rows of each rank.
        world: the ranks.
    """
    size, most = column.kind.nbytes, max(lengths)
    if not size:  # rows of a shape with a 0: there is nothing to send
        return
    device, step = group_device(world.group), max(1, WINDOW // size)
    for first in range(0, most, step):
        longest = min(step, most - first)
        mine = column.rows(first, first + longest)
        message = torch.zeros(longest * size, dtype=torch.uint8, device=device)
        message[: len(mine)] = mine
        received = [torch.empty_like(message) for _ in lengths] if world.rank == 0 else None
        wait_for(
            partial(dist.gather, message, received, group=world.group, group_dst=0),
            lambda: f"rank {world.rank} of {world.world_size}: {_CALL}",
            name=_CALL,
        )
        for rank, data in enumerate(received or ()):
            rows = min(longest, max(0, lengths[rank] - first))
            if rows:
                yield rank, first, data.cpu()[: rows * size]


class _Failure:
    """The first error on rank 0 while the other ranks send."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def keep(self, call: Callable[[], object]) -> None:
        """Make the call unless one has failed, and keep its error until :meth:`say`."""
        if self._error is None:
            try:
                call()
            except Exception as error:  # noqa: BLE001  (the other ranks are sending: say raises it when they have)
                self._error = error

    def say(self) -> None:
        """Raise the error, if there was one."""
        if self._error is not None:
            raise self._error


class IndicesOfRanks:
    """Receives a number for each row, int64; the result is a list of each rank's.

    Args:
        lengths: how many each rank has.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._data = [torch.empty(length * _INDEX.nbytes, dtype=torch.uint8, device="cpu") for length in lengths]

    def take(self, column: int, rank: int, first: int, data: torch.Tensor) -> None:  # noqa: ARG002  (there is one)
        """See :class:`Receiver`."""
        begin = first * _INDEX.nbytes
        self._data[rank][begin : begin + len(data)] = data

    def result(self) -> list[Indices]:
        """See :class:`Receiver`."""
        return [data.view(_INDEX.dtype).numpy() for data in self._data]

    def close(self) -> None:
        """See :class:`Receiver`: nothing is held."""


class Trees:
    """Receives trees of any shapes, as bytes; the result is a list of them.

    Args:
        lengths: the number of bytes of each rank.
        places: the places of each rank's trees.
    """

    def __init__(self, lengths: Sequence[int], places: Sequence[Indices]) -> None:
        self._data = [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths]
        self._places = places

    def take(self, column: int, rank: int, first: int, data: torch.Tensor) -> None:  # noqa: ARG002  (there is one)
        """See :class:`Receiver`."""
        self._data[rank][first : first + len(data)] = data

    def result(self) -> list[Any]:
        """See :class:`Receiver`."""
        return _ordered([*map(bytes_to_trees, self._data)], self._places)

    def close(self) -> None:
        """See :class:`Receiver`: nothing is held."""


class Table:
    """Receives rows of columns; the result is an output like the ranks', of all rows, or a file.

    Args:
        pattern: an output of rank 0.
        kinds: the columns.
        lengths: by column, the number of rows of each rank; of plain values: of bytes.
        places: the places of each rank's rows.
        path: the file to write; None: the result is in memory.

    Raises:
        LockstepError: the file can't be created.
        ValueError: there are no outputs to write to it.
    """

    def __init__(
        self,
        pattern: Any,
        kinds: Sequence[RowKind],
        lengths: Sequence[Sequence[int]],
        places: Sequence[Indices],
        path: Path | None,
    ) -> None:
        self._pattern, self._kinds, self._places = pattern, kinds, places
        rows = sum(map(len, places))
        self._file: RowFile | None = None
        #: By column: the bytes of each row, uint8 [rows, bytes]; and those of each rank where they are plain values.
        self._tensors: dict[int, torch.Tensor] = {}
        self._plain: dict[int, list[torch.Tensor]] = {}
        if path is not None:
            if not kinds:
                raise ValueError(f"{_CALL}: no rank has any output, so there is nothing to write to {path}")
            self._file = _said(partial(RowFile, path, kinds, rows))
            return
        for number, kind in enumerate(kinds):
            if kind.kind == "plain":
                self._plain[number] = [
                    torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths[number]
                ]
            else:
                self._tensors[number] = torch.empty((rows, kind.nbytes), dtype=torch.uint8, device="cpu")

    def take(self, column: int, rank: int, first: int, data: torch.Tensor) -> None:
        """See :class:`Receiver`."""
        if column in self._plain:
            self._plain[column][rank][first : first + len(data)] = data
            return
        # (As bytes: not all dtypes can be indexed.)
        rows = data.view(-1, self._kinds[column].nbytes)
        places = self._places[rank][first : first + len(rows)]
        if self._file is not None:
            _said(partial(self._file.put, column, places, rows))
        else:
            self._tensors[column][torch.from_numpy(places)] = rows

    def result(self) -> Any:
        """See :class:`Receiver`: None if it is in a file."""
        if self._file is not None:
            _said(self._file.complete)
            return None
        values = [*map(self._value, range(len(self._kinds)))]
        # (The rank that has the first of all outputs is rank 0, whatever way they are dealt out.)
        return put_together(self._pattern, values) if values else []

    def _value(self, column: int) -> Any:
        if column in self._plain:
            lists = [json.loads(data.numpy().tobytes() or b"[]") for data in self._plain[column]]
            return _ordered(lists, self._places)
        kind, rows = self._kinds[column], self._tensors[column]
        tensor = rows.view(-1).view(kind.dtype).reshape(len(rows), *kind.shape)
        return tensor.numpy() if kind.kind == "array" else tensor

    def close(self) -> None:
        """See :class:`Receiver`."""
        if self._file is not None:
            self._file.close()


def _ordered(by_rank: Sequence[Sequence[Any]], places: Sequence[Indices]) -> list[Any]:
    """Put the elements of all ranks' lists in their places."""
    result: list[Any] = [None] * sum(map(len, places))
    for elements, where in zip(by_rank, places, strict=True):
        for element, place in zip(elements, where.tolist(), strict=True):
            result[place] = element
    return result


def _said(call: Callable[[], Result]) -> Result:
    """Make a call that writes; what fails is said in words.

    Raises:
        LockstepError: a file error.
    """
    try:
        return call()
    except OSError as error:
        raise LockstepError(f"{_CALL}: {_files.describe(error)}") from error


def _as_list(outputs: object, handed: HandedOut, *, in_batches: bool) -> Sequence[Any]:
    if not isinstance(outputs, (list, tuple)):
        raise TypeError(
            f"{_CALL}: the outputs are a {type(outputs).__name__}: expected a list, with one output for each "
            f"{'batch' if in_batches else handed.item} that this rank was given, in this order"
        )
    noun = "batch" if in_batches else handed.item
    given = len(handed.batches or ()) if in_batches else handed.counts.items
    if len(outputs) != given:
        were = f"this rank was given {given:,} {'batches' if in_batches else noun + 's'} by {handed.source}"
        more = f" ({handed.unfinished})" if handed.unfinished else ""
        raise ValueError(
            f"{_CALL}: {counted(len(outputs), 'output')}, but {were}{more}: append one output to the list for each "
            f"{noun}, also where a batch has no {handed.item}"
        )
    return outputs


def _common_kinds(told: Sequence[Any]) -> list[RowKind]:
    """Return what rows are on all ranks.

    Raises:
        ValueError: they differ between ranks; the same on all ranks.
    """
    for name in ("per", "to"):
        if any(each[name] != told[0][name] for each in told):
            listed = "; ".join(f"rank {rank}: {each[name]}" for rank, each in enumerate(told))
            raise ValueError(
                f"{_CALL}: the ranks pass different arguments, {'per' if name == 'per' else 'path'}: {listed}"
            )
    having = [(rank, [*map(RowKind.loads, each["kinds"])]) for rank, each in enumerate(told) if each["kinds"]]
    if not having:
        return []
    first, kinds = having[0]
    for rank, others in having[1:]:
        if others != kinds:
            said = ["; ".join(kind.words() for kind in each) for each in (kinds, others)]
            raise ValueError(
                f"{_CALL}: the ranks' outputs are not alike: on rank {first} {said[0]}; on rank {rank} {said[1]}"
            )
    return kinds
