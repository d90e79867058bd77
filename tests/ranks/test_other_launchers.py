"""A script that calls lockstep.init() runs under torch's own launchers too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import lockstep
world = lockstep.init("gloo")
total = world.all_reduce(world.rank + 1)
place = f"rank {world.rank} of {world.world_size} (local {world.local_rank} of {world.local_world_size})"
print(f"{place}: {total}\\n", end="", flush=True)
"""

SPAWN = """
import os
import torch.distributed as dist
import torch.multiprocessing as mp
import lockstep

def work(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    world = lockstep.init()
    print(f"rank {world.rank} of {world.world_size}: {world.all_reduce(world.rank + 1)}\\n", end="", flush=True)
    lockstep.shutdown()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, args=(os.path.abspath("store"),), nprocs=2)
"""


def start(folder: Path, source: str, *launcher: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))


def test_under_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert start(tmp_path, SCRIPT, *launcher) == [f"rank {r} of 2 (local {r} of 2): 3" for r in (0, 1)]


def test_under_torch_multiprocessing_spawn(tmp_path: Path) -> None:
    assert start(tmp_path, SPAWN) == [f"rank {r} of 2: 3" for r in (0, 1)]


def test_alone(tmp_path: Path) -> None:
    assert start(tmp_path, SCRIPT) == ["rank 0 of 1 (local 0 of 1): 1"]
