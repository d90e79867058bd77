"""Files that rows are written into as they come, in any order: .npy and .safetensors, which are read by mapping them.

A file appears under its name when it is complete. Rows are written, not assigned to mapped memory: on a full disk a
write is an error that can be told, and an access to a mapped page ends the process.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lockstep.comm.in_order.columns import RowKind
from lockstep.comm.in_order.places import Indices
from lockstep.text import joined

#: The formats, by the suffix of a file.
SUFFIXES = (".npy", ".safetensors")
#: torch's dtypes as safetensors names them.
SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
#: The name of a tensor that is the whole output.
_WHOLE = "outputs"


def refuse_unwritable(path: Path, kinds: Sequence[RowKind]) -> None:
    """Check that the file's format can hold these columns.

    Raises:
        ValueError: it can't, or ``path`` has the suffix of no format.
    """
    call = f"World.gather_in_order(path={os.fspath(path)!r})"
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{call}: expected a file name that ends in {joined(SUFFIXES, 'or')}")
    names = [*map(_name, kinds)]
    for kind in kinds:
        if kind.kind == "plain":
            raise ValueError(f"{call}: {_name(kind)!r} is a list of plain values, and a file holds tensors alone")
    if path.suffix == ".npy":
        if len(kinds) > 1:
            said = joined(map(repr, names))
            raise ValueError(
                f"{call}: the outputs have {len(kinds)} tensors ({said}), and .npy holds one: name it .safetensors"
            )
        for kind in kinds:
            if _numpys(kind.dtype) is None:
                raise ValueError(f"{call}: NumPy has no dtype for {kind.dtype}: name the file .safetensors")
        return
    for kind in kinds:
        if kind.dtype not in SAFETENSORS_NAMES:
            raise ValueError(
                f"{call}: safetensors has no dtype for {kind.dtype} ({_name(kind)!r}): gather torch.view_as_real of "
                "complex numbers"
            )
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{call}: two tensors of the outputs would have the name {name!r}: rename a key")


class RowFile:
    """A file of one tensor for each column, under a name of its own until :meth:`complete`.

    Args:
        path: the file, which :func:`refuse_unwritable` has let pass.
        kinds: the columns.
        rows: the number of rows of each.

    Raises:
        OSError: it can't be created.
    """

    def __init__(self, path: Path, kinds: Sequence[RowKind], rows: int) -> None:
        self._path, self._kinds = path, kinds
        self._temporary = f"{os.fspath(path)}.tmp-{os.getpid()}"
        head = _npy_header(kinds[0], rows) if path.suffix == ".npy" else _safetensors_header(kinds, rows)
        #: The place where each column begins.
        self._begins = [len(head)]
        for kind in kinds:
            self._begins.append(self._begins[-1] + rows * kind.nbytes)
        try:
            self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            error.filename = os.fspath(path)  # the user does not know the temporary name
            raise
        try:
            self._write(memoryview(head), 0)
        except BaseException:
            self.close()
            raise

    def put(self, column: int, places: Indices, rows: torch.Tensor) -> None:
        """Write rows of a column.

        Args:
            column: its number.
            places: where they belong: int64 [n].
            rows: their bytes: uint8 [n, bytes of a row], contiguous, on the CPU.

        Raises:
            OSError: they can't be written.
        """
        size, begin = self._kinds[column].nbytes, self._begins[column]
        data = rows.view(-1).numpy().data
        first = 0
        for stop in [*(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]:  # runs of neighbours
            self._write(data[first * size : stop * size], begin + int(places[first]) * size)
            first = stop

    def complete(self) -> None:
        """Let the file appear under its name.

        Raises:
            OSError: its bytes can't be brought to the disk.
        """
        os.fsync(self._file)
        os.rename(self._temporary, self._path)
        os.close(self._file)
        self._file = -1

    def close(self) -> None:
        """Remove the file if it is not complete."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)

    def _write(self, data: memoryview, at: int) -> None:
        while len(data):
            try:
                written = os.pwrite(self._file, data, at)
            except OSError as error:
                error.filename = os.fspath(self._path)
                raise
            data, at = data[written:], at + written


def _name(kind: RowKind) -> str:
    return ".".join(map(str, kind.path)) or _WHOLE


def _numpys(dtype: torch.dtype) -> np.dtype[np.generic] | None:
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return None


def _npy_header(kind: RowKind, rows: int) -> bytes:
    dtype = _numpys(kind.dtype)
    assert dtype is not None  # refuse_unwritable has looked
    head = io.BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (rows, *kind.shape)}
    np.lib.format.write_array_header_1_0(head, fields)
    return head.getvalue()


def _safetensors_header(kinds: Sequence[RowKind], rows: int) -> bytes:
    fields, end = {}, 0
    for kind in kinds:
        shape = [rows, *kind.shape]
        begin, end = end, end + math.prod(shape) * kind.dtype.itemsize
        fields[_name(kind)] = {"dtype": SAFETENSORS_NAMES[kind.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
