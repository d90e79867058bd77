"""How functions on ranks end by a signal, with the process that forks, or on a full disk, and what is said of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.launching import own_mount, python_path, run, start, wait_for

_FILLS = """
import os, lockstep

def fail(rank):
    try:
        for number in range(1000):
            open(os.path.join(os.environ["TMPDIR"], str(number)), "x").close()
    except OSError:
        raise RuntimeError("the real cause") from None

if __name__ == "__main__":
    lockstep.spawn(fail, nprocs=1)
"""


def test_an_error_of_which_there_is_no_room_for_a_record_is_printed(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "train.py").write_text(_FILLS)
    done = run(["train"], tmp_path, torch=True, before=own_mount(temporary, "nr_inodes=100"), TMPDIR=str(temporary))
    assert done.code == 1, done
    assert "rank 0's failure record can't be written" in done.err
    assert "RuntimeError: the real cause" in done.err
    assert "RankFailed: rank 0 of 1 failed: exit code 1" in done.err


_LATE = """
import os, time
import torch, lockstep
from torch import nn

def train(rank):
    world = lockstep.init()
    model = lockstep.replicate(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer)
    for epoch in saved.epochs(10):
        for step in range(20):
            saved.between_steps()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        open("trained", "w").close()
        while saved._boundary._requests.stop is None:  # (the launcher's message comes before its signal)
            time.sleep(0.01)
        break

if __name__ == "__main__":
    lockstep.spawn(train, nprocs=1)
"""


def test_ranks_that_had_nothing_left_to_save_have_succeeded(tmp_path: Path) -> None:
    """The signal has its effect on the program all the same."""
    (tmp_path / "train.py").write_text(_LATE)
    with start(["train"], tmp_path, torch=True, LOCKSTEP_TIMES="aside=1000") as job:
        wait_for((tmp_path / "trained").exists, "the end of training")
        os.kill(job.pid, signal.SIGTERM)
        job.read_errors_to("SIGTERM: the ranks finish a step, save and leave")
        done = job.finish()
    assert done.code == -signal.SIGTERM, done
    told = "SIGTERM came when training was over: all ranks ended by themselves"
    assert done.err.splitlines()[-1] == f"lockstep: {told}"
    assert _end(tmp_path) == {"code": "run-done", "text": told}


def _end(tmp_path: Path) -> object:
    """The end in the only record that a program has left."""
    (record,) = (tmp_path / "state").rglob("run.json")
    return json.loads(record.read_text())["end"]


_IMPORTS = """
import lockstep

def wait(rank):
    pass

if __name__ == "__main__":
    lockstep.spawn(wait, nprocs=1)
"""


def test_a_signal_while_the_process_that_forks_imports_is_what_ends_the_ranks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "slow_import.py").write_text("open('importing', 'w').close()\nopen('fifo').read()\n")
    (tmp_path / "train.py").write_text(_IMPORTS)
    path = python_path(tmp_path)
    with start(["train"], tmp_path, LOCKSTEP_PRELOAD="slow_import", PYTHONPATH=path) as job:
        wait_for((tmp_path / "importing").exists, "the import")
        os.kill(job.pid, signal.SIGTERM)
        done = job.finish()
    assert done.code == -signal.SIGTERM, done
    assert done.err == "lockstep: stopped by SIGTERM\n"


_KILLS = """
import os, signal
import torch, lockstep
from torch import nn

def train(rank):
    world = lockstep.init()
    model = lockstep.replicate(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    os.kill(os.getppid(), signal.SIGKILL)

if __name__ == "__main__":
    lockstep.spawn(train, nprocs=1)
"""


def test_the_record_of_a_run_ends_with_the_process_that_forks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_KILLS)
    done = run(["train"], tmp_path, torch=True)
    assert done.code == 1, done
    said = done.err.splitlines()[-1].partition("LaunchError: ")[2]
    assert "was killed by signal 9 (SIGKILL); all ranks were stopped" in said
    assert _end(tmp_path) == {"code": "run-failed", "text": said}
