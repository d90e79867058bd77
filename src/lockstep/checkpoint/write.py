"""A snapshot of training becomes a checkpoint: the one place that decides what is in which file."""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import storage
from lockstep.checkpoint.codec import encode
from lockstep.checkpoint.manifest import MODEL, Manifest
from lockstep.checkpoint.tensors import file_content
from lockstep.version import __version__


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is made of."""

    step: int
    epoch: int
    in_epoch: bool
    world_size: int
    #: The model's state dict, under the names of the bare model.
    model: Mapping[str, Any]
    #: Trees by the name of their file: optimizer, scheduler, loader, extra, rng.
    parts: Mapping[str, Any]


def write(root: Path, snapshot: Snapshot) -> Path:
    """**Rank 0.** Write a checkpoint into ``root``, wholly or not at all; its folder.

    ``model.safetensors`` holds the tensors of the model, ``model.json`` what else its state dict has. Every other part
    is a JSON file, with a safetensors file beside it if there are tensors in it.

    Raises:
        CheckpointError: something in the snapshot can't be written down.
        OSError: it could not be written; nothing is left of it.
    """
    tensors = {name: value for name, value in snapshot.model.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in snapshot.model.items() if name not in tensors}
    trees = {"model": encode(others, None, where="model")} if others else {}
    kept: dict[str, dict[str, torch.Tensor]] = {}
    for part, tree in snapshot.parts.items():
        trees[part] = encode(tree, kept.setdefault(part, {}), where=part)
    storage.sweep(root)
    draft = storage.Draft(root, snapshot.step)
    try:
        draft.write(MODEL, file_content(tensors, where="model"))
        for part, tree in trees.items():
            draft.write(f"{part}.json", [json.dumps(tree, allow_nan=False).encode()])
            if kept.get(part):
                draft.write(f"{part}.safetensors", file_content(kept[part], where=part))
        return draft.commit(_manifest(snapshot, draft))
    except BaseException:  # an interrupt as well must not leave a draft behind
        draft.discard()
        raise


def _manifest(snapshot: Snapshot, draft: storage.Draft) -> Manifest:
    return Manifest(
        step=snapshot.step,
        epoch=snapshot.epoch,
        in_epoch=snapshot.in_epoch,
        world_size=snapshot.world_size,
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={"lockstep": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        files=dict(draft.files),
    )


def prune(root: Path, newest: Path, keep: int | None) -> None:
    """**Rank 0.** Remove the checkpoints that ``newest`` makes superfluous: earlier ones of its step, and all but the
    ``keep`` last steps. Those of later steps (a damaged one, say, behind which training went on) are left alone."""
    step = storage.step_of(newest)
    older = [folder for folder in storage.checkpoints(root) if storage.step_of(folder) <= step and folder != newest]
    same_step = [folder for folder in older if storage.step_of(folder) == step]
    earlier = [folder for folder in older if folder not in same_step]
    superfluous = same_step + ([] if keep is None else earlier[keep - 1 :])
    for folder in superfluous:
        try:
            storage.remove(folder)
        except OSError as error:
            # The new checkpoint is safe; failing the save for an old one's sake would be wrong.
            warnings.warn(f"could not remove the old checkpoint {folder}: {error}", RuntimeWarning, stacklevel=2)
