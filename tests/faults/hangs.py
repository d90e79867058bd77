"""Start the training of hanging.py, and hear what the launcher says of the rank that got stuck, and when."""

from __future__ import annotations

import os
import random
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults.hanging import line_of
from tests.launching import Running, environment

SCRIPT = Path(__file__).with_name("hanging.py")
PLACES = ("data", "forward", "backward", "own")
#: Seconds within which the right rank and place are to be named.
WITHIN = 10.0
_LIMIT = 60.0


@dataclass(frozen=True)
class Case:
    """One job with one rank that gets stuck."""

    kind: str
    rank: int
    step: int
    place: str
    ranks: int = 2
    backend: str = "shm"
    torch: bool = False

    def __str__(self) -> str:
        engine = "torch alone" if self.torch else self.backend
        return f"{self.kind} on rank {self.rank} of {self.ranks} at step {self.step} in {self.place} ({engine})"


@dataclass(frozen=True)
class Heard:
    """What the launcher said until it had named the rank, and how long that took."""

    text: str
    seconds: float


def cases(kind: str, count: int, *, seed: int = 5) -> list[Case]:
    """``count`` cases of one kind, drawn."""
    draw = random.Random(f"{kind} {seed}")
    found = []
    for number in range(count):
        ranks = draw.choice((2, 3))
        backend = "gloo" if kind == "miss" and number % 2 else "shm"
        found.append(Case(kind, draw.randrange(ranks), draw.randrange(8, 40), draw.choice(PLACES), ranks, backend))
    return found


def start(case: Case, folder: Path) -> Running:
    """Start the job of one case."""
    run = ["lockstep", "run", "-n", str(case.ranks), "--grace", "1", "--log-dir", str(folder / "logs")]
    options = ["--kind", case.kind, "--rank", str(case.rank), "--step", str(case.step), "--place", case.place]
    env = environment(folder, torch=True, LOCKSTEP_BACKEND=case.backend)
    return Running(
        [*run, str(SCRIPT), str(folder), *options, *(["--torch"] if case.torch else [])], cwd=folder, env=env
    )


def hear(case: Case, folder: Path) -> Heard:
    """Run one case until the launcher has named the rank and its place, or the time for that is over; then end it."""
    with start(case, folder) as job, ended(job):
        text = listen(job, lambda said: _is_complete(case, said), folder=folder)
        pid, at = (folder / "stuck").read_text().split()
        seconds = time.monotonic() - float(at)
        if case.kind == "stop":
            os.kill(int(pid), signal.SIGCONT)
    return Heard(text, seconds)


def listen(job: Running, enough: Callable[[str], bool], *, folder: Path) -> str:
    """The job's standard error until ``enough(text)``, its end, or WITHIN seconds after a rank got stuck."""
    stream = job.process.stderr
    assert stream is not None
    said, limit = "", time.monotonic() + _LIMIT
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not enough(said) and time.monotonic() < limit:
            if selector.select(0.1):
                piece = os.read(stream.fileno(), 65536).decode()
                if not piece:
                    break
                said += piece
            noted = (folder / "stuck").read_text().split() if (folder / "stuck").exists() else []
            if noted:
                limit = min(limit, float(noted[1]) + WITHIN + 2.0)
    return said


@contextmanager
def ended(job: Running) -> Iterator[None]:
    """End the job's ranks, stopped or not, before its pipes are closed."""
    try:
        yield
    finally:
        if job.process.poll() is None:
            os.kill(job.pid, signal.SIGTERM)
            try:
                job.process.wait(10)
            except subprocess.TimeoutExpired:
                job.process.kill()


def wrong(case: Case, heard: Heard) -> str:
    """What is wrong with what was heard; empty if it names the right rank and place in time."""
    missing = [text for text in _expected(case) if text not in heard.text]
    late = [f"only after {heard.seconds:.1f} s"] if heard.seconds > WITHIN else []
    problems = [f"not said: {text!r}" for text in missing] + late
    return f"{case}: {'; '.join(problems)}\n{heard.text}" if problems else ""


def _is_complete(case: Case, said: str) -> bool:
    return all(text in said for text in _expected(case))


def _expected(case: Case) -> list[str]:
    """What must be said: the late rank, its line or its state, and the line where the others wait."""
    rank, script = case.rank, str(SCRIPT)
    backward, barrier = (
        f"{script}:{line_of('waits: backward')} in train",
        f"{script}:{line_of('waits: barrier')} in train",
    )
    if case.kind == "leave":  # the others' error says it, and where they were
        return [f"for rank {rank}, which", backward]
    if case.kind == "miss":
        went_on = f"{script}:{line_of('goes on')} in train"
        if case.backend == "shm":  # the others' error, at once
            return [f"  rank {rank}: all_reduce #", barrier, went_on]
        # With two ranks in different collectives nobody can know which of them missed one.
        odd = (
            f"rank {rank} of {case.ranks} has left out the collective"
            if case.ranks > 2
            else "one of them has left one out"
        )
        return [odd, f"rank {rank} waits" if case.ranks == 2 else "it waits", barrier, went_on]
    waits = f"{script}:{line_of('waits: torch')} in with_torch_alone" if case.torch else backward
    expected = [f"rank {rank} of {case.ranks} has held up", waits]
    if case.kind == "stop":
        return [*expected, "stopped by a signal", script]
    if case.kind == "disk":
        return [*expected, "disk", script]
    return [*expected, f"{script}:{line_of(f'stuck: {case.kind}')} in stuck"]


@contextmanager
def frozen_disk(folder: Path) -> Iterator[None]:
    """A small disk of its own at ``folder / "disk"``, which does not answer a write until the context ends.

    Raises:
        PermissionError: only root can do this, where there are loop devices.
    """
    image, mount = folder / "image", folder / "disk"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    _root("mkfs.ext4", "-q", str(image))
    _root("mount", "-o", "loop", str(image), str(mount))
    try:
        _root("fsfreeze", "--freeze", str(mount))
        try:
            yield
        finally:
            _root("fsfreeze", "--unfreeze", str(mount))
    finally:
        _root("umount", "--lazy", str(mount))
        image.unlink()


def why_no_disk() -> str:
    """Why there can be no frozen disk here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, to freeze a disk of its own"
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as folder:
        try:
            with frozen_disk(Path(folder)):
                return ""
        except (PermissionError, FileNotFoundError) as error:
            return f"no disk of its own can be mounted and frozen here: {error}"


def _root(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise PermissionError(f"{' '.join(command)}: {done.stderr.strip()}")
