"""A rank that SIGSTOP hits at any moment, in a collective above all, is named within 10 s, and no other one."""

from __future__ import annotations

import os
import random
import re
import selectors
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.job.page import Cell, Mark, Pages
from tests.faults.hangs import WITHIN, ended
from tests.launching import LIMIT, Running, environment, wait_for

SCRIPT = Path(__file__).with_name("stopped_anywhere.py")
#: Jobs of one campaign: ranks and backend.
_JOBS = [(2, "shm"), (3, "shm"), (2, "gloo"), (3, "gloo")]


class _Target:
    """A job whose ranks are stopped, one after the other, and continued; each is to be named within some seconds."""

    def __init__(self, folder: Path, ranks: int, backend: str, *, within: float) -> None:
        self._within = within
        self.ranks, self.folder, self.name = ranks, folder, f"{backend}, {ranks} ranks"
        env = environment(folder, torch=True, LOCKSTEP_BACKEND=backend)
        command = ["lockstep", "run", "-n", str(ranks), "--grace", "1", "--log-dir", str(folder / "logs")]
        self.job = Running([*command, str(SCRIPT), str(folder)], cwd=folder, env=env)
        self._said = ""

    def begin(self) -> None:
        """Wait until it trains."""
        files = [self.folder / f"pid-{rank}" for rank in range(self.ranks)]
        wait_for(lambda: (self.folder / "job").exists() and all(f.exists() and f.read_text() for f in files), "ranks")
        wait_for(lambda: (self.folder / "job").read_text(), "the folder's name")
        self.pids = [int(file.read_text()) for file in files]
        self.pages = Pages((self.folder / "job").read_text(), self.ranks)
        self.take_steps(20)

    def take_steps(self, count: int) -> None:
        """Wait until all ranks have taken so many more steps."""
        before = self.pages.all(Cell.STEPS)
        wait_for(lambda: min(self.pages.all(Cell.STEPS)) >= max(before) + count, "steps")

    def stop(self, rank: int, *, in_collective: bool, after: float) -> str:
        """Stop a rank until it is named; what is wrong with what was said, empty if nothing is.

        Args:
            rank: which.
            in_collective: the moment is one at which its page says that it waits.
            after: seconds of training before that.
        """
        time.sleep(after)
        limit = time.monotonic() + 2 * self._within
        while in_collective and not Mark.of(self.pages.get(rank, Cell.MARK)).waiting and time.monotonic() < limit:
            pass
        os.kill(self.pids[rank], signal.SIGSTOP)
        begun = time.monotonic()
        try:
            report = self._hear(lambda said: "\nnext: " in said)
        finally:
            os.kill(self.pids[rank], signal.SIGCONT)
        seconds = time.monotonic() - begun
        right = rf"lockstep: rank {rank} of {self.ranks} has held up the others for .*\n.* is stopped by a signal"
        if not re.match(right, report):
            return f"{self.name}, rank {rank} stopped, after {seconds:.1f} s:\n{report or 'nothing was said'}"
        over = self._hear(lambda said: "moved on" in said)
        if over.count("\n") != 1:
            return f"{self.name}, rank {rank}: one line was expected when it was continued:\n{over}"
        self.take_steps(3)
        return "" if seconds <= self._within else f"{self.name}, rank {rank}: only after {seconds:.1f} s"

    def _hear(self, enough: Callable[[str], bool]) -> str:
        """The whole lines of the job's standard error up to the one with which it is enough, or until the limit."""
        stream = self.job.process.stderr
        assert stream is not None
        limit = time.monotonic() + 2 * self._within
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while time.monotonic() < limit:
                lines = self._said.splitlines(keepends=True)
                for count in range(1, len(lines) + 1):
                    heard = "".join(lines[:count])
                    if heard.endswith("\n") and enough(heard):
                        self._said = "".join(lines[count:])
                        return heard
                if selector.select(0.1):
                    piece = os.read(stream.fileno(), 65536).decode()
                    if not piece:
                        break
                    self._said += piece
        heard, self._said = self._said, ""
        return heard


def _play(tmp_path: Path, jobs: list[tuple[int, str]], *, stops: int, seed: int, within: float) -> int:
    """Stop ranks of each job so often, every second time in a collective; how often. Fails with all that was wrong."""

    def one(numbered: tuple[int, tuple[int, str]]) -> list[str]:
        number, (ranks, backend) = numbered
        draw, folder = random.Random(f"{seed} {number}"), tmp_path / str(number)
        folder.mkdir()
        target = _Target(folder, ranks, backend, within=within)
        with target.job, ended(target.job):
            target.begin()
            try:
                return [
                    target.stop(draw.randrange(ranks), in_collective=stop % 2 == 0, after=draw.uniform(0.0, 0.2))
                    for stop in range(stops)
                ]
            finally:
                target.pages.close()

    with ThreadPoolExecutor(len(jobs)) as pool:
        outcomes = [outcome for each in pool.map(one, enumerate(jobs)) for outcome in each]
    problems = [outcome for outcome in outcomes if outcome]
    assert not problems, f"{len(problems)} of {len(outcomes)}:\n" + "\n\n".join(problems)
    return len(outcomes)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_rank_stopped_at_any_moment_is_named(tmp_path: Path) -> None:
    stops = _play(tmp_path, _JOBS, stops=50, seed=1, within=WITHIN)
    print(f"\n{stops} of {stops} stops named within {WITHIN:g} s")


def test_a_selection_of_stops_is_named(tmp_path: Path) -> None:
    _play(tmp_path, _JOBS[1:3], stops=1, seed=2, within=LIMIT / 3)
