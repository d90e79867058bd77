"""Ctrl-C, SIGTERM, SIGHUP: passed on, waited for, and enforced."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.launching import LIMIT, Running, environment, gone_within, python_path, run, start, wait_for

_TRAIN = """
import os, signal, sys, time
rank = os.environ["RANK"]
def on_term(signum, frame): raise SystemExit("asked to stop")
if {handles_term}: signal.signal(signal.SIGTERM, on_term)
try:
    open(f"ready-{{rank}}", "w").close()
    while True: time.sleep(0.05)  # not pause(), which a signal that comes right before it does not end
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGINT)      # a Ctrl-C that comes twice must not hit the clean-up
    with open(f"interrupted-{{rank}}", "a") as file: file.write("once ")
    if {stubborn}:
        while True: signal.pause()
    raise
finally:
    open(f"cleaned-{{rank}}", "w").close()
"""


def _training(tmp_path: Path, *options: str, handles_term: bool = False, stubborn: bool = False) -> Running:
    (tmp_path / "train.py").write_text(_TRAIN.format(handles_term=handles_term, stubborn=stubborn))
    job = start(["lockstep", "run", "-n", "2", *options, "train.py"], tmp_path)
    _wait_until_ready(tmp_path)
    return job


def _wait_until_ready(tmp_path: Path) -> None:
    wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)), "training")


def _marks(tmp_path: Path, kind: str) -> list[str]:
    return [(tmp_path / f"{kind}-{rank}").read_text() for rank in range(2) if (tmp_path / f"{kind}-{rank}").exists()]


@pytest.mark.parametrize("to_group", [False, True])
def test_one_interrupt_stops_everyone_cleanly(tmp_path: Path, to_group: bool) -> None:
    with _training(tmp_path) as job:
        (os.killpg if to_group else os.kill)(job.pid, signal.SIGINT)
        done = job.finish()
    assert done.code == 130
    assert _marks(tmp_path, "interrupted") == ["once ", "once "]
    assert len(_marks(tmp_path, "cleaned")) == 2
    assert "lockstep: stopped by SIGINT" in done.err.splitlines()


#: A module that has the signal come to a rank as soon as it is forked.
_EARLY = """
import os, signal
fork = os.fork
def fork_and_ask():
    pid = fork()
    if pid == 0:
        os.kill(os.getpid(), signal.{signal})
    return pid
os.fork = fork_and_ask
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_as_a_rank_is_forked_waits_for_its_handler(tmp_path: Path, signum: signal.Signals) -> None:
    (tmp_path / "early.py").write_text(_EARLY.format(signal=signum.name))
    (tmp_path / "train.py").write_text("print('it trains on')\n")
    done = run(
        ["lockstep", "run", "-n", "1", "train.py"], tmp_path, LOCKSTEP_PRELOAD="early", PYTHONPATH=python_path(tmp_path)
    )
    assert (done.code, done.out) == (128 + signum, ""), done.err


_ASKED = """
import pathlib, signal, time
def on_term(*_):
    pathlib.Path("asked").touch()
    raise SystemExit
signal.signal(signal.SIGTERM, on_term)
pathlib.Path("ready-0").touch()
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("reads", [True, False])
def test_a_signal_is_passed_on_though_nobody_reads_the_launchers_messages(tmp_path: Path, reads: bool) -> None:
    """Which the reader finds when it goes on, and which do not keep the launcher for a user who wants an end."""
    (tmp_path / "train.py").write_text(_ASKED)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"\n" * 4096)
    os.set_blocking(writing, True)
    argv = [sys.executable, "-m", "lockstep", "run", "-n", "1", "train.py"]
    with (
        open(reading, "rb") as shown,
        subprocess.Popen(
            argv, cwd=tmp_path, env=environment(tmp_path), stdin=subprocess.DEVNULL, stderr=writing
        ) as job,
        _killed_if_left(job),
    ):
        os.close(writing)
        wait_for((tmp_path / "ready-0").exists, "training")
        job.send_signal(signal.SIGUSR1)  # of which it says that no rank can save
        job.terminate()
        wait_for((tmp_path / "asked").exists, "the signal reaches the rank", limit=60.0)
        if reads:
            said = shown.read().decode()
            assert said.index("SIGUSR1: no rank can save now") < said.index("lockstep: stopped by SIGTERM")
        else:
            wait_for(lambda: _has_ended_by_now(job), "the end", limit=60.0)
        assert job.wait(LIMIT) == 128 + signal.SIGTERM


def _has_ended_by_now(job: subprocess.Popen[bytes]) -> bool:
    """Ask for an end once more."""
    job.terminate()
    return job.poll() is not None


@contextmanager
def _killed_if_left(job: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever the test finds, leave no launcher behind that waits for a reader."""
    try:
        yield
    finally:
        job.kill()


_IN_A_COLLECTION = """
import ctypes, functools, gc, operator, signal, threading
send = functools.partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGINT)
try:
    list(map(operator.methodcaller("__call__"), [send, gc.collect]))  # no Python code runs between the two
    threading.Event().wait(30)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_that_comes_as_a_collection_is_noted_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_IN_A_COLLECTION)
    done = run(["lockstep", "run", "-n", "1", "train.py"], tmp_path, torch=True)
    assert (done.code, done.out, done.err) == (0, "interrupted\n", "")


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    with _training(tmp_path, "--grace", "60", stubborn=True) as job:
        os.kill(job.pid, signal.SIGINT)
        wait_for(lambda: len(_marks(tmp_path, "interrupted")) == 2, "the first interrupt")
        time.sleep(0.3)  # two signals within a quarter of a second are taken for one
        os.kill(job.pid, signal.SIGINT)
        done = job.finish(limit=10)
    assert done.code == 130
    assert _marks(tmp_path, "cleaned") == []
    assert "stopped by SIGINT; a second signal killed ranks 0 and 1 at once" in done.err


def test_who_does_not_leave_within_the_grace_period_is_killed(tmp_path: Path) -> None:
    with _training(tmp_path, "--grace", "0.3", stubborn=True) as job:
        os.kill(job.pid, signal.SIGINT)
        done = job.finish(limit=10)
    assert done.code == 130
    assert _marks(tmp_path, "cleaned") == []


def test_sigterm_is_passed_on(tmp_path: Path) -> None:
    with _training(tmp_path, handles_term=True) as job:
        os.kill(job.pid, signal.SIGTERM)
        done = job.finish()
    assert done.code == 143
    assert len(_marks(tmp_path, "cleaned")) == 2
    assert "asked to stop" in done.err


_LEAVES_ONE = """
import os, signal, time
launcher = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
reading, writing = os.pipe()
if os.fork() == 0:
    def on_term(*_):
        os.kill(launcher, signal.SIGTERM)
        os._exit(0)
    signal.signal(signal.SIGTERM, on_term)
    os.write(writing, b"x")
    while True:
        time.sleep(0.05)
os.read(reading, 1)
"""


def test_a_signal_after_all_ranks_have_ended_does_not_undo_what_they_did(tmp_path: Path) -> None:
    """It comes as what they have left is ended, from that process."""
    (tmp_path / "train.py").write_text(_LEAVES_ONE)
    done = run(["lockstep", "run", "-n", "1", "train.py"], tmp_path)
    assert done.code == 0, done
    assert done.err == "lockstep: SIGTERM came when training was over: all ranks ended by themselves\n"


def test_a_signal_once_the_end_is_recorded_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('done')\n")
    options = ["--notify", "kill -TERM $PPID"]
    done = run(["lockstep", "run", "-n", "1", *options, "train.py"], tmp_path)
    assert (done.code, done.out) == (0, "done\n"), done


def test_sighup_ends_a_job(tmp_path: Path) -> None:
    with _training(tmp_path) as job:
        os.kill(job.pid, signal.SIGHUP)
        assert job.finish().code == 129


def test_a_job_under_nohup_outlives_a_hangup(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "train.py").write_text(
        "import os, signal\n"
        "assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN\n"
        "open('ready-' + os.environ['RANK'], 'w').close()\n"
        "if os.environ['RANK'] == '0': print(open('fifo').read())\n"
    )
    process = subprocess.Popen(
        ["nohup", sys.executable, "-m", "lockstep", "run", "-n", "2", "train.py"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _wait_until_ready(tmp_path)
        os.killpg(process.pid, signal.SIGHUP)
        fifo.write_text("went on")
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out) == (0, "went on\n"), err


def test_ctrl_c_at_the_terminal_reaches_each_rank_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAIN.format(handles_term=False, stubborn=False))
    keyboard, code = _at_a_terminal(["lockstep", "run", "-n", "2", "train.py"], tmp_path)
    try:
        _wait_until_ready(tmp_path)
        os.write(keyboard, b"\x03")
        assert code() == 130
    finally:
        os.close(keyboard)
    assert _marks(tmp_path, "interrupted") == ["once ", "once "]


def test_ctrl_c_before_the_ranks_run_leaves_nothing(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "slow_import.py").write_text("import os\nopen('importing', 'w').close()\nopen('fifo').read()\n")
    (tmp_path / "train.py").write_text("import signal\nsignal.pause()\n")
    with start(
        ["lockstep", "run", "-n", "2", "train.py"],
        tmp_path,
        LOCKSTEP_PRELOAD="slow_import",
        PYTHONPATH=python_path(tmp_path),
    ) as job:
        wait_for((tmp_path / "importing").exists, "the import")
        os.killpg(job.pid, signal.SIGINT)
        everyone = job.tree()
        # (The signal may have ended the import, and with it whoever reads.)
        wait_for(lambda: _ends_reading(fifo) or not job.tree(), "the end of the import")
        done = job.finish(limit=8)  # not the grace period of 10
    assert done.code == 130
    assert gone_within(everyone, 1.0) == []


def _ends_reading(fifo: Path) -> bool:
    """Give whoever reads ``fifo`` its end; False if nobody does."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        assert error.errno == errno.ENXIO  # noqa: PT017
        return False
    return True


def _at_a_terminal(argv: list[str], tmp_path: Path) -> tuple[int, WaitForCode]:
    """Start ``python -m argv`` in the foreground of a terminal; its keyboard, and a way to wait for its exit code."""
    import pty

    env = environment(tmp_path)
    os.sched_yield()
    pid, keyboard = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, [sys.executable, "-m", *argv], env)
    return keyboard, WaitForCode(pid)


class WaitForCode:
    """Waits for a forked process within the limit."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __call__(self) -> int:
        deadline = time.monotonic() + LIMIT
        while True:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.005)
