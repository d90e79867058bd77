"""Start a program of ``programs/`` alone and on ranks, and read the numbers that it hands over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.launching import Finished, Running, environment, python_path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
LIMIT = 200.0

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Job:
    """What a program printed and, for each rank, what it handed over."""

    finished: Finished
    ranks: list[Arrays]


def run(program: str, *options: str, ranks: int | None, folder: Path, launcher: str = "lockstep", **env: str) -> Job:
    """Run ``programs/<program>.py`` on so many ranks under a launcher, or alone.

    Raises:
        AssertionError: it failed.
    """
    job = attempt(program, *options, ranks=ranks, folder=folder, launcher=launcher, **env)
    assert job.finished.code == 0, f"{program} {options}: {job.finished.code}\n{job.finished.out}\n{job.finished.err}"
    return job


def attempt(
    program: str, *options: str, ranks: int | None, folder: Path, launcher: str = "lockstep", **env: str
) -> Job:
    """As :func:`run`, for a program that is expected to fail."""
    folder.mkdir(parents=True, exist_ok=True)
    script = [str(PROGRAMS / f"{program}.py"), str(folder), *options]
    if ranks is None:
        argv = ["tests.ecosystem.alone", *script]
    elif launcher == "torchrun":
        argv = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *script]
    else:
        argv = ["lockstep", "run", "-n", str(ranks), *script]
    env = {"PYTHONPATH": python_path(ROOT, ROOT / "tests" / "site"), "OMP_NUM_THREADS": "1"} | env
    with Running(argv, cwd=folder, env=environment(folder, torch=True, **env), cold=True) as running:
        finished = running.finish(LIMIT)
    found = sorted(folder.glob("rank-*.npz"))
    return Job(finished, [dict(np.load(path)) for path in found])
