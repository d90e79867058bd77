"""The environment's knobs, and what the machine offers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lockstep import BatchShare, EnvironmentMismatch, knobs, machine
from lockstep.launch.binding import Bind

SOURCE = Path(knobs.__file__).parent


def test_the_timeout_has_a_default_and_can_be_set() -> None:
    assert knobs.timeout({}) == 600.0
    assert knobs.timeout({"LOCKSTEP_TIMEOUT": "2.5"}) == 2.5


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan", ""])
def test_a_timeout_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(EnvironmentMismatch, match=f"LOCKSTEP_TIMEOUT='{text}'"):
        knobs.timeout({"LOCKSTEP_TIMEOUT": text})


def test_knobs_are_read_in_one_place_and_all_documented() -> None:
    text = Path(knobs.__file__).read_text()
    names = set(re.findall(r'"(LOCKSTEP_\w+)"', text))
    assert names, "no knob found: the pattern is wrong"
    assert all(f"``{name}``" in (knobs.__doc__ or "") for name in names)
    for file in SOURCE.rglob("*.py"):
        if file.name != "knobs.py":
            assert not re.findall(r"[\"'](LOCKSTEP_\w+)[\"']", file.read_text()), f"{file} names a knob itself"


def test_cores_are_those_this_process_may_use() -> None:
    assert 1 <= machine.cores() <= len(os.sched_getaffinity(0))


def test_ranks_that_are_bound_still_know_how_many_cores_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_CORES", raising=False)
    assert machine.cores_of_all_ranks() == machine.cores()
    monkeypatch.setenv("LOCKSTEP_CORES", "96")
    assert machine.cores_of_all_ranks() == 96
    assert machine.cores() <= len(os.sched_getaffinity(0))


def test_how_ranks_are_bound_has_a_default_and_can_be_set() -> None:
    assert knobs.bind({}) == knobs.bind({"LOCKSTEP_BIND": ""}) == "auto"
    assert [Bind(name).value for name in knobs.BINDS] == list(knobs.BINDS) == [each.value for each in Bind]
    assert knobs.bind({"LOCKSTEP_BIND": "numa"}) == "numa"
    with pytest.raises(EnvironmentMismatch, match="LOCKSTEP_BIND='node': expected auto, none, numa or cores"):
        knobs.bind({"LOCKSTEP_BIND": "node"})


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 4), ("0,2", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0,1,2,3,4,5", 4)]
)
def test_gpus_are_those_that_cuda_would_show(
    visible: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = ["null", "nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"]
    monkeypatch.setattr(os, "listdir", lambda _folder: devices)
    assert machine.gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_weights_of_all_ranks_sum_to_the_world_size() -> None:
    weights = [BatchShare(samples, 7).weight(3) for samples in (3, 2, 2)]
    assert sum(weights) == pytest.approx(3)
    assert BatchShare(2, 6).weight(3) == 1.0
    assert BatchShare(0, 1).weight(3) == 0.0
