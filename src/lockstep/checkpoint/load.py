"""A checkpoint's folder becomes values again, checked before anything is made of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import storage
from lockstep.checkpoint.codec import decode
from lockstep.checkpoint.manifest import MODEL, Manifest
from lockstep.checkpoint.tensors import read_tensors
from lockstep.errors import CheckpointCorrupt


@dataclass(frozen=True)
class Contents:
    """A verified checkpoint, in memory."""

    folder: Path
    manifest: Manifest
    #: The model's state dict.
    model: dict[str, Any]
    #: Trees by name: optimizer, scheduler, loader, extra, rng.
    parts: dict[str, Any]


def read(folder: Path) -> Contents:
    """**Local.** Verify a whole checkpoint, then read it.

    Raises:
        CheckpointCorrupt: it is not what its manifest says.
    """
    manifest = storage.verify(folder)
    names = [name.removesuffix(".json") for name in manifest.files if name.endswith(".json") and name != "model.json"]
    parts = {name: _part(folder, manifest, name) for name in names}
    return Contents(folder, manifest, _model(folder, manifest), parts)


def read_model(folder: Path) -> dict[str, Any]:
    """**Local.** Verify and read the model alone.

    Raises:
        CheckpointCorrupt: its files are not what the manifest says.
    """
    return _model(folder, storage.verify(folder, only=(MODEL, "model.json")))


def _model(folder: Path, manifest: Manifest) -> dict[str, Any]:
    state: dict[str, Any] = dict(read_tensors(folder / MODEL))
    if "model.json" in manifest.files:
        state.update(_part(folder, manifest, "model", inline=True))
    return state


def _part(folder: Path, manifest: Manifest, name: str, *, inline: bool = False) -> Any:
    path = folder / f"{name}.json"
    beside = f"{name}.safetensors"
    tensors = read_tensors(folder / beside) if beside in manifest.files and not inline else {}
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path}: not JSON ({error})") from None
    return decode(data, tensors, where=str(path))
