"""``lockstep run``: a script on N ranks behaves as it does alone under python."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep import knobs
from tests.launching import Finished, python_path, run, start

_WORLD = """
import torch, lockstep
w = lockstep.init()
total = torch.tensor([1.0, 10.0]) * (w.rank + 1)
torch.distributed.all_reduce(total)
print(w.rank, w.local_rank, w.world_size, total.tolist())
"""


def test_ranks_make_a_world(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_WORLD)
    done = run(["lockstep", "run", "-n", "3", "--all-output", "train.py"], tmp_path, torch=True)
    lines = sorted(done.out.splitlines())
    assert lines == ["0 0 3 [6.0, 60.0]", "[1] 1 1 3 [6.0, 60.0]", "[2] 2 2 3 [6.0, 60.0]"], done
    assert done.code == 0
    assert done.err == ""


_TORCH_WORLD = """
import os, torch, torch.distributed as dist
assert int(os.environ["MASTER_PORT"]) < 32768
dist.init_process_group("gloo")
total = torch.tensor([1.0]) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(total.item())
dist.destroy_process_group()
"""


def test_a_script_that_opens_torchs_group_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TORCH_WORLD)
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True)
    assert (done.code, done.out) == (0, "3.0\n"), done.err


_LOADERS = """
import multiprocessing, sys, threading, atexit, torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):                       # defined in __main__: spawned workers must find it there
    def __len__(self): return 6
    def __getitem__(self, index): return torch.tensor(index * index)

class Batch:                                  # and so must this process what they send of its classes
    def __init__(self, samples): self.samples = torch.stack(samples).tolist()

def main():
    for method in ("fork", "spawn"):
        loader = DataLoader(Squares(), 2, num_workers=1, multiprocessing_context=method, collate_fn=Batch)
        print(method, [batch.samples for batch in loader])
    atexit.register(lambda: print("atexit", Squares.__name__, __name__))
    threading.Thread(target=lambda: (threading.main_thread().join(), print("thread", len(Squares())))).start()

if __name__ == "__main__":
    main()
"""


def test_loader_workers_threads_and_exit_functions(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_LOADERS)
    done = run(["lockstep", "run", "-n", "1", "train.py"], tmp_path, torch=True)
    batches = "[[0, 1], [4, 9], [16, 25]]"
    assert done.out.splitlines() == [f"fork {batches}", f"spawn {batches}", "thread 6", "atexit Squares __main__"], done
    assert (done.code, done.err) == (0, "")


_SELF_PORTRAIT = """
import json, os, random, sys, __main__
def f(x: 1 + 1): pass
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "package": __package__,
    "spec": __spec__ and __spec__.name, "main": __main__.__dict__ is globals(), "cwd": os.getcwd(),
    "doc": __doc__, "annotations": f.__annotations__, "threads": os.listdir("/proc/self/task").__len__(),
    "umask": os.umask(0o22), "session": os.getpgid(0) == os.getpgid(os.getppid()),
}))
"""


@pytest.mark.parametrize("how", ["script", "module", "package"])
def test_a_script_sees_what_python_would_show_it(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "pkg"
    folder.mkdir()
    for name in ("__init__.py", "sub.py", "__main__.py"):
        (folder / name).write_text(_SELF_PORTRAIT if name != "__init__.py" else "")
    program = {"script": ["pkg/sub.py"], "module": ["-m", "pkg.sub"], "package": ["-m", "pkg"]}[how]
    arguments = ["-n", "5", "--", "--log-dir", "-x", "--help", ""]
    alone = _python([*program, *arguments], tmp_path)
    done = run(["lockstep", "run", "-n", "1", *program, *arguments], tmp_path)
    assert done.code == 0, done
    assert json.loads(done.out) == json.loads(alone)


def _python(argv: list[str], cwd: Path) -> str:
    import subprocess
    import sys

    return subprocess.run([sys.executable, *argv], cwd=cwd, capture_output=True, text=True, check=True).stdout


_RANDOM = "import random, numpy; print(random.random(), numpy.random.rand(), flush=True)"


def test_ranks_draw_different_random_numbers(tmp_path: Path) -> None:
    (tmp_path / "draw.py").write_text(_RANDOM)
    done = run(
        ["lockstep", "run", "-n", "3", "--all-output", "draw.py"], tmp_path, LOCKSTEP_PRELOAD="numpy.random,random"
    )
    draws = done.out.replace("[1]", "").replace("[2]", "").split()
    assert len(draws) == len(set(draws)) == 6, done


def test_only_rank_0_reads_standard_input(tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text("import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))")
    done = run(["lockstep", "run", "-n", "2", "--all-output", "ask.py"], tmp_path, stdin="yes\nno\n")
    assert sorted(done.out.splitlines()) == ["0 'yes\\nno\\n'", "[1] 1 ''"], done


def test_a_debugger_on_rank_0(tmp_path: Path) -> None:
    (tmp_path / "debug.py").write_text("import os\nanswer = 6 * 7\nif os.environ['RANK'] == '0': breakpoint()\n")
    done = run(["lockstep", "run", "-n", "2", "debug.py"], tmp_path, stdin="p answer\nc\n")
    assert "42" in done.out, done
    assert done.code == 0


_LEAVE = """
import os, sys
rank = int(os.environ["RANK"])
if rank == {rank}: {how}
"""


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("sys.exit(7)", 7, "rank 1 of 2 failed: exit code 7"),
        ("sys.exit('no data here')", 1, "rank 1 of 2 failed: exit code 1\n  no data here"),
        ("sys.exit(256)", 1, "rank 1 of 2 failed: exit code 1"),
        ("sys.exit(-1)", 255, "rank 1 of 2 failed: exit code 255"),
        ("os._exit(9)", 9, "rank 1 of 2 failed: exit code 9"),
        ("sys.exit(0)", 0, ""),
        ("sys.exit()", 0, ""),
    ],
)
def test_the_exit_code_is_the_ranks(tmp_path: Path, how: str, code: int, text: str) -> None:
    (tmp_path / "leave.py").write_text(_LEAVE.format(rank=1, how=how))
    done = run(["lockstep", "run", "-n", "2", "leave.py"], tmp_path)
    assert done.code == code, done
    assert text in done.err
    assert text or not done.err


def test_a_rank_that_is_done_early_stops_nobody(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '1': sys.exit(0)\n"
        "print('waiting', flush=True)\n"
        f"print(open({str(fifo)!r}).read())\n"
    )
    with start(["lockstep", "run", "-n", "2", "train.py"], tmp_path) as job:
        assert job.read_line() == "waiting"
        fifo.write_text("went on")
        done = job.finish()
    assert (done.code, done.out) == (0, "went on\n"), done


def test_auto_is_one_rank_for_two_cores(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; print(os.environ['WORLD_SIZE'])")
    cores = len(os.sched_getaffinity(0))
    done = run(["lockstep", "run", "-n", "auto", "train.py"], tmp_path, CUDA_VISIBLE_DEVICES="")
    assert 1 <= int(done.out) <= max(1, cores // 2), done


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "2", "nosuch.py"], "script not found: nosuch.py"),
        (["-n", "2", "-m", "no.such"], "module not found: no.such"),
        (["-n", "2", "."], ". is a folder"),
        (["-n", "0", "train.py"], "-n 0: expected a whole number of ranks"),
        (["-n", "-1", "train.py"], "-n -1: expected a whole number of ranks"),
        (["-n", "two", "train.py"], "-n two: expected a whole number of ranks"),
        (["-n", "2", "--grace", "-1", "train.py"], "--grace=-1"),
        (
            ["-n", "2", "--log-dir", "train.py/logs", "train.py"],
            "logs can't be written to {folder}/train.py/logs: Not a directory",
        ),
        (["-n", "2", "--nosuch", "train.py"], "No such option"),
        (["-n", "2", "--nnodes", "2", "--node-rank", "2", "train.py"], "--node_rank=2 does not fit --nnodes=2"),
        (["-n", "2", "--nnodes", "2", "--standalone", "train.py"], "--standalone is for jobs on one machine"),
        (["-n", "2"], "Missing argument"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(tmp_path: Path, arguments: list[str], text: str) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')")
    done = run(["lockstep", "run", *arguments], tmp_path)
    assert done.code == 2, done
    assert text.format(folder=tmp_path) in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
    assert not (tmp_path / "started").exists()


def test_the_words_that_torchrun_takes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; print(os.environ['WORLD_SIZE'])")
    options = ["--standalone", "--nnodes=1", "--nproc-per-node", "3", "--max_restarts=0"]
    assert run(["lockstep", "run", *options, "train.py"], tmp_path).out == "3\n"


def test_one_job_for_all_tasks_of_srun_and_any_in_a_batch_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; print(os.environ['WORLD_SIZE'])")
    command = ["lockstep", "run", "-n", "2", "train.py"]
    step: dict[str, Any] = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "n1",
    }
    done = run(command, tmp_path, **step)
    assert done.code == 2
    assert done.err.startswith("lockstep run: srun started 2 tasks, 2 of them on one machine"), done
    assert "Traceback" not in done.err
    one_a_node: dict[str, Any] = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[1-2]"}
    assert run(command, tmp_path, **{**step, **one_a_node}).out == "4\n"
    assert run(command, tmp_path, SLURM_PROCID="0", SLURM_NTASKS="2").out == "2\n"


def test_a_knob_that_makes_no_sense_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')")
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, LOCKSTEP_LATE="soon")
    assert (done.code, done.err.count("\n")) == (2, 1), done
    assert "LOCKSTEP_LATE='soon'" in done.err


_THREADS = """
import os, sys
before = os.environ["OMP_NUM_THREADS"]
if "early" in sys.argv: os.environ["OMP_NUM_THREADS"] = "2"
import numpy, threadpoolctl
print(before, [pool["num_threads"] for pool in threadpoolctl.threadpool_info()])
"""


def test_ranks_divide_the_cores_and_a_program_may_say_otherwise(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_THREADS)
    cores = len(os.sched_getaffinity(0))
    command = ["lockstep", "run", "-n", str(cores), "train.py"]  # a core for each

    def shown(*arguments: str, **env: Any) -> str:
        with start([*command, *arguments], tmp_path, cold=True, **env) as job:  # libraries are loaded in the zygote
            return job.finish().out

    assert shown(LOCKSTEP_PRELOAD="numpy", OMP_NUM_THREADS="") == "1 [1]\n"
    assert shown("early", LOCKSTEP_PRELOAD="numpy", OMP_NUM_THREADS="") == f"1 [{min(2, cores)}]\n"
    assert shown(OMP_NUM_THREADS="2") == f"2 [{min(2, cores)}]\n"


def test_more_ranks_than_cores_share_the_import_that_the_first_optimizer_needs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print('torch._dynamo' in sys.modules)")
    for ranks, shared in ((1, "False"), (len(os.sched_getaffinity(0)) + 1, "True")):
        with start(["lockstep", "run", "-n", str(ranks), "train.py"], tmp_path, torch=True, cold=True) as job:
            assert job.finish().out == f"{shared}\n"


def test_a_home_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("in the way")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "train.py").write_text("import os; print(os.environ['RANK'])")
    home, temporary = str(tmp_path / "home"), str(tmp_path / "tmp")
    command = ["lockstep", "run", "-n", "2", "train.py"]
    done = run(command, tmp_path, HOME=home, XDG_STATE_HOME="", TMPDIR=temporary)
    assert (done.code, done.out) == (0, "0\n"), done
    (log,) = (tmp_path / "tmp").rglob("rank1.log")
    assert log.read_text() == "1\n"
    moved, seen = done.err.splitlines()
    assert moved.endswith(f"so the ranks' logs are in {log.parent}; --log-dir names another folder")
    assert seen == f"lockstep: what rank 1 wrote is in {log.parent}"


def test_an_import_that_fails_before_the_ranks_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')")
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, LOCKSTEP_PRELOAD="no_such_module")
    assert done.code == 1
    assert "the ranks could not be started" in done.err
    assert "No module named 'no_such_module'" in done.err
    assert not (tmp_path / "started").exists()


_NO_ROOM = """
import errno, os
fork, left = os.fork, [{times}]
def fork_later():
    left[0] -= 1
    if left[0] >= 0:
        raise OSError(errno.{name}, os.strerror(errno.{name}))
    return fork()
os.fork = fork_later
"""


def _run_without_room(tmp_path: Path, *, times: int, name: str) -> Finished:
    """Run two ranks on a machine that has no process for them at first."""
    (tmp_path / "full.py").write_text(_NO_ROOM.format(times=times, name=name))
    (tmp_path / "train.py").write_text("import os; open('started-' + os.environ['RANK'], 'w')")
    path = python_path(tmp_path)
    return run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, LOCKSTEP_PRELOAD="full", PYTHONPATH=path)


@pytest.mark.parametrize("name", ["EAGAIN", "ENOMEM"])
def test_a_machine_without_room_for_a_process_has_a_moment_to_make_some(name: str, tmp_path: Path) -> None:
    done = _run_without_room(tmp_path, times=3, name=name)
    assert (done.code, done.err) == (0, "")
    assert all((tmp_path / f"started-{rank}").exists() for rank in range(2))


@pytest.mark.parametrize(("name", "advice"), [("EAGAIN", "pids.max"), ("ENOMEM", "there is no memory for it")])
def test_a_machine_without_room_for_a_process_is_told(name: str, advice: str, tmp_path: Path) -> None:
    done = _run_without_room(tmp_path, times=1_000_000, name=name)
    assert (done.code, "Traceback" in done.err) == (1, False), done
    first, why = done.err.splitlines()
    assert first == "lockstep: the ranks could not be started:"
    assert why.startswith(f"no process could be forked for 1 s: {os.strerror(getattr(errno, name))}; ")
    assert advice in why
    assert "start fewer ranks and loader workers" in why


def test_a_preload_that_initialises_cuda_is_refused_before_any_rank_is_forked(tmp_path: Path) -> None:
    (tmp_path / "opens_cuda.py").write_text(
        "import torch\n"
        "torch.accelerator.current_accelerator = lambda check_available=False: torch.device('cuda')\n"
        "torch.cuda.is_initialized = lambda: True\n"
    )
    (tmp_path / "train.py").write_text("open('started', 'w')")
    done = run(
        ["lockstep", "run", "-n", "2", "train.py"],
        tmp_path,
        LOCKSTEP_PRELOAD="torch,opens_cuda",
        PYTHONPATH=python_path(tmp_path),
    )
    assert done.code == 1
    assert "LaunchError: importing opens_cuda has opened CUDA's driver. " in done.err
    assert "Take opens_cuda out of LOCKSTEP_PRELOAD" in done.err
    assert not (tmp_path / "started").exists()


def test_nothing_stays_in_the_temporary_folder(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (tmp_path / "look.py").write_text(
        "import os\nfolder = os.environ['LOCKSTEP_JOB_DIR']\nprint(oct(os.stat(folder).st_mode & 0o777), folder)\n"
    )
    done = run(["lockstep", "run", "-n", "2", "look.py"], tmp_path, TMPDIR=str(temporary))
    mode, folder = done.out.split()
    assert mode == "0o700"
    assert Path(folder).parent.parent == temporary  # a folder for each start within that of the job
    assert list(temporary.iterdir()) == []


def test_the_version_and_the_help(tmp_path: Path) -> None:
    assert run(["lockstep", "--version"], tmp_path).out.startswith("lockstep, version 0.")
    assert "--all-output" in run(["lockstep", "run", "--help"], tmp_path).out


_ENDS = """
import atexit, ctypes, sys

class Late:
    def __del__(self):
        print("an object", flush=True)

kept = Late()
atexit.register(print, "an exit function", flush=True)
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(b"a library of the program")), None)
sys.exit(7)
"""
#: In the process that ranks are forked from, before anything is imported.
_BEFORE = """
import ctypes, sys
if "-c" in sys.orig_argv:
    libc = ctypes.CDLL(None)
    libc.strdup.restype = ctypes.c_void_p
    libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(b"a library from before the fork")), None)
"""


@pytest.mark.parametrize("more", [{}, {knobs.PRELOAD: "numpy.random"}, {"GCOV_PREFIX": "somewhere"}])
def test_a_rank_leaves_as_python_does_but_for_taking_torch_apart(tmp_path: Path, more: dict[str, str]) -> None:
    """What the program brings has its end; what was loaded before the fork has one unless it is lockstep's choice."""
    (tmp_path / "ends.py").write_text(_ENDS)
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "sitecustomize.py").write_text(_BEFORE)
    env = {"PYTHONPATH": str(tmp_path / "before"), **more}
    with start(["lockstep", "run", "-n", "1", "ends.py"], tmp_path, cold=True, torch=True, **env) as job:
        done = job.finish()
    assert done.code == 7, done
    before = ["a library from before the fork"] if more else []
    assert done.out.splitlines() == ["an exit function", "an object", "a library of the program", *before]
