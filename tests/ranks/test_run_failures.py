"""When a rank fails: the first is shown, in full, and everyone is gone within a second."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.launching import UNHURRIED, gone_within, run, start, wait_for

_PEER_FAILS = """
import sys, torch, lockstep

def step(rank):
    if rank == {failing}:
        raise ValueError("bad batch on rank {failing}")
    torch.distributed.all_reduce(torch.ones(1))

w = lockstep.init()
w.barrier()
step(w.rank)
"""


def test_the_first_failure_is_shown_with_its_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PEER_FAILS.format(failing=1))
    done = run(["lockstep", "run", "-n", "3", "train.py"], tmp_path, torch=True)
    assert done.code == 1
    report = done.err[done.err.index("lockstep: ") :].splitlines()
    assert report[0] == "lockstep: rank 1 of 3 failed: exit code 1"
    assert report[1:4] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/train.py", line 11, in <module>',
        "    step(w.rank)",
    ]
    assert "ValueError: bad batch on rank 1" in report
    (log,) = [line for line in report if line.startswith("rank 1's log: ")]
    assert "ValueError: bad batch on rank 1" in Path(log.removeprefix("rank 1's log: ")).read_text()
    assert "ranks 0 and 2: stopped because rank 1 failed" in report


def test_a_run_that_fails_before_its_first_step_is_the_one_that_is_explained(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PEER_FAILS.format(failing=1))
    done = run(["lockstep", "run", "-n", "2", "--log-dir", "logs", "train.py"], tmp_path, torch=True)
    assert done.code == 1
    told = run(["lockstep", "runs", "explain", "./logs", "--json"], tmp_path)
    found = json.loads(told.out)
    assert (found["end"]["code"], found["end"]["exit_code"], found["ranks"], found["steps"]) == ("run-failed", 1, 2, 0)
    (failure,) = found["failures"]
    assert (failure["rank"], failure["error"]["type"]) == (1, "ValueError")


_PRINTS_SLOWLY = """
import os, signal, sys, time
from pathlib import Path

def prints_slowly(kind, error, traceback):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    Path("prints").touch()
    while signal.SIGTERM not in signal.sigpending():  # until this rank is asked to stop
        time.sleep(0.001)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    sys.__excepthook__(kind, error, traceback)

if os.environ["RANK"] == "0":
    sys.excepthook = prints_slowly
    raise ValueError("the first")
while not Path("prints").exists():
    time.sleep(0.001)
raise ValueError("the second")
"""


def test_a_traceback_is_printed_though_another_rank_fails_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PRINTS_SLOWLY)
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, before=UNHURRIED)
    assert done.code == 1, done
    assert "ValueError: the first\n" in done.err[: done.err.index("lockstep: rank 0 of 2 failed")], done.err


_PRINTS_FOR_LONG = """
import os, signal, sys, time
from pathlib import Path

def prints_for_long(kind, error, traceback):
    Path("prints").touch()
    while Path("/proc", stubborn.read_text()).exists():  # a rank that is killed since it does not leave
        time.sleep(0.001)
    sys.__excepthook__(kind, error, traceback)

stubborn, rank = Path("stubborn"), os.environ["RANK"]
if rank == "2":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path("pid").write_text(str(os.getpid()))
    Path("pid").rename(stubborn)
    while True:
        signal.pause()
while not (stubborn if rank == "0" else Path("prints")).exists():
    time.sleep(0.001)
if rank == "0":
    sys.excepthook = prints_for_long
raise ValueError(f"on rank {rank}")
"""


def test_a_traceback_is_printed_to_its_end_though_other_ranks_are_killed_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PRINTS_FOR_LONG)
    done = run(["lockstep", "run", "-n", "3", "train.py"], tmp_path, LOCKSTEP_TIMES="telling=60")
    assert done.code == 1, done
    shown, told, _ = done.err.partition("lockstep: rank 0 of 3 failed: exit code 1")
    assert told, done
    assert "ValueError: on rank 0\n" in shown, done


_SAYS_WHY_AND_LEAVES = """
import argparse, os, sys, time

if os.environ["RANK"] == "0":
    time.sleep(100)  # slower than rank 1 at importing what it needs
for line in range(20):
    print("line", line, "x" * 300)
if {how!r} == "argparse":
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--epochs", type=int)
    parser.parse_args(["--epochs", "none"])
print("out of patience", flush=True)
os._exit(3)
"""


_CRASHES = """
import ctypes, os, signal, threading, torch, lockstep

w = lockstep.init()

def crash():
    {crash}

if w.rank == {rank}:
    crash()
w.barrier()
"""


@pytest.mark.parametrize(
    ("crash", "rank", "begin"),
    [
        ("ctypes.string_at(0)", 0, "  Fatal Python error: Segmentation fault"),
        ("os.kill(os.getpid(), signal.SIGABRT)", 1, "  Fatal Python error: Aborted"),
    ],
)
def test_a_crash_in_native_code_names_the_line_of_python(tmp_path: Path, crash: str, rank: int, begin: str) -> None:
    (tmp_path / "train.py").write_text(_CRASHES.format(crash=crash, rank=rank))
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True)
    assert done.code > 128
    lines = done.err.splitlines()
    assert any(line.startswith(f"lockstep: rank {rank} of 2 failed: killed by signal") for line in lines)
    frames = lines[lines.index(begin) + 1 :]
    assert f'    File "{tmp_path}/train.py", line 7 in crash' in frames[:3]
    assert f'    File "{tmp_path}/train.py", line 10 in <module>' in frames[:3]


@pytest.mark.parametrize(
    ("how", "last"), [("argparse", "train.py: error: argument --epochs: invalid int value: 'none'"), ("exit", "out of")]
)
def test_what_an_unseen_rank_wrote_last_is_told_where_nothing_else_says_why(
    tmp_path: Path, how: str, last: str
) -> None:
    (tmp_path / "train.py").write_text(_SAYS_WHY_AND_LEAVES.format(how=how))
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path)
    report = done.err[done.err.index("lockstep: ") :].splitlines()
    code = 2 if how == "argparse" else 3
    assert report[0] == f"lockstep: rank 1 of 2 failed: exit code {code}"
    (log,) = [number for number, line in enumerate(report) if line.startswith("rank 1's log: ")]
    assert report[log - 1].startswith(f"  {last}")
    assert 2 <= log <= 9


_LATE = """
import datetime, os, lockstep
w = lockstep.init(timeout=60)
w.barrier()
w.group.set_timeout(datetime.timedelta(seconds=2))
if w.rank == 1:
    while not os.path.exists("told"):
        pass
print(w.mean(1.0))
"""


def test_a_late_rank_is_told_in_one_exception_of_the_users_frames(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_LATE)
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True)
    shown = [line.removeprefix("[rank0]: ") for line in done.err.splitlines() if line.startswith("[rank0]: ")]
    assert shown[:3] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/train.py", line 9, in <module>',
        "    print(w.mean(1.0))",
    ]
    (message,) = [line for line in shown if line.startswith("lockstep.CollectiveTimeout: ")]
    expected = "rank 0 of 2: World.mean(): rank 1 did not come: rank 0 timed out after 2 s in all_reduce #"
    assert message.startswith(f"lockstep.CollectiveTimeout: {expected}")
    assert "lockstep: rank 1 did not come: rank 0 of 2 failed: exit code 1" in done.err
    assert done.err.count("Traceback") == 1
    assert len(shown) < 10


def test_a_traceback_on_the_terminal_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nif os.environ['RANK'] == '0': 1 / 0\n")
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path)
    assert done.err.count("Traceback") == 1
    assert (
        "lockstep: rank 0 of 2 failed: exit code 1\nZeroDivisionError: division by zero (its traceback is above)"
        in done.err
    )
    own = done.err.index("Traceback (most recent call last):\n" + f'  File "{tmp_path}/train.py", line 2')
    assert own == 0  # as under python: no frame of the launcher's before it


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f(): f()\nf()\n", "RecursionError"),
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt"),
        (
            "class Odd(ValueError):\n  def __str__(self): 1 / 0\nraise Odd\n",
            'train.py", line 3, in <module>\n    raise Odd',
        ),
        ("import sys\nsys.excepthook = lambda *a: print('mine', file=sys.stderr)\n1 / 0\n", "ZeroDivisionError"),
    ],
)
def test_every_kind_of_error_is_told(tmp_path: Path, source: str, text: str) -> None:
    (tmp_path / "train.py").write_text(source)
    done = run(["lockstep", "run", "-n", "1", "train.py"], tmp_path)
    assert done.code == (130 if "Interrupt" in text else 1)
    assert text in done.err
    assert "/launch/" not in done.err
    if "excepthook" in source:
        assert done.err.startswith("mine\n")


_WAIT = """
import os, signal, sys
rank = int(os.environ["RANK"])
if {stubborn}: signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0: signal.pause()       # a child that nobody waits for
open(f"ready-{{rank}}", "w").write(str(os.getpid()))
print("ready", rank, flush=True)
while True: signal.pause()
"""


def _pids_when_ready(tmp_path: Path, ranks: int) -> list[int]:
    files = [tmp_path / f"ready-{rank}" for rank in range(ranks)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), "the ranks")
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_killed_rank_is_named_and_everyone_is_gone_within_a_second(tmp_path: Path, stubborn: bool) -> None:
    (tmp_path / "train.py").write_text(_WAIT.format(stubborn=stubborn))
    with start(["lockstep", "run", "-n", "3", "train.py"], tmp_path) as job:
        pids = _pids_when_ready(tmp_path, 3)
        everyone = [job.pid, *job.tree()]
        assert len(everyone) == 8  # launcher, zygote, three ranks and a child of each
        os.kill(pids[1], signal.SIGKILL)
        # 0.5 s to leave by themselves, 0.3 s for what ranks left behind, and then nobody asks any more
        left = gone_within([pid for pid in everyone if pid != job.pid], 1.0)
        done = job.finish()
    assert left == []
    assert done.code == 128 + signal.SIGKILL
    assert "lockstep: rank 1 of 3 failed: killed by signal 9 (SIGKILL)" in done.err
    assert "the kernel's out-of-memory killer" in done.err
    assert "\nranks 0 and 2: stopped because rank 1 failed" in done.err


_HANGS_AFTER_FAILING = """
import os, signal, threading
if os.environ["RANK"] == "1":
    threading.Thread(target=signal.sigwait, args=([signal.SIGUSR1],)).start()   # keeps the process from leaving
    raise ValueError("cause")
while True: signal.pause()
"""


def test_a_failed_rank_that_can_not_leave_does_not_hold_up_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_HANGS_AFTER_FAILING)
    done = run(["lockstep", "run", "-n", "2", "--grace", "0.2", "train.py"], tmp_path)
    assert done.code == 1
    assert "rank 1 of 2 failed: exit code 1" in done.err
    assert "ValueError: cause" in done.err
    assert "rank 0: stopped because rank 1 failed" in done.err


def test_several_ranks_that_fail_by_themselves_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "rank = int(os.environ['RANK'])\n"
        "open(f'here-{rank}', 'w').close()\n"
        "while not all(os.path.exists(f'here-{r}') for r in range(2)): pass\n"
        "raise ValueError(f'on rank {rank}')\n"
    )
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path)
    assert done.code == 1
    (first,) = re.findall(r"lockstep: rank (\d) of 2 failed: exit code 1", done.err)
    assert f"ValueError: on rank {first}" in done.err
    assert "failed too: ValueError: on rank" in done.err or "stopped because rank" in done.err


def test_more_ranks_than_open_files_allow_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')\n")
    done = run(["lockstep", "run", "-n", "1000000", "hello.py"], tmp_path)
    assert done.code != 0
    assert "1000000 ranks on this machine need about 7000032 open files, and the limit is" in done.err
    assert "Traceback" not in done.err


_WEIGHS_ALONE = """
import torch, lockstep

world = lockstep.init("gloo")
model = lockstep.replicate(torch.nn.Linear(4, 1))
for step in range(2):
    if step and world.rank == 0:
        world.weigh(3)
    model(torch.ones(2, 4)).sum().backward()
"""


def test_ranks_in_different_collectives_are_named_where_gloo_ends_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_WEIGHS_ALONE)
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True, LOCKSTEP_TIMEOUT="30")
    assert done.code == 128 + signal.SIGABRT
    assert "the ranks were in different collectives, which gloo answers with abort():" in done.err
    assert f"  rank 0 waited in adding up the items of all ranks (World.weigh) at {tmp_path}/train.py:9" in done.err
    assert f"  rank 1 waited in averaging gradients at {tmp_path}/train.py:9" in done.err


_SAVES_AND_FAILS = """
import torch, lockstep
world = lockstep.init()
model = lockstep.replicate(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer)
for step in range(7):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 4:
        saved.save()
if {fails}:
    raise ValueError("planted")
"""


@pytest.mark.parametrize("fails", [True, False])
def test_after_a_failure_it_is_said_from_what_the_run_can_go_on(fails: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SAVES_AND_FAILS.format(fails=fails))
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True)
    assert done.code == int(fails), done
    said = (
        "lockstep: the last checkpoint is of step 5\n"
        "next: run the same command again: with epochs() or restore() it resumes from the newest checkpoint that is "
        "sound\n"
    )
    assert (said in done.err) == fails, done.err
