"""What a Checkpointer can't save, refused before the first step and in words that say what can."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

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
