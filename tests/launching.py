"""Start real jobs with the launcher, in a session of their own, and look at what they leave."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from lockstep import knobs
from lockstep._proc import descendants
from tests import warm
from tests.namespaces import skip_unless

#: Generous: it only ends a test that hangs.
LIMIT = 300.0
#: Seconds before the end of a test's own time in which a job that hangs is told with what it has written.
_TELLING = 20.0
#: The monotonic time at which the test that runs would be ended, without a word of its jobs.
test_ends = float("inf")

#: LOCKSTEP_TIMES of jobs on several machines, of which none is to be lost because it gets no processor for a while.
PATIENT = "silent=60,cut_off=70,stuck=90,heard=60,forming=120,farewell=60,leaving=70"

#: Python for ``before``: what this job mounts nobody else sees. (CLONE_NEWNS; os.unshare came with Python 3.12.)
OWN_MOUNTS = """
import ctypes, subprocess
if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):
    raise OSError(ctypes.get_errno(), "unshare")
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
"""

#: The same: ranks that are asked to stop since another one has failed are not killed, however late they run.
UNHURRIED = "from lockstep.launch import policy\npolicy.FAILURE_GRACE = 60.0\n"

#: A module that leaves the process that forks room for some processes.
ROOM = """
import errno, os
fork, left = os.fork, [{room}]
def fork_while_there_is_room():
    if not left[0]:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    left[0] -= 1
    return fork()
os.fork = fork_while_there_is_room
"""


@dataclass(frozen=True)
class Finished:
    """A job that ended."""

    code: int
    out: str
    err: str


class Running:
    """A job in a session of its own, so that signals to its process group reach nobody else.

    A job with torch comes from the session's warm process, see tests/warm.py, unless it is to be ``cold``.
    ``before`` is as there.
    """

    def __init__(
        self,
        argv: list[str],
        *,
        cwd: Path,
        env: dict[str, str],
        stdin: str | None = None,
        cold: bool = False,
        before: str = "",
    ) -> None:
        self.process: warm.Process | subprocess.Popen[str]
        if before or (not cold and knobs.PRELOAD not in env):
            self.process = warm.Process(["-m", *argv], cwd=cwd, env=env, stdin=stdin, before=before)
            return
        self.process = subprocess.Popen(
            [sys.executable, "-m", *argv],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if stdin is not None:
            assert self.process.stdin is not None
            self.process.stdin.write(stdin)
            self.process.stdin.close()
            self.process.stdin = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        running = self.process.poll() is None
        if running:
            self.process.kill()
        out, err = self.process.communicate(timeout=LIMIT)
        if running and kind is not None:  # pytest shows it with the failure
            print(f"--- a job that was killed as the test failed, out:\n{out}\n--- err:\n{err}")

    def read_line(self) -> str:
        """The next line on standard output; how a script says where it is."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def read_error(self) -> str:
        """The next line on standard error."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().rstrip("\n")

    def read_errors_to(self, words: str) -> str:
        """What is on standard error up to a line with these words."""
        said = ""
        while words not in said:
            line = self.read_error()
            assert line, f"it never said {words!r}: {said}"
            said += line + "\n"
        return said

    def finish(self, limit: float = LIMIT) -> Finished:
        """Wait for the job's end, or fail with what it has written and where its processes are."""
        seconds = max(0.0, min(limit, test_ends - _TELLING - time.monotonic()))
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            where = "".join(f"\n{pid}: {_where(pid)}" for pid in [self.pid, *self.tree()])
            for pid in [*self.tree(), self.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            out, err = self.process.communicate(timeout=_TELLING / 2)
            raise AssertionError(f"no end within {seconds:.0f} s{where}\n--- out:\n{out}\n--- err:\n{err}") from None
        return Finished(self.process.wait(), out, err)

    def stop_once_it_has_said(self, *texts: str) -> Finished:
        """Send SIGTERM when all of ``texts`` stand on standard error; what it has written there is complete."""
        said = ""
        while not all(text in said for text in texts):
            line = self.read_error()
            assert line or self.process.poll() is None, f"it never said all of {texts}:\n{said}"
            said += f"{line}\n"
        self.process.send_signal(signal.SIGTERM)
        done = self.finish()
        return replace(done, err=said + done.err)

    def tree(self) -> list[int]:
        """Every process of the job but the launcher."""
        return descendants(self.pid)


def environment(tmp_path: Path, *, torch: bool = False, **changes: str) -> dict[str, str]:
    """The environment of a job: logs under ``tmp_path``; no torch in the zygote unless the test asks for it.

    Most tests here are about processes, and importing torch is nine tenths of their time; with ``torch=True`` the
    zygote is as users have it.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")} | {knobs.QUIET: "1"}
    return env | {"XDG_STATE_HOME": str(tmp_path / "state")} | ({} if torch else {knobs.PRELOAD: ""}) | changes


def python_path(*first: Path) -> str:
    """What PYTHONPATH is to be for these folders to come before those of this process."""
    return os.pathsep.join(filter(None, [*map(str, first), os.environ.get("PYTHONPATH", "")]))


def start(
    argv: list[str],
    tmp_path: Path,
    *,
    torch: bool = False,
    stdin: str | None = None,
    cold: bool = False,
    before: str = "",
    **env: str,
) -> Running:
    """Start ``python -m <argv>``; ``torch`` as for :func:`environment`, the rest as for :class:`Running`."""
    job_env = environment(tmp_path, torch=torch, **env)
    return Running(argv, cwd=tmp_path, env=job_env, stdin=stdin, cold=cold, before=before)


def run(
    argv: list[str], tmp_path: Path, *, torch: bool = False, stdin: str | None = None, before: str = "", **env: str
) -> Finished:
    """Start ``python -m <argv>`` and wait for its end."""
    with start(argv, tmp_path, torch=torch, stdin=stdin, cold=False, before=before, **env) as job:
        return job.finish()


def own_mount(target: str | Path, options: str) -> str:
    """Python for ``before``: have an empty file system in memory at ``target`` that only this job sees.

    Skips the test where the machine lets nobody mount.
    """
    skip_unless("mount -t tmpfs tmpfs /mnt && umount /mnt", "a file system of the job's own")
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(target)]
    return f"{OWN_MOUNTS}subprocess.run({mount!r}, check=True)\n"


@contextmanager
def closed_port() -> Iterator[int]:
    """A port of 127.0.0.1 at which nothing listens, and nobody begins to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def gone_within(pids: list[int], seconds: float) -> list[int]:
    """Those of ``pids`` that are still there after ``seconds``; returns as soon as none is.

    The seconds are those of a machine at rest: where more wants to run than there are cores, they are as many more.
    """
    deadline = time.monotonic() + seconds * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))
    while True:
        left = [pid for pid in pids if _is_alive(pid)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.005)


def wait_for(condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
    """Poll until ``condition()`` is true."""
    seconds = max(0.0, min(limit, test_ends - _TELLING - time.monotonic()))
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.005)


@contextmanager
def python(code: str, *args: str) -> Iterator[int]:
    """The process id of a Python that has printed "ready"; it is killed at the end."""
    with subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


@contextmanager
def killed_afterwards(pids: list[int]) -> Iterator[None]:
    """Whatever the test finds, leave none of ``pids`` behind."""
    try:
        yield
    finally:
        for pid in pids:
            if _is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def _where(pid: int) -> str:
    """A process's command line, and the kernel's function that it sleeps in."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{words[-200:]}in {Path(f'/proc/{pid}/wchan').read_text()}"
    except OSError:
        return "gone"


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
