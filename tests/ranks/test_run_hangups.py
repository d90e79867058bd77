"""A terminal that goes: its window is closed, or the connection to its host is lost. The run saves, as by SIGTERM."""

from __future__ import annotations

import os
import pty
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep import _proc
from lockstep.job.files import EXIT_SAVED
from lockstep.runs import history
from tests.launching import environment, gone_within, killed_afterwards, wait_for

_TRAIN = """
import os, sys, time
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

world = lockstep.init()
model = lockstep.replicate(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4, num_workers=1))
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer, loader=loader)
for epoch in saved.epochs(10**6):
    for (batch,) in loader:
        print("a line for the terminal")
        print("another one", file=sys.stderr)
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if saved.step == 5:
            open(f"trains-{world.rank}", "w").close()
    if epoch == 3 and world.is_main:
        open("long", "w").close()
"""


class _Job:
    """A job in a terminal. ``leader`` is the first process of the terminal's session."""

    def __init__(self, folder: Path, leader: int, screen: int) -> None:
        self.folder, self.leader, self.screen = folder, leader, screen

    @property
    def _logs(self) -> Path:
        return self.folder / "state" / "lockstep" / "logs"

    def launcher(self) -> int:
        """The launcher's process, once the ranks train."""
        wait_for(lambda: self._read() and all((self.folder / f"trains-{rank}").exists() for rank in range(2)), "steps")
        wait_for(lambda: self._read() and list(self._logs.glob("*/run.json")), "the run's record")
        found = [self.leader, *_proc.descendants(self.leader)]
        return next(pid for pid in found if "lockstep\0run" in _proc.read(pid, "cmdline") and _proc.children(pid))

    def _read(self) -> bool:
        os.set_blocking(self.screen, False)
        try:
            os.read(self.screen, 1 << 16)
        except BlockingIOError:
            pass
        return True

    def hang_up(self) -> None:
        """Close the window."""
        os.close(self.screen)
        self.screen = -1

    def end(self) -> tuple[int, int]:
        """The exit code of the run, once all of it has ended, and the step of its newest checkpoint."""
        (folder,) = self._logs.iterdir()
        wait_for(lambda: history.read(folder).about.get("ended") is not None, "the run's end")
        about = history.read(folder).about
        return int(about["exit_code"]), max(int(path.name[5:]) for path in (self.folder / "run").glob("step-*"))


@contextmanager
def _in_a_terminal(folder: Path, *before: str, controls: bool = True) -> Iterator[_Job]:
    """Start the training in a terminal of its own.

    Args:
        folder: where.
        before: what starts it; nothing: the launcher leads the terminal's session itself.
        controls: the terminal is the session's own; else the launcher has only its descriptors, as what a daemon starts.
    """
    (folder / "train.py").write_text(_TRAIN)
    env = environment(folder, torch=True)
    command = [*before, sys.executable, "-m", "lockstep", "run", "-n", "2", "train.py"]
    screen, keyboard = pty.openpty()
    leader = os.fork()
    if leader == 0:
        os.setsid()
        if controls:
            import fcntl
            import termios

            fcntl.ioctl(keyboard, termios.TIOCSCTTY, 0)
        for fd in range(3):
            os.dup2(keyboard, fd)
        os.closerange(3, 100)
        os.chdir(folder)
        os.execvpe(command[0], command, env)
    os.close(keyboard)
    job = _Job(folder, leader, screen)
    try:
        yield job
    finally:
        everyone = [leader, *_proc.descendants(leader)]
        with killed_afterwards(everyone):
            pass
        if job.screen >= 0:
            job.hang_up()
        os.waitpid(leader, 0)


@pytest.mark.parametrize("how", ["launcher leads", "shell leads", "shell is killed", "no controlling terminal"])
def test_a_terminal_that_goes_makes_the_run_save(tmp_path: Path, how: str) -> None:
    before = ["bash", "-c", '"$@"; true', "bash"] if how.startswith("shell") else []
    with _in_a_terminal(tmp_path, *before, controls=how != "no controlling terminal") as job:
        launcher = job.launcher()
        everyone = [launcher, *_proc.descendants(launcher)]
        with killed_afterwards(everyone):
            if how == "shell is killed":
                os.kill(job.leader, signal.SIGKILL)
            else:
                job.hang_up()
            if how == "no controlling terminal":  # nobody tells it, and it loses nothing but its output
                wait_for((tmp_path / "long").exists, "more epochs")
                os.kill(launcher, signal.SIGHUP)
            code, step = job.end()
            assert (code, step >= 5) == (EXIT_SAVED, True)
            if launcher == job.leader:
                everyone.remove(launcher)  # a zombie until we ask
            assert gone_within(everyone, 10.0) == []
