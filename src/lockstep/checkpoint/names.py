"""The names of a model's tensors, without what wrappers put into them.

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
from typing import Any

from torch import nn

from lockstep import _torch

#: Classes that hold the user's model in their attribute ``module``; by name, since not all are at hand to import.
_WRAPPERS = {"DistributedDataParallel", "DataParallel"}
#: torch.compile(module) holds it under this name; its class is private.
_COMPILED = _torch.COMPILED_PREFIX.rstrip(".")
_WORDS = ("module", _COMPILED)


def bare(model: nn.Module) -> nn.Module:
    """Return the user's own module, without what data-parallel wrappers and ``torch.compile`` put around it."""
    while (name := _inner(model)) is not None:
        model = getattr(model, name)
    return model


def _inner(module: nn.Module) -> str | None:
    """The name under which a wrapper holds the user's module; None if this is none."""
    if _COMPILED in module._modules:
        return _COMPILED
    if any(cls.__name__ in _WRAPPERS for cls in type(module).__mro__) and "module" in module._modules:
        return "module"
    return None


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return the function that takes the wrappers inside a model out of a name of its state dict.

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
    """Return for each saved name the one that the model has for it, or, where it has none, what it would be called.

    Args:
        own: the names of the model's state dict.
        saved: those of a file. See Note [Names and wrappers].
    """
    own = set(own)
    called = without_prefixes(saved, own.__contains__)
    left_here = own.difference(called.values())
    left_there = {name for name in called.values() if name not in own}
    here, there = _by_core(left_here), _by_core(left_there)
    meant = {there[core]: here[core] for core in here.keys() & there.keys()}
    return {name: meant.get(now, now) for name, now in called.items()}


def _by_core(names: Iterable[str]) -> dict[str, str]:
    """Names by what is left of them without the wrappers' words, as far as that is one name's alone."""
    cores = {name: ".".join(word for word in name.split(".") if word not in _WORDS) or name for name in names}
    count = Counter(cores.values())
    return {core: name for name, core in cores.items() if count[core] == 1}


def without_prefixes(names: Iterable[str], fits: Callable[[str], bool]) -> dict[str, str]:
    """Return each name with what it is without the wrappers' words that all of them begin with.

    Args:
        names: a file's.
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
    """Return a module's state dict without the wrappers inside it; itself, if there are none.

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
