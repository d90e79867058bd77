"""A model and the tensors of a checkpoint: how their names correspond, and where they differ.

Note [Names and wrappers]
~~~~~~~~~~~~~~~~~~~~~~~~~
DistributedDataParallel, DataParallel and ``torch.compile`` each put a word into the names of a state dict:
``module.`` or ``_orig_mod.``, in front for the whole model, in the middle for a submodule that was compiled or wrapped
by itself (``layers.0._orig_mod.weight``). A checkpoint is saved without them, which the model's structure decides:
:func:`plain_names`. What is loaded may have them or not, and comes from files that know no structure, so names are
laid side by side: :func:`aligned`. Equal names belong together first; of the others those that are equal without these
words, unless two names on one side would become the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep import _torch
from lockstep.checkpoint.safetensors import unsavable
from lockstep.errors import CheckpointMismatch
from lockstep.text import listed

#: The names of classes that hold the user's model in their attribute ``module``; not all can be imported.
_WRAPPERS = {"DistributedDataParallel", "DataParallel"}
#: torch.compile(module) holds it under this name; its class is private.
_COMPILED = _torch.COMPILED_PREFIX.rstrip(".")
_WORDS = ("module", _COMPILED)

# Names.


def bare(model: nn.Module) -> nn.Module:
    """Return the user's own module, without what data-parallel wrappers and ``torch.compile`` put around it."""
    return layers(model)[-1]


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the model and what it wraps, the user's own module last."""
    found = [model]
    while (name := _inner(found[-1])) is not None:
        found.append(getattr(found[-1], name))
    return found


def _inner(module: nn.Module) -> str | None:
    """Return the name under which a wrapper holds the user's module; None if ``module`` is not a wrapper."""
    if _COMPILED in module._modules:
        return _COMPILED
    if any(cls.__name__ in _WRAPPERS for cls in type(module).__mro__) and "module" in module._modules:
        return "module"
    return None


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return the function that removes the wrappers' words from a name of the model's state dict.

    See Note [Names and wrappers].
    """
    wrapped = set()
    for path, module in model.named_modules(remove_duplicate=False):
        name = _inner(module)
        if name is not None:
            wrapped.add(f"{path}.{name}" if path else name)
    if not wrapped:
        return lambda name: name

    def plain(name: str) -> str:
        kept, path = [], ""
        for word in name.split("."):
            path = f"{path}.{word}" if path else word
            if path not in wrapped:
                kept.append(word)
        return ".".join(kept)

    return plain


def aligned(own: Collection[str], saved: Iterable[str]) -> dict[str, str]:
    """Return each saved name -> the model's name for it, or, where the model has none, the name that it would have.

    Args:
        own: the names of the model's state dict.
        saved: the names in a file. See Note [Names and wrappers].
    """
    own = set(own)
    called = without_prefixes(saved, own.__contains__)
    left_here = own.difference(called.values())
    left_there = {name for name in called.values() if name not in own}
    here, there = _by_core(left_here), _by_core(left_there)
    meant = {there[core]: here[core] for core in here.keys() & there.keys()}
    return {name: meant.get(now, now) for name, now in called.items()}


def _by_core(names: Iterable[str]) -> dict[str, str]:
    """Return names by what is left of them without the wrappers' words, leaving out those that share it."""
    cores = {name: ".".join(word for word in name.split(".") if word not in _WORDS) or name for name in names}
    count = Counter(cores.values())
    return {core: name for name, core in cores.items() if count[core] == 1}


def without_prefixes(names: Iterable[str], fits: Callable[[str], bool]) -> dict[str, str]:
    """Return each name -> the name without the wrappers' words that all of them begin with.

    Args:
        names: the names in a file.
        fits: whether a name is one that is looked for. As many words are taken off as make the most names fit.
    """
    called = {name: name for name in names}
    best, most = called, sum(map(fits, called.values()))
    while called:
        word = next((w for w in _WORDS if all(name.startswith(f"{w}.") for name in called.values())), None)
        if word is None:
            break
        called = {name: now.removeprefix(f"{word}.") for name, now in called.items()}
        count = sum(map(fits, called.values()))
        if count > most:
            best, most = called, count
    return best


def under_plain_names(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a module's state dict without the wrappers' words in its names; the same object if there are none.

    Raises:
        ValueError: two names would become the same.
    """
    plain = plain_names(model)
    names = {name: plain(name) for name in state}
    if all(name == now for name, now in names.items()):
        return state
    if len(set(names.values())) < len(names):
        twice = next(now for now, count in Counter(names.values()).items() if count > 1)
        raise ValueError(f"without its wrappers, two tensors of {type(model).__name__} would be called {twice!r}")
    renamed = type(state)() if isinstance(state, dict) else {}
    renamed.update((names[name], value) for name, value in state.items())
    return renamed


# Values.


@dataclass(frozen=True)
class Match:
    """The comparison of a checkpoint with a model."""

    #: The values that can be loaded, under the model's names.
    loadable: dict[str, Any]
    #: Names that the model has and the checkpoint lacks.
    missing: tuple[str, ...]
    #: Names that the checkpoint has and the model lacks.
    unexpected: tuple[str, ...]
    #: The tensors that differ: "name: shape in the checkpoint, shape in the model"; likewise dtypes that must agree.
    mismatched: tuple[str, ...]

    def refuse_differences(self, source: object) -> None:
        """Refuse a checkpoint of another model.

        Raises:
            CheckpointMismatch: there are differences; it names the first of each kind.
        """
        kinds = [
            ("the model has, the checkpoint lacks", self.missing),
            ("the checkpoint has, the model lacks", self.unexpected),
            ("in both, but different", self.mismatched),
        ]
        lines = [f"  {title} ({len(names)}): {listed(names, between='; ')}" for title, names in kinds if names]
        if lines:
            raise CheckpointMismatch(f"{source} is a checkpoint of another model:\n" + "\n".join(lines))


def compare(model: nn.Module, state: Mapping[str, Any], *, exact: bool) -> Match:
    """Compare ``state`` with ``model.state_dict()``, changing neither.

    Args:
        model: without a wrapper around it.
        state: tensors, and what else a state dict has, by name; see Note [Names and wrappers].
        exact: the state is of the same model: dtypes must be the same, and there may be no other tensors. Otherwise
            values are cast as torch does, and what the model makes for itself (its buffers with
            ``persistent=False``, which older files of transformers hold) is left out.
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
    # A tied parameter that the file has under its other name is not missing.
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
        return None  # it takes its shape from what is loaded
    if saved.shape != own.shape:
        return f"shape {list(saved.shape)} in the checkpoint, {list(own.shape)} in the model"
    if saved.dtype != own.dtype and (exact or saved.is_complex() != own.is_complex()):
        return f"{saved.dtype} in the checkpoint, {own.dtype} in the model"
    return None


def _memory(value: Any) -> tuple[object, ...] | None:
    if not isinstance(value, torch.Tensor) or unsavable(value) is not None or not value.numel():
        return None
    return value.device, value.data_ptr(), value.shape, value.stride()


def describe_optimizer(optimizer: torch.optim.Optimizer, *, groups: int | None = None) -> dict[str, Any]:
    """Return the class and shapes that an optimizer must share with another one to take its state.

    Args:
        groups: the number of its groups that count, from the first on; None: all.
    """
    shapes = [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups[:groups]]
    return {"class": type(optimizer).__name__, "shapes": shapes}


def refuse_other_optimizer(saved: dict[str, Any], optimizer: torch.optim.Optimizer, source: object) -> None:
    """Compare a saved :func:`describe_optimizer` with that of ``optimizer``.

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
