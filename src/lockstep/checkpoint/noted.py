"""What the small objects of a run hold at a point of rest: schedulers, the options of optimizers, extra objects.

Note [Small states]
~~~~~~~~~~~~~~~~~~~
A scheduler, an early stopper or a GradScaler changes when the program calls it, not only when an optimizer has
stepped: after the loader's pass, after an evaluation, or for a step that was left out. So a checkpoint of a point of
rest needs what they held at that point. Their states are small, and are copied: with all that they hold, since
``state_dict`` often returns the very lists and tensors that change next.

What ``state_dict`` costs is known of schedulers. Other objects are first looked at: the *mark* of an object is what
its attributes hold, numbers by their values and tensors by the count of their changes, and its state is copied only
where the mark is another one than before. Objects with large tensors (an average of weights), or tensors on an
accelerator, for which a copy would wait, are never copied: as long as their mark is that of the point they hold what
they held then, and afterwards their state of then is not known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lockstep.errors import CheckpointError

_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})
#: The most values and tensors of an object that are looked at; of objects that hold more nothing is noted.
_MOST = 4096
#: The most bytes of tensors that are copied with an object, and of an array that are compared.
_SMALL, _SMALL_ARRAY = 2**20, 4096


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
    """

    def __init__(self, things: Mapping[str, Any], known: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._things = things
        self._known = known
        self._ids: set[int] | None = None
        #: The tensors of modules that objects hold, by the module's id.
        self._tensors: dict[int, list[torch.Tensor]] = {}
        self._too_large: set[str] = set()
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
            f"extra {name!r} ({type(thing).__name__}) has changed since, and no optimizer has stepped: the state that "
            "it had between the last two steps is not known"
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
            self._walk(getattr(thing, "__dict__", None) or thing.state_dict(), leaves, tensors, {id(thing)})
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
                leaves.append((id(value), -1 if value.is_inference() else value._version))
                tensors.append(value)
        elif id(value) in seen:
            return
        elif isinstance(value, np.ndarray):
            leaves.append((id(value), value.tobytes() if value.nbytes <= _SMALL_ARRAY else None))
        elif isinstance(value, torch.optim.Optimizer):
            return
        else:
            seen.add(id(value))
            leaves.append(id(value) if not isinstance(value, (Mapping, Sequence)) else len(value))
            for part in self._parts(value):
                self._walk(part, leaves, tensors, seen)
        if len(leaves) > _MOST:
            raise _TooLargeError

    def _parts(self, value: Any) -> Iterable[Any]:
        if isinstance(value, Mapping):
            return [part for item in value.items() for part in item]
        if isinstance(value, (list, tuple, set, frozenset)):
            return value
        if isinstance(value, nn.Module):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = [*value.parameters(), *value.buffers()]
            return self._tensors[id(value)]
        return [getattr(value, "__dict__", None)]


class _TooLargeError(Exception):
    """An object holds more than is looked at."""
