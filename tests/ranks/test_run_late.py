"""A rank that holds up the others is named while it does: with what it is doing, and where the others wait."""

from __future__ import annotations

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from lockstep._proc import descendants
from lockstep.job.page import NAMES, Phase
from tests.launching import Running, own_mount, run, start

#: Times of a launcher that looks for a late rank sooner, and more often.
_SOON = "late=1,heartbeat=0.2,unmoved=0.2"

_TRAINING = """
import os, signal, sys, threading, time
import torch, lockstep
from torch import nn

world = lockstep.init()
model = lockstep.replicate(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def hang():
{hang}

for step in range(8):
    if step == 5 and world.rank == 1:
        hang()
    loss = model(torch.ones(8, 4)).sum()
    optimizer.zero_grad()
    loss.backward()  # here the others wait
    optimizer.step()
print("done", flush=True)
"""
_WAIT_LINE = 1 + _TRAINING.splitlines().index("    loss.backward()  # here the others wait")


def _write(tmp_path: Path, hang: str) -> int:
    """The training script with a hang in it; how many lines it is longer than the template."""
    lines = hang.strip("\n").splitlines()
    (tmp_path / "train.py").write_text(_TRAINING.format(hang="\n".join(f"    {line}" for line in lines)))
    return len(lines) - 1


def _report(job: Running) -> list[str]:
    """The launcher's next message on a late rank, line by line; nothing else may come before it."""
    assert job.process.stderr is not None
    lines = [job.process.stderr.readline().rstrip("\n")]
    while lines[-1] and not lines[-1].startswith("next: "):
        lines.append(job.process.stderr.readline().rstrip("\n"))
    return lines


def test_a_blocked_read_is_named_with_its_file_once_it_is_unexpected(tmp_path: Path) -> None:
    fifo, end = tmp_path / "shard-7", tmp_path / "end"
    os.mkfifo(fifo)
    os.mkfifo(end)
    longer = _write(
        tmp_path,
        f"""
with lockstep.expect_slow("looking for data"):
    time.sleep(2.5)
with open({str(fifo)!r}, "rb", buffering=0) as file:
    file.read(1)
""",
    )
    with (tmp_path / "train.py").open("a") as script:
        script.write(f"if world.rank == 0:\n    open({str(end)!r}, 'rb').read(1)\n")
    argv = ["lockstep", "run", "-n", "2", "train.py"]
    with start(argv, tmp_path, torch=True, LOCKSTEP_TIMES=_SOON) as job, ExitStack() as stack:
        # Opened for reading too, so that a rank gets as far as the read.
        writing, ending = (os.open(each, os.O_RDWR) for each in (fifo, end))
        stack.callback(os.close, writing)
        stack.callback(os.close, ending)
        report = _report(job)
        os.write(writing, b"x")
        assert job.process.stderr is not None
        over = job.process.stderr.readline()
        os.write(ending, b"x")
        done = job.finish()
    assert re.fullmatch(r"lockstep: rank 1 of 2 has held up the others for \d+ s", report[0]), report
    assert int(report[0].split()[-2]) >= 3, "it said so before it was unexpected"
    assert f"is sleeping in read of {fifo}" in report[1]
    assert re.match(r"  in your code for \d+ s, after optimizer.step\(\) at ", report[2]), report
    assert f"at {tmp_path}/train.py:{_WAIT_LINE + longer + 1} in <module>, 5 steps taken" in report[2]
    assert report[4].endswith("train.py:14 in hang")
    waits = next(line for line in report if line.startswith("  rank 0 waits in "))
    assert f"at {tmp_path}/train.py:{_WAIT_LINE + longer} in <module>" in waits
    assert done.code == 0, done
    assert re.fullmatch(r"lockstep: rank 1 has moved on after \d+ s\n", over)
    assert "held up" not in done.err, "one message is enough"


def test_a_full_folder_for_temporary_files_does_not_end_a_job_whose_rank_is_late(
    tmp_path: Path, temporary: Path
) -> None:
    fifo = tmp_path / "shard-7"
    os.mkfifo(fifo)
    _write(
        tmp_path,
        f"""
try:
    for number in range(1000):
        open(os.path.join({str(temporary)!r}, str(number)), "x").close()
except OSError:
    print("full", flush=True)
open({str(fifo)!r}, "rb").read(1)
""",
    )
    argv = ["lockstep", "run", "-n", "2", "--log-dir", "logs", "train.py"]
    mounted = own_mount(temporary, "nr_inodes=100")
    with (
        start(argv, tmp_path, torch=True, before=mounted, LOCKSTEP_TIMES=_SOON, TMPDIR=str(temporary)) as job,
        open(os.open(fifo, os.O_RDWR), "wb", buffering=0) as writing,
    ):
        report = _report(job)
        writing.write(b"x")
        done = job.finish()
    assert re.fullmatch(r"lockstep: rank 1 of 2 has held up the others for \d+ s", report[0]), report
    assert (tmp_path / "logs" / "rank1.log").read_text() == "full\ndone\n"
    assert (done.code, "Traceback" in done.err) == (0, False), done
    assert re.match(r"lockstep: rank 1 has moved on after \d+ s\n", done.err)


def test_the_error_at_the_timeout_says_it_again(tmp_path: Path) -> None:
    _write(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)")
    argv = ["lockstep", "run", "-n", "2", "train.py"]
    done = run(argv, tmp_path, torch=True, LOCKSTEP_TIMES=_SOON, LOCKSTEP_TIMEOUT="4")
    assert done.code == 1
    before, _, after = done.err.partition("CollectiveTimeout: ")
    for text in (before, after):
        assert "rank 1 of 2 has held up the others for " in text
        assert "is stopped by a signal" in text
    assert "moved on" not in done.err


def test_a_collective_that_one_rank_leaves_out_is_named_with_both_places(tmp_path: Path) -> None:
    script = _TRAINING.format(hang="    pass").replace(
        "    loss = model", "    if step != 5 or world.rank != 1:\n        world.barrier()\n    loss = model"
    )
    (tmp_path / "train.py").write_text(script)
    line = 1 + script.splitlines().index("        world.barrier()")
    argv = ["lockstep", "run", "-n", "2", "train.py"]
    done = run(argv, tmp_path, torch=True, LOCKSTEP_TIMES=_SOON, LOCKSTEP_BACKEND="gloo", LOCKSTEP_TIMEOUT="4")
    assert done.code == 1
    report = done.err[done.err.index("lockstep: rank 1 of 2 has left out") :].splitlines()
    assert "the collective that the others wait in, or they have one too many: all ranks have waited for" in report[0]
    assert report[1].startswith("  rank 1 (process ")
    assert f"it waits in averaging gradients at {tmp_path}/train.py:" in report[2]
    assert f"  rank 0 waits in World.barrier() at {tmp_path}/train.py:{line} in <module>" in report


_OWN_GROUP = """
import threading, torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    if step == 5 and dist.get_rank() == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=30)
    loss = model(torch.ones(8, 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_ranks_with_a_process_group_of_their_own_are_told_apart_by_their_stacks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_OWN_GROUP)
    argv = ["lockstep", "run", "-n", "2", "train.py"]
    with start(argv, tmp_path, torch=True, LOCKSTEP_TIMES=_SOON) as job:
        report = _report(job)
        job.process.terminate()
        job.finish()
    assert report[0].startswith("lockstep: rank 1 of 2 has held up the others for "), report
    assert f"    {tmp_path}/train.py:13 in <module>" in report
    assert any(line.startswith("  rank 0 waits in ") and f"{tmp_path}/train.py:16 in" in line for line in report)


_LAGGARD = """
import time, torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 180

    def __getitem__(self, index):
        time.sleep(0.05 if world.rank == 1 else 0.01)
        return torch.ones(4)

world = lockstep.init()
model = lockstep.replicate(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in lockstep.shard(DataLoader(Slow(), batch_size=4), seed_samples=False):
    loss = model(batch).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_rank_that_is_steadily_slower_is_named_at_the_end_and_is_no_alarm(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_LAGGARD)
    command = ["lockstep", "run", "-n", "2", "train.py"]
    done = run(command, tmp_path, torch=True, LOCKSTEP_LATE="1", LOCKSTEP_QUIET="")
    assert done.code == 0, done
    assert "held up" not in done.err
    assert "input straggler: rank 1, in data: " in done.err


_STOPPED = """
import os, signal
from contextlib import nullcontext
import lockstep
from lockstep.job import flight
from lockstep.job.page import Phase

world = lockstep.init()
announced = lockstep.expect_slow("a long upload") if {announced} else nullcontext()
for turn in range(3):
    with flight.phase(Phase.{phase}), announced:
        if turn == 2 and world.rank == 1:
            {stuck}
    world.barrier()
"""
_STUCK = {
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)",
    "lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
}


@pytest.mark.parametrize(
    ("stuck", "phase", "announced", "times"),
    [
        ("stop", "SAVE", False, "late=2"),
        ("stop", "EVALUATE", True, _SOON),
        ("lock", "SAVE", False, _SOON),
        ("lock", "OWN", True, _SOON),
    ],
)
def test_who_cannot_go_on_is_named_in_every_phase_and_without_an_optimizer(
    tmp_path: Path, stuck: str, phase: str, announced: bool, times: str
) -> None:
    script = _STOPPED.format(announced=announced, phase=phase, stuck=_STUCK[stuck])
    (tmp_path / "train.py").write_text(script)
    argv = ["lockstep", "run", "-n", "2", "train.py"]
    with start(argv, tmp_path, torch=True, LOCKSTEP_TIMES=times) as job:
        report = _report(job)
        job.process.terminate()
        for pid in descendants(job.pid):
            os.kill(pid, signal.SIGCONT)
        job.finish()
    assert re.fullmatch(r"lockstep: rank 1 of 2 has held up the others for [1-9] s", report[0]), report
    if stuck == "stop":
        assert "is stopped by a signal" in report[1]
        assert re.match(rf"  in {NAMES[Phase[phase]]} for \d s, 0 steps taken", report[2]), report
    else:
        assert f"    {tmp_path}/train.py:13 in <module>" in report
    assert any("inside lockstep.expect_slow('a long upload')" in line for line in report) == announced
