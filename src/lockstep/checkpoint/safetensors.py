"""Tensors as safetensors files: the places of their bytes, and the header that describes them. No I/O.

The format is simple enough to be written and read here, block by block: each rank writes its part of a file, every byte
is copied once at most, and digests are taken while the bytes pass. Any tool that reads safetensors reads these files.

The metadata holds two things that safetensors has no fields for: ``lockstep.aliases`` (JSON: name -> name of the same
tensor, saved once) and ``lockstep.complex`` (JSON: names of complex tensors, saved as pairs of reals).
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.blocks import TensorPart
from lockstep.checkpoint.encoding import digest_of, new_digest, strict_json
from lockstep.checkpoint.finite import Bound
from lockstep.comm.in_order.files import SAFETENSORS_NAMES
from lockstep.errors import CheckpointError

#: Bytes of the field at the beginning of the file that holds the header's length.
LENGTH = 8
#: The format's own limit on the header, in bytes.
MAX_HEADER = 100_000_000

_ALIASES = "lockstep.aliases"
_COMPLEX = "lockstep.complex"
#: Bytes at the beginning of each tensor that ranks compare to notice that their replicas differ; at most its first row
#: if it is not contiguous.
_SAMPLE = 256

#: The dtypes that can be read: those above, and those that other tools write as well.
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()} | {
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
}


#: The advice on a model or an optimizer that is divided among the ranks.
USE_DCP = (
    "a Checkpointer saves replicas, of which each rank holds all; save what is sharded with "
    "torch.distributed.checkpoint and the functions of torch.distributed.checkpoint.state_dict"
)


@dataclass(frozen=True)
class TensorSpan:
    """The place of a tensor in a file, by its header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    #: The first byte and the one after the last, counted from the beginning of the file.
    start: int
    stop: int


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file that is to be written."""

    name: str
    #: The field with the header's length, and the header itself.
    header: bytes
    #: The places of the tensors, in the order of their bytes, without gaps.
    spans: tuple[TensorSpan, ...]
    #: The tensors by name, in the same order: of any strides, on any device, real.
    tensors: Mapping[str, torch.Tensor]
    #: The names of the tensors that every rank holds with the same bits.
    alike: Collection[str]
    #: Name -> the rank that alone holds the tensor; such a tensor has the same shape and dtype on all ranks.
    owners: Mapping[str, int] = field(default_factory=dict)
    #: Name -> the bound of the tensor's values, if it should be finite; see Note [Finite] in ``finite.py``.
    bounds: Mapping[str, Bound] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of bytes of the whole file."""
        return self.spans[-1].stop if self.spans else len(self.header)

    @property
    def size_alike(self) -> int:
        """Number of bytes that every rank should hold alike, or at least in the same places."""
        return sum(one.stop - one.start for one in self.spans if one.name in self.alike or one.name in self.owners)

    def parts(self) -> list[TensorPart]:
        """Return the parts of the file, in order: rank 0 writes the header, and what the ranks don't share."""
        tensors = [TensorPart(one.name, one.start, one.stop) for one in self.spans]
        return [
            TensorPart("", 0, len(self.header)).written_by(0),
            *(part if part.name in self.alike else part.written_by(self.owners.get(part.name, 0)) for part in tensors),
        ]

    def source(self, name: str) -> torch.Tensor | bytes:
        """Return the content of the part of this name."""
        return self.tensors[name] if name else self.header

    def fingerprints(self) -> tuple[str, str]:
        """Return a digest of the header, and one of what all ranks should hold alike: the names, dtypes and shapes of
        these tensors, and the beginning of each."""
        digest = new_digest()
        elsewhere: dict[torch.device, list[torch.Tensor]] = {}
        for one in self.spans:
            tensor = self.tensors[one.name]
            if one.name not in self.alike:
                continue
            digest.update(f"{one.name} {one.dtype} {one.shape}\n".encode())
            if one.start == one.stop:
                continue
            if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg():
                # No tensor operations here: a state has thousands of tensors, and training waits.
                digest.update(ctypes.string_at(tensor.data_ptr(), min(_SAMPLE, one.stop - one.start)))
            else:
                elsewhere.setdefault(tensor.device, []).append(_first(tensor))
        for parts in elsewhere.values():  # one copy from each device
            digest.update(torch.cat(parts).cpu().numpy().data)
        return digest_of(self.header), digest.hexdigest()


def _first(tensor: torch.Tensor) -> torch.Tensor:
    """Return some bytes of a tensor of any strides on any device, without a copy of all of it."""
    while tensor.dim() > 1 and not tensor.is_contiguous():
        tensor = tensor[0]
    count = _SAMPLE // tensor.element_size()
    return tensor.reshape(-1)[:count].resolve_neg().contiguous().view(torch.uint8)


def lay_out(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    where: str,
    alike: Collection[str] | None = None,
    owners: Mapping[str, int] | None = None,
    judged: Mapping[str, bool] | None = None,
) -> TensorFile:
    """Lay tensors out in the safetensors file ``name``; nothing is copied.

    Args:
        tensors: any strides, any device, any shape; the same memory under several names is written once.
        where: what is being written, for the message.
        alike: the names of the tensors whose bits are the same on all ranks. None: all.
        owners: name -> the rank that alone holds the tensor; the others have one of its shape in its place.
        judged: name of each tensor that should be finite -> whether infinities are meant there all the same.

    Raises:
        CheckpointError: a tensor is sharded, sparse, quantized, without data, or of a dtype the format does not know.
    """
    first_names: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    written: dict[str, torch.Tensor] = {}
    owners = owners or {}
    for key, tensor in tensors.items():
        _refuse_what_has_no_bytes(key, tensor, where)
        first = first_names.setdefault((owners.get(key), *_identity(tensor)), key) if tensor.numel() else key
        if first != key:
            aliases[key] = first
        else:
            tensor = tensor.detach()
            written[key] = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    complex_names = [key for key in written if tensors[key].is_complex()]
    # Tensors with the largest elements go first, so that each starts at a multiple of its element size.
    written = {key: written[key] for key in sorted(written, key=lambda key: (-written[key].element_size(), key))}
    header = _header(written, aliases, complex_names)
    spans, end = [], len(header)
    for key, tensor in written.items():
        start, end = end, end + tensor.nbytes
        spans.append(TensorSpan(key, tensor.dtype, tuple(tensor.shape), start, end))
    bounds = {
        one.name: bound
        for one in spans
        if judged is not None and one.name in judged
        if (bound := Bound.of(one.dtype, infinities=judged[one.name])) is not None
    }
    alike = frozenset(written if alike is None else alike)
    return TensorFile(name, header, tuple(spans), written, alike, owners, bounds)


def _header(tensors: Mapping[str, torch.Tensor], aliases: dict[str, str], complex_names: list[str]) -> bytes:
    metadata = {"format": "pt"}
    if aliases:
        metadata[_ALIASES] = json.dumps(aliases)
    if complex_names:
        metadata[_COMPLEX] = json.dumps(complex_names)
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(LENGTH, "little") + text


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def unsavable(tensor: torch.Tensor) -> str | None:
    """Return why a tensor has no bytes that could be saved, and what to do; None if it has."""
    classes = [cls.__name__ for cls in type(tensor).__mro__]
    if "DTensor" in classes or "ShardedTensor" in classes:  # by name: their modules are slow to import
        return f"is a {classes[0]}, of which each rank holds a part: {USE_DCP}"
    if nn.parameter.is_lazy(tensor):
        return "is not initialized: run one batch through the model first"
    if tensor.is_nested or tensor.is_quantized or tensor.is_mkldnn:
        kind = "a nested" if tensor.is_nested else "a quantized" if tensor.is_quantized else "an mkldnn"
        return f"is {kind} tensor, and a checkpoint holds dense ones: convert it first"
    if _is_wrapper(tensor):
        return (
            f"is a {type(tensor).__module__}.{classes[0]}, which keeps its data in other tensors and would need its "
            "code to be loaded: convert it to a plain tensor, or save it by a state_dict() that returns plain tensors"
        )
    if tensor.is_meta:
        return "is on the meta device, where tensors hold nothing: model.to_empty(device=…) and initialize it first"
    if tensor.layout != torch.strided:
        return (
            f"is {tensor.layout}, and a checkpoint holds dense tensors: keep its indices and values as buffers, or "
            "register it with persistent=False if the model can recompute it"
        )
    if tensor.dtype not in SAFETENSORS_NAMES and tensor.dtype not in (torch.complex64, torch.complex128):
        return f"has dtype {tensor.dtype}, which safetensors does not know: convert it"
    return None


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a class of its own and no memory."""
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # torch raises it when there is no memory to return
        return not tensor.is_meta
    return hasattr(tensor, "__tensor_flatten__")


def _refuse_what_has_no_bytes(name: str, tensor: torch.Tensor, where: str) -> None:
    reason = unsavable(tensor)
    if reason is not None:
        raise CheckpointError(f"{where}: {name} {reason}")
    if name in ("__metadata__", ""):
        raise CheckpointError(f"{where}: a tensor can't be named {name!r} in a checkpoint")


@dataclass(frozen=True)
class Header:
    """The parsed header of a safetensors file."""

    tensors: tuple[TensorSpan, ...]
    _aliases: dict[str, str]
    _complex: list[str]

    def finish(self, read: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Make the tensors what they were when saved: complex ones, and the same tensor again under its other names.

        Raises:
            ValueError: the metadata names tensors that are not there.
        """
        try:
            for name in self._complex:
                read[name] = torch.view_as_complex(read[name])
            for name, same in self._aliases.items():
                if name in read:
                    raise ValueError(f"{name!r} is a tensor and another's alias")
                read[name] = read[same]
        except (KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"its metadata do not fit: {error}") from None
        return read


def header_length(start: bytes, size: int) -> int:
    """Return the position at which a file's data begin.

    Args:
        start: its first 8 bytes.
        size: its size.

    Raises:
        ValueError: the header would be larger than the file or the format allows.
    """
    length = int.from_bytes(start, "little")
    if len(start) < LENGTH or not 2 <= length <= min(MAX_HEADER, size - LENGTH):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    return LENGTH + length


def parse_header(header: bytes, size: int) -> Header:
    """Read a header, which must account for every byte of the file once.

    Args:
        header: the file's bytes up to the data.
        size: the file's size.

    Raises:
        ValueError: it is not a header, names a tensor twice, or its tensors have an unknown dtype, a size other than
            that of their shape, overlap, leave gaps or do not end where the file does.
    """
    body = strict_json(header[LENGTH:])
    if type(body) is not dict:
        raise ValueError("its header is not an object")
    metadata = body.pop("__metadata__", {})
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise ValueError("its metadata is not a dict of strings")
    described = sorted((_describe(name, entry, len(header)) for name, entry in body.items()), key=_position)
    end = len(header)
    for one in described:
        if one.start != end:
            raise ValueError(f"the data of {one.name!r} begin at byte {one.start}, where the one before ends at {end}")
        end = one.stop
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, the file at {size}")
    aliases = strict_json(metadata.get(_ALIASES, "{}").encode())
    names = strict_json(metadata.get(_COMPLEX, "[]").encode())
    if type(aliases) is not dict or type(names) is not list:
        raise ValueError("its metadata do not fit")
    return Header(tuple(described), aliases, names)


def _position(one: TensorSpan) -> tuple[int, int]:
    return one.start, one.stop


def _describe(name: str, entry: Any, data: int) -> TensorSpan:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the entry of {name!r} is malformed") from None
    if type(shape) is not list or not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"the entry of {name!r} is malformed")
    if type(dtype) is not str or dtype not in _DTYPES:
        raise ValueError(f"{name!r} has the dtype {dtype!r}, which torch does not know")
    if stop - start != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise ValueError(f"{name!r} has {stop - start} bytes, which is not {dtype} of shape {shape}")
    if len(shape) > 64 or math.prod(max(n, 1) for n in shape) >= 2**62:
        raise ValueError(f"{name!r} has the shape {shape}")
    return TensorSpan(name, _DTYPES[dtype], tuple(shape), data + start, data + stop)
