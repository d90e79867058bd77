"""lockstep.init() and the backend "shm" under every launcher: torchrun, spawn, MPI's, our own, and none.

A launch takes seconds, so each script does all that its launcher allows: worlds over gloo and over shm, one after
another in one process, met in every way.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from lockstep.launch.ports import free_port
from tests import warm

#: The script's own part of the work: ``use`` what was opened, and close it.
COMMON = """
import os
from datetime import timedelta
import torch
import torch.distributed as dist
import lockstep

LIMIT = timedelta(seconds=60)

def say(text):
    print(f"{text}\\n", end="", flush=True)

def use(how):
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == "shm"
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    say(f"rank {rank} of {size} over {how}: {tensor.unique().tolist()}")
    dist.destroy_process_group()

def meet(rank, size):
    place = {"rank": rank, "world_size": size, "timeout": LIMIT}
    for name in ("first", "second"):  # several worlds in one process
        dist.init_process_group("shm", init_method=f"file://{os.path.abspath(name)}", **place)
        use("file://")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return  # under torchrun torch takes every tcp:// address for that of torchrun's own store
    dist.init_process_group("shm", init_method=f"tcp://127.0.0.1:{os.environ['A_PORT']}", **place)
    use("tcp://")

def world(backend):
    world = lockstep.init(backend)
    total = world.all_reduce(world.rank + 1)
    local = f"local {world.local_rank} of {world.local_world_size}"
    say(f"rank {world.rank} of {world.world_size} ({local}) over {dist.get_backend()}: {total}")
    lockstep.shutdown()
"""

#: Under a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
SCRIPT = (
    COMMON
    + """
world("gloo")
world("shm")
dist.init_process_group("shm")
use("env://")
meet(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
"""
)

#: Under mpirun, with an address given: lockstep knows MPI's variables, torch does not.
MPI = (
    COMMON
    + """
world("shm")
meet(int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"]))
"""
)

SPAWN = (
    COMMON
    + """
import torch.multiprocessing as mp

def work(rank):
    dist.init_process_group("gloo", init_method=f"file://{os.path.abspath('store')}", rank=rank, world_size=2)
    world = lockstep.init()
    say(f"rank {world.rank} of {world.world_size} over gloo: {world.all_reduce(world.rank + 1)}")
    lockstep.shutdown()
    dist.destroy_process_group()
    meet(rank, 2)

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""
)

OUR_SPAWN = (
    COMMON
    + """
def work(rank):
    world("shm")
    dist.init_process_group("shm")
    use("env://")
    meet(rank, 2)

if __name__ == "__main__":
    lockstep.spawn(work, nprocs=2)
"""
)

#: Rank 1 fails before it meets rank 0, which has come, in the first start.
RESTARTED = (
    COMMON
    + """
import sys, time
from pathlib import Path
from lockstep.comm import roll_call

def get(*args):
    Path("came").touch()
    return got(*args)

got, roll_call.get = roll_call.get, get
if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
    while not Path("came").exists():
        time.sleep(0.01)
    sys.exit(3)
world(None)
"""
)

ALONE = COMMON + 'world("gloo")\nworld("shm")\nmeet(0, 1)\n'

MET = ["tcp://", "file://", "file://"]


def start(folder: Path, source: str, *launcher: str, program: str | Path = sys.executable, **env: str) -> list[str]:
    """What the ranks said, in order. Without a launcher in between, ``program`` may be the warm process's Python."""
    script = folder / "script.py"
    script.write_text(source)
    done = subprocess.run(
        [program, *launcher, str(script)],
        cwd=folder,
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": str(folder / "state"),
            "A_PORT": str(free_port()),
            **env,
        },
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line.partition("rank")[2] for line in done.stdout.splitlines() if "rank" in line)


def over(*ways: str, world_size: int = 2) -> list[str]:
    """What ``use`` says."""
    total = float(world_size * (world_size + 1) // 2)
    return [f" {rank} of {world_size} over {way}: [{total}]" for rank in range(world_size) for way in ways]


def worlds(*backends: str, world_size: int = 2) -> list[str]:
    """What ``world`` says."""
    n = world_size
    return [f" {r} of {n} (local {r} of {n}) over {each}: {n * (n + 1) // 2}" for r in range(n) for each in backends]


def test_under_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    said = start(tmp_path, SCRIPT, *launcher, program=warm.server().commands / "python")
    assert said == sorted(worlds("gloo", "shm") + over("env://", "file://", "file://"))


def test_ranks_that_torchrun_starts_again_meet_anew(tmp_path: Path) -> None:
    """Its store outlives them: what a rank has left there that waited in vain is not of their meeting."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1", f"--master-port={free_port()}"]
    said = start(tmp_path, RESTARTED, *launcher, program=warm.server().commands / "python")
    assert said == worlds("shm")


def test_a_rank_that_torchrun_starts_again_on_one_of_two_machines_meets_the_other(tmp_path: Path) -> None:
    """Each machine's torchrun counts its own restarts: the rank that waits is in its start 0, the other in 1."""
    common = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--max-restarts=1"]
    common += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    python = warm.server().commands / "python"
    with ThreadPoolExecutor(2) as machines:
        said = [
            machines.submit(start, tmp_path, RESTARTED, *common, f"--node-rank={node}", program=python)
            for node in range(2)
        ]
        lines = [line for each in said for line in each.result()]
    assert lines == [f" {rank} of 2 (local 0 of 1) over shm: 3" for rank in range(2)]


def test_under_lockstep_run(tmp_path: Path) -> None:
    launcher = ["-m", "lockstep", "run", "--all-output", "-n", "2"]
    said = start(tmp_path, SCRIPT, *launcher, program=warm.server().commands / "python")
    assert said == sorted(worlds("gloo", "shm") + over("env://", *MET))


def test_under_torch_multiprocessing_spawn(tmp_path: Path) -> None:
    gloo = [f" {r} of 2 over gloo: 3" for r in (0, 1)]
    assert start(tmp_path, SPAWN, program=warm.server().commands / "python") == sorted(gloo + over(*MET))


def test_under_lockstep_spawn(tmp_path: Path) -> None:
    assert start(tmp_path, OUR_SPAWN, program=warm.server().commands / "python") == sorted(
        worlds("shm") + over("env://", *MET)
    )


def test_under_mpirun(tmp_path: Path) -> None:
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None or find_spec("mpi4py") is None:
        pytest.skip("no MPI here: pip install 'torch-lockstep[bench]' brings one")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said = start(tmp_path, MPI, "-n", "2", sys.executable, program=mpirun, **address)
    assert said == sorted(worlds("shm") + over(*MET))


def test_alone(tmp_path: Path) -> None:
    assert start(tmp_path, ALONE, program=warm.server().commands / "python") == sorted(
        worlds("gloo", "shm", world_size=1) + over(*MET, world_size=1)
    )
