"""Pack batches, or whatever is made of tensors and plain values, into memory that another process can map.

Note [Parcels]
~~~~~~~~~~~~~~
A parcel is a memfd: it has no name, so nothing is left of it when its processes end, however they end. It holds the
bytes of tensors and arrays, and the rest as JSON. Whoever gets its descriptor maps it and has tensors on that memory,
without a copy; the memory goes with the last of them.

What can be packed is data: tensors, arrays, numbers, texts, bytes and None in lists, tuples, dicts, named tuples,
dataclasses, and mappings of other classes. A class is sent as its name, and must be loaded already where the parcel is
opened; its objects are made without a call of their own code. So a parcel can't make its receiver run code, as a pickle
could. An error names what can't be packed, and its owner does without a parcel.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch

from lockstep import bits
from lockstep.comm.shm.segment import make_file, map_memory, seal
from lockstep.errors import LockstepError
from lockstep.trees import path_text

#: Bytes to which pieces are aligned: a cache line, and a vector of any processor.
_ALIGNED = 64
#: The types that JSON keeps as they are.
_PLAIN = (type(None), bool, int, float, str)
#: Bytes of a row from which on a write of each is faster than to put them together before.
_LARGE = 1 << 13
#: The most pieces that one write takes.
_PIECES = 1024


class Unpackable(TypeError):
    """Something can't be packed into a parcel; the message says what, and where it is."""


class Rows:
    """Tensors of one shape, packed as the tensor of which they are the rows, without being put together before.

    Args:
        tensors: dense ones on the CPU, all of one dtype and shape, whose elements follow each other in memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.nbytes = len(tensors) * tensors[0].nbytes


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor | Rows:
    """Return what packs as ``torch.stack(tensors)`` does, in the cheapest form.

    Raises:
        RuntimeError: they can't be stacked.
    """
    first = tensors[0]
    # (Of one and of two it may be asked how the number of samples shows in a batch.)
    if len(tensors) > 2 and first.nbytes >= _LARGE and all(_is_row(each, first) for each in tensors):
        return Rows(tensors)
    return torch.stack(list(tensors))


def _is_row(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and tensor.dtype == like.dtype
        and tensor.shape == like.shape
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


class Parcel:
    """Packed trees; see Note [Parcels]. A DataLoader's worker can send it to its rank.

    Args:
        descriptor: the memory's, which the parcel closes when it is gone.
        size: bytes.
        places: for each tree, where its description begins and ends.
    """

    def __init__(self, descriptor: int, size: int, places: Sequence[tuple[int, int]]) -> None:
        self.descriptor, self.size, self.places = descriptor, size, places
        self._end = weakref.finalize(self, os.close, descriptor)
        self._end.atexit = False

    @classmethod
    def of(cls, trees: Iterable[Any]) -> Parcel:
        """Pack ``trees``, one beside the other. Each is copied before the next one is asked for, which may be made in
        the memory of the last.

        Raises:
            Unpackable: they contain something that is not data.
            OSError: there is no memory for it.
        """
        descriptor = make_file(None)
        try:
            packing, places = _Packing(descriptor), []
            for tree in trees:
                text = json.dumps(packing.describe(tree, ())).encode()
                begin = packing.place(memoryview(text))
                places.append((begin, begin + len(text)))
                packing.write()
            seal(descriptor, packing.size)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, packing.size, places)

    def __reduce__(self) -> Any:
        return _arrived, (DupFd(self.descriptor), self.size, self.places)


def _arrived(duplicate: Any, size: int, places: Sequence[tuple[int, int]]) -> Parcel:
    return Parcel(duplicate.detach(), size, places)


def opened(descriptor: int, size: int, place: tuple[int, int], *, writable: bool = True) -> Any:
    """Return a tree of a parcel, with tensors and arrays on its memory. The descriptor is not needed afterwards.

    Args:
        descriptor: the parcel's.
        size: bytes of the parcel.
        place: where the tree's description begins and ends.
        writable: if False, arrays refuse to be written to, and a write to a tensor ends this process with SIGSEGV.

    Raises:
        LockstepError: it has an object of a class that is not loaded here.
        OSError: it can't be mapped.
    """
    # (A buffer that says it can't be written to would make torch warn; ours does not say it.)
    content = torch.frombuffer(map_memory(descriptor, size, writable=writable), dtype=torch.uint8)
    begin, end = place
    return _Opening(content, writable=writable).made(json.loads(content[begin:end].numpy().tobytes()))


@dataclass(frozen=True)
class Handed:
    """The message with a parcel's descriptor: which of its trees the receiver is to have."""

    #: The bytes of the parcel, and where the description of the tree begins and ends.
    size: int
    begin: int
    end: int

    @classmethod
    def of(cls, parcel: Parcel, number: int) -> Handed:
        """Return the message for the tree of this number."""
        return cls(parcel.size, *parcel.places[number])

    def opened(self, descriptor: int, *, writable: bool = True) -> Any:
        """Return the tree; see :func:`opened`."""
        return opened(descriptor, self.size, (self.begin, self.end), writable=writable)

    def taken(self, descriptor: int, *, writable: bool = True) -> Any:
        """Do as :meth:`opened` where the message has come, and close the descriptor that came with it."""
        try:
            return self.opened(descriptor, writable=writable)
        finally:
            os.close(descriptor)


class _Packing:
    """Describes trees in JSON types, and finds a place in a file for values that JSON can't hold."""

    def __init__(self, descriptor: int) -> None:
        self.size, self._descriptor = 0, descriptor
        self._pieces: list[tuple[int, memoryview | torch.Tensor | Rows]] = []

    def place(self, piece: memoryview | torch.Tensor | Rows) -> int:
        """Return where a piece will lie: bytes, or dense tensors whose elements follow each other in memory."""
        begin = -(-self.size // _ALIGNED) * _ALIGNED
        self.size = begin + piece.nbytes
        if piece.nbytes:
            self._pieces.append((begin, piece))
        return begin

    def write(self) -> None:
        """Write the pieces that were placed since the last call to the file. (So the kernel fills pages at once that it
        would clear first if they were mapped and touched.)"""
        for begin, piece in self._pieces:
            if isinstance(piece, Rows):
                left = deque(map(_bytes_of, piece.tensors))
            else:
                left = deque([_bytes_of(piece) if isinstance(piece, torch.Tensor) else piece])
            while left:
                done = os.pwritev(self._descriptor, [*islice(left, _PIECES)], begin)
                begin += done
                while left and done >= left[0].nbytes:
                    done -= left.popleft().nbytes
                if done:
                    left[0] = left[0][done:]
        self._pieces.clear()

    def describe(self, node: Any, path: tuple[Any, ...]) -> Any:
        """Return the description of a tree in JSON types."""
        kind = type(node)
        if kind in _PLAIN:
            return node
        if kind is torch.Tensor:
            return self._describe_tensor(node, path)
        if kind is Rows:
            row = node.tensors[0]
            return {**_described(row), "shape": [len(node.tensors), *row.shape], "at": self.place(node)}
        if kind is np.ndarray or isinstance(node, np.generic):
            return self._describe_array(node, path)
        if kind is bytes:
            return {"is": "bytes", "at": self.place(memoryview(node)), "size": len(node)}
        if kind is complex:
            return {"is": "complex", "parts": [node.real, node.imag]}
        if kind in (list, tuple):
            return {"is": kind.__name__, "of": self._describe_all(node, path)}
        if kind is dict or (kind is OrderedDict and not vars(node)):  # (a state_dict has attributes)
            return {"is": kind.__name__, **self._describe_items(node, path)}
        return self._describe_object(node, path)

    def _describe_tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        for is_other, what in (
            (not tensor.is_cpu, f"a tensor on {tensor.device}"),
            (tensor.layout != torch.strided, f"a tensor of layout {tensor.layout}"),
            (tensor.is_quantized, "a quantized tensor"),
            (tensor.requires_grad, "a tensor that requires gradients"),
        ):
            if is_other:
                raise _unpackable(what, path)
        told = _described(tensor)
        # (Of a view whose elements do not follow each other in memory a copy is made, of the strides that clone gives.)
        whole = tensor.resolve_conj().resolve_neg()
        if not whole.is_contiguous():
            whole = whole.clone()
            if not whole.is_contiguous():
                told["strides"] = list(whole.stride())
        return {**told, "shape": list(whole.shape), "at": self.place(whole)}

    def _describe_array(self, node: Any, path: tuple[Any, ...]) -> dict[str, Any]:
        array = np.asarray(node)
        if array.dtype.kind not in "biufcSUmM":
            raise _unpackable(f"an array of {array.dtype}", path)
        in_columns = array.flags.f_contiguous and not array.flags.c_contiguous
        flat = np.ascontiguousarray(array.T if in_columns else array)
        told = {"is": "array", "dtype": array.dtype.str, "shape": list(array.shape)}
        told |= {"columns": True} if in_columns else {}
        told |= {"scalar": True} if isinstance(node, np.generic) else {}
        return {**told, "at": self.place(flat.reshape(-1).view(np.uint8).data if flat.nbytes else memoryview(b""))}

    def _describe_all(self, nodes: Sequence[Any], path: tuple[Any, ...]) -> list[Any]:
        return [self.describe(each, (*path, number)) for number, each in enumerate(nodes)]

    def _describe_items(self, node: Mapping[Any, Any], path: tuple[Any, ...]) -> dict[str, Any]:
        keys = [self.describe(key, (*path, key)) for key in node]
        return {"keys": keys, "of": [self.describe(part, (*path, key)) for key, part in node.items()]}

    def _describe_object(self, node: Any, path: tuple[Any, ...]) -> dict[str, Any]:
        cls = type(node)
        name = f"{cls.__module__}:{cls.__qualname__}"
        is_data = dataclasses.is_dataclass(cls) or isinstance(node, Mapping)
        if _loaded(name) is not cls or (isinstance(node, defaultdict) and node.default_factory is not None):
            raise _unpackable(f"an object of {name}", path)
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            return {"is": "named", "class": name, "of": self._describe_all(node, path)}
        if not is_data or not hasattr(node, "__dict__") or any(vars(each).get("__slots__") for each in cls.__mro__):
            raise _unpackable(f"an object of {name}", path)
        told: dict[str, Any] = {"is": "object", "class": name}
        if isinstance(node, dict):
            told["items"] = self._describe_items(node, path)
        if vars(node) is node:
            return {**told, "itself": True}
        return {**told, "attributes": self._describe_items(vars(node), path)}


class _Opening:
    """Makes trees of their descriptions."""

    def __init__(self, content: torch.Tensor, *, writable: bool) -> None:
        self._content, self._writable = content, writable

    def made(self, told: Any) -> Any:
        """Return the tree of a description."""
        if not isinstance(told, dict):
            return told
        kind = told["is"]
        if kind == "tensor":
            return self._tensor(told)
        if kind == "array":
            return self._array(told)
        if kind == "bytes":
            return self._content[told["at"] : told["at"] + told["size"]].numpy().tobytes()
        if kind == "complex":
            return complex(*told["parts"])
        if kind == "list":
            return [*map(self.made, told["of"])]
        if kind == "tuple":
            return tuple(map(self.made, told["of"]))
        if kind in ("dict", "OrderedDict"):
            items = self._items(told)
            return dict(items) if kind == "dict" else OrderedDict(items)
        return self._object(told)

    def _tensor(self, told: dict[str, Any]) -> torch.Tensor:
        dtype, shape = getattr(torch, told["dtype"]), told["shape"]
        flat = self._content[told["at"] : told["at"] + math.prod(shape) * dtype.itemsize].view(dtype)
        return flat.as_strided(shape, told["strides"]) if "strides" in told else flat.view(shape)

    def _array(self, told: dict[str, Any]) -> Any:
        dtype, shape = np.dtype(told["dtype"]), told["shape"]
        size = math.prod(shape) * dtype.itemsize
        flat = self._content[told["at"] : told["at"] + size].numpy().view(dtype) if size else np.zeros(shape, dtype)
        array = flat.reshape(shape[::-1]).T if told.get("columns") else flat.reshape(shape)
        if told.get("scalar"):
            return array[()]
        array.flags.writeable = self._writable
        return array

    def _items(self, told: dict[str, Any]) -> list[tuple[Any, Any]]:
        return [*zip(map(self.made, told["keys"]), map(self.made, told["of"]), strict=True)]

    def _object(self, told: dict[str, Any]) -> Any:
        cls = _loaded(told["class"])
        if not isinstance(cls, type) or not (dataclasses.is_dataclass(cls) or issubclass(cls, (tuple, Mapping))):
            raise LockstepError(
                f"a batch has an object of the class {told['class']}, which is not loaded in this process: import its "
                "module at the top of the program"
            )
        if told["is"] == "named":
            return tuple.__new__(cls, map(self.made, told["of"]))  # type: ignore[type-var]  # a tuple by what it says
        base: Any = OrderedDict if issubclass(cls, OrderedDict) else dict if issubclass(cls, dict) else object
        made = base.__new__(cls)
        if "items" in told:
            for key, part in self._items(told["items"]):
                base.__setitem__(made, key, part)
        if "itself" in told:
            made.__dict__ = made
        else:
            vars(made).update(self._items(told["attributes"]))
        return made


def _described(tensor: torch.Tensor) -> dict[str, Any]:
    return {"is": "tensor", "dtype": str(tensor.dtype).removeprefix("torch.")}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense tensor in the order in which they lie in memory. The tensor must stay meanwhile."""
    return memoryview(bits.chars(tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _loaded(name: str) -> Any:
    """Return the class of this name, ``module:class``, if it is loaded; else None."""
    module, _, path = name.partition(":")
    try:
        return operator.attrgetter(path)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _unpackable(what: str, path: tuple[Any, ...]) -> Unpackable:
    where = f" at {path_text(path)}" if path else ""
    return Unpackable(f"{what}{where}")
