"""A model and the tensors of a checkpoint: under which names they meet, and where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.names import aligned
from lockstep.checkpoint.tensors import unsavable
from lockstep.errors import CheckpointMismatch

_SHOWN = 8


@dataclass(frozen=True)
class Match:
    """What a checkpoint and a model have in common, and what not."""

    #: What can be loaded, under the model's names.
    loadable: dict[str, Any]
    #: Names that the model has and the checkpoint lacks.
    missing: tuple[str, ...]
    #: Names that the checkpoint has and the model lacks.
    unexpected: tuple[str, ...]
    #: "name: shape in the checkpoint, shape in the model", likewise dtypes where they must agree.
    mismatched: tuple[str, ...]

    def refuse_differences(self, source: object) -> None:
        """**Local.**

        Raises:
            CheckpointMismatch: there are any; it names the first of each kind.
        """
        kinds = [
            ("the model has, the checkpoint lacks", self.missing),
            ("the checkpoint has, the model lacks", self.unexpected),
            ("in both, but different", self.mismatched),
        ]
        lines = [f"  {title} ({len(names)}): {_first(names)}" for title, names in kinds if names]
        if lines:
            raise CheckpointMismatch(f"{source} is a checkpoint of another model:\n" + "\n".join(lines))


def compare(model: nn.Module, state: Mapping[str, Any], *, exact: bool) -> Match:
    """**Local.** Lay ``state`` beside ``model.state_dict()``, changing neither.

    Args:
        model: without a wrapper around it.
        state: tensors, and what else a state dict has, by name; see Note [Names and wrappers] in ``names.py``.
        exact: it is the same model's: dtypes must be the same, and there may be nothing more in it. Else values are
            cast as torch does, and what the model makes for itself (its buffers with ``persistent=False``, which
            older files of transformers hold) is left out.
    """
    own = model.state_dict()
    names = aligned(own, state)
    own_buffers = set() if exact else {name for name, _ in model.named_buffers(remove_duplicate=False)}
    loadable: dict[str, Any] = {}
    mismatched: list[str] = []
    unexpected: list[str] = []
    for saved_name, value in state.items():
        name = names[saved_name]
        if name not in own:
            unexpected += [] if name in own_buffers else [name]
            continue
        difference = _difference(value, own[name], exact)
        if difference is None:
            loadable[name] = value
        else:
            mismatched.append(f"{name}: {difference}")
    # A tied parameter that the file has under its other name is there.
    there = {_memory(own[name]): value for name, value in loadable.items()}
    here = set(names.values())
    missing: list[str] = []
    for name, value in own.items():
        memory = None if name in here else _memory(value)
        if memory in there and memory is not None:
            loadable[name] = there[memory]
        elif name not in here:
            missing.append(name)
    return Match(loadable, tuple(missing), tuple(unexpected), tuple(mismatched))


def _difference(saved: Any, own: Any, exact: bool) -> str | None:
    if not isinstance(own, torch.Tensor) or not isinstance(saved, torch.Tensor):
        same_kind = isinstance(own, torch.Tensor) == isinstance(saved, torch.Tensor)
        return None if same_kind else f"{type(saved).__name__} in the checkpoint, {type(own).__name__} in the model"
    if nn.parameter.is_lazy(own):
        return None  # takes its shape from what is loaded
    if saved.shape != own.shape:
        return f"shape {list(saved.shape)} in the checkpoint, {list(own.shape)} in the model"
    if saved.dtype != own.dtype and (exact or saved.is_complex() != own.is_complex()):
        return f"{saved.dtype} in the checkpoint, {own.dtype} in the model"
    return None


def _memory(value: Any) -> tuple[object, ...] | None:
    if not isinstance(value, torch.Tensor) or unsavable(value) is not None or not value.numel():
        return None
    return value.device, value.data_ptr(), value.shape, value.stride()


def _first(names: tuple[str, ...]) -> str:
    shown = "; ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}; and {len(names) - _SHOWN} more"


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """**Local.** What an optimizer must have in common with another one to take its state."""
    shapes = [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "shapes": shapes}


def refuse_other_optimizer(saved: dict[str, Any], optimizer: torch.optim.Optimizer, source: object) -> None:
    """**Local.** Compare two :func:`describe_optimizer`.

    Raises:
        CheckpointMismatch: they differ; it names the first difference.
    """
    own = describe_optimizer(optimizer)
    if saved["class"] != own["class"]:
        raise CheckpointMismatch(f"{source} is of the optimizer {saved['class']}, this one is {own['class']}")
    counts = [[len(group) for group in shapes] for shapes in (saved["shapes"], own["shapes"])]
    if counts[0] != counts[1]:
        raise CheckpointMismatch(
            f"{source}: its optimizer has parameter groups of {counts[0]} parameters, this one of {counts[1]}"
        )
    for number, (theirs, ours) in enumerate(zip(saved["shapes"], own["shapes"], strict=True)):
        for index, (their_shape, our_shape) in enumerate(zip(theirs, ours, strict=True)):
            if their_shape != our_shape:
                raise CheckpointMismatch(
                    f"{source}: parameter {index} of the optimizer's group {number} has shape {their_shape}, this "
                    f"one's has {our_shape}; are the parameters in another order?"
                )
