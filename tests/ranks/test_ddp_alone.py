"""What a replica does and costs that a world of one shows."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

import lockstep
from lockstep.ddp.api import replica_of
from tests.harness import run_ranks
from tests.ranks.ddp_cases import differentiate


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))


def _stand_ins(ordinary_steps: int) -> list[str]:
    """What is said when stand-ins come for a layer in the middle."""
    model = lockstep.replicate(_layers())
    leaf = torch.ones(3, 3, requires_grad=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(ordinary_steps):
            differentiate(model(torch.ones(1, 3)).sum())
        for _ in range(3):
            differentiate(functional_call(model, {"1.weight": leaf}, (torch.ones(1, 3),)).sum())
    return [str(warning.message) for warning in told]


def _replicas_after_release() -> int:
    model = _layers()
    replicas = []
    for _ in range(3):
        lockstep.replicate(model)
        differentiate(model(torch.ones(1, 3)).sum())
        replicas.append(weakref.ref(replica_of(model)))
        lockstep.release(model)
    gc.collect()
    return sum(replica() is not None for replica in replicas)


def _left_of_replicas() -> int:
    """How many of three models that are gone are alive, a part of each of which knows the whole, as hooks may."""
    models = []
    for wrap in (lockstep.replicate, lockstep.replicate, lockstep.DistributedDataParallel):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        object.__setattr__(model[1], "whole", model)
        replica = wrap(model)
        differentiate(replica(torch.ones(4, 3)).sum())
        models.append(weakref.ref(model))
        del model, replica
    gc.collect()
    return sum(model() is not None for model in models)


def _thawed_in_between() -> list[bool]:
    """Whether two forwards, between which a parameter was thawed, have the gradients of a plain module."""
    results = []
    for replicated in (True, False):
        torch.manual_seed(0)
        model = _layers()
        model[0].requires_grad_(False)
        if replicated:
            lockstep.replicate(model)
        first = model(torch.ones(1, 3))
        model[0].requires_grad_(True)
        second = model(torch.ones(1, 3))
        for _ in range(2):
            differentiate(first.sum() + second.sum(), retain_graph=True)
        results.append([param.grad for param in model.parameters()])
    return [torch.allclose(mine, plain) for mine, plain in zip(*results, strict=True)]


def _registered() -> int:
    """How many registrations are remembered of what was put in and taken out again in each step."""
    model = lockstep.replicate(_layers())
    own = model[1].weight
    for _ in range(5):
        model[1].weight = nn.Parameter(torch.ones(3, 3))
        model[1].weight = own
        differentiate(model(torch.ones(1, 3)).sum())
    ignoring = _layers()
    ignoring._ddp_params_and_buffers_to_ignore = ["1.weight"]  # type: ignore[assignment]
    lockstep.replicate(ignoring)
    for _ in range(5):
        ignoring[1].weight = nn.Parameter(torch.ones(3, 3))
        differentiate(ignoring(torch.ones(1, 3)).sum())
    return len(replica_of(model)._own.registered) + len(replica_of(ignoring)._own.registered)


def _all() -> dict[str, Any]:
    lockstep.init()
    return {
        "first": _stand_ins(0),
        "later": _stand_ins(2),
        "replicas": _replicas_after_release(),
        "models": _left_of_replicas(),
        "thawed": _thawed_in_between(),
        "registered": _registered(),
    }


def test_what_a_world_of_one_shows() -> None:
    (found,) = run_ranks(_all, 1)
    for said in (found["first"], found["later"]):
        assert len(said) == 1, said
        assert "this backward gives gradients to tensors that replaced parameters" in said[0]
    assert found["replicas"] == found["models"] == 0
    assert all(found["thawed"])
    assert found["registered"] == 0
