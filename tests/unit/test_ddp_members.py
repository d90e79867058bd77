"""What belongs to a replica, found without a walk: also when modules and buffers come, go or change places."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.ddp.members import Buffers, Tree, buffers_of, ignore


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2)))


def _register(model: Any) -> None:
    model[0].register_buffer("late", torch.ones(1))


def _register_in_root(model: Any) -> None:
    model.register_buffer("late", torch.ones(1))


def _assign(model: Any) -> None:
    model[1].running_mean = torch.ones(2)


def _convert(model: Any) -> None:
    model.double()


def _remove(model: Any) -> None:
    del model[1].running_mean


def _set_to_none(model: Any) -> None:
    model[1].running_var = None


def _replace_module(model: Any) -> None:
    model[1] = nn.BatchNorm1d(2)


def _replace_behind_torchs_back(model: Any) -> None:
    model[2]._modules["0"] = nn.BatchNorm1d(2)


def _add_module(model: Any) -> None:
    model[2].append(nn.BatchNorm1d(2))


def _remove_module(model: Any) -> None:
    del model[2]


def _share(model: Any) -> None:
    model[2].again = model[1]


def _share_a_buffer(model: Any) -> None:
    model[2][0].running_mean = model[1].running_mean


def _set_a_module_to_none(model: Any) -> None:
    model[2].last = None
    model[2]._modules["last"] = None


def _ignore(model: Any) -> None:
    ignore(model, ["1.running_mean"])


def _script(model: Any) -> None:
    model[1] = torch.jit.script(nn.BatchNorm1d(2))


CHANGES = [
    _register,
    _register_in_root,
    _assign,
    _convert,
    _remove,
    _set_to_none,
    _replace_module,
    _replace_behind_torchs_back,
    _add_module,
    _remove_module,
    _share,
    _share_a_buffer,
    _set_a_module_to_none,
    _ignore,
    _script,
]


def _addresses(tensors: list[Tensor]) -> list[int]:
    return sorted(tensor.data_ptr() for tensor in tensors)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_buffers_are_those_of_a_walk_after_every_change(change: Callable[[Any], None]) -> None:
    model = _model()
    buffers = Buffers(model)
    for turn in range(3):
        expected = [buffer for _, buffer in buffers_of(model)]
        assert _addresses(buffers.current(model)) == _addresses(expected)
        if turn == 0:
            change(model)


def test_a_module_without_buffers_has_none() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert Buffers(model).current(model) == []


def test_a_tree_sees_modules_that_take_the_memory_of_others() -> None:
    model = nn.Sequential(nn.ReLU())
    tree = Tree(model)
    for _ in range(100):
        assert tree.parts() is not None
        model[0] = nn.Identity()
        assert tree.parts() is None
        tree = Tree(model)


def test_a_tree_keeps_no_module_alive() -> None:
    model: Any = _model()
    object.__setattr__(model[1], "whole", model)  # as hooks that use it do
    tree, gone = Tree(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert tree.parts() is None
