"""Weights for a single device: from a run, a checkpoint, a safetensors file or a torch file, into a model."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep import caller
from lockstep.checkpoint import folders
from lockstep.checkpoint.guard import CheckpointGone, reading
from lockstep.checkpoint.load import read_model, read_tensors
from lockstep.checkpoint.manifest import MANIFEST
from lockstep.checkpoint.match import bare, compare
from lockstep.errors import CheckpointCorrupt, CheckpointError

#: Where training scripts put the state dict in the files they save.
_INNER_KEYS = ("model_state_dict", "state_dict", "model")
#: What wrappers put before every name.
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")
#: How often a run's folder is listed anew, while checkpoints in it are removed as fast as they are listed.
_LISTINGS = 10


@dataclass(frozen=True)
class LoadedWeights:
    """What :func:`load_weights` loaded, and what it could not."""

    #: The file or the checkpoint's folder.
    source: Path
    #: Names that the model has and the source lacks; they keep their values.
    missing: tuple[str, ...]
    #: Names that the source has and the model lacks.
    unexpected: tuple[str, ...]
    #: "name: shape in the checkpoint, shape in the model"; they keep their values.
    mismatched: tuple[str, ...]


def load_weights(
    path: str | Path,
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    strict: bool = True,
    prefix: str = "",
) -> LoadedWeights:
    """**Local.** Load a model's weights; needs no ``lockstep.init()``.

    Args:
        path: the folder of a run (its newest whole checkpoint is taken), the folder of one checkpoint, a
            ``.safetensors`` file, or a file from ``torch.save`` of a state dict, or of a dict that has one under
            ``model_state_dict``, ``state_dict`` or ``model``. A ``module.`` or ``_orig_mod.`` before every name (from
            DistributedDataParallel, DataParallel, torch.compile) is taken off.
        model: receives the weights in place, cast to its own dtypes. A wrapper's inner module is meant.
        device: move the model there first. None: leave it where it is. The weights may come from any device.
        strict: refuse any difference. False: load what fits and return the differences.
        prefix: take only the names that begin with it, and take it off: ``prefix="backbone."``.

    Raises:
        CheckpointMismatch: names or shapes differ and ``strict`` is on; nothing was loaded.
        CheckpointCorrupt: a digest does not match, or the file is truncated.
        CheckpointError: there is nothing to load there, or loading it would need to run code from the file.
    """
    path = Path(path)
    source, state = _find(path)
    names = _without_wrappers(state)
    if prefix:
        names = {name.removeprefix(prefix): value for name, value in names.items() if name.startswith(prefix)}
    target = bare(model)
    match = compare(target, names, same_dtype=False)
    if strict:
        match.refuse_differences(source)
    if device is not None:
        model.to(device)
    target.load_state_dict(match.loadable, strict=False)
    return LoadedWeights(source, match.missing, match.unexpected, match.mismatched)


def _find(path: Path) -> tuple[Path, Mapping[str, Any]]:
    if path.is_dir():
        return _from_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    with open(path, "rb") as file:
        start = file.read(9)
    # A safetensors file begins with the length of its header (8 bytes) and the header's brace.
    if path.suffix == ".safetensors" or start[8:] == b"{":
        return path, read_tensors(path)
    return path, _state_dict_in(_read_torch_file(path), path)


def _from_folder(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    if (folder / MANIFEST).exists():
        with reading(folder):
            return folder, read_model(folder)
    for _ in range(_LISTINGS - 1):
        try:
            return _newest_whole(folder)
        except CheckpointGone:
            continue  # pruned since it was listed, so there is a newer one now
    return _newest_whole(folder)


def _newest_whole(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    damaged = []
    for candidate in folders.checkpoints(folder):
        try:
            with reading(candidate):
                state = read_model(candidate)
        except CheckpointCorrupt as error:
            damaged.append(str(error))
            continue
        if damaged:
            caller.warn(f"{candidate} is loaded; skipped: {'; '.join(damaged)}", RuntimeWarning)
        return candidate, state
    if damaged:
        raise CheckpointCorrupt(f"{folder}: no whole checkpoint there: {'; '.join(damaged)}")
    raise CheckpointError(f"{folder}: no checkpoint there (expected folders named step-…)")


def _read_torch_file(path: Path) -> Any:
    try:
        # Old files (before torch 1.6) are no zip archives and can't be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: loading this file would need to run code from it, or it is no file of torch.save: "
            "save model.state_dict() instead of the model itself, where the file is trusted, and load that. torch "
            f"says: {str(error).splitlines()[0]}"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointCorrupt(f"{path}: not a whole file of torch.save ({type(error).__name__}: {error})") from error


def _state_dict_in(loaded: Any, path: Path) -> Mapping[str, Any]:
    if isinstance(loaded, Mapping):
        for key in _INNER_KEYS:
            if isinstance(loaded.get(key), Mapping):
                return _state_dict_in(loaded[key], path)
        if all(isinstance(name, str) for name in loaded) and any(isinstance(v, torch.Tensor) for v in loaded.values()):
            return loaded
    raise CheckpointError(
        f"{path}: no state dict in it: expected tensors by name, or such a dict under "
        f"{', '.join(_INNER_KEYS)}; found {_outline(loaded)}"
    )


def _outline(loaded: Any) -> str:
    if isinstance(loaded, Mapping):
        return "a dict with the keys " + ", ".join(repr(key) for key in list(loaded)[:8])
    return f"a {type(loaded).__name__}"


def _without_wrappers(state: Mapping[str, Any]) -> dict[str, Any]:
    names = dict(state)
    while names:
        prefix = next((p for p in _WRAPPER_PREFIXES if all(name.startswith(p) for name in names)), None)
        if prefix is None:
            return names
        names = {name.removeprefix(prefix): value for name, value in names.items()}
    return names
