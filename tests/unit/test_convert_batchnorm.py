"""convert_sync_batchnorm, and the layer where there is no process group."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lockstep

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


def test_parameters_and_buffers_are_taken_over_as_they_are() -> None:
    norm = nn.BatchNorm2d(2, eps=0.1, momentum=None)
    inner = nn.Sequential(norm, nn.ReLU())
    model = nn.Sequential(nn.Conv2d(1, 2, 1), inner)
    norm.weight.requires_grad_(False)
    norm.eval()
    before = dict(norm.named_parameters()) | dict(norm.named_buffers())
    keys = list(model.state_dict())
    assert lockstep.convert_sync_batchnorm(model) is model
    synced = inner[0]
    assert type(synced) is lockstep.SyncBatchNorm
    assert (synced.eps, synced.momentum, synced.training) == (0.1, None, False)
    after = dict(synced.named_parameters()) | dict(synced.named_buffers())
    assert all(after[name] is tensor for name, tensor in before.items())
    assert list(model.state_dict()) == keys


def test_torchs_own_layers_are_converted_and_ours_left_alone() -> None:
    ours = lockstep.SyncBatchNorm(4)
    assert lockstep.convert_sync_batchnorm(ours) is ours
    assert type(lockstep.convert_sync_batchnorm(nn.SyncBatchNorm(4))) is lockstep.SyncBatchNorm
    plain = nn.BatchNorm3d(4, affine=False, track_running_stats=False)
    synced = lockstep.convert_sync_batchnorm(plain)
    assert isinstance(synced, lockstep.SyncBatchNorm)
    assert synced.weight is None
    assert synced.running_mean is None
    group_norm = nn.GroupNorm(1, 4)
    assert lockstep.convert_sync_batchnorm(group_norm) is group_norm


def test_a_layer_in_two_places_stays_one_layer() -> None:
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Linear(2, 2), norm)
    lockstep.convert_sync_batchnorm(model)
    assert type(model[0]) is lockstep.SyncBatchNorm
    assert model[0] is model[2]


def test_a_lazy_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="LazyBatchNorm1d does not know its channels yet"):
        lockstep.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_without_a_process_group_it_is_a_plain_batch_norm() -> None:
    plain = nn.BatchNorm2d(3)
    synced = lockstep.convert_sync_batchnorm(copy.deepcopy(plain))
    images = torch.randn(4, 3, 5, 5)
    assert torch.equal(plain(images), synced(images))
    assert torch.equal(plain.eval()(images), synced.eval()(images))


def test_the_wrong_number_of_channels_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected \[batch, 3, ...\], got \[4, 2\]"):
        lockstep.SyncBatchNorm(3)(torch.randn(4, 2))
