"""How the processes of a job are ended, and which are left to themselves for a while."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lockstep import knobs
from lockstep.launch.channel import _BOOT
from lockstep.launch.processes import _is_tracker
from tests.launching import LIMIT, killed_afterwards, wait_for

#: Starts a tracker, and tells its process; ends with standard input.
_START = "from {module} import _resource_tracker as t; t.ensure_running(); print(t._pid, flush=True); input()"


@pytest.mark.parametrize(
    "module", ["multiprocessing.resource_tracker", "joblib.externals.loky.backend.resource_tracker"]
)
def test_a_resource_tracker_is_known(module: str) -> None:
    if find_spec(module.partition(".")[0]) is None:
        pytest.skip("not installed here")
    argv = [sys.executable, "-c", _START.format(module=module)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        tracker = int(starter.stdout.readline())
        wait_for(lambda: _is_tracker(tracker), "the fork becomes the tracker")
        assert not _is_tracker(starter.pid)
        starter.stdin.write("\n")
    wait_for(lambda: not Path(f"/proc/{tracker}").exists(), "the tracker ends with who started it")


#: Sweeps while the list of what is below shows nothing, twice: as it does where processes change parents meanwhile.
_UNSEEN = """
import os, subprocess
from lockstep import _proc
from lockstep.launch import processes
processes.become_subreaper()
child = subprocess.Popen(["sleep", "1000"])
seen, calls = _proc.descendants, []
def descendants(pid):
    calls.append(pid)
    return seen(pid) if len(calls) > 2 else []
_proc.descendants = descendants
swept = processes.sweep(patience=0.1)
print(child.pid, seen(os.getpid()), len(calls) > 2, swept.dead == {child.pid}, flush=True)
"""


def test_a_process_that_was_not_seen_is_ended_all_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", _UNSEEN], capture_output=True, text=True, timeout=LIMIT)
    child, rest = done.stdout.split(" ", 1)
    assert rest == "[] True True\n", done.stderr
    assert not Path(f"/proc/{child}").exists()


#: Has two processes below it, of which one belongs to root, and sweeps as another user.
_FOREIGN = """
import os, resource, subprocess  # (which the other user can't import)
from lockstep.launch import processes
processes.become_subreaper()
foreign = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
os.setuid(65534)
own = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
print(foreign.pid, own.pid, flush=True)
swept = processes.sweep(patience=0.1, limit=300.0)
print(swept.dead == {own.pid}, swept.kept == {foreign.pid: "sleep"}, flush=True)
"""


def test_a_process_of_another_user_does_not_keep_the_others_from_their_end() -> None:
    if os.getuid():
        pytest.skip("only root can become another user")
    with subprocess.Popen([sys.executable, "-c", _FOREIGN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with killed_afterwards([int(pid) for pid in process.stdout.readline().split()]):
            assert process.stdout.readline() == "True True\n"
            assert process.wait(LIMIT) == 0


#: Has a rank that belongs to another user, passes signals on to it, and ends what it can.
_FOREIGN_RANK = """
import os, resource, signal, socket, subprocess  # (which the other user can't import)
from lockstep.job.messages import Channel
from lockstep.launch.channel import Clear, Cleared, Signal
from lockstep.launch.zygote import _Zygote
ours, theirs = socket.socketpair()
launcher, here = Channel(ours, [Cleared]), os.pidfd_open(os.getpid())
zygote = _Zygote(Channel(theirs, []), "nowhere", frozenset(), launcher=here)
streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
foreign = subprocess.Popen(["sleep", "1000"], **streams)
os.setuid(65534)
own = subprocess.Popen(["sleep", "1000"], **streams)
print(foreign.pid, own.pid, flush=True)
zygote._ranks = {foreign.pid: 0, own.pid: 1}
zygote._handle(Signal([0, 1], signal.SIGTERM), [])
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
for _ in range(2):
    zygote._handle(Clear([]), [])
    print(launcher.receive(), flush=True)
"""


def test_a_rank_that_belongs_to_another_user_is_told_of_once() -> None:
    if os.getuid():
        pytest.skip("only root can become another user")
    with subprocess.Popen(
        [sys.executable, "-c", _FOREIGN_RANK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        foreign, own = (int(pid) for pid in process.stdout.readline().split())
        with killed_afterwards([foreign, own]):
            out, err = process.communicate(timeout=LIMIT)
    assert out == "[(Cleared(), [])]\n" * 2, err
    assert err == f"lockstep: process {foreign} (sleep) belongs to another user, so it can't be ended from here\n"


#: Spares a process that has ended by the time of the sweep, then passes a signal on to it.
_SPARED = """
import os, signal, socket
from lockstep.job.messages import Channel
from lockstep.launch.channel import Clear, Cleared, Signal
from lockstep.launch.zygote import _Zygote
ours, theirs = socket.socketpair()
launcher, here = Channel(ours, [Cleared]), os.pidfd_open(os.getpid())
zygote = _Zygote(Channel(theirs, []), "nowhere", frozenset(), launcher=here)
spared = os.fork()
if not spared:
    os._exit(0)
zygote._ranks = {spared: -1}
os.waitid(os.P_PID, spared, os.WEXITED | os.WNOWAIT)
zygote._handle(Clear([spared]), [])
zygote._handle(Signal([-1], signal.SIGKILL), [])
print(launcher.receive(), zygote._ranks)
"""


def test_a_spared_process_that_ends_meanwhile_gets_no_more_signals() -> None:
    done = subprocess.run([sys.executable, "-c", _SPARED], capture_output=True, text=True, timeout=30)
    assert done.stdout == "[(Cleared(), [])] {}\n", done.stderr


_BRIEF = """
import atexit, sys, threading, weakref
from lockstep.launch import processes

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
weakref.finalize(kept, print, "a finalizer of the zygote's")
processes.leave_finalizers_to_the_kernel()
weakref.finalize(kept, print, "a finalizer of its own")
atexit.register(print, "an exit function")
sys.stdout.write("a buffer, ")
threading.Timer(0.05, print, ("a thread",)).start()
processes.end_and_leave_memory_to_the_kernel(300)
"""


def test_a_process_that_leaves_its_memory_ends_as_any_other() -> None:
    done = subprocess.run([sys.executable, "-c", _BRIEF], capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.splitlines() == ["a buffer, a thread", "an exit function", "a finalizer of its own"], done.stderr
    assert done.returncode == 300 & 0xFF
    assert done.stderr == ""


#: Asks for many ranks before it reads a single answer, over a socket that holds little.
_MANY = """
import os, signal, socket, sys
from lockstep.job.messages import Channel
from lockstep.launch.channel import Exited, Finish, Fork, Ready, Request, Started
from lockstep.launch.zygote import _Zygote
signal.alarm({limit})
ours, theirs = socket.socketpair()
for end in (ours, theirs):
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
here = os.pidfd_open(os.getpid())
pid = os.fork()
if pid == 0:
    ours.close()
    zygote = _Zygote(Channel(theirs, Request.__args__), "nowhere", frozenset(), launcher=here)
    zygote.serve()
    os._exit(0)
theirs.close()
launcher = Channel(ours, [Ready, Started, Exited])
for rank in range(300):
    launcher.send(Fork(rank, {{"NAME": "x" * 300}}, {{}}))
launcher.send(Finish())
told = []
try:
    while True:
        told += [answer for answer, _ in launcher.receive()]
except EOFError:
    print([answer.rank for answer in told if isinstance(answer, Started)] == list(range(300)))
"""


def test_many_ranks_are_asked_for_before_an_answer_is_read() -> None:
    done = subprocess.run([sys.executable, "-c", _MANY.format(limit=60)], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_the_process_that_forks_leaves_if_its_launcher_was_killed_before(tmp_path: Path) -> None:
    """Though another process holds the launcher's end of the socket open."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    ours, theirs = socket.socketpair()
    (tmp_path / "job").mkdir()
    home = str(Path(knobs.__file__).parents[1])
    argv = [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(gone.pid), str(tmp_path / "job"), "", home]
    with ours, theirs:
        done = subprocess.run(argv, pass_fds=[theirs.fileno()], timeout=LIMIT, check=False)
    assert done.returncode == 0
    assert not (tmp_path / "job").exists()
