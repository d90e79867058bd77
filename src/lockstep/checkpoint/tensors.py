"""Tensors as safetensors files: written piece by piece, read back whole.

The file is written here rather than by the safetensors package, so that each tensor is copied once at most (package:
a second copy of everything), the digest is taken while the bytes pass, and the descriptor is ours to fsync. Reading
is the package's, whose parser is made for hostile files. Any tool that reads safetensors reads these files.

Two things safetensors can't say are said in its metadata: ``lockstep.aliases`` (JSON: name -> name of the same
tensor, saved once) and ``lockstep.complex`` (JSON: names of complex tensors, saved as pairs of reals).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from lockstep.errors import CheckpointCorrupt, CheckpointError

_ALIASES = "lockstep.aliases"
_COMPLEX = "lockstep.complex"

_NAMES: dict[torch.dtype, str] = {
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


def file_content(tensors: Mapping[str, torch.Tensor], *, where: str) -> Iterator[bytes | memoryview]:
    """**Local.** The bytes of a safetensors file, in pieces of one tensor each.

    Args:
        tensors: any strides, any device, any shape; the same memory under several names is written once.
        where: what is being written, for the message.

    Raises:
        CheckpointError: a tensor is sparse, quantized, without data, or of a dtype the format does not know; raised
            before the first piece.
    """
    first_names: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    written: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        _refuse_what_has_no_bytes(name, tensor, where)
        first = first_names.setdefault(_identity(tensor), name) if tensor.numel() else name
        if first != name:
            aliases[name] = first
        else:
            written[name] = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor
    complex_names = [name for name in written if tensors[name].is_complex()]
    # Largest elements first, so that each tensor starts at a multiple of its element size.
    order = sorted(written, key=lambda name: (-written[name].element_size(), name))
    yield _header({name: written[name] for name in order}, aliases, complex_names)
    for name in order:
        flat = written[name].detach().cpu().resolve_neg().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


def _header(tensors: Mapping[str, torch.Tensor], aliases: dict[str, str], complex_names: list[str]) -> bytes:
    metadata = {"format": "pt"}
    if aliases:
        metadata[_ALIASES] = json.dumps(aliases)
    if complex_names:
        metadata[_COMPLEX] = json.dumps(complex_names)
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text


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


def _refuse_what_has_no_bytes(name: str, tensor: torch.Tensor, where: str) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else str(tensor.layout)
        raise CheckpointError(f"{where}: {name} is {kind}, and a checkpoint holds dense tensors: convert it first")
    if tensor.dtype not in _NAMES and tensor.dtype not in (torch.complex64, torch.complex128):
        raise CheckpointError(f"{where}: {name} has dtype {tensor.dtype}, which safetensors does not know: convert it")
    if name == "__metadata__":
        raise CheckpointError(f"{where}: a tensor can't be named __metadata__ in safetensors")


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """**Local.** Every tensor of a safetensors file, in CPU memory of its own; aliases are the same tensor again.

    Raises:
        CheckpointCorrupt: the file is truncated or no safetensors file.
        OSError: it can't be read.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            # The package maps the file; a copy of one's own outlives its truncation, which would be a SIGBUS.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (no mapping)
        for name in json.loads(metadata.get(_COMPLEX, "[]")):
            tensors[name] = torch.view_as_complex(tensors[name])
        for name, same in json.loads(metadata.get(_ALIASES, "{}")).items():
            tensors[name] = tensors[same]
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointCorrupt(f"{path}: not a whole safetensors file ({error})") from error
    return tensors
