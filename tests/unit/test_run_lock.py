"""A run's folder belongs to one process, and the next one gets it however the first one ended."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep import _proc
from lockstep.checkpoint import locks
from lockstep.checkpoint.ask import save_now
from lockstep.checkpoint.disk_folder import DiskFolder
from lockstep.checkpoint.locks import LOCK_FILE, Owner, RunLock, owner_of
from tests.launching import LIMIT

_HOLDER = """
import sys
from pathlib import Path
from lockstep.checkpoint.locks import RunLock
held = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def _holder(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


_ROUND = "LOCKSTEP_ROUND"
_WRITER = """
import sys
from pathlib import Path
import lockstep
from lockstep.checkpoint.locks import RunLock
held = RunLock(Path(sys.argv[1]))
held.check()
print("held", flush=True)
sys.stdin.readline()
try:
    held.check()
except lockstep.CheckpointError as error:
    print(error, flush=True)
held.release()
print("released", flush=True)
"""


def test_a_later_round_of_the_job_displaces_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that has the lock is cut off, and let back when the job has gone on."""
    monkeypatch.setattr(locks, "SUCCESSION", 0.1)
    (tmp_path / f"step-00000003.tmp-{'0' * 16}").mkdir()
    monkeypatch.setenv(_ROUND, "job 1")
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as cut_off:
        assert cut_off.stdin is not None
        assert cut_off.stdout is not None
        assert cut_off.stdout.readline() == "held\n"
        for earlier in ("job 1", "job 0", "another 2"):
            monkeypatch.setenv(_ROUND, earlier)
            with pytest.raises(lockstep.CheckpointError, match="belongs to another job"):
                RunLock(tmp_path)
        monkeypatch.setenv(_ROUND, "job 2")
        lock = RunLock(tmp_path)
        assert not list(tmp_path.glob("*.tmp-*")), "what it was writing is gone"
        cut_off.stdin.write("\n")
        cut_off.stdin.flush()
        said = cut_off.stdout.readline()
        assert f"has another owner by now, process {os.getpid()} on" in said
        assert "the job has continued without this machine, in round 2, and nothing was saved here" in said
        assert cut_off.stdout.readline() == "released\n"
    lock.check()
    owner = owner_of(tmp_path)
    assert owner is not None
    assert (owner.pid, owner.job, owner.round) == (os.getpid(), "job", 2), "and took nothing away"
    lock.release()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_later_round_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_ROUND, "job 1")
    with _holder(tmp_path) as process:
        process.kill()
        process.wait()
        monkeypatch.setenv(_ROUND, "job 2")
        RunLock(tmp_path).release()


def test_another_process_is_refused_by_name_until_the_owner_ends(tmp_path: Path) -> None:
    with _holder(tmp_path) as process:
        owner = owner_of(tmp_path)
        assert owner is not None
        assert (owner.pid, owner.is_gone) == (process.pid, False)
        for _ in range(2):
            with pytest.raises(lockstep.CheckpointError) as caught:
                RunLock(tmp_path)
        assert f"belongs to another job, process {process.pid} on {owner.host} (user {owner.user}, since 20" in str(
            caught.value
        )
        assert "-c" in str(caught.value), "its command"
        assert "wait for it, stop it, or choose another folder" in str(caught.value)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LIMIT) == 0
        assert list(tmp_path.iterdir()) == [], "an owner that ends in peace leaves nothing"
        RunLock(tmp_path).release()


def test_the_lock_of_a_killed_owner_is_free_at_once(tmp_path: Path) -> None:
    with _holder(tmp_path) as process:
        process.kill()
        process.wait()
        assert (tmp_path / LOCK_FILE).exists()
        assert owner_of(tmp_path) is None
        held = RunLock(tmp_path)
        owner = owner_of(tmp_path)
        assert owner is not None
        assert owner.pid == os.getpid()
        held.release()


def test_a_stopped_owner_still_is_the_owner(tmp_path: Path) -> None:
    with _holder(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(lockstep.CheckpointError, match=f"process {process.pid} on"):
            RunLock(tmp_path)


def test_a_host_that_is_renamed_is_the_same_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = RunLock(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    monkeypatch.setenv("LOGNAME", "somebody")
    held.check()
    held.release()


def test_a_lock_that_the_program_lost_is_taken_again(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    (tmp_path / LOCK_FILE).read_bytes()  # as shutil.copytree does, for instance
    held.check()
    with pytest.raises(AssertionError), _holder(tmp_path):
        pass
    (tmp_path / LOCK_FILE).read_bytes()
    with _holder(tmp_path) as process:
        with pytest.raises(lockstep.CheckpointError, match=rf"(?s)owner by now, process {process.pid} on .* a copy"):
            held.check()
        held.release()
        assert (tmp_path / LOCK_FILE).exists()  # it is the other's
        with pytest.raises(lockstep.CheckpointError, match="belongs to another job"):
            RunLock(tmp_path)


def test_one_that_is_just_taking_a_lost_lock_is_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_RECORD_LIMIT", 0.2)
    held = RunLock(tmp_path)
    record = (tmp_path / LOCK_FILE).read_bytes()
    with _holder(tmp_path):
        (tmp_path / LOCK_FILE).write_bytes(record)
        with pytest.raises(lockstep.CheckpointError, match="another owner by now, a job that left no record"):
            held.check()
    held.check()
    held.release()


def test_one_process_shares_its_lock_and_the_last_holder_frees_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    first, second, third = (RunLock(tmp_path / name) for name in ("run", "link", "run"))
    first.release()
    first.release()
    assert owner_of(tmp_path / "link") is not None, "asking must not free it"
    assert _is_refused_elsewhere(tmp_path / "run")
    second.release()
    assert _is_refused_elsewhere(tmp_path / "run")
    del third
    assert owner_of(tmp_path / "run") is None
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def _is_refused_elsewhere(root: Path) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", _HOLDER, str(root)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert f"process {os.getpid()} on" in done.stderr or done.returncode == 0, done.stderr
    return done.returncode != 0


def test_a_forked_child_neither_keeps_nor_frees_its_parents_lock(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    reading, writing = os.pipe()
    tried, trying = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(writing)
            os.close(tried)
            held.release()  # a copy of the parent's: no effect
            try:
                RunLock(tmp_path)
            except lockstep.CheckpointError as error:
                code = 0 if f"process {os.getppid()} on" in str(error) else 2
            os.write(trying, b".")
            os.read(reading, 1)
        finally:
            os._exit(code)
    os.close(reading)
    os.close(trying)
    os.read(tried, 1)
    os.close(tried)
    assert (tmp_path / LOCK_FILE).exists()
    held.release()
    assert not _is_refused_elsewhere(tmp_path), "the child is alive, and has a copy of every descriptor"
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_many_jobs_at_once_have_one_winner_at_a_time(tmp_path: Path) -> None:
    """Processes take and free the folder as fast as they can; a file made with O_EXCL tells if two ever have it."""
    script = """
import os, sys, time
from pathlib import Path
from lockstep.checkpoint.locks import RunLock
from lockstep.errors import CheckpointError
root, taken = Path(sys.argv[1]), 0
limit = time.monotonic() + 250
while taken < 40 and time.monotonic() < limit:
    try:
        held = RunLock(root)
    except CheckpointError:
        continue
    os.close(os.open(root / "inside", os.O_CREAT | os.O_EXCL))
    (root / "inside").unlink()
    held.release()
    taken += 1
print(taken)
"""
    jobs = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [job.communicate(timeout=300)[0] for job in jobs] == ["40\n"] * 4
    assert [job.returncode for job in jobs] == [0] * 4
    assert list(tmp_path.iterdir()) == []


def test_what_is_known_of_an_owner() -> None:
    me = Owner.this_process()
    assert not me.is_gone
    assert Owner.from_json(json.dumps(asdict(me)).encode()) == me
    assert replace(me, start=me.start - 1).is_gone, "the number is another process's now"
    assert replace(me, boot="another").is_gone, "the machine has been started anew"
    assert not replace(me, boot="another", host="elsewhere").is_gone, "not known from here"
    assert not replace(me, namespace="another", pid=2**22 + 1).is_gone, "not known from here"
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert replace(me, pid=child, start=locks._start_of(child) or 0).is_gone, "a zombie"
    os.waitpid(child, 0)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"pid": 1}', b"\xff" * 20, b"[" * 5000])
def test_a_broken_record_is_no_owner_and_no_obstacle(tmp_path: Path, content: bytes) -> None:
    assert Owner.from_json(content) is None
    (tmp_path / LOCK_FILE).write_bytes(content)
    RunLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_record_with_wrong_kinds_is_no_owner() -> None:
    fields = asdict(Owner.this_process())
    assert Owner.from_json(json.dumps({**fields, "pid": "1"}).encode()) is None
    assert Owner.from_json(json.dumps({**fields, "user": 3}).encode()) is None


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run" / LOCK_FILE).symlink_to(tmp_path / "victim")
    with pytest.raises(OSError) as caught:
        RunLock(tmp_path / "run")
    assert caught.value.errno == errno.ELOOP
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has none."""

    def refuse(*_: Any) -> Any:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(locks, "_SETTLING", 0.01)


def _leave_record(root: Path, **changes: Any) -> Owner:
    owner = replace(Owner.this_process(), **changes)
    (root / LOCK_FILE).write_text(json.dumps(asdict(owner)))
    return owner


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_record_counts_until_its_owner_is_known_to_be_gone(tmp_path: Path) -> None:
    changes: dict[str, Any]
    for changes in ({"host": "elsewhere"}, {"pid": os.getppid(), "start": locks._start_of(os.getppid())}):
        owner = _leave_record(tmp_path, **changes)
        assert owner_of(tmp_path) == owner
        with pytest.raises(lockstep.CheckpointError, match=r"If it is gone, remove .*run\.lock: this file system has"):
            RunLock(tmp_path)
    for changes in ({"boot": "another"}, {"start": 1}):
        _leave_record(tmp_path, **changes)
        assert owner_of(tmp_path) is None
        RunLock(tmp_path).release()
        assert list(tmp_path.iterdir()) == []
    RunLock(tmp_path).release()


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_last_of_two_at_once_has_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another_writes_now(_: float) -> None:
        _leave_record(tmp_path, pid=os.getppid())

    monkeypatch.setattr(time, "sleep", another_writes_now)
    with pytest.raises(lockstep.CheckpointError, match=f"process {os.getppid()} on"):
        RunLock(tmp_path)


def test_a_lock_file_that_goes_while_it_is_taken_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner lets go of it between the two moments at which the next job opens it and locks it."""
    locks = fcntl.lockf
    taken = 0

    def lets_go_first(fd: int, how: int) -> None:
        nonlocal taken
        taken += 1
        if taken == 1:
            (tmp_path / LOCK_FILE).unlink()
        locks(fd, how)

    monkeypatch.setattr(fcntl, "lockf", lets_go_first)
    held = RunLock(tmp_path)
    assert taken == 2
    assert Owner.from_json((tmp_path / LOCK_FILE).read_bytes()) == Owner.this_process()
    held.release()


@pytest.mark.parametrize(
    ("look", "seen"),
    [("catches", False), ("catches", True), ("lives", True)],
    ids=["before its handlers are looked at", "after that", "as the signal is sent"],
)
def test_an_owner_that_ends_as_it_is_asked_to_save_is_said_to_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str, seen: bool
) -> None:
    with _holder(tmp_path) as process:

        def end(*_: int) -> bool:
            process.kill()
            process.wait()
            return seen

        monkeypatch.setattr(_proc, "catches", lambda *_: True)
        monkeypatch.setattr(_proc, look, end)
        with pytest.raises(lockstep.CheckpointError, match=rf"(?s)^process {process.pid} on .* and has not saved$"):
            save_now(tmp_path, limit=30.0)


_SAVER = """
import os, signal, sys, time
from pathlib import Path
from lockstep.checkpoint.disk_folder import DiskFolder
from lockstep.checkpoint.locks import RunLock
root, asked = Path(sys.argv[1]), []
held, folder = RunLock(root), DiskFolder(root)
signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))

def publish(draft):
    (draft.path / "manifest.json").write_text("{}")
    os.rename(draft.path, root / draft._name)

under_way = folder.draft(3, []) if sys.argv[2] == "under way" else None
print("held", flush=True)
while not asked:
    time.sleep(0.01)
if under_way is not None:
    publish(under_way)
    time.sleep(0.5)
publish(folder.draft(3, []))
sys.stdin.read()
"""


@pytest.mark.parametrize(("what", "expected"), [("under way", "step-00000003-r2"), ("dead", "step-00000003")])
def test_a_save_that_was_under_way_is_not_the_one_that_was_asked_for(tmp_path: Path, what: str, expected: str) -> None:
    if what == "dead":
        (tmp_path / f"step-00000003.tmp-{'0' * 16}").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", _SAVER, str(tmp_path), what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "held\n"
        assert save_now(tmp_path, limit=30.0).name == expected
        job.communicate("")


def test_no_other_process_is_asked_to_save_that_has_the_owners_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner has ended since its record was read, and the signal would end the process that has its number now."""
    with _holder(tmp_path) as process:
        owner = owner_of(tmp_path)
        assert owner is not None
        earlier = replace(owner, start=owner.start - 1)
        monkeypatch.setattr(DiskFolder, "owner_now", lambda _: earlier)
        monkeypatch.setattr(_proc, "catches", lambda *_: True)
        with pytest.raises(lockstep.CheckpointError, match="has ended, and has not saved"):
            save_now(tmp_path, limit=30.0)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=30) == 0
