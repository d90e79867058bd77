"""A terminal that goes: its window is closed, or the connection to its host is lost. The run saves, as by SIGTERM."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lockstep import _proc
from lockstep.job.files import EXIT_SAVED
from lockstep.runs import history
from tests.faults import jobs
from tests.launching import LIMIT, environment, gone_within, killed_afterwards, python_path, wait_for
from tests.sshd import sshd

_TRAIN = """
import atexit, os, sys, time
from pathlib import Path
import lockstep.checkpoint.storage
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

strikes_at = sys.argv[1] if len(sys.argv) > 1 else ""
struck = Path("struck")

def at(place, rank=0):
    "Be here for a while, so that the terminal goes meanwhile."
    print("a line for the terminal")
    print("another one", file=sys.stderr)
    if place == strikes_at and int(os.environ["RANK"]) == rank and not struck.exists():
        struck.touch()
        begun = time.monotonic()
        while time.monotonic() < begun + 1.0:
            print("at", place)
            time.sleep(0.01)

at("import")
world = lockstep.init()
if strikes_at == "restart" and world.rank == 1 and os.environ["LOCKSTEP_RESTART"] == "1":
    struck.touch()
model = lockstep.replicate(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4, num_workers=1))
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer, loader=loader)
model.register_forward_pre_hook(lambda *_: at("forward"))
rename = os.rename
def slow_rename(*args, **kwargs):
    at("save")
    at("async save")
    rename(*args, **kwargs)
os.rename = slow_rename
atexit.register(at, "shutdown")
for epoch in saved.epochs(2 if strikes_at == "shutdown" else 10**6):
    for (batch,) in loader:
        at("step")
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        at("collective", 1)
        world.mean(1.0)
        if saved.step == 5:
            Path(f"trains-{world.rank}").write_text(str(os.getpid()))
            if strikes_at == "restart" and world.rank == 1 and os.environ["LOCKSTEP_RESTART"] == "0":
                os.kill(os.getpid(), 9)
    model.eval()
    for turn in range(2):
        at("evaluation", 1)
        saved.between_steps()
    model.train()
    if strikes_at == "save":
        saved.save()
    if strikes_at == "async save":
        saved.async_save()
    at("epoch")
    if epoch == 3 and world.is_main:
        open("long", "w").close()
"""


class _Job:
    """A job in a terminal. ``leader`` is the first process of the terminal's session."""

    def __init__(self, folder: Path, leader: int, screen: int) -> None:
        self.folder, self.leader, self.screen = folder, leader, screen
        os.set_blocking(screen, False)
        self._code: int | None = None

    @property
    def _logs(self) -> Path:
        return self.folder / "state" / "lockstep" / "logs"

    def launcher(self) -> int:
        """The launcher's process, once the ranks train."""
        self.wait_for(lambda: all((self.folder / f"trains-{rank}").exists() for rank in range(2)), "steps")
        self.wait_for(lambda: list(self._logs.glob("*/run.json")), "the run's record")
        found = [self.leader, *_proc.descendants(self.leader)]
        return next(pid for pid in found if "lockstep\0run" in _proc.read(pid, "cmdline") and _proc.children(pid))

    def wait_for(self, condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
        """Read from the screen until ``condition()`` is true."""

        def reads() -> object:
            with suppress(BlockingIOError, OSError):
                os.read(self.screen, 1 << 16)
            return condition()

        wait_for(reads, what, limit)

    def hang_up(self) -> None:
        """Close the window."""
        os.close(self.screen)
        self.screen = -1

    def has_ended(self) -> bool:
        """Whether the leader has."""
        if self._code is None:
            pid, status = os.waitpid(self.leader, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code is not None

    def code(self) -> int:
        """The exit code of the leader."""
        wait_for(self.has_ended, "the leader's end", 120.0)
        assert self._code is not None
        return self._code

    def end(self) -> int:
        """The exit code of the run, once all of it has ended, by its record."""
        (folder,) = self._logs.iterdir()
        wait_for(lambda: history.read(folder).about.get("ended") is not None, "the run's end")
        return int(history.read(folder).about["exit_code"])

    def saved_at(self) -> int:
        """The step of the newest checkpoint; 0: there is none."""
        return max((int(path.name[5:]) for path in (self.folder / "run").glob("step-*")), default=0)


@contextmanager
def _in_a_terminal(
    folder: Path, command: list[str], *, controls: bool = True, env: dict[str, str] | None = None
) -> Iterator[_Job]:
    """Start a command in a terminal of its own.

    Args:
        folder: where.
        command: what leads the session.
        controls: the terminal is the session's own; else it has only the descriptors, as what a daemon starts.
        env: variables to change.
    """
    screen, keyboard = pty.openpty()
    environ = environment(folder, torch=True, **(env or {}))
    leader = os.fork()
    if leader == 0:
        os.setsid()
        if controls:
            fcntl.ioctl(keyboard, termios.TIOCSCTTY, 0)
        for fd in range(3):
            os.dup2(keyboard, fd)
        os.closerange(3, 100)
        os.chdir(folder)
        os.execvpe(command[0], command, environ)
    os.close(keyboard)
    job = _Job(folder, leader, screen)
    try:
        yield job
    finally:
        if job._code is None:
            with killed_afterwards([leader, *_proc.descendants(leader)]):
                pass
            job.code()
        if job.screen >= 0:
            job.hang_up()


def _run(*words: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", "run", *words]


@pytest.mark.parametrize("how", ["launcher leads", "shell leads", "shell is killed", "no controlling terminal"])
def test_a_terminal_that_goes_makes_the_run_save(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    shell = ["bash", "-c", '"$@"; true', "bash"] if how.startswith("shell") else []
    with _in_a_terminal(
        tmp_path, [*shell, *_run("-n", "2", "train.py")], controls=how != "no controlling terminal"
    ) as job:
        launcher = job.launcher()
        everyone = [launcher, *_proc.descendants(launcher)]
        with killed_afterwards([pid for pid in everyone if pid != job.leader]):
            if how == "shell is killed":
                os.kill(job.leader, signal.SIGKILL)
            else:
                job.hang_up()
            if how == "no controlling terminal":  # nobody tells it, and it loses nothing but its output
                wait_for((tmp_path / "long").exists, "more epochs")
                os.kill(launcher, signal.SIGHUP)
            assert job.end() == EXIT_SAVED
            assert job.saved_at() >= 5
            job.code()
            assert gone_within(everyone, 10.0) == []


@pytest.mark.parametrize("launcher", ["python", pytest.param("torchrun", marks=pytest.mark.campaign)])
def test_without_a_launcher_of_lockstep_a_run_saves_too(tmp_path: Path, launcher: str) -> None:
    """Also if it finds out by a line that it prints, long before the signal comes."""
    (tmp_path / "train.py").write_text(_TRAIN)
    torchrun = ["-m", "torch.distributed.run", "--standalone"] if launcher == "torchrun" else []
    with _in_a_terminal(tmp_path, [sys.executable, *torchrun, "train.py"], controls=False) as job:
        job.wait_for((tmp_path / "trains-0").exists, "steps")
        everyone = [job.leader, *_proc.descendants(job.leader)]
        with killed_afterwards(everyone[1:]):
            job.hang_up()
            wait_for(lambda: (tmp_path / "long").exists() or job.has_ended(), "more epochs, whose output is lost")
            assert not job.has_ended(), job.code()
            os.kill(int((tmp_path / "trains-0").read_text()), signal.SIGHUP)
            assert job.code() == EXIT_SAVED or torchrun, "torchrun has codes of its own"
            assert job.saved_at() >= 5
            assert gone_within(everyone, 10.0) == []


_WORKERS = """
import os, sys, time
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

context, sharded = sys.argv[1], sys.argv[2] == "sharded"

class Data(Dataset):
    def __init__(self):
        self.rank = os.environ["RANK"]
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.ones(4)
    def __setstate__(self, state):  # in a worker that is not forked
        self.__dict__.update(state)
        hang_about(self.rank)

def hang_about(rank):
    open(f"worker-of-{rank}", "w").close()
    limit = time.monotonic() + 60
    while not os.path.exists("hung-up") and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.2)  # so that the signal is seen here

if __name__ == "__main__":
    world = lockstep.init()
    model = lockstep.replicate(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context=context)
    loader = lockstep.shard(loader) if sharded else loader
    saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer, loader=loader if sharded else None)
    for epoch in saved.epochs(10):
        if epoch == 1 and context == "fork":
            os.register_at_fork(after_in_child=lambda: hang_about(world.rank))
        for batch in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            if not sharded:
                saved.between_steps()
"""


@pytest.mark.parametrize(
    ("context", "loader"),
    [
        ("fork", "sharded"),
        ("fork", "plain"),
        pytest.param("spawn", "sharded", marks=pytest.mark.campaign),
        pytest.param("forkserver", "sharded", marks=pytest.mark.campaign),
    ],
)
def test_a_worker_that_is_about_to_start_outlives_the_terminal(tmp_path: Path, context: str, loader: str) -> None:
    (tmp_path / "train.py").write_text(_WORKERS)
    # The kernel tells all processes of the terminal when the leader of its session, a shell, has ended.
    shell = ["bash", "-c", '"$@"; true', "bash"]
    with _in_a_terminal(tmp_path, [*shell, *_run("-n", "2", "train.py", context, loader)]) as job:
        job.wait_for(lambda: all((tmp_path / f"worker-of-{rank}").exists() for rank in range(2)), "workers")
        job.wait_for(lambda: list(job._logs.glob("*/run.json")), "the run's record")
        everyone = _proc.descendants(job.leader)
        with killed_afterwards(everyone):
            job.hang_up()
            job.code()
            (tmp_path / "hung-up").touch()
            assert job.end() == EXIT_SAVED
            assert gone_within(everyone, 10.0) == []


#: Where the terminal goes, and how the run may end. Ranks that have just been started again may have nothing to save,
#: and who is on its way out when all is done is ended by the signal, or is faster.
_PLACES = {
    "start": {129},
    "import": {129},
    "forward": {EXIT_SAVED},
    "collective": {EXIT_SAVED},
    "save": {EXIT_SAVED},
    "epoch": {EXIT_SAVED},
    "evaluation": {EXIT_SAVED},
    "async save": {EXIT_SAVED},
    "shutdown": {0, 129},
    "restart": {EXIT_SAVED, 129},
}


@pytest.mark.campaign
@pytest.mark.parametrize("place", _PLACES)
def test_a_terminal_that_goes_at_any_place(tmp_path: Path, place: str) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    with _in_a_terminal(tmp_path, _run("-n", "2", "--max-restarts", "1", "train.py", place)) as job:
        if place != "start":
            job.wait_for((tmp_path / "struck").exists, place)
        else:
            job.wait_for(lambda: _proc.children(job.leader), "the zygote")
        everyone = [job.leader, *_proc.descendants(job.leader)]
        with killed_afterwards(everyone[1:]):
            job.hang_up()
            code = job.code()
            assert gone_within(everyone, 10.0) == []
    assert code in _PLACES[place]
    assert bool(job.saved_at()) == (code == EXIT_SAVED)


def test_a_job_on_several_hosts_saves_when_its_terminal_goes(tmp_path: Path) -> None:
    command = _run("--hosts", "one,two", "-n", "1", str(jobs.SCRIPT), str(tmp_path), "--slow", "0.05", "--epochs", "50")
    path = python_path(jobs.SCRIPT.parents[2])
    (tmp_path / "sshd").mkdir(mode=0o700)
    with sshd(tmp_path / "sshd") as server:
        env = {"LOCKSTEP_SSH": server.client, "LOCKSTEP_BACKEND": "gloo", "PYTHONPATH": path}
        with _in_a_terminal(tmp_path, command, env=env) as job:
            job.wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 3, "training", 120.0)
            there = [*_proc.descendants(job.leader), *_proc.descendants(server.pid)]
            with killed_afterwards(there):
                job.hang_up()
                assert job.code() == EXIT_SAVED
                assert gone_within(there, 10.0) == []
    assert job.saved_at() == max(line["step"] for line in jobs.lines(tmp_path, 0) if "step" in line)
