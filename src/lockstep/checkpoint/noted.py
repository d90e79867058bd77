"""What the small objects of a run hold at a point of rest: schedulers, the options of optimizers, extra objects.

Note [Small states]
~~~~~~~~~~~~~~~~~~~
A scheduler, an early stopper or a GradScaler changes when the program calls it, not only when an optimizer has
stepped: after the loader's pass, after an evaluation, or for a step that was left out. So a checkpoint of a point of
rest needs what they held at that point. Their states are small, and are copied: with all that they hold, since
``state_dict`` often returns the very lists and tensors that change next.

What ``state_dict`` costs is known of schedulers. Other objects are first looked at: the *mark* of an object is what
its attributes and slots hold, numbers by their values, tensors by the count of their changes and generators of random
numbers by their states, and its state is copied only where the mark is another one than before. Objects with large
tensors (an average of weights), or tensors on an accelerator, for which a copy would wait, are never copied: as long as
their mark is that of the point they hold what they held then, and afterwards their state of then is not known.

What a module's state dict has besides parameters and buffers (``get_extra_state``, hooks) is looked at in the same way,
by what the module returns, since nothing tells where it keeps that; tensors of it by their values, since they may be
made anew each time. Where two looks one after the other differ, or tensors of it come from a model on an accelerator,
for which each look may wait, a save takes what it is then. Modules without any cost nothing.
"""

from __future__ import annotations

import array
import copy
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lockstep.bits import hexdigest
from lockstep.checkpoint.encoding import digest_of
from lockstep.checkpoint.match import plain_names, under_plain_names
from lockstep.errors import CheckpointError

#: The key of a module's ``get_extra_state`` in its state dict.
_EXTRA_STATE = "_extra_state"
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})
#: Objects that are what they hold one after another, and those that are known by their names.
_HOLDERS = (list, tuple, set, frozenset, deque)
_NAMED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
#: The most values and tensors of an object that are looked at; of objects that hold more nothing is noted.
_MOST = 4096
#: The most bytes of tensors that are copied with an object, and of an array of which a digest is taken; those that are
#: compared themselves.
_SMALL, _SMALL_ARRAY = 2**20, 4096
#: The values at each end of a long deque that are looked at.
_ENDS = 32


def copied(state: Any) -> Any:
    """Return a copy of a state with copies of all that it holds; an object that can't be copied is taken itself."""
    kind = type(state)
    if kind in _ATOMS:
        return state
    if kind is dict:
        return {key: copied(value) for key, value in state.items()}
    if kind is list or kind is tuple:
        return kind(copied(value) for value in state)
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    try:
        return copy.deepcopy(state)
    except Exception:  # noqa: BLE001  (whatever a class of a user's raises: a save says what it can't write)
        return state


def same(one: Any, other: Any) -> bool:
    """Return whether two states hold the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


class OptionGroup(NamedTuple):
    """A group of an optimizer at one moment."""

    params: list[torch.Tensor]
    #: A copy of its options.
    options: dict[str, Any]

    @classmethod
    def all_of(cls, optimizer: torch.optim.Optimizer) -> list[OptionGroup]:
        """Return an optimizer's groups as they are now."""
        groups = []
        for group in optimizer.param_groups:
            options = group.copy()
            params = options.pop("params")
            for name, value in options.items():
                if type(value) not in _ATOMS:
                    options[name] = copied(value)
            groups.append(cls(params.copy(), options))
        return groups


def with_groups(name: str, optimizer: torch.optim.Optimizer, then: Sequence[OptionGroup]) -> dict[str, Any]:
    """Return an optimizer's state with the groups that it had at an earlier moment, after its last step.

    Args:
        name: how to call it.
        optimizer: it.
        then: its groups at that moment.

    Raises:
        CheckpointError: other parameters are in these groups now.
    """
    state = optimizer.state_dict()
    now = optimizer.param_groups
    # Groups may have been added since. None of their parameters was stepped.
    if len(now) < len(then) or any(
        [*map(id, old.params)] != [*map(id, new["params"])] for old, new in zip(then, now, strict=False)
    ):
        raise CheckpointError(
            f"{name}: parameters were put into its groups, or taken from them, since the last step, so its state "
            "between two steps is not known"
        )
    groups = state.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(now):
        return state  # a class with a state of its own kind
    groups = [{**old.options, "params": new["params"]} for old, new in zip(then, groups, strict=False)]
    count = sum(len(old.params) for old in then)
    values = {key: value for key, value in state["state"].items() if not isinstance(key, int) or key < count}
    return {**state, "state": values, "param_groups": groups}


class Noted(NamedTuple):
    """What an object held at one moment."""

    #: What tells whether the object has changed; None: it holds too much to be looked at.
    mark: list[Any] | None
    #: A copy of its state; None: it was not copied.
    state: Any


class Objects:
    """Extra objects of a run, as they are looked at. See Note [Small states].

    Args:
        things: the objects, by their names.
        known: what changes with the run itself, and says nothing of an object that holds it: the model's tensors.
        words: returns how to call one, from its name.
    """

    def __init__(
        self,
        things: Mapping[str, Any],
        known: Callable[[], Iterable[torch.Tensor]],
        *,
        words: Callable[[str], str],
    ) -> None:
        self._things = things
        self._known = known
        self._words = words
        self._ids: set[int] | None = None
        #: The modules that objects hold and their tensors, by the module's id.
        self._tensors: dict[int, tuple[nn.Module, list[torch.Tensor]]] = {}
        #: The numbers of tensors and arrays, by their ids.
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._last_number = 0
        self._too_large: set[str] = set()
        #: True if tensors are told apart by what they hold, and not by who they are.
        self._by_value = False
        self._last: dict[str, Noted] = {}

    def note(self) -> dict[str, Noted]:
        """Return what the objects hold now, by their names."""
        if not self._things:
            return {}
        for name, thing in self._things.items():
            mark, copies = self._mark(name, thing)
            before = self._last.get(name)
            if before is None or mark is None or before.mark != mark:
                self._last[name] = Noted(mark, copied(thing.state_dict()) if mark is not None and copies else None)
        return dict(self._last)

    def mark(self, name: str) -> list[Any] | None:
        """Return the mark that an object has now; None: it holds too much to be looked at."""
        return self._mark(name, self._things[name])[0]

    def state(self, name: str, then: Noted) -> Any:
        """Return the state of an object at an earlier moment.

        Raises:
            CheckpointError: it has changed since, and was not copied.
        """
        thing = self._things[name]
        mark, _ = self._mark(name, thing)
        if mark is None or mark == then.mark:
            return thing.state_dict()
        if then.state is not None:
            return then.state
        raise CheckpointError(
            f"{self._words(name)} has changed since, and no optimizer has stepped: the state that it had between the "
            "last two steps is not known"
        )

    def _mark(self, name: str, thing: Any) -> tuple[list[Any] | None, bool]:
        """Return an object's mark, None if it holds too much, and whether its state may be copied."""
        if name in self._too_large:
            return None, False
        if self._ids is None:
            self._ids = {*map(id, self._known())}
        leaves: list[Any] = []
        tensors: list[torch.Tensor] = []
        try:
            self._by_value = isinstance(thing, BesideTensors)  # what is made anew for each look
            attributes = [] if self._by_value else _attributes_of(thing)
            self._walk(attributes or thing.state_dict(), leaves, tensors, {id(thing)})
            if isinstance(thing, BesideTensors) and name not in self._last:
                again: list[Any] = []
                self._walk(thing.state_dict(), again, [], {id(thing)})
                if again != leaves or (tensors and thing.is_on_accelerator):
                    raise _TooLargeError  # nothing tells a change from none, or each look may wait for the device
        except _TooLargeError:
            self._too_large.add(name)
            return None, False
        small = all(each.is_cpu for each in tensors) and sum(each.nbytes for each in tensors) <= _SMALL
        return leaves, small

    def _walk(self, value: Any, leaves: list[Any], tensors: list[torch.Tensor], seen: set[int]) -> None:
        kind = type(value)
        if kind in _ATOMS:
            leaves.append(value)
        elif isinstance(value, torch.Tensor):
            if id(value) not in self._ids:  # type: ignore[operator]  # set before
                leaves.append(_value_of(value) if self._by_value else None)
                if leaves[-1] is None:
                    leaves[-1] = (self._number_of(value), -1 if value.is_inference() else value._version)
                tensors.append(value)
        elif id(value) in seen:
            return
        elif isinstance(value, np.ndarray):
            leaves.append((self._number_of(value), _bytes_of(value)))
        elif isinstance(value, (array.array, bytearray)):
            leaves.append((kind, len(value), digest_of(bytes(memoryview(value)[:_SMALL]))))
        elif isinstance(value, PurePath):
            leaves.append(str(value))  # its slots are filled when it is used
        elif isinstance(value, torch.optim.Optimizer):
            return
        else:
            seen.add(id(value))
            drawn = _state_of_generator(value)
            parts = [] if drawn is not None else self._parts(value)
            # Objects that can be looked into are what they hold; of others there is only who they are.
            holds = isinstance(value, (Mapping, *_HOLDERS))
            leaves.append(drawn or ((kind, len(value)) if holds else kind if parts else _Itself(value)))
            for part in parts:
                self._walk(part, leaves, tensors, seen)
        if len(leaves) > _MOST:
            raise _TooLargeError

    def _number_of(self, value: Any) -> int:
        """Return what tells a tensor or an array from all others, also from an earlier one in the same memory."""
        known = self._numbers.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        if len(self._numbers) > 2 * _MOST:
            self._numbers = {key: each for key, each in self._numbers.items() if each[0]() is not None}
        self._last_number += 1
        self._numbers[id(value)] = weakref.ref(value), self._last_number
        return self._last_number

    def _parts(self, value: Any) -> list[Any]:
        if isinstance(value, nn.Module):
            known = self._tensors.get(id(value))
            if known is None or known[0] is not value:
                known = self._tensors[id(value)] = value, [*value.parameters(), *value.buffers()]
            return [*known[1]]
        if isinstance(value, _NAMED):
            return []
        parts = _attributes_of(value)
        if isinstance(value, Mapping):
            return [part for item in [*value.items()] for part in item] + parts  # (another thread may change it)
        if isinstance(value, deque) and len(value) > 2 * _ENDS:  # what comes and goes does so at its ends
            return [*islice(value, _ENDS), *islice(reversed(value), _ENDS), *parts]
        return [*value, *parts] if isinstance(value, _HOLDERS) else parts


def _attributes_of(value: Any) -> list[Any]:
    """Return what an object holds in its attributes, in ``__dict__`` and in slots."""
    own = getattr(value, "__dict__", None)
    found = [own] if own else []
    for kind in type(value).__mro__:
        if "__slots__" not in vars(kind):
            continue
        for slot in vars(kind).values():
            if type(slot) is MemberDescriptorType:
                with suppress(AttributeError):  # nothing was put there
                    found.append(slot.__get__(value))
    return found


def _value_of(tensor: torch.Tensor) -> object:
    """Return what a tensor holds; None where that would take long to find out."""
    if not tensor.is_cpu or tensor.layout != torch.strided or tensor.nbytes > _SMALL:
        return None
    return tensor.dtype, tuple(tensor.shape), hexdigest(tensor)


def _bytes_of(array: np.ndarray[Any, Any]) -> bytes | str:
    """Return what an array holds, or of a large one a digest of its beginning."""
    if array.nbytes <= _SMALL_ARRAY:
        return array.tobytes()
    count = min(array.size, _SMALL // max(1, array.itemsize))
    return digest_of(array.ravel(order="K")[:count].tobytes())  # (by memory: at no copy, however it is transposed)


def _state_of_generator(value: Any) -> Any:
    """Return the state of a generator of random numbers, which no attribute shows; None: it is none."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if isinstance(value, np.random.BitGenerator):
        return _comparable(value.state)
    return _comparable(value.get_state(legacy=False)) if isinstance(value, np.random.RandomState) else None


def _comparable(state: Any) -> Any:
    """Return a state of NumPy's as values that can be compared."""
    if isinstance(state, Mapping):
        return tuple((key, _comparable(value)) for key, value in state.items())
    return state.tobytes() if isinstance(state, np.ndarray) else state


class _Itself:
    """An object that is only equal to itself, and stays as long as it may be compared: no other takes its place."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


class BesideTensors:
    """What the state dict of a module has besides its parameters and buffers, as an object with a state of its own."""

    __slots__ = ("_modules", "_others", "_owner")

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner
        #: The modules with a state beside their tensors, by their keys in the owner's, and all other such keys.
        self._modules: dict[str, nn.Module] = {}
        self._others: set[str] = set()
        plain, tensors = plain_names(owner), _named_tensors(owner)
        memory, modules = {*map(_address, tensors.values())} - {None}, dict(owner.named_modules(remove_duplicate=False))
        for key, value in owner.state_dict().items():
            path, _, last = key.rpartition(".")
            if key in tensors or (isinstance(value, torch.Tensor) and _address(value) in memory):
                continue  # under another name, by a hook: optimizers alone change it, or it is watched
            if last == _EXTRA_STATE and path in modules:
                self._modules[plain(key)] = modules[path]
            else:
                self._others.add(plain(key))

    def __bool__(self) -> bool:
        return bool(self._modules or self._others)

    @property
    def is_on_accelerator(self) -> bool:
        """Whether parameters of the module are on an accelerator."""
        return any(not param.is_cpu for param in self._owner.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return it, under the names of the bare module."""
        found = {key: module.get_extra_state() for key, module in self._modules.items()}
        if self._others:
            state = under_plain_names(self._owner, self._owner.state_dict())
            found |= {key: state[key] for key in self._others if key in state}
        return found


def _named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    both = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name: tensor for named in both for name, tensor in named}


def _address(tensor: torch.Tensor) -> object:
    """Return where a tensor is in memory; None if it has none, or is of a kind that does not say so."""
    if nn.parameter.is_lazy(tensor):
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


class _TooLargeError(Exception):
    """An object holds more than is looked at."""
