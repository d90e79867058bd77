"""Load weights into a model: from a run, a checkpoint, a safetensors file or a torch file, or from the folders that
Hugging Face's libraries write: ``model.safetensors`` or ``pytorch_model.bin``, whole or in shards that an index names.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from lockstep import callsite
from lockstep._files import StorePath, run_path
from lockstep.checkpoint import folders
from lockstep.checkpoint.encoding import strict_json
from lockstep.checkpoint.folders import MANIFEST
from lockstep.checkpoint.match import bare, compare, without_prefixes
from lockstep.checkpoint.read import (
    newest_complete,
    read_manifest,
    read_model,
    read_tensors,
    why_unsound,
)
from lockstep.checkpoint.run_folder import run_folder
from lockstep.checkpoint.state import refuse_unreplicated
from lockstep.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from lockstep.text import listed

#: The keys under which training scripts put the state dict in the files they save.
_INNER_KEYS = ("model_state_dict", "state_dict", "model")
#: The names of the file with a folder's weights, in the order in which transformers tries them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
#: Patterns of other names (diffusion_pytorch_model.safetensors, open_clip_model.safetensors); one file must match.
_OTHER_WEIGHTS = ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json")
#: Bytes of the largest index that is read. Those of the largest models have a few megabytes.
_MAX_INDEX = 64 * 2**20


@dataclass(frozen=True)
class LoadedWeights:
    """The result of :func:`load_weights`: the source, and the names that did not match."""

    #: The file or the checkpoint's folder.
    source: PurePath
    #: Names that the model has and the source lacks; they keep their values.
    missing: tuple[str, ...]
    #: Names that the source has and the model lacks.
    unexpected: tuple[str, ...]
    #: Tensors of other shapes, which keep their values: "name: shape in the checkpoint, shape in the model".
    mismatched: tuple[str, ...]


def load_weights(
    path: str | PurePath,
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    strict: bool = True,
    prefix: str = "",
    key: str | None = None,
) -> LoadedWeights:
    """Load a model's weights; needs no ``lockstep.init()``.

    The words that DistributedDataParallel, DataParallel and ``torch.compile`` put into the names (``module.``,
    ``_orig_mod.``, before or within them) make no difference, neither in the file nor in the model.

    Args:
        path: the folder of a run (its newest complete and sound checkpoint is taken) or of one checkpoint, also in an
            object store (``s3://bucket/run``). On a disk also a ``.safetensors`` file, or a file from ``torch.save`` of
            a state dict, or of a dict that has one under
            ``model_state_dict``, ``state_dict`` or ``model``. Or a folder that Hugging Face's libraries wrote (a
            model's, a snapshot in their cache, one of accelerate's ``save_state``): ``model.safetensors`` goes before
            ``pytorch_model.bin``, either whole or in shards; or the index of the shards
            (``model.safetensors.index.json``).
        model: receives the weights in place, cast to its own dtypes. A wrapper's inner module is meant.
        device: move the model there first. None: leave it where it is. The weights may come from any device.
        strict: refuse any difference. False: load what fits and return the differences.
        prefix: take only the names that begin with it, and take it off: ``prefix="backbone."``.
        key: where a file of ``torch.save`` has the state dict: ``key="net"``, or ``key="ema.params"`` in nested dicts.

    Raises:
        CheckpointMismatch: names or shapes differ and ``strict`` is on; nothing was loaded.
        CheckpointCorrupt: a digest does not match, a file is truncated, or an index contradicts its shards.
        CheckpointError: there is nothing to load there, a shard is missing, loading it would need to run code from the
            file (with torch's advice), or the model is sharded or on the meta device.
        ValueError: the path is a URL of a file, or an address without a bucket.
    """
    refuse_targets(model)
    source, state = _find(run_path(path, "path"), key)
    return into(model, source, state, device=device, strict=strict, prefix=prefix)


def into(
    model: nn.Module,
    source: PurePath,
    state: Mapping[str, Any],
    *,
    device: torch.device | str | None,
    strict: bool,
    prefix: str,
) -> LoadedWeights:
    """Put the weights that were read from ``source`` into a model; the rest is as for :func:`load_weights`."""
    target = bare(model)
    if prefix:
        state = _under_prefix(state, prefix)
    match = compare(target, state, exact=False)
    if strict:
        try:
            match.refuse_differences(source)
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{error}{_advice(list(target.state_dict()), state)}") from None
    if device is not None:
        model.to(device)
    target.load_state_dict(match.loadable, strict=False)
    return LoadedWeights(source, match.missing, match.unexpected, match.mismatched)


def refuse_targets(model: nn.Module) -> None:
    """Refuse a model into which no weights can be loaded: a sharded one, or one on the meta device.

    Raises:
        CheckpointError: it is such a model; the error says what to do.
    """
    model = bare(model)
    refuse_unreplicated(
        model,
        "model",
        "load its weights before it is sharded, or with set_model_state_dict of "
        "torch.distributed.checkpoint.state_dict and StateDictOptions(full_state_dict=True)",
    )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise CheckpointError(
                f"model: {name} is on the meta device, where tensors hold nothing: model.to_empty(device=…) first"
            )


def _under_prefix(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    called = without_prefixes(state, lambda name: name.startswith(prefix))
    return {now.removeprefix(prefix): state[name] for name, now in called.items() if now.startswith(prefix)}


def _advice(own: list[str], state: Mapping[str, Any]) -> str:
    """Return advice if a prefix would make the names fit; empty if none would."""
    if not own:
        return ""
    prefixes = {name.removesuffix(own[0]) for name in state if name.endswith(f".{own[0]}")}
    fitting = [prefix for prefix in prefixes if all(f"{prefix}{name}" in state for name in own)]
    return f"\n  prefix={min(fitting, key=len)!r} would make all names of the model fit" if fitting else ""


# The places of weights: what a path means, and the state dict that is there.


def _find(path: Path | StorePath, key: str | None) -> tuple[PurePath, Mapping[str, Any]]:
    """Return the file or the checkpoint's folder that a path means, and the state dict in it."""
    if isinstance(path, StorePath):
        return _in_store(path, key)
    if path.is_dir():
        return _in_folder(path, key)
    return path, _in_file(path, key)


def _in_folder(folder: Path, key: str | None) -> tuple[PurePath, Mapping[str, Any]]:
    is_checkpoint = (folder / MANIFEST).exists()
    if is_checkpoint or folders.checkpoints(folder):
        return _in_checkpoints(folder, key, is_checkpoint=is_checkpoint)
    weights = _weights_in(folder)
    return weights, _in_file(weights, key)


def _in_store(path: StorePath, key: str | None) -> tuple[PurePath, Mapping[str, Any]]:
    folder = run_folder(path)
    is_checkpoint = folder.is_checkpoint()
    if not is_checkpoint and not folder.checkpoints():
        raise CheckpointError(
            f"{path}: no checkpoint there: of a store, the folder of a run or of one of its checkpoints can be loaded; "
            "copy other files to a disk first"
        )
    return _in_checkpoints(path, key, is_checkpoint=is_checkpoint)


def _in_checkpoints(folder: PurePath, key: str | None, *, is_checkpoint: bool) -> tuple[PurePath, Mapping[str, Any]]:
    _refuse_key(key, folder, "a checkpoint of lockstep's holds one model")
    return _chosen(folder) if is_checkpoint else _newest(folder)


def _in_file(path: Path, key: str | None) -> Mapping[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path}: {'not a plain file' if path.exists() else 'no such file or folder'}")
    with open(path, "rb") as file:
        start = file.read(9)
    if path.suffix == ".json":
        return _in_shards(path, key)
    # A safetensors file begins with the length of its header (8 bytes) and the header's brace.
    if path.suffix == ".safetensors" or start[8:] == b"{":
        _refuse_key(key, path, "a safetensors file holds tensors by name, without nests; prefix= chooses among them")
        return read_tensors(path)
    loaded = _read_torch_file(path)
    return _state_dict_in(loaded, path) if key is None else _state_dict_under(key, loaded, path)


def _refuse_key(key: str | None, path: PurePath, why: str) -> None:
    if key is not None:
        raise CheckpointError(f"{path}: key={key!r} has no meaning here: {why}")


def _newest(folder: PurePath) -> tuple[PurePath, Mapping[str, Any]]:
    search = newest_complete(run_folder(folder).checkpoints, lambda each: read_model(each, only_sound=True))
    if search.found is None:
        gone = CheckpointError(f"{folder}: its checkpoints have just been removed")
        raise search.nothing(folder, remedy="give the path of one of them to load it all the same") or gone
    skipped = [*search.unsound.values(), *search.damaged.values()]
    if skipped:
        callsite.warn(f"{search.found[0]} is loaded; skipped: {'; '.join(skipped)}", RuntimeWarning)
    return search.found


def _chosen(folder: PurePath) -> tuple[PurePath, Mapping[str, Any]]:
    words = why_unsound(folder, read_manifest(folder))
    state = read_model(folder)
    if words:
        callsite.warn(f"{folder} is loaded, but {words}", RuntimeWarning)
    return folder, state


# The folders of Hugging Face's libraries.


def _weights_in(folder: Path) -> Path:
    """Return the file that holds a folder's weights, or the index of the files that do."""
    several = sorted(folder.glob("model_[0-9]*.safetensors")) + sorted(folder.glob("pytorch_model_[0-9]*.bin"))
    if several:  # accelerate's save_state of more than one model
        names = listed([path.name for path in several])
        raise CheckpointError(f"{folder} holds the weights of several models ({names}): give the path of one file")
    for name in _WEIGHTS:
        if (folder / name).exists():
            return folder / name
    for pattern in _OTHER_WEIGHTS:
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = listed([path.name for path in found])
            raise CheckpointError(
                f"{folder}: {len(found)} files, and none of them is clearly the model ({names}): give the path of one, "
                "or, if these are shards, add their index (….safetensors.index.json)"
            )
    raise CheckpointError(
        f"{folder}: no checkpoint there: expected folders named step-…, or one of {', '.join(_WEIGHTS)}; "
        f"{_what_else_is_in(folder)}"
    )


def _what_else_is_in(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    if any(name.endswith(".distcp") for name in names):
        return (
            "these are files of torch.distributed.checkpoint: python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pt makes one file of them"
        )
    if {"blobs", "snapshots"} <= set(names):
        revisions = listed(sorted(path.name for path in (folder / "snapshots").iterdir()))
        return f"it is a model's folder in Hugging Face's cache: give one of its snapshots ({revisions})"
    return f"found {listed(names)}" if names else "it is empty"


def _in_shards(index: Path, key: str | None) -> dict[str, Any]:
    """Read the tensors of all the files that an index names."""
    _refuse_key(key, index, "its shards hold tensors by name, without nests; prefix= chooses among them")
    shards = _shards_of(index)
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: {len(missing)} of its {len(shards)} shards are missing: {listed(missing)}; "
            "fetch them again, into the same folder"
        )
    state: dict[str, Any] = {}
    for shard, names in shards.items():
        path = index.parent / shard
        there = _in_file(path, None)
        absent = [name for name in names if name not in there]
        if absent:
            raise CheckpointCorrupt(
                f"{path}: {index.name} lists {listed(absent)}, which it lacks: do both come from one download?"
            )
        state.update((name, there[name]) for name in names)
    return state


def _shards_of(index: Path) -> dict[str, list[str]]:
    """Return the file -> names of its tensors, from an index that lies beside the files."""
    size = index.stat().st_size
    if size > _MAX_INDEX:
        raise CheckpointCorrupt(f"{index}: {size} bytes, and no index has more than {_MAX_INDEX}")
    try:
        content = strict_json(index.read_bytes())
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(shard, str) for shard in weight_map.values())
        ):
            raise ValueError('expected {"weight_map": {name of a tensor: name of a file}}')
    except ValueError as error:
        raise CheckpointCorrupt(f"{index}: not an index of shards: {error}") from None
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        # A shard lies beside the index and nowhere else, and is not an index itself.
        leads_away = shard in ("", "..") or shard != Path(shard).name or "\\" in shard or "\0" in shard
        if leads_away or shard.endswith(".json"):
            raise CheckpointCorrupt(
                f"{index}: {name!a} is listed as in {shard[:200]!a}, which is not a file beside the index"
            )
        shards.setdefault(shard, []).append(name)
    return shards


# Files of torch.save.


def _read_torch_file(path: Path) -> Any:
    try:
        # Old files (before torch 1.6) are not zip archives and can't be mapped.
        is_zip = zipfile.is_zipfile(path)
        is_script = is_zip and _is_torchscript(path)
        loaded = None if is_script else torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: loading this file would need to run code from it, or it is not a file of torch.save. Where it is "
            "trusted: let torch.serialization.add_safe_globals([…]) allow the class before you load, or save a "
            f"state_dict() alone and load that. torch says:\n{error}"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointCorrupt(f"{path}: not a valid file of torch.save ({type(error).__name__}: {error})") from error
    if is_script:
        raise CheckpointError(
            f"{path}: a TorchScript archive, which holds code: where it is trusted, save "
            "torch.jit.load(path).state_dict() and load that"
        )
    return loaded


def _is_torchscript(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _is_state_dict(value: Any) -> bool:
    """Return whether ``value`` holds tensors by name; other values in it may be anything (a module's extra state)."""
    return (
        isinstance(value, Mapping)
        and all(isinstance(name, str) for name in value)
        and any(isinstance(item, torch.Tensor) for item in value.values())
    )


def _state_dict_in(loaded: Any, path: Path) -> Mapping[str, Any]:
    if isinstance(loaded, Mapping):
        for key in _INNER_KEYS:
            if isinstance(loaded.get(key), Mapping):
                return _state_dict_in(loaded[key], path)
        if _is_state_dict(loaded):
            return loaded
    elsewhere = _state_dicts(loaded)
    advice = f"; choose one: {listed([f'key={found!r}' for found in elsewhere], between=' or ')}" if elsewhere else ""
    raise CheckpointError(
        f"{path}: no state dict in it: expected tensors by name, or such a dict under {', '.join(_INNER_KEYS)}; "
        f"found {_outline(loaded)}{advice}"
    )


def _state_dict_under(key: str, loaded: Any, path: Path) -> Mapping[str, Any]:
    found = _under(key, loaded)
    if found is None:
        elsewhere = listed([*map(repr, _state_dicts(loaded))]) or "none"
        raise CheckpointError(
            f"{path}: no value under key={key!r}: found {_outline(loaded)}; state dicts are under: {elsewhere}"
        )
    return _state_dict_in(found, path)


def _under(key: str, loaded: Any) -> Any:
    """Return the value under a key, with dots in it or between the keys of nested dicts; None if there is none."""
    if not isinstance(loaded, Mapping):
        return None
    if key in loaded:
        return loaded[key]
    dots = [at for at, letter in enumerate(key) if letter == "."]
    tries = (_under(key[at + 1 :], loaded[key[:at]]) for at in dots if key[:at] in loaded)
    return next((found for found in tries if found is not None), None)


def _state_dicts(loaded: Any, depth: int = 3) -> list[str]:
    """List the keys, with dots between them, under which there are tensors by name."""
    if not isinstance(loaded, Mapping) or not depth:
        return []
    found = []
    for key, value in loaded.items():
        if _is_state_dict(value):
            found.append(str(key))
        else:
            found += [f"{key}.{inner}" for inner in _state_dicts(value, depth - 1)]
    return found


def _outline(loaded: Any) -> str:
    if isinstance(loaded, Mapping):
        return "a dict with the keys " + listed([repr(key) for key in loaded])
    return f"a {type(loaded).__name__}"
