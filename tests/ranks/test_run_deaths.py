"""What killed a rank, in words: the real thing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.launching import LIMIT, environment, own_mount, run

_WORKERS = """
import os, signal, torch, lockstep
from torch.utils.data import DataLoader, Dataset

class Deadly(Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        {trouble}
        return torch.zeros({size})

world = lockstep.init()
for batch in lockstep.shard(DataLoader(Deadly(), batch_size=4, num_workers=2)):
    pass
"""


def test_a_worker_that_dies_is_told_with_its_sample(tmp_path: Path) -> None:
    trouble = "if index == 22: os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "train.py").write_text(_WORKERS.format(trouble=trouble, size=1))
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True)
    assert done.code == 1
    told = [line for line in done.err.splitlines() if line.startswith("a DataLoader worker of rank 1 (process ")]
    assert len(told) == 1, done.err
    assert told[0].endswith("died of Killed while fetching sample 22"), "of the global batch 20 to 23, the second half"


def test_open_files_that_run_out_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("files = [open('/dev/null') for _ in range(100000)]\n")
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n 64 && exec {sys.executable} -m lockstep run -n 1 train.py"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1
    assert "rank 0 has too many files open: the limit is 64 per process" in done.stderr
    assert "ulimit -n" in done.stderr


def test_a_full_dev_shm_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_WORKERS.format(trouble="pass", size=300_000))
    mounted = own_mount("/dev/shm", "size=1m")
    done = run(["lockstep", "run", "-n", "1", "train.py"], tmp_path, torch=True, before=mounted)
    assert done.code != 0
    assert "/dev/shm (1 MiB, of which " in done.err, done.err
    assert "docker run --shm-size" in done.err


_FILLS = """
import contextlib, multiprocessing, os
held = open("/dev/shm/batches", "wb", buffering=0)
os.unlink("/dev/shm/batches")
with contextlib.suppress(OSError):
    while True:
        held.write(bytes(4096))
multiprocessing.Semaphore()
"""


def test_a_dev_shm_that_is_full_only_while_the_job_runs_is_told(tmp_path: Path) -> None:
    """The error of a semaphore names no place, and what a job holds in memory is free once it has ended."""
    (tmp_path / "train.py").write_text(_FILLS)
    done = run(["lockstep", "run", "-n", "1", "train.py"], tmp_path, before=own_mount("/dev/shm", "size=1m"))
    assert done.code == 1, done
    assert "OSError: [Errno 28] No space left on device\n" in done.err
    assert "/dev/shm (1 MiB, of which 0 bytes were free then) was full" in done.err
