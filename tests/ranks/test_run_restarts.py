"""``lockstep run --max-restarts``: what is started again, what is not, and how soon."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.launching import ROOM, Finished, gone_within, own_mount, python_path, run, start, wait_for

_TRAIN = """
import os, signal
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

world = lockstep.init()
restart = int(os.environ["LOCKSTEP_RESTART"])
model = lockstep.replicate(nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = lockstep.shard(DataLoader(TensorDataset(torch.arange(240.0).view(60, 4)), batch_size=4, num_workers={workers}))
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer, loader=loader)
for epoch in saved.epochs(1):
    for (batch,) in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        if saved.step % 4 == 0:
            saved.save()
        {trouble}
world.print("done at", saved.step, "after restart", restart)
"""

#: Rank 1 is killed at steps 6 and 10, in the first two starts.
_KILLED = """
        if world.rank == 1 and saved.step == (6, 10, 99)[restart]:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def _run(tmp_path: Path, trouble: str, *options: str, workers: int = 0) -> Finished:
    (tmp_path / "train.py").write_text(_TRAIN.format(trouble=trouble.strip(), workers=workers))
    return run(["lockstep", "run", "-n", "2", *options, "train.py"], tmp_path, torch=True)


def test_killed_ranks_come_back_and_finish(tmp_path: Path) -> None:
    done = _run(tmp_path, _KILLED, "--max-restarts", "2", "--log-dir", "logs", workers=2)
    assert done.code == 0, done
    assert "done at 15 after restart 2" in done.out.splitlines()
    assert done.err.count("lockstep: rank 1 of 2 failed: killed by signal 9 (SIGKILL)") == 2
    for number in (1, 2):
        assert f"restart {number} of 2: all ranks start again" in done.err.splitlines()
        assert (tmp_path / "logs" / f"restart-{number}" / "rank1.log").exists()
    assert f"rank 1's log: {tmp_path / 'logs'}/restart-1/rank1.log" in done.err


def test_restarts_are_used_up(tmp_path: Path) -> None:
    done = _run(tmp_path, _KILLED, "--max-restarts", "1")
    assert done.code == 128 + signal.SIGKILL
    assert "not restarted: the one restart is used up (--max-restarts)\nlockstep: the last checkpoint is of" in done.err


def test_the_same_error_at_the_same_step_stops_the_job(tmp_path: Path) -> None:
    trouble = "if world.rank == 1 and saved.step == 7: raise ValueError(f'bad sample (process {os.getpid()})')"
    done = _run(tmp_path, trouble, "--max-restarts", "5")
    assert done.code == 1
    assert done.err.count("all ranks start again") == 1
    assert "not restarted: the same failure happened twice, on rank 1 at step 7, and would happen again" in done.err


#: Fills the folder for temporary files, and is killed.
_FILLS = """
        if world.rank == 1 and saved.step == 6:
            try:
                for number in range(1000):
                    open(os.path.join(os.environ["TMPDIR"], str(number)), "x").close()
            except OSError:
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("options", [[], ["--nnodes", "1:2", "--rdzv", "file:."]])
def test_a_restart_that_finds_no_place_for_its_files_is_told_after_the_failure(
    options: list[str], tmp_path: Path, temporary: Path
) -> None:
    (tmp_path / "train.py").write_text(_TRAIN.format(trouble=_FILLS.strip(), workers=0))
    argv = ["lockstep", "run", "-n", "2", "--max-restarts", "1", *options, "train.py"]
    mounted = own_mount(temporary, "nr_inodes=100")
    done = run(argv, tmp_path, torch=True, before=mounted, TMPDIR=str(temporary), LOCKSTEP_TIMES="0.2")
    assert done.code == 128 + signal.SIGKILL, done
    _, failed, rest = done.err.partition("lockstep: rank 1 of 2 failed: killed by signal 9 (SIGKILL)\n")
    assert failed, done.err
    assert f"lockstep: not restarted: the job's files can't be written in {temporary}" in rest
    assert "No space left on device; the disk is full: free space, or choose another folder" in rest
    assert "lockstep: the last checkpoint is of step 4\n" in rest


def test_a_restart_whose_logs_can_not_be_written_is_told_after_the_failure(tmp_path: Path) -> None:
    trouble = """
        if world.rank == 1 and saved.step == 6:
            open("logs/restart-1", "x")  # in the way of a folder
            os.kill(os.getpid(), signal.SIGKILL)
"""
    done = _run(tmp_path, trouble, "--max-restarts", "1", "--log-dir", "logs")
    assert done.code == 128 + signal.SIGKILL, done
    text = f"lockstep: not restarted: the ranks' logs can't be written to {tmp_path}/logs: File exists; name another"
    assert text in done.err


@pytest.mark.parametrize("room", [2, 3])
def test_a_restart_without_room_for_a_process_is_told_after_the_failure(room: int, tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(ROOM.format(room=room))
    (tmp_path / "train.py").write_text(_TRAIN.format(trouble=_KILLED.strip(), workers=0))
    argv = ["lockstep", "run", "-n", "2", "--max-restarts", "1", "train.py"]
    done = run(argv, tmp_path, torch=True, LOCKSTEP_PRELOAD="full", PYTHONPATH=python_path(tmp_path))
    assert done.code == 128 + signal.SIGKILL, done
    _, failed, rest = done.err.partition("lockstep: rank 1 of 2 failed: killed by signal 9 (SIGKILL)\n")
    assert failed, done.err
    assert "lockstep: not restarted: no process could be forked for 1 s: Resource temporarily unavailable; " in rest
    assert "lockstep: the last checkpoint is of step 4\n" in rest


@pytest.mark.parametrize("torch", [True, False])
def test_an_error_before_the_first_step_is_not_tried_again(tmp_path: Path, torch: bool) -> None:
    trouble = "import torch, lockstep\nlockstep.init()\nraise ValueError('no such option')\n"
    (tmp_path / "train.py").write_text(trouble)
    done = run(["lockstep", "run", "-n", "1", "--max-restarts", "5", "train.py"], tmp_path, torch=torch)
    assert done.code == 1
    assert done.err.count("lockstep: rank ") == 1
    assert "not restarted: it failed before its first step, and would fail again" in done.err.splitlines()


_TORCH_ONLY = """
import os, signal, torch, torch.distributed as dist
restart = int(os.environ["LOCKSTEP_RESTART"])
dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
parameter.grad = torch.ones(1)
print("rank", dist.get_rank(), "restart", restart, "listens at", os.environ["MASTER_PORT"], flush=True)
dist.all_reduce(parameter.grad)
optimizer.step()
if restart < 2 and dist.get_rank() == 0:
    raise RuntimeError(f"restart {'!' * restart}")
dist.barrier()
dist.destroy_process_group()
"""


def test_a_script_of_torchs_own_is_started_again_under_launch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TORCH_ONLY)
    options = ["--nproc_per_node=2", "--max_restarts=3", "--use_env"]
    done = run(["lockstep.launch", *options, "train.py"], tmp_path, torch=True)
    assert done.code == 0, done
    for rank in (0, 1):
        for restart in range(3):
            assert done.out.count(f"rank {rank} restart {restart} ") == 1


def test_several_machines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = run(["lockstep.launch", "--nnodes=2", "--max_restarts=3", "train.py"], tmp_path)
    assert done.code == 2
    assert "--max-restarts=3 with --nnodes=2: the launchers of several machines can restart together only" in done.err


def test_what_a_killed_attempt_left_is_gone_before_the_next_begins(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, signal, subprocess\n"
        "rank, restart = os.environ['RANK'], os.environ['LOCKSTEP_RESTART']\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "open(f'new-{rank}-{restart}', 'w').write(str(child.pid))\n"
        "os.rename(f'new-{rank}-{restart}', f'child-{rank}-{restart}')\n"
        "if restart == '0':\n"
        "    while not all(os.path.exists(f'child-{r}-0') for r in range(2)): pass\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('rank', rank, [os.path.exists('/proc/' + open(f'child-{r}-0').read()) for r in range(2)])\n"
    )
    done = run(["lockstep", "run", "-n", "2", "--max-restarts", "1", "train.py"], tmp_path)
    assert (done.code, done.out) == (0, "rank 0 [False, False]\n"), done
    pids = [int((tmp_path / f"child-{rank}-{restart}").read_text()) for rank in range(2) for restart in range(2)]
    assert gone_within(pids, 1.0) == []


def test_a_signal_ends_a_job_that_is_restarting_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, signal\nprint(os.environ['LOCKSTEP_RESTART'], flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with start(["lockstep", "run", "-n", "1", "--max-restarts", "100000", "train.py"], tmp_path) as job:
        while job.read_line() != "20":
            pass
        os.kill(job.pid, signal.SIGTERM)
        done = job.finish()
    assert done.code in (128 + signal.SIGTERM, 128 + signal.SIGKILL)


def test_a_signal_before_a_restart_says_nothing_of_one(tmp_path: Path) -> None:
    """It comes while what the ranks have left behind is given its time to leave, which stands still meanwhile."""
    (tmp_path / "left.py").write_text(
        "import os, signal, time\n"
        "def asked(*_):\n"
        "    os.kill(os.getppid(), signal.SIGSTOP)\n"
        "    open('new', 'w').write(str(os.getppid()))\n"
        "    os.rename('new', 'asked')\n"
        "signal.signal(signal.SIGTERM, asked)\n"
        "print(flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    (tmp_path / "train.py").write_text(
        "import os, signal, subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, 'left.py'], start_new_session=True, stdout=subprocess.PIPE)\n"
        "left.stdout.readline()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with start(["lockstep", "run", "-n", "1", "--max-restarts", "1", "train.py"], tmp_path) as job:
        wait_for((tmp_path / "asked").exists, "the end of what is left")
        os.kill(job.pid, signal.SIGTERM)
        os.kill(int((tmp_path / "asked").read_text()), signal.SIGCONT)
        done = job.finish()
    assert done.code == 128 + signal.SIGKILL
    assert "failed: killed by signal 9 (SIGKILL)" in done.err
    assert "all ranks start again" not in done.err
