"""Ranks that the kernel kills for want of memory, in a memory cgroup of the test's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launch.evidence import MemoryGroup, memory_group
from tests.launching import LIMIT, environment

_LIMIT = 700 << 20

_TRAIN = """
import os, torch, lockstep

world = lockstep.init()
restart = int(os.environ["LOCKSTEP_RESTART"])
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
kept = []
for step in range(restart + 2):  # a step later each time, or it would be the same failure once more
    world.barrier()
    parameter.grad = torch.ones(1)
    optimizer.step()
if restart < {kills}:
    while world.rank == restart % 2:
        kept.append(torch.ones(4 << 20))
    world.barrier()
world.print("finished")
"""


def _why_not() -> str | None:
    """Why no cgroup can be made here, or None."""
    group = memory_group()
    if group is None:
        return (
            "this process's memory cgroup can't be seen (neither version 1's memory.oom_control nor 2's memory.events)"
        )
    if group.version == 2:
        controllers = (group.folder / "cgroup.subtree_control").read_text().split()
        if "memory" not in controllers:
            return f"{group.folder} does not hand the memory controller on to groups below it"
    if not os.access(group.folder, os.W_OK):
        return f"no group can be made in {group.folder}: it can't be written by this user"
    return None


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup with 700 MiB."""
    reason = _why_not()
    if reason is not None:
        pytest.skip(f"needs a memory cgroup of its own: {reason}")
    parent = memory_group()
    assert parent is not None
    folder = parent.folder / f"lockstep-test-{os.getpid()}"
    folder.mkdir()
    try:
        limit = "memory.limit_in_bytes" if parent.version == 1 else "memory.max"
        (folder / limit).write_text(str(_LIMIT))
        yield folder
        assert MemoryGroup(folder, folder, parent.version).kills(), "the kernel counts what it kills"
    finally:
        folder.rmdir()


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.campaign)])
def test_ranks_out_of_memory_are_told_and_started_again(tmp_path: Path, small_group: Path, kills: int) -> None:
    (tmp_path / "train.py").write_text(_TRAIN.format(kills=kills))
    command = f"{sys.executable} -m lockstep run -n 2 --max-restarts {kills} train.py"
    done = subprocess.run(
        ["bash", "-c", f"echo $$ > {small_group}/cgroup.procs && exec {command}"],
        cwd=tmp_path,
        env=environment(tmp_path, torch=True),
        capture_output=True,
        text=True,
        timeout=LIMIT * 3,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    told = re.findall(
        r"^out of memory: the kernel killed rank (\d) \(limit 700 MiB, its peak (\d+) MiB\)$", done.stderr, re.M
    )
    assert [int(rank) for rank, _ in told] == [restart % 2 for restart in range(kills)], done.stderr
    assert all(300 < int(peak) <= 720 for _, peak in told), told
    print(f"\n{kills} ranks out of memory, each told with its limit and peak, and the job finished")
