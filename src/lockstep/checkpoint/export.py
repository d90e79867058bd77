"""One file out of a checkpoint, for tools that know nothing of lockstep."""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch

from lockstep.checkpoint.guard import reading
from lockstep.checkpoint.load import read, read_model
from lockstep.errors import CheckpointCorrupt, CheckpointError

Format = Literal["torch", "safetensors"]

_SUFFIXES: dict[str, Format] = {
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch",
}  # fmt: skip
#: What torch.load(weights_only=True) takes beside tensors.
_PLAIN = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True)
class Exported:
    """The file that :func:`export` wrote."""

    path: Path
    #: The checkpoint it came from.
    source: Path
    format: Format
    tensors: int
    size: int
    #: Newer checkpoints that are damaged.
    skipped: tuple[str, ...] = ()


def format_of(path: Path) -> Format | None:
    """**Local.** The format that a file's name asks for, or None."""
    return _SUFFIXES.get(path.suffix)


def export(
    checkpoints: list[Path], output: Path, *, format: Format, extra: str | None = None, overwrite: bool = False
) -> Exported:
    """**Local.** Write the model of the first whole checkpoint into one file, which appears whole or not at all.

    Tensors keep their dtypes. Tied ones, which the checkpoint holds once, are in a safetensors file under each name.

    Args:
        checkpoints: folders, the one to take first before those to take if it is damaged.
        output: the file.
        format: ``"torch"``: a state dict that ``torch.load(…, weights_only=True)`` reads; ``"safetensors"``.
        extra: the name of an object of ``Checkpointer(extra=…)`` whose state is meant, in place of the model's.
        overwrite: replace a file that is there.

    Raises:
        CheckpointCorrupt: none of them is whole.
        CheckpointError: there is such a file; there is no such object; or its state does not fit the format.
        OSError: the file can't be written.
    """
    if output.exists() and not overwrite:
        raise CheckpointError(f"{output} is there already: choose another name, or overwrite it")
    source, state, skipped = _first_whole(checkpoints, extra)
    state = _plain_state(state, f"{source.name}: {'the model' if extra is None else f'extra {extra!r}'}")
    if format == "safetensors":
        others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
        if others:
            raise CheckpointError(
                f"{source.name}: {', '.join(others[:8])}: no tensors, which is all that safetensors holds; export to "
                "a torch file (.pt)"
            )
    _write_whole(output, lambda path: _write(state, path, format))
    tensors = sum(isinstance(value, torch.Tensor) for value in state.values())
    return Exported(output, source, format, tensors, output.stat().st_size, skipped)


def _first_whole(checkpoints: list[Path], extra: str | None) -> tuple[Path, Mapping[str, Any], tuple[str, ...]]:
    damaged: list[str] = []
    for folder in checkpoints:
        try:
            with reading(folder):
                return folder, read_model(folder) if extra is None else _extra(folder, extra), tuple(damaged)
        except CheckpointCorrupt as error:
            damaged.append(str(error))
    raise CheckpointCorrupt(f"no checkpoint there is whole: {'; '.join(damaged)}")


def _extra(folder: Path, name: str) -> Mapping[str, Any]:
    saved = read(folder).parts.get("extra", {})
    if name not in saved:
        there = f"it has {', '.join(map(repr, saved))}" if saved else "it has none"
        raise CheckpointError(f"{folder}: no extra object {name!r} was saved; {there}")
    state = saved[name]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{folder}: extra {name!r} is a {type(state).__name__}, not a dict of tensors")
    return state


def _plain_state(state: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The state with nothing in it that needs code to be loaded."""
    _refuse_what_needs_code(state, what)
    return dict(state)


def _refuse_what_needs_code(value: Any, where: str) -> None:
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _refuse_what_needs_code(key, f"{where}, a key")
            _refuse_what_needs_code(item, f"{where}, {key}")
    elif type(value) in (list, tuple):
        for item in value:
            _refuse_what_needs_code(item, where)
    else:
        kind = type(value)
        raise CheckpointError(
            f"{where}: a {kind.__module__}.{kind.__qualname__}, which torch.load(weights_only=True) would refuse"
        )


def _write(state: dict[str, Any], path: Path, format: Format) -> None:
    if format == "torch":
        torch.save(state, path)
    else:
        seen: set[int] = set()
        tensors = {}
        for name, value in state.items():
            pointer = value.untyped_storage().data_ptr()
            tensors[name] = value.clone() if pointer in seen else value.contiguous()
            seen.add(pointer)
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def _write_whole(output: Path, write: Any) -> None:
    temporary = output.with_name(f".{output.name}.tmp-{secrets.token_hex(8)}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        write(temporary)
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
