"""torch's private names that replicas rest on: each does what its function in ``_torch.py`` promises."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import _torch

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


def test_a_storage_counts_its_tensors() -> None:
    flat = torch.zeros(4)
    storage = flat.untyped_storage()
    count = _torch.storage_use_count(storage)
    alone = count()
    alias = flat[1:].detach().numpy()
    assert count() > alone
    del alias
    assert count() == alone


def test_a_tensor_counts_its_owners_in_graphs() -> None:
    count = _torch.tensor_use_count()
    held = torch.ones(3)
    alone = count(held)
    graph = held * torch.ones(3, requires_grad=True)
    assert count(held) > alone
    del graph
    assert count(held) == alone


class _Wrapping(torch.Tensor):
    """What torch wants of a class whose tensors wrap others."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None

    @staticmethod
    def __tensor_unflatten__(*_: object) -> torch.Tensor:
        raise NotImplementedError


def test_a_tensor_made_of_tensors_is_told_from_others() -> None:
    assert _torch.is_made_of_tensors(torch.ones(2).as_subclass(_Wrapping))
    assert not _torch.is_made_of_tensors(torch.ones(2))
    assert not _torch.is_made_of_tensors(nn.Parameter(torch.ones(2)))


def test_the_attribute_is_the_one_that_torchs_class_sets() -> None:
    module = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["weight"])
    assert getattr(module, _torch.IGNORED_BY_DDP) == ["weight"]
