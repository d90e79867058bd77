"""Ranks on their way out are asked for their stacks again and again, and none of them dies of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lockstep import _proc
from lockstep.job.page import STACK_SIGNAL
from tests.launching import LIMIT, run, start, wait_for

#: Each rank waits for the end of the pipe once its interpreter is gone, among what C does at the end of a process.
_LEAVES = """
import ctypes, os
import torch, lockstep

world = lockstep.init()
c = ctypes.CDLL(None)
c.on_exit(ctypes.cast(c.getchar, ctypes.c_void_p), None)
os.dup2(os.open("end", os.O_RDONLY), 0)
open(f"pid-{world.rank}", "w").write(str(os.getpid()))
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
while not os.path.exists("leave"):
    optimizer.step()
    os.sched_yield()
"""


def _ask_leaving_ranks(folder: Path, ranks: int, times: int) -> None:
    """Let one job end, and send the signal to its ranks all the time, to each so often once it has no handler."""
    folder.mkdir()
    os.mkfifo(folder / "end")
    (folder / "train.py").write_text(_LEAVES)
    with start(["lockstep", "run", "-n", str(ranks), "train.py"], folder, torch=True, cold=True) as job:
        with (folder / "end").open("w"):
            files = [folder / f"pid-{rank}" for rank in range(ranks)]
            wait_for(lambda: all(file.exists() and file.read_text() for file in files), "the ranks")
            asked = {int(file.read_text()): 0 for file in files}
            assert all(_proc.catches(pid, STACK_SIGNAL) for pid in asked)
            records = (folder / "state").rglob
            wait_for(lambda: any("series-0.bin" in each.read_text() for each in records("run.json")), "the record")
            (folder / "leave").touch()
            wait_for(lambda: not any(_proc.catches(pid, STACK_SIGNAL) for pid in asked), "their leaving")
            told = run(["lockstep", "runs", "stack"], folder)
            assert told.code == 0, told
            assert told.out.count("does not answer: it has not begun yet, or is leaving") == ranks, told
            limit = time.monotonic() + LIMIT
            while min(asked.values()) < times:
                assert time.monotonic() < limit, asked
                for pid in asked:
                    catches, stat = _proc.catches(pid, STACK_SIGNAL), _proc.stat(pid)
                    assert stat is not None, f"process {pid} has ended after {asked[pid]} questions"
                    assert not stat.is_dead, f"process {pid} has ended after {asked[pid]} questions"
                    os.kill(pid, STACK_SIGNAL)
                    asked[pid] += not catches
        done = job.finish()
    assert done.code == 0, done


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_thousand_questions_kill_no_rank_that_is_leaving(tmp_path: Path) -> None:
    for job in range(5):
        _ask_leaving_ranks(tmp_path / str(job), 8, 25)
    print("\n1000 signals to 40 ranks without a handler: none was killed")


def test_a_question_kills_no_rank_that_is_leaving(tmp_path: Path) -> None:
    _ask_leaving_ranks(tmp_path / "job", 2, 3)


def test_a_question_kills_no_rank_whose_program_has_taken_the_handler_away(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import faulthandler, os, subprocess, sys\n"
        f"number = {int(STACK_SIGNAL)}\n"
        "assert faulthandler.unregister(number)\n"
        "os.kill(os.getpid(), number)\n"
        "subprocess.run([sys.executable, '-c', f'import os; os.kill(os.getpid(), {number})'], check=True)\n"
        "print('still there')\n"
    )
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path)
    assert (done.code, done.out) == (0, "still there\n"), done
