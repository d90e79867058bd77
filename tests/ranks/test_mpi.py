"""Ranks that mpirun starts: where they meet without an address, and the engine over mpi4py.

With mpi4py and an MPI (the extra ``mpi``) in the environment of the tests; left out elsewhere.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import lockstep
from tests.namespaces import skip_unless

_REPOSITORY = Path(__file__).parents[2]


def _mpirun() -> list[str]:
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None or find_spec("mpi4py") is None:
        pytest.skip("no MPI here: pip install 'torch-lockstep[mpi]' brings one")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    openmpi = "Open MPI" in version or "OpenRTE" in version or "PRRTE" in version
    return [found, *(["--allow-run-as-root", "--oversubscribe"] if openmpi else [])]


def _start(
    script: str, ranks: int, *words: str, before: tuple[str, ...] = (), code: int = 0, **variables: str
) -> list[str]:
    """Run a program on ``ranks`` ranks, without an address, and return its lines, sorted."""
    paths = f"{_REPOSITORY / 'src'}:{_REPOSITORY}"
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        env.pop(name, None)
    command = [*_mpirun(), "-n", str(ranks), *before, sys.executable, "-c", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line)


_SAY = """
import sys
def say(text):
    sys.stdout.write(f"{text}\\n")  # (at once, so that lines of several ranks stay whole)
    sys.stdout.flush()
"""

_TWO_WORLDS = (
    _SAY
    + """
import lockstep, torch.distributed as dist
for _ in range(2):
    world = lockstep.init(sys.argv[1] if len(sys.argv) > 1 else None, timeout=60)
    say(f"{world.rank} of {world.world_size} over {dist.get_backend()}: {world.all_reduce(world.rank + 1)}")
    lockstep.shutdown()
"""
)


@pytest.mark.parametrize(("backend", "opened"), [(None, "shm"), ("gloo", "gloo"), ("mpi", "mpi4py")])
def test_ranks_meet_without_an_address(backend: str | None, opened: str, tmp_path: Path) -> None:
    said = _start(_TWO_WORLDS, 3, *([backend] if backend else []), TMPDIR=str(tmp_path))
    assert said == sorted(f"{rank} of 3 over {opened}: 6" for rank in range(3) for _ in range(2))
    assert [file.name for folder in tmp_path.glob("lockstep-mpi-*") for file in folder.iterdir()] == []


#: What MPICH would say if each rank were on a machine of its own.
_APART = {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}


def test_ranks_on_several_machines_meet_by_a_broadcast() -> None:
    if len(_mpirun()) > 1:
        pytest.skip("Open MPI's variables of a rank can't be set from outside")
    before = ("env", *(f"{name}={value}" for name, value in _APART.items()))
    assert _start(_TWO_WORLDS, 2, "gloo", before=before) == sorted(
        f"{r} of 2 over gloo: 3" for r in (0, 1) for _ in "ab"
    )


def test_what_to_do_is_said_where_nothing_tells_ranks_of_several_machines_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lockstep.comm import mpirun
    from lockstep.identity import Identity

    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    identity = Identity(1, 2, 0, 1, 1, launched=True)
    from datetime import timedelta

    with pytest.raises(lockstep.EnvironmentMismatch, match=r"rank 1 of 2: mpirun started ranks .* set MASTER_ADDR"):
        mpirun.meet(identity, timedelta(seconds=5), number=1)


def test_the_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from datetime import timedelta

    from lockstep.comm import mpirun
    from lockstep.identity import Identity

    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / f"lockstep-mpi-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(lockstep.EnvironmentMismatch, match="not a folder of this user's alone"):
        mpirun.meet(Identity(0, 2, 0, 2, 0, launched=True), timedelta(seconds=5), number=1)


def test_the_files_of_a_job_that_was_killed_are_removed(tmp_path: Path) -> None:
    from lockstep import _proc
    from lockstep.comm import mpirun

    here = mpirun._place()
    mine = f"{here}-{os.getpid()}-{_proc.started(os.getpid())}--1"
    for name in (mine, f"{here}-{os.getpid()}-1--1", f"{here}-999999999-5--1", "notes"):
        (tmp_path / name).touch()
    mpirun._tidy(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([mine, "notes"])


_IN_A_CONTAINER = """
import os, sys
from datetime import timedelta
from lockstep.comm import mpirun
from lockstep.identity import Identity
store = mpirun.meet(Identity(0, 2, 0, 2, 0, launched=True), timedelta(seconds=5), number=1)
print("opened", flush=True)
sys.stdin.read()
"""


def test_the_file_of_a_job_in_another_container_stays(tmp_path: Path) -> None:
    """The two share /tmp, and neither sees the other's processes."""
    namespaces = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child"]
    skip_unless(" ".join([*namespaces, "true"]), "a container")
    job = [*namespaces, "sh", "-c", f'{shlex.quote(sys.executable)} -c "$0"; exit', _IN_A_CONTAINER]
    env = {**os.environ, "PYTHONPATH": str(_REPOSITORY / "src"), "TMPDIR": str(tmp_path)}
    with ExitStack() as jobs:
        files: list[set[Path]] = []
        for _ in range(2):
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            one = jobs.enter_context(subprocess.Popen(job, env=env, text=True, **pipes))
            assert one.stdout is not None
            assert one.stdout.readline() == "opened\n"
            files.append({*(tmp_path / f"lockstep-mpi-{os.getuid()}").iterdir()})
    assert [len(there) for there in files] == [1, 2]


def test_mpi_without_mpi4py_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.comm.init.find_spec", lambda _name: None)
    with pytest.raises(ValueError, match="mpi4py, which lockstep uses instead, is not installed"):
        lockstep.init("mpi")


# --- the engine ------------------------------------------------------------------------------------------------------

_CONFORM = (
    _SAY
    + """
from tests.ranks.test_shm_conformance import conform
done, wrong = conform("mpi", None, tuple(map(int, sys.argv[1:])), True)
say(f"{done > 300} {wrong[:5]}")
import lockstep
lockstep.shutdown()
"""
)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_every_collective(ranks: int) -> None:
    assert _start(_CONFORM, ranks, "0", "1", "257", "5001") == ["True []"] * ranks


_SAME_BITS = (
    _SAY
    + """
import hashlib, lockstep, torch, torch.distributed as dist
world = lockstep.init("mpi", timeout=60)
groups = [None, dist.new_group(backend="shm")]
found = []
for group in groups:
    sums = [torch.randn(n, generator=torch.Generator().manual_seed(world.rank)) for n in (5, 1000, 200_003)]
    for tensor in sums:
        dist.all_reduce(tensor, group=group)
    found.append(hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in sums)).hexdigest())
say(f"{len(set(found))} {found[0] == world.broadcast(found[0])}")
lockstep.shutdown()
"""
)


def test_sums_have_the_bits_of_shm() -> None:
    assert _start(_SAME_BITS, 3) == ["1 True"] * 3


_WRONG = (
    _SAY
    + """
import time, lockstep, torch, torch.distributed as dist
case = sys.argv[1]
world = lockstep.init("mpi", timeout=60)
dist.barrier()
begun = time.monotonic()
try:
    if case == "size":
        dist.all_reduce(torch.ones(3 if world.rank == 1 else 4))
    elif case == "late" and world.rank == 1:
        store = dist.group.WORLD.get_group_store()
        store.wait(["over"])
        dist.all_reduce(torch.ones(4))
    elif case == "late":
        options = dist.BarrierOptions()
        options.timeout, options.asyncOp = lockstep_seconds(0.5 if world.rank == 0 else 30), False
        dist.group.WORLD.barrier(options)
    elif case == "dead":
        if world.rank == 1:
            raise ValueError("no such file")
        dist.barrier()
    elif case == "message":
        dist.send(torch.ones(3), 2) if world.rank == 0 else dist.recv(torch.ones(5), 0) if world.rank == 2 else None
        dist.barrier()
except lockstep.LockstepError as error:
    first = str(error).splitlines()[0]
    say(f"{type(error).__name__}: {first[:60]} {time.monotonic() - begun < 15}")
if case == "late" and world.rank != 1:
    dist.group.WORLD.get_group_store().set("over", "")
""".replace("lockstep_seconds(", "__import__('datetime').timedelta(0, ")
)


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("size", "CollectiveMismatch: rank"),
        ("late", "CollectiveTimeout: rank 1 did not come: rank 0 timed out after 1.5"),
        ("dead", "PeerLost: rank 1 ended with ValueError: no such file"),
        ("message", "CollectiveMismatch: rank 0 sent 12 bytes of torch.float32 at"),
    ],
)
def test_errors_are_those_of_shm(case: str, error: str) -> None:
    said = _start(_WRONG, 3, case, code=case == "dead")
    assert len(said) == (2 if case == "dead" else 3)
    assert all(line.startswith(error) and line.endswith(" True") for line in said), said


_NO_DESCRIPTOR = (
    _SAY
    + """
import os, resource, sys, time
import lockstep, torch, torch.distributed as dist
world = lockstep.init("mpi", timeout=60)
dist.barrier()
before = resource.getrlimit(resource.RLIMIT_NOFILE)
if world.rank == 1:
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
else:
    time.sleep(0.5)  # late, but not gone
tensor = torch.ones(4)
dist.all_reduce(tensor)
resource.setrlimit(resource.RLIMIT_NOFILE, before)  # torch ends a process that can't open its store at the end
say(f"rank {world.rank}: {tensor.tolist()}")
"""
)


def test_a_rank_without_descriptors_waits_for_the_others() -> None:
    assert _start(_NO_DESCRIPTOR, 2) == [f"rank {rank}: [2.0, 2.0, 2.0, 2.0]" for rank in (0, 1)]


_FEW_TAGS = (
    _SAY
    + """
from lockstep.comm.mpi import MpiEngine
numbers = MpiEngine.numbers
MpiEngine.numbers = property(lambda self: 8)  # MPI promises 32768
import lockstep, torch, torch.distributed as dist
world = lockstep.init("mpi", timeout=60)
assert numbers.fget(dist.group.WORLD._shm_group.engine) >= 32768
used = []
message = MpiEngine.message
MpiEngine.message = lambda self, content, number, **whom: used.append(number) or message(self, content, number, **whom)
got = []
for step in range(20):
    tensor = torch.full((3,), float(step))
    if world.rank == 0:
        dist.send(tensor, 1, tag=step % 4)
    else:
        got.append(torch.zeros(3))
        dist.recv(got[-1], 0, tag=step % 4)
try:
    dist.isend(torch.ones(1), 1 - world.rank, tag=4)
except RuntimeError as error:
    said = str(error)
say(f"{max(used)} {said} {[int(each[2]) for each in got] == list(range(20))}")
dist.barrier()
lockstep.shutdown()
"""
)


def test_messages_keep_to_the_tags_that_mpi_has() -> None:
    assert _start(_FEW_TAGS, 2) == [f"7 tag=4: expected 0 to 3 {received}" for received in (False, True)]


_IN_FLIGHT = (
    _SAY
    + """
import datetime, gc, lockstep, torch, torch.distributed as dist
from lockstep.comm import mpi
world = lockstep.init("mpi", timeout=60)
group = dist.group.WORLD
store = group.get_group_store()
dist.barrier()
kept = []
if world.rank == 0:
    receive = dist.irecv(torch.zeros(5), 1)
    group.set_timeout(datetime.timedelta(seconds=0.3))
    try:
        dist.all_reduce(torch.ones(100_000))
    except lockstep.CollectiveTimeout:
        pass
    try:
        receive.wait()
    except lockstep.LockstepError:
        pass
    gc.collect()
    kept = [type(each).__name__ for each in mpi._unfinished]
    store.set("over", "")
else:
    store.wait(["over"])
say(str(sorted(kept)))
"""
)


def test_what_mpi_may_still_write_to_stays_after_an_error() -> None:
    assert _start(_IN_FLIGHT, 2) == ["['Request', '_Request']", "[]"]
