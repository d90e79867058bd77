"""A command that is told what becomes of a job: in order, beside the job, within its time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lockstep import knobs
from lockstep.launch.notify import Notice, Notifier
from lockstep.launch.spec import JobSpec, Program
from tests.launching import killed_afterwards, wait_for


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command takes too long, unless the test says so."""
    monkeypatch.setenv(knobs.TIMES, "notify=300")


def _read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_commands_run_in_the_order_of_what_they_tell(tmp_path: Path) -> None:
    told, gate = tmp_path / "told", tmp_path / "gate"
    os.mkfifo(gate)
    notifier = Notifier(f"cat {gate} > /dev/null; cat >> {told}")
    before = time.time()
    notifier.tell(Notice.HANG, "rank 1 is late\nby far", ranks=2, step=None)
    notifier.tell(Notice.ENDED, "done", ranks=2, step=7)
    assert notifier.look(time.monotonic()) == []  # the first one waits at the gate, and holds nobody up
    assert not told.exists()
    gate.write_text("")  # it returns when the first command has opened the gate
    while not told.exists() or not told.read_text():
        time.sleep(0.01)
    assert [each["event"] for each in _read(told)] == ["hang"]
    opener = threading.Thread(target=gate.write_text, args=("",))  # and now when the second has, which begins below
    opener.start()
    assert notifier.finish() == []
    opener.join()
    one, other = _read(told)
    assert before <= float(str(one.pop("at"))) <= time.time()
    assert one.pop("host") == os.uname().nodename
    assert one == {
        "schema": "lockstep.notify/1",
        "event": "hang",
        "text": "rank 1 is late\nby far",
        "ranks": 2,
        "step": None,
    }
    assert (other["event"], other["text"], other["step"]) == ("ended", "done", 7)


def test_a_command_that_fails_is_told_with_its_last_words() -> None:
    notifier = Notifier("echo first; echo no such host >&2; exit 7")
    notifier.tell(Notice.FAILED, "rank 0 failed")
    assert notifier.finish() == [
        "the command of --notify failed with exit code 7; the event was: the job has failed\n  no such host"
    ]
    silent = Notifier("kill -9 $$")
    silent.tell(Notice.RESTART, "again")
    assert silent.finish() == ["the command of --notify was killed by signal 9; the event was: the ranks start again"]


#: Runs a command as root that takes too long, and becomes another user, who can't kill it.
_FOREIGN = """
import json, os, resource, socket, subprocess  # (which the other user can't import)
from lockstep.launch.notify import Notice, Notifier
notifier = Notifier("exec sleep 1000 < /dev/null")
notifier.tell(Notice.ENDED, "done")
print(notifier._running._process.pid, flush=True)
os.setuid(65534)
print(notifier.finish(), flush=True)
os._exit(0)  # a warning that it still runs is of no use here
"""


def test_a_command_that_belongs_to_another_user_and_takes_too_long_is_left_to_itself() -> None:
    if os.getuid():
        pytest.skip("only root can become another user")
    env = os.environ | {knobs.TIMES: "notify=1"}
    with subprocess.Popen([sys.executable, "-c", _FOREIGN], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with killed_afterwards([int(process.stdout.readline())]):
            said = process.stdout.readline()
    assert "did not end within 1 s, and belongs to another user: it was left to itself; the event was" in said


def test_a_command_that_takes_too_long_is_killed_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knobs.TIMES, "notify=1")
    pid = tmp_path / "pid"
    notifier = Notifier(f"sleep 600 & echo $! > {pid}; echo waiting; wait")
    begin = time.monotonic()
    notifier.tell(Notice.HANG, "late")
    running = notifier._running
    assert running is not None
    wait_for(lambda: b"waiting" in os.pread(running._output.fileno(), 100, 0), "its words")
    (said,) = notifier.finish()
    assert time.monotonic() - begin >= 1
    assert said == (
        "the command of --notify did not end within 1 s, and was killed; the event was: ranks hold up the others\n"
        "  waiting"
    )
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX":
        time.sleep(0.01)


def test_a_command_gets_the_signals_that_the_launcher_blocks() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        notifier = Notifier("kill -TERM $$; exit 3")
        notifier.tell(Notice.ENDED, "done")
        (said,) = notifier.finish()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "was killed by signal 15" in said


def test_without_a_command_nothing_is_told() -> None:
    notifier = Notifier(None)
    notifier.tell(Notice.ENDED, "done")
    assert notifier.finish() == []
    assert notifier.look(0.0) == []
    with pytest.raises(ValueError, match="--notify=' ': expected a command"):
        JobSpec(Program("train.py"), nproc=1, notify=" ")
