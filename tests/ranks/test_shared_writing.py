"""Real ranks write one checkpoint: the same whatever their number, and rank 0's own where they differ."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lockstep
from lockstep.checkpoint.read import read_manifest
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
    lockstep.Checkpointer(folder, model=other, optimizer=other_optimizer).restore(strict=True, only_sound=False)
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


def _differ_in_turn(folder: str) -> dict[str, Any]:
    lockstep.init()
    model, optimizer = _trained()
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, keep=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        weight = model.get_parameter("0.weight").detach().clone()
        for step in range(1, 7):
            saved.step = step
            if step == 4:
                model.get_parameter("0.weight").data[0, 0] += lockstep.world().rank
            if step == 5:  # (an optimizer's state alone: the parameters may be equal nevertheless)
                model.get_parameter("0.weight").data.copy_(weight)
                optimizer.state[model.get_parameter("0.weight")]["exp_avg"][0, 0] += lockstep.world().rank
            if step == 6:
                model.get_parameter("2.bias").data[0] += lockstep.world().rank
            saved.save()
    return {path.name: read_manifest(path).apart for path in sorted(Path(folder).glob("step-*"))}


def _resume(folder: str, options: dict[str, bool]) -> tuple[int, list[str]]:
    lockstep.init()
    model, optimizer = _trained()
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = saved.restore(**options)
    assert found is not None
    return found.step, [str(warning.message) for warning in caught]


def test_a_checkpoint_in_which_ranks_differed_replaces_none_and_no_run_resumes_from_it(tmp_path: Path) -> None:
    (there, *others) = run_ranks(_differ_in_turn, 3, str(tmp_path))
    assert others == [there] * 2
    assert there == {"step-00000003": None, "step-00000005": None, "step-00000006": [1, 2]}, "keep=2, and the newest"
    (step, said), *_ = run_ranks(_resume, 2, str(tmp_path), {})
    assert step == 5
    words = "step-00000006 holds the parameters of rank 0, from which those of ranks 1 and 2 differed"
    assert f"skipped newer checkpoints: {words}" in said[0]
    (step, said), *_ = run_ranks(_resume, 2, str(tmp_path), {"only_sound": False})
    assert (step, words in said[0]) == (6, True)


def _leave_alone(folder: str, within: bool) -> tuple[list[int] | None, list[str]]:
    world = lockstep.init()
    model, optimizer = _trained()
    model._ddp_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]
    model.get_parameter("0.weight").data.add_(world.rank)
    lockstep.replicate(model)
    whole = nn.ModuleDict({"trained": model, "other": nn.Identity()}) if within else model
    saved = lockstep.Checkpointer(folder, model=whole, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apart = read_manifest(saved.save()).apart
    return apart, [str(warning.message) for warning in caught]


def _leave_state_alone(folder: str, how: str) -> tuple[list[int] | None, list[str], bool]:
    """Each rank's optimizer holds something else of a parameter that replicas leave alone, in many blocks."""
    world = lockstep.init()
    torch.manual_seed(4)
    table, layer = nn.Linear(2000, 1500), nn.Linear(2000, 1500)
    model = nn.ModuleDict({"layer": layer, "table": table})
    model._ddp_params_and_buffers_to_ignore = ["table.weight", "table.bias"]  # type: ignore[assignment]
    lockstep.replicate(model)
    optimizer = torch.optim.SGD([*layer.parameters(), *table.parameters()], lr=0.1, momentum=0.9)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, float(number))
    own = optimizer.state[table.weight]
    if how == "beginning":
        own["momentum_buffer"] += world.rank
    elif how == "end":
        own["momentum_buffer"][1] += world.rank
    elif world.rank:
        optimizer.state.pop(table.weight)
    parameters = [*model.parameters()] if world.is_main else []
    expected = [optimizer.state[each]["momentum_buffer"].clone() for each in parameters]
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apart = read_manifest(saved.save()).apart
    saved.restore()
    found = [optimizer.state[each]["momentum_buffer"] for each in model.parameters()]
    same = all(torch.equal(one, other) for one, other in zip(found, expected, strict=False))
    return apart, [str(warning.message) for warning in caught], same


@pytest.mark.parametrize("how", ["beginning", "end", "none on others"])
def test_so_may_what_an_optimizer_holds_of_them(how: str, tmp_path: Path) -> None:
    assert run_ranks(_leave_state_alone, 2, str(tmp_path), how) == [(None, [], True)] * 2


@pytest.mark.parametrize("within", [False, True])
def test_parameters_that_replicas_leave_alone_may_differ(within: bool, tmp_path: Path) -> None:
    assert run_ranks(_leave_alone, 2, str(tmp_path), within) == [(None, [])] * 2
