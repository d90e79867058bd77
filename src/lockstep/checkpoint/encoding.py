"""Exact JSON for trees of plain values, which come back with the same types and bits; digests.

JSON has no tuples, no keys but strings, no infinities and no tensors. A value that JSON would distort is written as an
object with the key ``"$"``, which names its type; tensors are put aside under a name and written by
:mod:`lockstep.checkpoint.safetensors`. Nothing is ever pickled: a value that can't be encoded is an error that names
the place.

The digest is XXH3 with 128 bits: it finds every fault of disks, memory and networks that a file of this size will ever
see, at the speed of memory. It does not prove a file's origin; nothing in a checkpoint is ever executed, so forging one
gains nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from lockstep.errors import CheckpointCorrupt, CheckpointError

#: Matches a digest.
DIGEST = re.compile(r"[0-9a-f]{32}")
#: Bytes that are hashed and written, or read and hashed, at a time: few enough to stay in the cache in between.
PIECE = 2**18
#: The greatest depth of a tree: deeper ones are circular, or an attack on the parser.
_MAX_DEPTH = 64

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip


def encode(tree: Any, tensors: dict[str, torch.Tensor] | None, *, where: str) -> Any:
    """Return ``tree`` in JSON types.

    Args:
        tree: dicts, lists, tuples, None, bool, int, float, str, bytes, NumPy arrays and scalars, and tensors.
        tensors: receives the tensors by name. None: they are written into the JSON itself, for small ones.
        where: the tree's name, with which paths in errors and names of tensors begin.

    Raises:
        CheckpointError: something in the tree is of another type.
    """
    return _encode(tree, tensors, where, 0)


def _encode(value: Any, tensors: dict[str, torch.Tensor] | None, where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where[:200]}…: nested more than {_MAX_DEPTH} deep; does it contain itself?")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if kind is list:
        return [_encode(item, tensors, f"{where}.{i}", depth + 1) for i, item in enumerate(value)]
    if kind is tuple:
        return {"$": "tuple", "items": _encode(list(value), tensors, where, depth)}
    if kind is dict and all(type(key) is str and key != "$" for key in value):
        return {key: _encode(item, tensors, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if kind in (dict, OrderedDict, Counter):
        items = [
            [
                _encode(key, tensors, f"{where} (a key)", depth + 1),
                _encode(item, tensors, f"{where}.{key}", depth + 1),
            ]
            for key, item in value.items()
        ]
        return {"$": kind.__name__, "items": items}
    if isinstance(value, torch.Tensor):
        return _encode_inline(value, where) if tensors is None else _put_aside(value, tensors, where)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        array = torch.from_numpy(np.array(value))
        return {"$": "ndarray" if kind is np.ndarray else "numpy", "value": _encode(array, tensors, where, depth)}
    if kind is bytes:
        return {"$": "bytes", "hex": value.hex()}
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint can't hold without running code "
        "to load it: let its state_dict() return dicts, lists, tuples, numbers, strings and tensors"
    )


def _encode_inline(value: torch.Tensor, where: str) -> Any:
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or dtype not in _DTYPES:
        raise CheckpointError(f"{where}: a tensor of {value.dtype}, {value.layout} can't be written here")
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes().hex()
    return {"$": "tensor", "dtype": dtype, "shape": list(value.shape), "hex": content}


def _put_aside(value: torch.Tensor, tensors: dict[str, torch.Tensor], where: str) -> Any:
    name, number = where, 1
    while name in tensors:  # the key "a.b", and the key "b" in "a"
        number += 1
        name = f"{where}#{number}"
    tensors[name] = value
    return {"$": "tensor", "name": name}


def decode(data: Any, tensors: Mapping[str, torch.Tensor], *, where: str) -> Any:
    """Return the tree that :func:`encode` was given.

    Raises:
        CheckpointCorrupt: this was not written by :func:`encode`, or a tensor is missing.
    """
    try:
        return _decode(data, tensors, 0)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointCorrupt(f"{where}: not what lockstep writes ({type(error).__name__}: {error})") from None


def _decode(data: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(data, list):
        return [_decode(item, tensors, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    kind = data.get("$")
    if kind is None:
        return {key: _decode(item, tensors, depth + 1) for key, item in data.items()}
    if kind == "float":
        return float(data["value"])
    if kind == "bytes":
        return bytes.fromhex(data["hex"])
    if kind == "tensor":
        return tensors[data["name"]] if "name" in data else _inline_tensor(data)
    if kind in ("ndarray", "numpy"):
        array = _decode(data["value"], tensors, depth + 1).numpy()
        return array if kind == "ndarray" else array[()]
    items = _decode(data["items"], tensors, depth + 1)
    if kind == "tuple":
        return tuple(items)
    factories: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict}
    if kind == "Counter":
        return Counter(dict(items))
    return factories[kind](items)


def _inline_tensor(data: dict[str, Any]) -> torch.Tensor:
    content = bytearray.fromhex(data["hex"])
    dtype = _DTYPES[data["dtype"]]
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype, device="cpu")
    return flat.reshape(data["shape"])


def new_digest() -> xxhash.xxh3_128:
    """Begin a digest, to be updated with bytes."""
    return xxhash.xxh3_128()


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of some bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_digests(digests: Iterable[str]) -> str:
    """Return one digest of many, in their order."""
    return digest_of("".join(digests).encode())


def strict_json(content: bytes) -> Any:
    """Parse unambiguous JSON: no key twice in an object, no NaN, no infinity.

    Raises:
        ValueError: ``content`` is not such JSON.
    """
    try:
        return json.loads(content, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
