"""Ranks that are each shown some GPUs of the machine, by whatever starts them, take one of their own, or say so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.launch.ports import free_port
from tests.launching import LIMIT, environment, python_path

pytestmark = [pytest.mark.gpu(4, apart=True), pytest.mark.timeout(300)]

_SCRIPT = """
import tests, os
import torch
import lockstep

torch.set_num_threads(1)
try:
    world = lockstep.init(timeout=120)
except lockstep.EnvironmentMismatch as error:
    raise SystemExit(f"refused: {error}")
model = lockstep.replicate(torch.nn.Linear(3, 2).to(world.device))
model(torch.full((4, 3), 1.0 + world.rank, device=world.device)).sum().backward()
uuid = torch.cuda.get_device_properties(world.device).uuid
print(f"{world.device} of {torch.cuda.device_count()}, {str(uuid)[-1]}, {model.weight.grad[0, 0].item()}", flush=True)
"""


@dataclass(frozen=True)
class Told:
    code: int
    out: str
    err: str


def _tasks(tmp_path: Path, visible: Sequence[str]) -> list[Told]:
    """Start a task for each entry, with these GPUs to see, as ``srun`` does; return how they have ended."""
    (tmp_path / "train.py").write_text(_SCRIPT)
    port = free_port()
    size = str(len(visible))
    tasks = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env=environment(
                tmp_path,
                torch=True,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=size,
                LOCAL_WORLD_SIZE=size,
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                CUDA_VISIBLE_DEVICES=seen,
                PYTHONPATH=python_path(Path(__file__).parents[2]),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, seen in enumerate(visible)
    ]
    try:
        ends = [task.communicate(timeout=LIMIT) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    return [Told(task.returncode, *end) for task, end in zip(tasks, ends, strict=True)]


_PRELOADED = """
import lockstep, torch
world = lockstep.init()
print(torch.ones(2, device=world.device).sum().item())
"""


@pytest.mark.parametrize(
    ("asks", "hidden", "opens"),
    [
        ("torch.cuda.is_available()", False, False),
        ("torch._C._cuda_getDeviceCount()", False, True),
        ("torch._C._cuda_getDeviceCount()", True, False),  # a machine without GPUs: there is nothing to refuse
        ("torch.ones(1).cuda()", False, True),
    ],
)
def test_a_module_that_asks_for_a_gpu_as_it_is_imported_before_the_fork(
    asks: str, hidden: bool, opens: bool, tmp_path: Path
) -> None:
    (tmp_path / "asks.py").write_text(f"import torch\n{asks}\n")
    (tmp_path / "train.py").write_text(_PRELOADED)
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "-n", "2", "train.py"],
        cwd=tmp_path,
        env=environment(
            tmp_path,
            torch=True,
            LOCKSTEP_PRELOAD="tests,torch,asks",
            PYTHONPATH=python_path(tmp_path, Path(__file__).parents[2]),
            **({"CUDA_VISIBLE_DEVICES": ""} if hidden else {}),
        ),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if opens:
        assert done.returncode == 1, done
        assert "LaunchError: importing asks has opened CUDA's driver. " in done.stderr
        assert "Take asks out of LOCKSTEP_PRELOAD" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "2.0\n"), done


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (("1", "0"), ["cuda:0 of 1, 1", "cuda:0 of 1, 0"]),
        (("2,3", "2,3"), ["cuda:0 of 2, 2", "cuda:1 of 2, 3"]),
        pytest.param(("3,0", "1", "2"), ["cuda:0 of 2, 3", "cuda:0 of 1, 1", "cuda:0 of 1, 2"], id="uneven"),
    ],
)
def test_ranks_take_a_gpu_of_their_own_among_those_that_they_see(
    visible: tuple[str, ...], expected: list[str], gpus: str, tmp_path: Path
) -> None:
    if gpus == "real":
        pytest.skip("real GPUs have UUIDs of their own")
    mean = sum(4.0 * (1 + rank) for rank in range(len(visible))) / len(visible)
    for told, wanted in zip(_tasks(tmp_path, visible), expected, strict=True):
        assert told.code == 0, told
        assert told.out == f"{wanted}, {mean}\n"


@pytest.mark.parametrize(
    ("visible", "ranks"), [(("1", "1"), "0 and 1"), (("0,1", "1,0"), "0 and 1"), (("0,1", "0,1", "0,1"), "0 and 2")]
)
def test_two_ranks_on_one_gpu_are_refused_on_all_ranks(
    visible: tuple[str, ...], ranks: str, gpus: str, tmp_path: Path
) -> None:
    if gpus == "real":
        pytest.skip("real GPUs have UUIDs of their own")
    for rank, told in enumerate(_tasks(tmp_path, visible)):
        assert told.code == 1, told
        assert (
            f"refused: rank {rank} of {len(visible)}: several ranks have the same device (ranks {ranks} on " in told.err
        )
        assert "srun --gpus-per-task=1" in told.err
