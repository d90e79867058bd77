"""What of a module belongs to its replica: all parameters and buffers, but for those that the module says to ignore.

The names to ignore stand in the attribute that torch's DDP reads (libraries that manage some parameters themselves set
it, through ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model``). What is ignored is neither
compared nor sent nor averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from lockstep import _torch

_NONE: frozenset[str] = frozenset()


def ignored_names(module: nn.Module) -> frozenset[str]:
    """**Local.** Names of the parameters and buffers that are left alone."""
    # Looked up where it is set; a module's own way to say that it has no such attribute takes ten times as long.
    names = module.__dict__.get(_torch.IGNORED_BY_DDP) or getattr(type(module), _torch.IGNORED_BY_DDP, None)
    return frozenset(names) if names else _NONE


def ignore(module: nn.Module, names: Iterable[str]) -> None:
    """**Local.** Leave the parameters and buffers of these names alone, once ``module`` is replicated."""
    setattr(module, _torch.IGNORED_BY_DDP, list(names))


def parameters_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """**Local.** Name and parameter of those that the replica compares, sends and averages."""
    ignored = ignored_names(module)
    return ((name, param) for name, param in module.named_parameters() if name not in ignored)


def buffers_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """**Local.** Name and tensor of the buffers that the replica compares and sends."""
    ignored = ignored_names(module)
    if not ignored:
        return module.named_buffers()
    return ((name, buffer) for name, buffer in module.named_buffers() if name not in ignored)


def tensors_of(module: nn.Module, *, buffers: bool) -> list[Tensor]:
    """**Local.** The parameters, and the buffers if asked for."""
    params: list[Tensor] = [param for _, param in parameters_of(module)]
    return params + ([buffer for _, buffer in buffers_of(module)] if buffers else [])
