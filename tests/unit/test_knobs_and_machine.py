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
    ("visible", "expected"),
    [
        (None, 4),
        ("0,2", 2),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,1,2,3,4,5", 4),
        ("0,7,1", 1),
        ("GPU-8932f937,GPU-5d2c", 2),
        ("MIG-0f5e,MIG-77aa", 1),
        ("MIG-GPU-8932f937/1/0,MIG-GPU-5d2c/2/0", 1),
        ("GPU-8932f937,MIG-77aa", 1),
        ("none", 0),
        ("NoDevFiles", 0),
        ("1,none", 1),
        ("0,0", 0),
    ],
)
def test_gpus_are_those_that_cuda_would_show(visible: str | None, expected: int, tmp_path: Path) -> None:
    _files(tmp_path, *(f"dev/{name}" for name in ("null", "nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl")))
    assert machine.gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == expected


def _files(root: Path, *names: str, text: str = "") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(("cut", "visible", "expected"), [(2, None, 1), (2, "0,1", 1), (2, "", 0), (1, None, 2)])
def test_of_cards_that_are_all_cut_into_instances_cuda_shows_one(
    cut: int, visible: str | None, expected: int, tmp_path: Path
) -> None:
    _files(tmp_path, "dev/nvidia0", "dev/nvidia1")
    capabilities = "proc/driver/nvidia/capabilities"
    _files(
        tmp_path, *(f"{capabilities}/gpu{card}/mig/gi{instance}/access" for card in range(cut) for instance in (1, 2))
    )
    _files(tmp_path, f"{capabilities}/gpu1/mig/config", f"{capabilities}/mig/monitor")
    assert machine.gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, 3),
        ({"HIP_VISIBLE_DEVICES": "0,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2", "HIP_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "GPU-DEADBEEFDEADBEEF"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "0,1,2"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "2"}, 0),
        ({"HIP_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_gpus_are_those_that_hip_would_show(env: dict[str, str], expected: int, tmp_path: Path) -> None:
    """Node 0 is the processor; the fifth GPU is the host's, and not this container's."""
    nodes = "sys/class/kfd/kfd/topology/nodes"
    _files(tmp_path, f"{nodes}/0/properties", text="cpu_cores_count 16\nsimd_count 0\ndrm_render_minor 0\n")
    for number in range(1, 5):
        facts = f"cpu_cores_count 0\nsimd_count 256\ndrm_render_minor {127 + number}\n"
        _files(tmp_path, f"{nodes}/{number}/properties", text=facts)
    _files(tmp_path, "dev/kfd", "dev/dri/card0", "dev/dri/renderD128", "dev/dri/renderD129", "dev/dri/renderD130")
    assert machine.gpus(env, tmp_path) == expected


def test_where_there_is_no_gpu_none_is_counted(tmp_path: Path) -> None:
    _files(tmp_path, "dev/null", "dev/dri/renderD128")
    assert machine.gpus({}, tmp_path) == 0


def test_weights_of_all_ranks_sum_to_the_world_size() -> None:
    weights = [BatchShare(samples, 7).weight(3) for samples in (3, 2, 2)]
    assert sum(weights) == pytest.approx(3)
    assert BatchShare(2, 6).weight(3) == 1.0
    assert BatchShare(0, 1).weight(3) == 0.0


@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        ("0::/\n", {"cpu.max": "200000 100000"}, 2.0),  # a container
        ("0::/user.slice/run-1.scope\n", {"user.slice/run-1.scope/cpu.max": "400000 100000"}, 4.0),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "100000 100000"}, 1.0),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000"}, None),
        ("0::/of/the/host\n", {"cpu.max": "100000 100000"}, 1.0),
        ("0::/\n", {}, None),
        ("", {"cpu.max": "200000 100000"}, 2.0),
        (
            "3:cpu,cpuacct:/c\n0::/\n",
            {"cpu/c/cpu.cfs_quota_us": "250000\n", "cpu/c/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        ("3:cpu,cpuacct:/c\n", {"cpu/c/cpu.cfs_quota_us": "-1\n", "cpu/c/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_the_quota_is_that_of_this_processs_group_and_those_above(
    group: str, limits: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    _files(tmp_path, "proc/self/cgroup", text=group)
    for name, text in limits.items():
        _files(tmp_path, f"sys/fs/cgroup/{name}", text=text)
    assert machine.cpu_quota(tmp_path) == expected
