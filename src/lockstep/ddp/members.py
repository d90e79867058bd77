"""What of a module belongs to its replica: all parameters and buffers, but for those that the module says to ignore.

The names to ignore stand in the attribute that torch's DDP reads (libraries that manage some parameters themselves set
it, through ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model``). What is ignored is neither
compared nor sent nor averaged.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from lockstep import _torch

_NONE: frozenset[str] = frozenset()
_buffers = operator.attrgetter("_buffers")


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


class Tree:
    """The modules within a module, and whether they are still those.

    Held weakly, since any of them may refer to the root, which the replica must not keep alive. TorchScript's modules
    are leaves: they let nothing be put into them, and make what hangs in them anew for who looks at it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [*map(weakref.ref, module.modules())]
        self._hanging = [_ref(child) for child in _hanging_in(self.parts())]
        #: Whether TorchScript's are among them.
        self.is_scripted = any(isinstance(part, torch.jit.ScriptModule) for part in self.parts())

    def parts(self) -> list[nn.Module]:
        """**Local.** The modules, each once, the root first; without those that are gone."""
        return [part for ref in self._parts if (part := ref()) is not None]

    def is_kept(self) -> bool:
        """**Local.** Whether the same modules hang in the same order as when this was made.

        Takes some 0.2 µs for each; to walk them takes ten times as long.
        """
        hanging = _hanging_in(self.parts())
        return len(hanging) == len(self._hanging) and all(map(operator.is_, hanging, [ref() for ref in self._hanging]))


class Buffers:
    """What :func:`buffers_of` gives, for who asks in every step: the modules are walked when others have come."""

    def __init__(self, module: nn.Module) -> None:
        self._tree = Tree(module)

    def current(self, module: nn.Module) -> list[Tensor]:
        """**Local.** The buffers of ``module``, always the same one, as they are now."""
        if self._tree.is_scripted or ignored_names(module):
            return [buffer for _, buffer in buffers_of(module)]
        if not self._tree.is_kept():
            self._tree = Tree(module)
        parts = self._tree.parts()
        if not any(map(_buffers, parts)):
            return []
        named = [buffer for part in parts for buffer in part._buffers.values() if buffer is not None]
        return [*dict(zip(map(id, named), named, strict=True)).values()]


def _hanging_in(parts: Iterable[nn.Module]) -> list[nn.Module | None]:
    scripted = torch.jit.ScriptModule
    return [child for part in parts if not isinstance(part, scripted) for child in part._modules.values()]


def _ref(child: nn.Module | None) -> Callable[[], nn.Module | None]:
    return _nothing if child is None else weakref.ref(child)


def _nothing() -> None:
    """What hangs in the place of a module that was set to None."""
