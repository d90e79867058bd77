"""Trees go to JSON and come back with the same types and bits; what can't is named."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.checkpoint.encoding import decode, encode

_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
_trees = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.booleans() | st.tuples(st.integers()), inner)
        | st.dictionaries(st.sampled_from(["$", "items", "name"]), inner)
    ),
    max_leaves=12,
)


def _round_trip(tree: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(tree, tensors, where="tree"), allow_nan=False)
    return decode(json.loads(text), tensors, where="tree")


def _same(one: Any, two: Any) -> bool:
    """Equal in type, order and bits, with NaN equal to itself and 0.0 unlike -0.0."""
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return len(one) == len(two) and all(
            _same(a, b) and _same(one[a], two[b]) for a, b in zip(one, two, strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(_same, one, two))
    if isinstance(one, float):
        return (one == two and math.copysign(1, one) == math.copysign(1, two)) or (one != one and two != two)
    return bool(one == two)


@given(tree=_trees)
def test_plain_trees_come_back_exactly(tree: Any) -> None:
    assert _same(_round_trip(tree), tree)


def test_subclasses_of_dict_that_torch_uses_come_back() -> None:
    milestones = Counter([2, 2, 5])  # as MultiStepLR keeps them, whose methods need them to be a Counter
    back = _round_trip({"milestones": milestones, "ordered": OrderedDict(b=1, a=2)})
    assert type(back["milestones"]) is Counter
    assert back["milestones"] == milestones
    assert type(back["ordered"]) is OrderedDict
    assert list(back["ordered"]) == ["b", "a"]


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64, torch.uint32]
)
def test_tensors_come_back_in_files_and_inline(dtype: torch.dtype, inline: bool) -> None:
    for tensor in (torch.tensor([[1, 0], [0, 1]]).to(dtype).T, torch.tensor(1).to(dtype), torch.empty(0, 3).to(dtype)):
        tensors: dict[str, torch.Tensor] = {}
        data = json.loads(json.dumps(encode([tensor], None if inline else tensors, where="x")))
        (back,) = decode(data, tensors, where="x")
        assert back.dtype == tensor.dtype
        assert back.tolist() == tensor.tolist()


def test_names_of_tensors_do_not_collide() -> None:
    tree = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), 0: torch.tensor(3), "0": torch.tensor(4)}
    back = _round_trip(tree)
    assert [int(back["a"]["b"]), int(back["a.b"]), int(back[0]), int(back["0"])] == [1, 2, 3, 4]


def test_numpy_comes_back() -> None:
    back = _round_trip([np.arange(3, dtype=np.uint32), np.float64(0.1), np.int16(7), np.bool_(True)])
    assert back[0].dtype == np.uint32
    assert back[0].tolist() == [0, 1, 2]
    assert [type(value) for value in back[1:]] == [np.float64, np.int16, np.bool_]
    assert back[1] == 0.1


class Custom:
    pass


def test_what_cannot_be_said_is_named_by_its_place() -> None:
    with pytest.raises(lockstep.CheckpointError, match=r"^opt\.groups\.1\.fn is a tests\.unit\.test_codec\.Custom"):
        encode({"groups": [0, {"fn": Custom()}]}, {}, where="opt")
    with pytest.raises(lockstep.CheckpointError, match=r"^x\.0 is a builtins\.function|^x\.0 is a builtins\.set"):
        encode([{1, 2}], {}, where="x")
    circular: list[Any] = []
    circular.append(circular)
    with pytest.raises(lockstep.CheckpointError, match="contain itself"):
        encode(circular, {}, where="x")
    with pytest.raises(lockstep.CheckpointError, match="sparse"):
        encode([torch.eye(2).to_sparse()], None, where="x")


@pytest.mark.parametrize(
    "data",
    [
        {"$": "tensor", "name": "absent"},
        {"$": "pickle", "items": []},
        {"$": "tuple"},
        {"$": "tensor", "dtype": "object", "shape": [1], "hex": "00"},
        {"$": "tensor", "dtype": "float32", "shape": [9], "hex": "00000000"},
        {"$": "dict", "items": [1]},
    ],
)
def test_what_lockstep_did_not_write_is_refused(data: Any) -> None:
    with pytest.raises(lockstep.CheckpointCorrupt, match="where it is: not what lockstep writes"):
        decode(data, {}, where="where it is")
