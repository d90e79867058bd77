"""What a Checkpointer can't save, refused before the first step and in words that say what can."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.digests import digest_of
from lockstep.checkpoint.names import bare
from lockstep.checkpoint.tensors import USE_DCP, unsavable
from lockstep.errors import CheckpointError


def refuse_unsavable(things: Mapping[str, object]) -> None:
    """**Local.** Refuse models and optimizers whose state can't be saved, or of which each rank holds a part.

    Args:
        things: by the name that an error calls them; of modules and optimizers only.

    Raises:
        CheckpointError: there is one; it names the first, and what to use.
    """
    for name, thing in things.items():
        if isinstance(thing, nn.Module):
            refuse_unreplicated(thing, name)
            _refuse_tensors(thing, name)
        elif _is_a(thing, "ZeroRedundancyOptimizer"):
            raise CheckpointError(
                f"{name} is a ZeroRedundancyOptimizer, whose state is divided among the ranks, and a Checkpointer "
                "saves what each rank holds: use its optimizer_class itself, or save its state with torch: "
                "optimizer.consolidate_state_dict(to=0) on all ranks, then torch.save(optimizer.state_dict(), …) on "
                "rank 0"
            )


def refuse_unreplicated(model: nn.Module, name: str, advice: str = USE_DCP) -> None:
    """**Local.** Refuse a model of which each rank holds a part.

    Raises:
        CheckpointError: it is one; with ``advice``.
    """
    for path, module in model.named_modules():
        if _is_a(module, "FullyShardedDataParallel"):
            where = f"{name}.{path}" if path else name
            raise CheckpointError(f"{where} is a FullyShardedDataParallel, of which each rank holds a part: {advice}")
    for path, parameter in model.named_parameters():
        if _is_a(parameter, "DTensor"):
            raise CheckpointError(f"{name}: {path} is a DTensor, of which each rank holds a part: {advice}")


def parameters_in_short(model: nn.Module) -> list[Any]:
    """**Local.** What :func:`refuse_parts` compares: a digest of all names and shapes, how many, and the first name."""
    listed = [
        [name, None if nn.parameter.is_lazy(param) else list(param.shape)]
        for name, param in bare(model).named_parameters()
    ]
    return [digest_of(json.dumps(listed).encode()), len(listed), listed[0][0] if listed else ""]


def refuse_parts(shorts: Sequence[Sequence[Any]]) -> None:
    """**Local.** Refuse models of which the ranks hold other parts, such as the stages of a pipeline.

    Args:
        shorts: each rank's :func:`parameters_in_short`, in order of rank.

    Raises:
        CheckpointError: they differ; the same on every rank.
    """
    first = shorts[0]
    for rank, other in enumerate(shorts):
        if other[0] != first[0]:
            raise CheckpointError(
                f"model: rank {rank} holds other parameters than rank 0, or of other shapes: {_in_words(other)} there "
                f"and {_in_words(first)} on rank 0; {USE_DCP}"
            )


def _in_words(short: Sequence[Any]) -> str:
    _, count, name = short
    return f"{count} ('{name}' first)" if count else "none"


def _refuse_tensors(module: nn.Module, name: str) -> None:
    for path, value in bare(module).state_dict().items():
        if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value):
            continue  # the first forward makes a lazy one
        reason = unsavable(value)
        if reason is not None:
            raise CheckpointError(f"{name}: {path} {reason}")


def _is_a(thing: object, name: str) -> bool:
    """Whether it is of a class of torch's of this name, whose module is slow to import, or can't be everywhere."""
    return any(cls.__name__ == name and cls.__module__.startswith("torch.") for cls in type(thing).__mro__)
