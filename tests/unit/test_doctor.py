"""What the doctor finds: judged from what machines say, each fault with what to do about it."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import _proc, machine
from lockstep.launch.evidence import MemoryGroup
from lockstep.tools.doctor import checks, child, facts, findings, trials, variables, visit
from lockstep.tools.doctor.between import (
    HostClock,
    Try,
    compare_clocks,
    compare_versions,
    judge_folder,
    judge_ways,
    name_ranks,
)
from lockstep.tools.doctor.checks import CheckTask
from lockstep.tools.doctor.disk import check_folder
from lockstep.tools.doctor.findings import Finding, Level, Problem, verdict
from lockstep.tools.doctor.hosted import CHECKS
from lockstep.tools.doctor.visit import _advice

HERE = CheckTask(ranks=2, folder=Path("."))


def one(found: Iterable[Finding], level: Level) -> Finding:
    """The only finding of a level; what is not ok says what to do."""
    chosen = [finding for finding in found if finding.level is level]
    assert len(chosen) == 1, chosen
    assert bool(chosen[0].advice) == (level is not Level.OK)
    return chosen[0]


def levels(found: Iterable[Finding]) -> set[Level]:
    return {finding.level for finding in found}


# Findings ------------------------------------------------------------------------------------------------------------


def test_a_finding_goes_over_a_connection() -> None:
    finding = findings.warning(Problem.MORE_RANKS_THAN_CORES, "cores", "4 ranks for 2", "start 2")
    assert Finding.from_json(finding.to_json()) == finding
    assert finding.to_json() == {
        "level": "warning",
        "code": "more-ranks-than-cores",
        "about": "cores",
        "what": "4 ranks for 2",
        "advice": "start 2",
    }


def test_a_verdict_counts() -> None:
    fine = findings.ok("a", "b")
    odd, bad = (make(Problem.JOB_FAILED, "a", "b", "c") for make in (findings.warning, findings.wrong))
    assert verdict([fine]) == "all is well"
    assert verdict([fine, odd]) == "1 warning"
    assert verdict([bad, odd, odd]) == "1 thing is wrong, 2 warnings"
    assert verdict([bad, bad]) == "2 things are wrong"


def test_every_check_has_a_name_of_its_own() -> None:
    assert len({name for name, _ in CHECKS}) == len(CHECKS)


# This machine --------------------------------------------------------------------------------------------------------


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, tuple[int, int]], None]:
    """Have one of ulimit's values be another."""
    changed: dict[int, tuple[int, int]] = {}
    true = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda which: changed.get(which) or true(which))
    return changed.__setitem__


def test_limits_that_are_too_low(limit: Any) -> None:
    limit(resource.RLIMIT_NOFILE, (40, 5000))
    found = [each for each in checks.check_limits(HERE) if each.about == "open files"]
    assert one(found, Level.WRONG) == findings.wrong(
        Problem.OPEN_FILES_TOO_FEW,
        "open files",
        "ulimit -n is 40, and 2 ranks need about 46 to start",
        "ulimit -n 5000",
    )
    limit(resource.RLIMIT_NOFILE, (256, 512))
    found = [each for each in checks.check_limits(HERE) if each.about == "open files"]
    assert "raise the hard limit" in one(found, Level.WARNING).advice
    limit(resource.RLIMIT_NOFILE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    limit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    assert one(checks.check_limits(HERE), Level.WRONG).what.startswith("ulimit -f cuts files at 1 MiB")


def test_a_container_that_allows_few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_pids", lambda: (100, 60))
    found = [each for each in checks.check_limits(HERE) if each.about == "processes"]
    assert one(found, Level.WRONG).what == (
        "the container allows 100 processes and threads, 60 are in use, and 2 ranks with loader workers need about 128"
    )


def test_core_files(limit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(_proc, "text", lambda _path: "core\n")
    found = [each for each in checks.check_limits(HERE) if each.about == "core files"]
    assert one(found, Level.WARNING).advice.startswith("ulimit -c 0")
    monkeypatch.setattr(_proc, "text", lambda _path: "|/usr/lib/apport %p\n")
    found = [each for each in checks.check_limits(HERE) if each.about == "core files"]
    assert one(found, Level.OK).what == "a crash goes to /usr/lib/apport"


def test_cores_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.0, 0.0))
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.setattr(machine, "visible_cores", lambda: 6)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 3.5)
    monkeypatch.setattr(machine, "gpus", lambda: 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    said = "4 cores for {}; the affinity mask has 6 of the machine's 8; the container's quota is 3.5"
    assert list(checks.check_cores(HERE)) == [findings.ok("cores", said.format("2 ranks"))]
    crowded = one(checks.check_cores(replace(HERE, ranks=5)), Level.WARNING)
    assert crowded.what == f"{said.format('5 ranks')}: the ranks take turns"
    assert crowded.advice == "start 4 ranks: lockstep run -n 4"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "4 with 2 ranks is 8 threads for 4 cores" in one(checks.check_cores(HERE), Level.WARNING).what
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "leaves 2 of 4 cores idle" in one(checks.check_cores(HERE), Level.WARNING).what
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert one(checks.check_cores(HERE), Level.WARNING).advice == "unset OMP_NUM_THREADS"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "getloadavg", lambda: (7.5, 0.0, 0.0))
    assert one(checks.check_cores(HERE), Level.WARNING).what.startswith("7.5 of the machine's 8 cores were in use")


def test_memory_that_the_container_cuts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text(f"{300 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {100 << 20}\n")
    (tmp_path / "memory.max").write_text(f"{700 << 20}\n")
    group = MemoryGroup(tmp_path, tmp_path, 2)
    monkeypatch.setattr(checks, "memory_group", lambda: group)
    found = one(checks.check_memory(HERE), Level.WRONG)
    assert "the container's limit is 700 MiB, 200 MiB used: too little for 2 ranks" in found.what
    assert levels(checks.check_memory(replace(HERE, ranks=1))) == {Level.OK}


def test_the_own_name_that_leads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian writes it into /etc/hosts."""
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: answers)
    assert levels(checks.check_names(HERE)) == {Level.OK}
    found = one(checks.check_names(replace(HERE, several=True)), Level.WARNING)
    assert "resolves to 127.0.1.1" in found.what
    assert "--rdzv or --hosts" in found.advice


def test_no_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    assert one(checks.check_temporary(HERE), Level.WRONG).advice == "name one with TMPDIR"


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    fine = list(check_folder(replace(HERE, folder=tmp_path / "runs" / "first")))
    assert Level.WRONG not in levels(fine)
    assert f" free in {tmp_path}, where runs/first would be made; " in fine[0].what
    assert os.listdir(tmp_path) == [], "it only looks"
    (tmp_path / "file").write_text("")
    assert (
        one(check_folder(replace(HERE, folder=tmp_path / "file")), Level.WRONG).what
        == f"{tmp_path}/file is not a folder"
    )
    assert "nothing can be written to /proc" in one(check_folder(replace(HERE, folder=Path("/proc"))), Level.WRONG).what


# Variables -----------------------------------------------------------------------------------------------------------


def test_nothing_is_said_of_variables_that_mislead_nobody() -> None:
    env = {"HOME": "/root", "LOCKSTEP_TIMEOUT": "60", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo"}
    assert levels(variables.check_variables(env)) == {Level.OK}
    assert levels(variables.check_variables({"NCCL_SOCKET_IFNAME": "l"})) == {Level.OK}, "a beginning is enough"
    assert levels(variables.check_variables({"NCCL_SOCKET_IFNAME": "^docker"})) == {Level.OK}


@pytest.mark.parametrize(
    ("env", "level", "what", "advice"),
    [
        ({"LOCKSTEP_TIMEOUTS": "5"}, Level.WARNING, "LOCKSTEP_TIMEOUTS is not a variable", "say LOCKSTEP_TIMEOUT"),
        ({"LOCKSTEP_COLOUR_OF_IT": "5"}, Level.WARNING, "has no effect", "unset it; lockstep's variables are"),
        ({"LOCKSTEP_LEADER": "5"}, Level.WARNING, "has no effect", "unset it; lockstep's variables are"),
        ({"LOCKSTEP_TIMOUT": "5"}, Level.WARNING, "has no effect", "say LOCKSTEP_TIMEOUT, or unset it"),
        ({"LOCKSTEP_TIMEOUT": "soon"}, Level.WRONG, "LOCKSTEP_TIMEOUT='soon': expected a positive number", "set it so"),
        ({"LOCKSTEP_TIMEOUT": "2"}, Level.WARNING, "as soon as a rank is 2 s late", "the default is 600 s"),
        ({"LOCKSTEP_SHM_CHUNK": "63"}, Level.WRONG, "expected a positive multiple of 64", "set it so"),
        (
            {"LOCKSTEP_STORE": "/tmp/x"},
            Level.WRONG,
            "LOCKSTEP_STORE is set, which the launcher",
            "unset LOCKSTEP_STORE",
        ),
        ({"RANK": "1"}, Level.WRONG, "RANK=1 is set but WORLD_SIZE is not", "unset RANK"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
            Level.WRONG,
            "would take itself for rank 1 of 4, and wait for the others",
            "unset RANK WORLD_SIZE LOCAL_RANK",
        ),
        ({"MASTER_ADDR": "a"}, Level.WARNING, "MASTER_ADDR=a: left over", "unset MASTER_ADDR"),
        ({"PET_NNODES": "2"}, Level.WRONG, "PET_NNODES=2 is set but PET_NODE_RANK is not", "docs/many_machines.md"),
        ({"GLOO_SOCKET_IFNAME": "eth77"}, Level.WRONG, "there is no network device eth77", "name one of lo"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, Level.WRONG, "no network device here has that name", "name one of lo"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, Level.WARNING, "makes the GPU wait", "unset CUDA_LAUNCH_BLOCKING"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, Level.WARNING, "every collective", "unset TORCH_DISTRIBUTED_DEBUG"),
    ],
)
def test_variables_that_mislead(env: dict[str, str], level: Level, what: str, advice: str) -> None:
    found = one(variables.check_variables(env), level)
    assert what in found.what
    assert advice in found.advice


def test_what_a_scheduler_has_set_is_no_leftover() -> None:
    pod = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "KUBERNETES_SERVICE_HOST": "b"}
    assert levels(variables.check_variables(pod)) == {Level.OK}


_DIGITS = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LOCKSTEP_KEY", _DIGITS),
        ("LOCKSTEP_KEY", "short"),
        ("NCCL_SECRET", "s3same"),
        ("SLURM_JWT_TOKEN", "short-word-7"),
        ("PYTHON_PASSWORD", "open-1"),
        ("RAY_X", "hf_abcdefghij"),
        ("RAY_X", "prefix ghp_A1b2C3d4E5 suffix"),
        ("TORCH_HOME", f"/x?{_DIGITS}"),
        ("RAY_X", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"),
        ("RAY_X", "AKIAIOSFODNN7EXAMPLE"),
        ("RAY_X", "dGhpcyBpcyBhIHRva2VuIG9mIG1pbmU1"),
        ("RAY_ADDRESS", "redis://me:pa55word@host:1"),
    ],
)
def test_no_secret_is_shown(name: str, value: str) -> None:
    text = variables.telling({name: value})[name]
    for secret in (value, "hf_abcdefghij", "ghp_A1b2C3d4E5", "pa55word", _DIGITS, "c2lnbmF0dXJl"):
        assert secret not in text


def test_what_is_no_secret_is_shown() -> None:
    env = {
        "LD_LIBRARY_PATH": "/usr/lib/x86_64-linux-gnu:/opt/a-very-long-name-of-a-folder-with-2-digits/lib",
        "OMP_NUM_THREADS": "4",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "LOCKSTEP_BACKEND": "gloo",
        "EDITOR": "vi",
    }
    assert variables.telling(env) == {name: value for name, value in env.items() if name != "EDITOR"}


# torch and GPUs ------------------------------------------------------------------------------------------------------

_GPU = {"name": "H100", "capability": [9, 0], "memory": 80 << 30, "free": 79 << 30, "error": ""}
_CUDA: dict[str, Any] = {
    "torch": "2.13.0",
    "cuda": "13.0",
    "rocm": None,
    "kind": "cuda",
    "backend": "nccl",
    "available": True,
    "devices": [_GPU, _GPU],
    "architectures": ["sm_80", "sm_90"],
    "nccl": "2.28.3",
    "backends": ["fake", "gloo", "nccl", "shm"],
    "threads": 8,
    "warnings": [],
}


@pytest.mark.parametrize(
    ("changes", "seen", "level", "what", "advice"),
    [
        ({}, (2, 2), None, "", ""),
        ({"devices": [], "available": False}, (0, 0), None, "", ""),
        ({"cuda": None, "devices": [], "available": False}, (2, 2), Level.WRONG, "is built without CUDA", "for CUDA"),
        ({"devices": [], "available": False}, (2, 0), Level.WARNING, "hides all 2", "unset CUDA_VISIBLE_DEVICES"),
        (
            {"devices": [], "available": False, "warnings": ["The NVIDIA driver on your system is too old"]},
            (2, 2), Level.WRONG, "torch can't use them: The NVIDIA driver", "compare nvidia-smi",
        ),
        ({"devices": [_GPU, {**_GPU, "error": "it is lost"}]}, (2, 2), Level.WRONG, "GPU 1, H100: it is", "end the"),
        ({"architectures": ["sm_70", "sm_80"]}, (2, 2), None, "", ""),
        ({"devices": [_GPU]}, (2, 2), Level.WARNING, "torch sees 1 of 2", "nvidia-smi"),
        ({"devices": [_GPU, {**_GPU, "free": 1 << 30}]}, (2, 2), Level.WARNING, "1 GiB free of 80 GiB", "uses it"),
        ({"devices": [_GPU, {**_GPU, "name": "A100"}]}, (2, 2), Level.WARNING, "they differ: A100, H100", "equal"),
        ({"nccl": ""}, (2, 2), Level.WRONG, "comes without NCCL", "LOCKSTEP_BACKEND=gloo"),
    ],
)  # fmt: skip
def test_gpus(changes: dict[str, Any], seen: tuple[int, int], level: Level | None, what: str, advice: str) -> None:
    judged = {**_CUDA, **changes}
    found = list(trials.judge_torch(judged, gpus=seen[0], visible=seen[1], ranks=len(judged["devices"]) or 1))
    if changes.get("architectures"):  # of an older generation alone
        assert [each.what for each in found if each.level is Level.WRONG] == [
            f"GPU {index}, H100 has capability 9.0, for which this torch has no kernels (sm_70, sm_80)"
            for index in (0, 1)
        ]
    elif level is None:
        assert levels(found) == {Level.OK}
    else:
        finding = one(found, level)
        assert what in finding.what
        assert advice in finding.advice


def test_accelerators_of_other_kinds() -> None:
    device = {"name": "Max 1550", "capability": None, "memory": 64 << 30, "free": 63 << 30, "error": ""}
    xpu = {**_CUDA, "cuda": None, "kind": "xpu", "backend": "xccl", "devices": [device] * 2, "architectures": []}
    found = list(trials.judge_torch({**xpu, "nccl": ""}, gpus=0, visible=0, ranks=2))
    assert levels(found) == {Level.OK}
    assert [each.what for each in found] == [
        "GPU 0, Max 1550, 64 GiB",
        "GPU 1, Max 1550, 64 GiB",
        "they are of the kind 'xpu', whose tensors go from rank to rank over xccl",
    ]
    (*_, last) = trials.judge_torch({**xpu, "kind": "mps", "backend": None}, gpus=0, visible=0, ranks=2)
    assert "this torch has no backend: ranks train on the CPU" in last.what


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build  (dvs-builder@U16)",
    ],
)
def test_the_drivers_version(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_proc, "text", lambda _path: f"{line}\nGCC version:  gcc version 12.2.0\n")
    assert facts.driver() == "535.104.05"


def test_more_ranks_than_gpus() -> None:
    found = one(trials.judge_torch(_CUDA, gpus=2, visible=2, ranks=3), Level.WARNING)
    assert found.what == "3 ranks for 2"


def test_a_backend_that_this_torch_lacks() -> None:
    found = trials.judge_torch(_CUDA, gpus=2, visible=2, ranks=2, env={"LOCKSTEP_BACKEND": "cpu:gloo,cuda:ncll"})
    assert one(found, Level.WRONG) == findings.wrong(
        Problem.BACKEND_UNKNOWN,
        "variables",
        "LOCKSTEP_BACKEND=cpu:gloo,cuda:ncll: this torch has no backend 'ncll'",
        "say one of gloo, nccl, shm, or unset it",
    )


# Short jobs ----------------------------------------------------------------------------------------------------------

_PAIR = {"ranks": [0, 1], "few": 1e-4, "many": 0.01, "bytes": 16 << 20, "right": True}


def test_a_job_on_one_machine() -> None:
    job = {"backend": "shm", "pairs": [_PAIR]}
    assert trials.judge_own_job(job) == findings.ok(
        "a job", "two ranks average 16 MiB in 10 ms, 8 bytes in 100 µs, over shm"
    )
    slow = {**job, "pairs": [{**_PAIR, "few": 0.1}]}
    assert trials.judge_own_job(slow).level is Level.WARNING
    false = {**job, "pairs": [{**_PAIR, "right": False}]}
    assert trials.judge_own_job(false).what == "two ranks average wrong numbers over shm"


def test_jobs_between_hosts() -> None:
    job = {"backend": "gloo", "pairs": [_PAIR]}
    assert one(trials.judge_job(job, ["a", "b"]), Level.OK).what == (
        "a and b average 16 MiB in 10 ms, 8 bytes in 100 µs, over gloo"
    )
    slow = {"backend": "gloo", "pairs": [{**_PAIR, "many": 2.0}]}
    assert "docs/local_steps.md" in one(trials.judge_job(slow, ["a", "b"]), Level.WARNING).advice
    false = {"backend": "gloo", "pairs": [{**_PAIR, "right": False}]}
    assert one(trials.judge_job(false, ["a", "b"]), Level.WRONG).what == "a and b average wrong numbers over gloo"


def test_a_pair_that_is_slower_than_the_others() -> None:
    pairs = [{**_PAIR, "ranks": list(pair)} for pair in ((0, 1), (0, 2))] + [{**_PAIR, "ranks": [1, 2], "many": 0.1}]
    found = one(trials.judge_job({"backend": "nccl", "pairs": pairs}, ["a", "b", "c"]), Level.WARNING)
    assert found.what.startswith("b and c average")
    assert found.what.endswith("slower than other pairs")


def test_what_a_job_has_printed() -> None:
    assert trials.read_job(child.ChildResult(0, 'hello\n{"backend": "shm"}\n', "")) == {"backend": "shm"}
    assert trials.read_job(child.ChildResult(1, "{}", "first\n\nlast\n")) == "first\nlast"
    assert trials.read_job(child.ChildResult(0, "hello", "")) == "hello"
    assert trials.read_job(child.ChildResult(0, "", "")) == "it said nothing"
    assert trials.read_job(child.ChildResult(None, "", "it waits")) == "it did not end in time; it waits"


# Between machines ----------------------------------------------------------------------------------------------------

_MACHINE: dict[str, Any] = {
    "packages": {"torch": "2.13.0", "numpy": "2.0"},
    "python": "3.11.7",
    "processor": "EPYC",
    "cores": 8,
    "visible_gpus": 0,
    "architecture": "x86_64",
}


def test_versions_that_differ() -> None:
    same = {"a": _MACHINE, "b": {**_MACHINE, "python": "3.11.2"}}
    assert levels(compare_versions(same)) == {Level.OK}
    other = {**_MACHINE, "packages": {"torch": "2.9.0", "numpy": "2.0"}}
    found = one(compare_versions({"a": _MACHINE, "b": other, "c": _MACHINE}), Level.WRONG)
    assert found.what == "torch differs: 2.13.0 on a and c, 2.9.0 on b"
    found = one(compare_versions({"a": _MACHINE, "b": {**_MACHINE, "python": "3.12.1"}}), Level.WRONG)
    assert found.what == "Python differs: 3.11 on a, 3.12 on b"
    found = one(compare_versions({"a": _MACHINE, "b": {**_MACHINE, "cores": 4}}), Level.WARNING)
    assert found.what == "cores for a process differ: 8 on a, 4 on b"


def test_clocks_are_compared_with_each_other() -> None:
    """Not with this machine's, and not more closely than they are known."""
    clock = HostClock.of([(10.0, 15.5, 11.0), (20.0, 25.2, 20.4)])
    assert clock.ahead == pytest.approx(5.0)
    assert clock.error == pytest.approx(0.2)
    fine = compare_clocks({"a": HostClock(100.0, 0.01), "b": HostClock(100.5, 0.01)})
    assert one(fine, Level.OK).what == "they agree to 500 ms"
    found = one(
        compare_clocks({"a": HostClock(0.0, 0.01), "b": HostClock(-3.0, 0.01), "c": HostClock(-1.0, 0.0)}),
        Level.WARNING,
    )
    assert found.what.startswith("the clock of a is 3.00 s ahead of that of b")
    assert "chronyd" in found.advice
    found = one(compare_clocks({"a": HostClock(0.0, 0.01), "b": HostClock(60.0, 0.01)}), Level.WARNING)
    assert "can't be put in order by their times" in found.what
    assert levels(compare_clocks({"a": HostClock(0.0, 1.0), "b": HostClock(3.0, 1.0)})) == {Level.OK}, (
        "asked over a slow line"
    )


class _Host:
    def __init__(self, name: str) -> None:
        self.name, self.heard, self.visited = name, time.time(), SimpleNamespace(facts=_MACHINE)


class _Losing:
    """Hosts of which the last is lost as it is asked for its time."""

    def __init__(self, *names: str) -> None:
        self._visits = [_Host(each) for each in names]
        self.there = [*self._visits]

    def ask(self, orders: dict[Any, dict[str, Any]], **_: float) -> dict[Any, Any]:
        (visit,) = orders
        if visit is self._visits[-1]:
            self.there = self._visits[:-1]
            return {}
        visit.heard = time.time()
        return {visit: time.time()} if orders[visit]["do"] == "clock" else {}


def test_a_host_that_is_lost_while_clocks_are_compared_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit, "_look_at_ways", lambda _party: iter(()))
    for names, checks_made in ((("a", "b", "c"), ["versions", "clocks"]), (("a", "b"), ["versions"])):
        found = list(visit._look_between(_Losing(*names), folder="x", quick=True))  # type: ignore[arg-type]
        assert [each.about for each in found] == checks_made
        assert not any("inf" in each.what.split() for each in found), found


def _try(how: str = "ok", *, source: str = "a", target: str = "b", port: int = 41000, **changes: Any) -> Try:
    fields = {"address": f"host-{target}", "resolved": "10.0.0.2", "why": "", "seconds": 0.001, **changes}
    return Try(source=source, target=target, port=port, how=how, **fields)


def test_hosts_that_reach_each_other() -> None:
    found = judge_ways([_try(), _try(source="b", target="a", seconds=0.002), _try(port=29400)], first="b", limit=3.0)
    assert one(found, Level.OK).what == "a and b reach each other, in 2 ms"


@pytest.mark.parametrize(
    ("tries", "what", "advice"),
    [
        (
            [_try("unknown", why="Name or service not known")],
            "a does not know the name host-b, which is b",
            "/etc/hosts on a",
        ),
        (
            [_try("refused", resolved="127.0.1.1", why="Connection refused")],
            "resolves to 127.0.1.1, a itself",
            "/etc/hosts on a",
        ),
        ([_try("other", resolved="127.0.1.1")], "resolves to 127.0.1.1, a itself", "/etc/hosts on a"),
        ([_try("other")], "the machine that answers a at host-b (10.0.0.2) is not b", "correct the name"),
        (
            [_try("silent"), _try("silent", port=29400)],
            "a does not reach b at host-b (10.0.0.2) within 3 s",
            "firewall",
        ),
        ([_try("refused", why="No route to host")], "at host-b (10.0.0.2) (No route to host)", "firewall"),
        (
            [_try(), _try("silent", port=29400)],
            "but not at the port 29400 (--rdzv) (it does at 41000)",
            "open all ports between the hosts in b's firewall",
        ),
    ],
)
def test_hosts_that_do_not(tries: list[Try], what: str, advice: str) -> None:
    found = list(judge_ways([*tries, _try(source="b", target="a")], first="b", limit=3.0))
    assert what in one(found, Level.WRONG).what
    assert advice in one(found, Level.WRONG).advice
    assert one(found, Level.OK).what == "b reaches a"


def test_a_second_address_is_judged_by_itself() -> None:
    tries = [_try(), _try("silent", address="172.17.0.1", resolved="172.17.0.1")]
    assert "a does not reach b at 172.17.0.1 within" in one(judge_ways(tries, first="b", limit=3.0), Level.WRONG).what


def test_the_name_of_a_host_that_nobody_meets_at() -> None:
    """One address is enough there."""
    tries = [_try("unknown", why="Name or service not known"), _try(address="10.0.0.2")]
    found = one(judge_ways(tries, first="c", limit=3.0), Level.WARNING)
    assert "another address of b is reached" in found.what
    assert levels(judge_ways(tries, first="b", limit=3.0)) == {Level.WRONG}
    assert levels(judge_ways(tries[:1], first="c", limit=3.0)) == {Level.WRONG}


def test_a_folder_that_is_not_everybodys() -> None:
    assert levels(judge_folder("/runs", "a", {"b": True})) == {Level.OK}
    found = one(judge_folder("/runs", "a", {"b": False, "c": True, "d": False}), Level.WARNING)
    assert found.what.startswith("/runs of a is not that of b and d")


def test_ranks_are_named_by_their_hosts() -> None:
    hosts = {"one": ["vm", "10.0.0.1"], "two": ["vm", "10.0.0.2"]}
    assert name_ranks([["vm", "10.0.0.2"], ["vm", "10.0.0.1"], ["x"]], hosts) == ["two", "one", "x"]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("user@h: Permission denied (publickey).", "ssh-copy-id h"),
        ("Host key verification failed.", "ssh h once by hand"),
        ("ssh: Could not resolve hostname h: Name or service not known", "~/.ssh/config"),
        ("ssh: connect to host h port 22: Connection refused", "start sshd there"),
        ("ssh: connect to host h port 22: Connection timed out", "firewall lets ssh in"),
        ("sh: 1: cd: can't cd to /x", "create the folder"),
        ("env: '/opt/x/bin/python': No such file or directory", "the same Python"),
        ("ModuleNotFoundError: No module named 'lockstep'", "install lockstep for that Python"),
        ("something else", "try ssh h true by hand"),
    ],
)
def test_what_to_do_about_what_ssh_says(words: str, advice: str) -> None:
    assert advice in _advice(words, "h")
