"""What killed a rank, in words: made-up endings, and memory cgroups of both versions as the kernel lays them out."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.job.files import FailureRecord
from lockstep.job.workers import AtWork, Fetching, find
from lockstep.launch.causes import explain, out_of_memory
from lockstep.launch.evidence import MachineFacts, MemoryGroup, machine_memory, memory_group
from lockstep.launch.policy import Ending, RankState

_GIB = 1 << 30
_QUIET = MachineFacts(
    memory_kills=0, memory_limit=4 * _GIB, machine=16 * _GIB, shared=(64 << 20, 0), files=1024, worker=lambda _: None
)


def _killed(signum: int = signal.SIGKILL) -> Ending:
    return Ending(RankState(1, exit_code=-signum, ended_at=1.0, peak=int(3.9 * _GIB)), None)


def _raised(message: str, kind: str = "RuntimeError") -> Ending:
    return Ending(RankState(1, exit_code=1, ended_at=1.0), FailureRecord(1, 0.9, 1, kind, message, "Traceback …"))


def test_a_rank_that_the_kernel_killed_for_memory() -> None:
    facts = replace(_QUIET, memory_kills=1)
    assert out_of_memory(_killed(), facts)
    assert explain(_killed(), facts)[0] == ("out of memory: the kernel killed rank 1 (limit 4 GiB, its peak 3.9 GiB)")
    unlimited = replace(facts, memory_limit=None)
    assert "(the machine has 16 GiB, its peak 3.9 GiB)" in explain(_killed(), unlimited)[0]
    assert not out_of_memory(_killed(signal.SIGSEGV), facts)
    assert not out_of_memory(_raised("an error at the same time"), facts)


def test_a_rank_that_somebody_killed() -> None:
    assert explain(_killed(), _QUIET) == [
        "  (sent by another process: the kernel's out-of-memory killer has killed nothing since the job began)"
    ]
    (line,) = explain(_killed(), replace(_QUIET, memory_kills=None))
    assert "see dmesg" in line


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("DataLoader worker (pid 77) is killed by signal: Killed. ", "died of Killed while fetching sample 17"),
        ("DataLoader worker (pid(s) 77) exited unexpectedly", "died without an error message while fetching sample 17"),
        (
            "DataLoader worker (pid(s) 77, 78) exited unexpectedly",
            "died without an error message while fetching sample 17",
        ),
        ("DataLoader worker (pid 78) is killed by signal: Killed. ", "which sample it was fetching is not known"),
        ("DataLoader worker (pid 79) is killed by signal: Killed. ", "died of Killed before its first sample"),
    ],
)
def test_a_worker_that_died_is_named_with_its_sample(message: str, says: str) -> None:
    known = {77: Fetching(1, 17), 79: Fetching(1, None)}
    lines = explain(_raised(message), replace(_QUIET, worker=known.get))
    assert any(line.startswith("a DataLoader worker of rank 1 (process 7") and says in line for line in lines), lines


def test_a_worker_that_the_kernel_killed_for_memory() -> None:
    ending = _raised("DataLoader worker (pid 77) is killed by signal: Killed. ")
    lines = explain(ending, replace(_QUIET, memory_kills=1))
    assert lines[0] == "out of memory: the kernel killed a DataLoader worker of rank 1 (limit 4 GiB)"


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        (_raised("unable to write to file </torch_9_1_0>: No space left on device (28)"), "/dev/shm (64 MiB, of which"),
        (_raised("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible"), "/dev/shm (64 MiB"),
        (_killed(signal.SIGBUS), "a mapped file lost its memory"),
        (
            _raised("[Errno 24] Too many open files: 'a'", "OSError"),
            "rank 1 has too many files open: the limit is 1024 per process",
        ),
        (_raised("received 0 items of ancdata"), "rank 1 has too many files open: the limit is 1024 per process"),
        (_killed(signal.SIGSEGV), "it accessed memory that is not mapped, or not its own"),
        (_killed(signal.SIGABRT), "compiled code called abort()"),
    ],
)
def test_limits_and_crashes_are_told(ending: Ending, says: str) -> None:
    lines = explain(ending, _QUIET)
    assert any(says in line for line in lines), lines


@pytest.mark.parametrize("message", ["bad batch", "[Errno 28] No space left on device: 'run/x'"])
def test_an_error_that_explains_itself_is_left_alone(message: str) -> None:
    assert explain(_raised(message), _QUIET) == []


def test_workers_say_what_they_fetch(tmp_path: Path) -> None:
    first, second = (AtWork(str(tmp_path), rank=3, name=f"0-{worker}") for worker in range(2))
    assert find(tmp_path, os.getpid()) == Fetching(3, None)
    first.note(17)
    second.note(17)
    assert find(tmp_path, os.getpid()) == Fetching(3, 17)
    assert find(tmp_path, 1) is None


def _proc(tmp_path: Path, cgroup: str, mountinfo: str) -> Path:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mountinfo)
    return proc


def _group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


def test_version_1_counts_in_oom_control(tmp_path: Path) -> None:
    mount = tmp_path / "memory"
    _group(
        mount / "jobs" / "one",
        memory_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        memory_stat="cache 1\nhierarchical_memory_limit 4294967296\n",
    )
    proc = _proc(
        tmp_path,
        "4:memory:/jobs/one\n1:cpu,cpuacct:/\n0::/\n",
        f"24 1 0:5 / {mount} rw - cgroup cgroup rw,memory\n25 1 0:6 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n",
    )
    group = memory_group(proc)
    assert group == MemoryGroup(mount / "jobs" / "one", mount, 1)
    assert (group.kills(), group.limit()) == (3, 4 * _GIB)
    (mount / "jobs" / "one" / "memory.stat").write_text("hierarchical_memory_limit 9223372036854771712\n")
    assert group.limit() is None


def test_version_2_counts_in_events_and_has_its_ancestors_limits(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    _group(mount / "jobs", memory_max=f"{2 * _GIB}\n")
    _group(mount / "jobs" / "one", memory_events="low 0\noom 7\noom_kill 5\noom_group_kill 0\n", memory_max="max\n")
    proc = _proc(tmp_path, "0::/jobs/one\n", f"25 1 0:6 / {mount} rw,nosuid - cgroup2 cgroup2 rw\n")
    group = memory_group(proc)
    assert group is not None
    assert (group.version, group.kills(), group.limit()) == (2, 5, 2 * _GIB)


def test_a_container_sees_its_own_group_as_the_mounts_root(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    _group(mount, memory_events="oom_kill 1\n", memory_max=f"{_GIB}\n")
    proc = _proc(tmp_path, "0::/docker/abc\n", f"25 1 0:6 /docker/abc {mount} rw - cgroup2 cgroup2 rw\n")
    group = memory_group(proc)
    assert group is not None
    assert (group.kills(), group.limit()) == (1, _GIB)


def test_without_a_group_nothing_is_known(tmp_path: Path) -> None:
    assert memory_group(_proc(tmp_path, "0::/\n", "")) is None
    assert memory_group(tmp_path / "no such process") is None
    assert (machine_memory() or 0) > _GIB // 4
