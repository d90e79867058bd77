"""Containers taken apart and rebuilt: the same kind, with what it carries beside its children."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import pytest

from lockstep.trees import parts_of, rebuilt

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Its second field has no value until someone gives it one."""

    first: int
    second: int = dataclasses.field(init=False)


class RefusesUpdate(OrderedDict[str, Any]):
    """As classes of model outputs do, which keep attributes beside their items."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("use attributes")


class Carries(UserDict[str, Any]):
    """A mapping with an attribute of its own."""

    note = "class"


class Attributes(dict[str, Any]):
    """Its items are its attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Mirrors(dict[str, Any]):
    """Its items were made attributes when it was."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vars(self).update(self)


class Textbook(MutableMapping[str, Any]):
    """Keeps its items in a dict of its own, and says nothing of copies."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class ReadOnly(Mapping[str, Any]):
    """Can't be made from a dict alone."""

    def __init__(self, items: dict[str, Any], schema: str) -> None:
        self._items, self.schema = items, schema

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def _doubled(tree: Any) -> Any:
    parts = parts_of(tree)
    assert parts is not None
    return rebuilt(tree, {key: 2 * value for key, value in parts.items()})


@pytest.mark.parametrize(
    ("tree", "twice"),
    [
        ([1, 2], [2, 4]),
        ((1, 2), (2, 4)),
        ({"a": 1}, {"a": 2}),
        (Pair(1, 2), Pair(2, 4)),
        (defaultdict(int, a=1), defaultdict(int, a=2)),
        (OrderedDict(b=1, a=2), OrderedDict(b=2, a=4)),
        (MappingProxyType({"a": 1}), MappingProxyType({"a": 2})),
    ],
)
def test_the_kind_is_kept(tree: Any, twice: Any) -> None:
    found = _doubled(tree)
    assert type(found) is type(tree)
    assert found == twice


def test_what_a_mapping_carries_beside_its_items_is_kept() -> None:
    tree = Carries(a=1)
    tree.note = "own"
    found = _doubled(tree)
    assert (found["a"], found.note, tree["a"]) == (2, "own", 1)
    assert _doubled(defaultdict(list, a=1)).default_factory is list


def test_a_mapping_that_refuses_update_keeps_its_attributes_in_step() -> None:
    tree = RefusesUpdate()
    tree["loss"] = 1
    found = _doubled(tree)
    assert (found["loss"], vars(found)["loss"], tree["loss"], vars(tree)["loss"]) == (2, 2, 1, 1)


@pytest.mark.parametrize("kind", [Attributes, Mirrors])
def test_items_that_are_attributes_too_stay_so(kind: type[dict[str, Any]]) -> None:
    tree = kind(x=1000, y=2000)
    found = _doubled(tree)
    assert type(found) is kind
    assert (found["x"], vars(found)["x"], vars(found)["y"]) == (2000, 2000, 4000)
    assert (tree["x"], vars(tree)["x"]) == (1000, 1000)


def test_a_mapping_of_ones_own_is_not_written_to() -> None:
    tree = Textbook({"a": 1})
    one, two = rebuilt(tree, {"a": 10}), rebuilt(tree, {"a": 20})
    assert type(one) is type(two) is Textbook
    assert (tree["a"], one["a"], two["a"]) == (1, 10, 20)


def test_a_read_only_mapping_that_cannot_be_made_from_a_dict_becomes_one() -> None:
    assert _doubled(ReadOnly({"a": 1}, schema="x")) == {"a": 2}


def test_a_dataclass_may_be_frozen_and_have_fields_without_a_value() -> None:
    found = _doubled(Frozen(1))
    assert found.first == 2
    assert not hasattr(found, "second")


@pytest.mark.parametrize("leaf", ["text", b"bytes", 3, None, Frozen, {1, 2}])
def test_leaves(leaf: Any) -> None:
    assert parts_of(leaf) is None
