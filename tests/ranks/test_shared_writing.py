"""Real ranks write one checkpoint: the same whatever their number, and rank 0's own where they differ."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import lockstep
from tests.harness import run_ranks


def _trained(*, differ: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(900, 1500), nn.BatchNorm1d(1500), nn.Linear(1500, 2))  # 5 MB: more than a block
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    rank = lockstep.world().rank
    model.get_buffer("1.running_mean").fill_(rank + 0.5)  # buffers follow each rank's own batches
    if differ:
        model.get_parameter("0.weight").data.add_(rank)
    return model, optimizer


def _save(folder: str) -> None:
    lockstep.init()
    warnings.simplefilter("error")
    model, optimizer = _trained()
    lockstep.Checkpointer(folder, model=model, optimizer=optimizer).save()


def test_one_rank_and_three_write_the_same_bytes(tmp_path: Path) -> None:
    found = []
    for world_size in (1, 2, 3):
        run_ranks(_save, world_size, str(tmp_path / str(world_size)))
        folder = tmp_path / str(world_size) / "step-00000000"
        found.append({file.name: file.read_bytes() for file in folder.iterdir()})
        # Other bytes: a state for each rank; the number of ranks, and the time.
        assert {"rng.json", "manifest.json"} <= found[-1].keys()
        del found[-1]["rng.json"], found[-1]["manifest.json"]
    assert found[0] == found[1] == found[2]
    assert set(found[0]) == {"model.safetensors", "optimizer.json", "optimizer.safetensors"}
    buffers = load_file(tmp_path / "3" / "step-00000000" / "model.safetensors")["1.running_mean"]
    assert buffers.eq(0.5).all(), "rank 0's"


def _drifted(folder: str) -> list[str]:
    lockstep.init()
    model, optimizer = _trained(differ=True)
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            saved.step = step
            saved.save()
    other, other_optimizer = _trained()
    lockstep.Checkpointer(folder, model=other, optimizer=other_optimizer).restore(strict=True)
    torch.manual_seed(4)
    ours = model.get_parameter("0.weight") - lockstep.world().rank
    assert torch.allclose(other.get_parameter("0.weight"), ours, atol=1e-5), "rank 0's on every rank"
    return [str(warning.message) for warning in caught]


def test_replicas_that_drifted_apart_are_said_once_and_rank_0_is_saved(tmp_path: Path) -> None:
    first, second = run_ranks(_drifted, 2, str(tmp_path))
    assert len(first) == 1
    assert "the replicas have drifted apart" in first[0]
    assert "(model.safetensors on rank 1)" in first[0]
    assert second == []
