"""Weights for a single device: from a run, a checkpoint, a safetensors file or a torch file, into a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint import sources
from lockstep.checkpoint.match import compare
from lockstep.checkpoint.names import bare, without_prefixes
from lockstep.checkpoint.supported import refuse_unreplicated
from lockstep.errors import CheckpointError, CheckpointMismatch


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
    key: str | None = None,
) -> LoadedWeights:
    """**Local.** Load a model's weights; needs no ``lockstep.init()``.

    What DistributedDataParallel, DataParallel and ``torch.compile`` put into the names (``module.``, ``_orig_mod.``,
    before or within them) makes no difference, neither in the file nor in the model.

    Args:
        path: the folder of a run (its newest whole checkpoint is taken), the folder of one checkpoint, a
            ``.safetensors`` file, or a file from ``torch.save`` of a state dict, or of a dict that has one under
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
    """
    target = bare(model)
    _refuse_targets(target)
    source, state = sources.find(Path(path), key)
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


def _refuse_targets(model: nn.Module) -> None:
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
    """What would make the names fit, if it is as simple as a prefix."""
    if not own:
        return ""
    prefixes = {name.removesuffix(own[0]) for name in state if name.endswith(f".{own[0]}")}
    fitting = [prefix for prefix in prefixes if all(f"{prefix}{name}" in state for name in own)]
    return f"\n  prefix={min(fitting, key=len)!r} would make all names of the model fit" if fitting else ""
