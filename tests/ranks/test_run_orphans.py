"""No process left behind: launcher or zygote killed in mid-training, with loader workers and a program of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import LIMIT, environment, gone_within, killed_afterwards, start, wait_for

_TRAIN = """
import os, subprocess, sys, torch, lockstep
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self): return 1_000_000
    def __getitem__(self, index): return torch.tensor(float(index))

def main():
    w = lockstep.init()
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    loaders = [DataLoader(Numbers(), num_workers=1, multiprocessing_context=m) for m in ("fork", "spawn")]
    for step, batches in enumerate(zip(*loaders)):
        total = sum(batches)
        torch.distributed.all_reduce(total)
        if step == 3: open(f"training-{w.rank}", "w").close()

if __name__ == "__main__":
    main()
"""

#: The zygote, two ranks; of each rank two programs, a forked and a spawned worker, and the spawn's resource tracker.
_PROCESSES = 1 + 2 + 2 * 5


#: Some of the kills in every run of the tests, all twenty in ``make faults``.
_VICTIMS = [
    "launcher",
    "launcher again",
    "zygote",
    *[pytest.param(f"launcher, kill {number}", marks=pytest.mark.campaign) for number in range(3, 21)],
]


@pytest.mark.parametrize("victim", _VICTIMS)
def test_nobody_outlives_a_killed_launcher(tmp_path: Path, temporary: Path, victim: str) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    argv = ["lockstep", "run", "-n", "2", "train.py"]
    with start(argv, tmp_path, torch=True, TMPDIR=str(temporary)) as job:
        wait_for(lambda: all((tmp_path / f"training-{rank}").exists() for rank in range(2)), "training")
        everyone = job.tree()
        with killed_afterwards(everyone):
            assert len(everyone) == _PROCESSES
            os.kill(everyone[0] if victim == "zygote" else job.pid, signal.SIGKILL)
            assert gone_within(everyone, 1.0) == []
        done = job.finish()
    if victim == "zygote":
        assert done.code == 128 + signal.SIGKILL
        assert "the process that forks the ranks" in done.err
        assert "killed by signal 9 (SIGKILL); all ranks were stopped" in done.err
    assert [path.name for path in temporary.iterdir() if path.name.startswith("lockstep-")] == []


#: Reads what a job prints, to its very end, and then tells whether a process of its own is still there.
_READER = """
import subprocess, sys
below = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
text = sys.stdin.read()
print(text, "lives" if below.poll() is None else "was ended")
below.kill()
"""


def test_processes_that_a_shell_left_to_the_launcher_are_not_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('trained')\nsys.exit(3)\n")
    command = 'exec "$0" -m lockstep run -n 1 train.py > >(exec "$0" -c "$1") 2>&1'
    words = ["bash", "-c", command, sys.executable, _READER]
    env = environment(tmp_path)
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 3, done
    assert done.stdout.startswith("trained\n"), done
    assert "rank 0 of 1 failed: exit code 3" in done.stdout
    assert done.stdout.endswith(" lives\n"), done


def test_workers_die_with_their_rank_even_if_nobody_is_left_to_see_to_it(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import multiprocessing, os, signal\n"
        "def work():\n"  # once it is here, it is tied to its rank
        "    open('ready', 'w').write(str(os.getpid()))\n"
        "    signal.pause()\n"
        "multiprocessing.get_context('fork').Process(target=work).start()\n"
        "signal.pause()\n"
    )
    # Nobody is left to remove the job's folder either, so it stands in the test's own.
    with start(["lockstep", "run", "-n", "1", "train.py"], tmp_path, TMPDIR=str(temporary)) as job:
        wait_for(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text(), "the worker")
        everyone = job.tree()
        with killed_afterwards(everyone):
            assert len(everyone) == 3
            os.kill(job.pid, signal.SIGSTOP)  # neither can do anything any more
            os.kill(everyone[0], signal.SIGSTOP)
            os.kill(everyone[1], signal.SIGKILL)
            assert gone_within(everyone[2:], 1.0) == []
            os.kill(everyone[0], signal.SIGKILL)
            os.kill(job.pid, signal.SIGKILL)


def test_a_worker_that_is_forked_as_its_rank_dies_goes_too(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import multiprocessing, os, signal, time\n"
        "def outlive_the_rank(rank=os.getpid()):\n"  # before multiprocessing has set up anything in the worker
        "    while os.getppid() == rank:\n"
        "        time.sleep(0.001)\n"
        "os.register_at_fork(after_in_child=outlive_the_rank)\n"
        "worker = multiprocessing.get_context('fork').Process(target=signal.pause)\n"
        "worker.start()\n"
        "open('ready', 'w').write(str(worker.pid))\n"
        "signal.pause()\n"
    )
    with start(["lockstep", "run", "-n", "1", "train.py"], tmp_path, TMPDIR=str(temporary)) as job:
        wait_for(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text(), "the worker")
        everyone = job.tree()
        with killed_afterwards(everyone):
            os.kill(job.pid, signal.SIGSTOP)  # so that nobody but the worker itself sees to it
            os.kill(everyone[0], signal.SIGSTOP)
            os.kill(everyone[1], signal.SIGKILL)
            assert gone_within(everyone[2:], 1.0) == []
            os.kill(everyone[0], signal.SIGKILL)
            os.kill(job.pid, signal.SIGKILL)


def test_what_a_finished_rank_left_running_is_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import subprocess\nprint(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=2).pid)\n"
    )
    with start(["lockstep", "run", "-n", "1", "train.py"], tmp_path) as job:
        sleeper = int(job.read_line())
        with killed_afterwards([sleeper]):
            assert job.finish().code == 0
            assert gone_within([sleeper], 0.0) == []


def test_shared_memory_of_killed_ranks_is_removed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, signal\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=1000)\n"
        "print(memory.name, flush=True)\n"
        "signal.pause()\n"
    )
    with start(["lockstep", "run", "-n", "1", "train.py"], tmp_path) as job:
        name = job.read_line()
        assert Path("/dev/shm", name).exists()
        everyone = job.tree()
        job.process.kill()
        assert gone_within(everyone, 1.0) == []
    assert not Path("/dev/shm", name).exists()


#: What ends between naming its memory and unlinking it -> a program in which it does so the first time, and whose file
#: ``began`` has its process id.
_LEFT_BY = {
    "a worker that its rank reaps": """
import os, signal
import lockstep
from torch.utils.data import DataLoader
lockstep.init()
if not os.path.exists("began"):
    class Dies:
        def __len__(self):
            return 8
        def __getitem__(self, index):
            open(f"/dev/shm/torch_{os.getpid()}_1_1", "w").close()
            open("began", "w").write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        list(lockstep.shard(DataLoader(Dies(), batch_size=4, num_workers=1)))
    except RuntimeError:
        os.kill(os.getpid(), signal.SIGKILL)
""",
    "an orphan that is reaped before its rank ends": """
import os, signal, time
if not os.path.exists("began"):
    if not os.fork():
        if not os.fork():
            open(f"/dev/shm/torch_{os.getpid()}_1_1", "w").close()
            open("pid", "w").write(str(os.getpid()))
            os.rename("pid", "began")
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    os.wait()
    while not os.path.exists("began") or os.path.exists("/proc/" + open("began").read()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
""",
    "a rank": """
import os, signal
if not os.path.exists("began"):
    open(f"/dev/shm/torch_{os.getpid()}_1_1", "w").close()
    open("began", "w").write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)
""",
}


@pytest.mark.parametrize("left_by", _LEFT_BY)
@pytest.mark.parametrize("restarts", [0, 1])
def test_what_was_named_by_a_process_that_died_before_its_job_is_removed(
    tmp_path: Path, left_by: str, restarts: int
) -> None:
    """Also before the ranks start again."""
    seen = "print(any(name.startswith('torch_' + open('began').read() + '_') for name in os.listdir('/dev/shm')))"
    (tmp_path / "train.py").write_text(_LEFT_BY[left_by] + seen + "\n")
    command = ["lockstep", "run", "-n", "1", "--max-restarts", str(restarts), "train.py"]
    with start(command, tmp_path, torch=True) as job:
        done = job.finish()
    assert (done.out, done.code == 0) == ("False\n" if restarts else "", restarts == 1), done
    assert not list(Path("/dev/shm").glob(f"torch_{(tmp_path / 'began').read_text()}_*"))
