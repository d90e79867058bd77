"""What a checkpoint says of where it was written, and what a run is told that resumes under other conditions."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoint import api
from lockstep.checkpoint.manifest import Manifest
from lockstep.step.conditions import conditions
from tests.harness import run_ranks


def _make(folder: str) -> lockstep.Checkpointer:
    torch.manual_seed(2)
    model = nn.Linear(3, 3)
    return lockstep.Checkpointer(folder, model=model, optimizer=torch.optim.AdamW(model.parameters()))


def _save(folder: str, others: dict[str, str]) -> dict[str, str]:
    world = lockstep.init()
    here = conditions(world.device)
    api.conditions = lambda device: {**conditions(device), **others}  # type: ignore[attr-defined]
    _make(folder).save()
    return here


def _resume(folder: str, threads: int) -> list[str]:
    lockstep.init()
    torch.set_num_threads(threads)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert _make(folder).restore() is not None
    return [str(warning.message) for warning in said]


def _versions(folder: Path) -> dict[str, Any]:
    versions: dict[str, Any] = json.loads(next(folder.glob("*/manifest.json")).read_text())["versions"]
    return versions


def test_a_checkpoint_says_where_it_was_written(tmp_path: Path) -> None:
    (here, _) = run_ranks(_save, 2, str(tmp_path), {})
    versions = _versions(tmp_path)
    assert {name: versions[name] for name in here} == here
    assert versions["torch"] == torch.__version__
    assert versions["threads"] == "1"
    assert versions["deterministic"] == "off"
    assert versions["gpu"] == "none"
    assert versions["processor"]
    assert versions["vectors"] == torch.backends.cpu.get_cpu_capability()
    assert all(type(value) is str for value in versions.values())  # as every version of lockstep reads them


def test_a_run_that_resumes_as_it_was_is_told_nothing(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path), {})
    assert run_ranks(_resume, 2, str(tmp_path), 1) == [[], []]


def test_another_number_of_threads_is_told_once_on_rank_0(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path), {})
    (told,), nothing = run_ranks(_resume, 2, str(tmp_path), 2)
    assert "written under other conditions (the number of threads: 1 there, 2 here)" in told
    assert "restored to the bit, but from here on results may differ in their last bits" in told
    assert nothing == []


@pytest.mark.parametrize("name", ["torch", "processor", "vectors", "gpu", "deterministic"])
def test_whatever_else_differs_is_told_too(tmp_path: Path, name: str) -> None:
    (here,) = run_ranks(_save, 1, str(tmp_path), {name: "something else"})
    ((told,),) = run_ranks(_resume, 1, str(tmp_path), 1)
    assert f": something else there, {here[name]} here)" in told


def test_what_an_earlier_version_did_not_write_is_not_missed(tmp_path: Path) -> None:
    run_ranks(_save, 1, str(tmp_path), {})
    (manifest,) = tmp_path.glob("*/manifest.json")
    written = Manifest.from_json(manifest.read_bytes(), where="here")
    for name in set(written.versions) - {"lockstep", "python", "torch"}:
        del written.versions[name]
    manifest.write_bytes(written.to_json())
    assert run_ranks(_resume, 1, str(tmp_path), 2) == [[]]
