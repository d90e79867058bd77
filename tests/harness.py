"""Run a function on N real ranks and get back what each returned, quickly.

Each rank is forked from the process that has imported torch and lockstep (warm.py) and joins a world through a
rendezvous file, as under the launcher. Nothing is mocked: ranks are processes, and the backend is the real one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lockstep import knobs
from lockstep.identity import Identity
from tests import seeding, warm
from tests.device import simulation

#: Asks a rank for its stacks; no other signal, since a Checkpointer takes SIGUSR1 for its own.
_STACKS = signal.SIGRTMIN + 3


@dataclass(frozen=True)
class Outcome:
    """What became of one rank."""

    rank: int
    #: What the function returned, if it did.
    value: Any = None
    #: The type name of the exception it raised, its message and traceback, or None.
    error: str | None = None
    message: str | None = None
    traceback: str | None = None
    #: Exit code, negative for a signal, when the rank died without reporting.
    exit_code: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not finish."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 300.0,
    threads: int = 1,
    hosts: Sequence[int] | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` ranks and return the ranks' results in order of rank.

    ``fn`` must be a module-level function; it calls ``lockstep.init()`` itself, which takes the backend of this
    process's ``LOCKSTEP_BACKEND``, or what is for its GPU (see tests/backends.py). ``hosts`` says how many ranks each
    of several machines is to have; what tells them apart is the rank's environment, as a launcher on each would set it.
    Raises RanksFailed with every failed rank's traceback if any rank did not return.
    """
    outcomes = collect_outcomes(fn, world_size, *args, timeout=timeout, threads=threads, hosts=hosts)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        raise RanksFailed("\n".join(_describe(outcome, world_size) for outcome in failed))
    return [outcome.value for outcome in outcomes]


def collect_outcomes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 300.0,
    threads: int = 1,
    hosts: Sequence[int] | None = None,
) -> list[Outcome]:
    """As :func:`run_ranks`, but failures are returned, for tests that expect them."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-test-"))
    processes: list[warm.Call] = []
    pipes: list[Connection] = []
    try:
        for rank in range(world_size):
            receiving, sending = multiprocessing.Pipe(duplex=False)
            pipes.append(receiving)
            identity = _identity(rank, hosts or [world_size])
            with sending:
                process = warm.Call(
                    _rank_main,
                    fn,
                    args,
                    identity,
                    str(folder),
                    threads,
                    knobs.backend(),
                    simulation.of_ranks,
                    fds=[sending.fileno()],
                )
            processes.append(process)
        return _gather(processes, pipes, folder, timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for pipe in pipes:
            pipe.close()
        shutil.rmtree(folder)


def _identity(rank: int, hosts: Sequence[int]) -> Identity:
    first = 0
    for host, ranks in enumerate(hosts):
        if rank < first + ranks:
            return Identity(rank, sum(hosts), rank - first, ranks, host, launched=True)
        first += ranks
    raise ValueError(f"there is no rank {rank} on hosts with {list(hosts)} ranks")


def _gather(processes: list[warm.Call], pipes: list[Connection], folder: Path, timeout: float) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout
    while len(outcomes) < len(processes):
        waiting = [rank for rank in range(len(processes)) if rank not in outcomes]
        ready = wait([pipes[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksFailed(_stacks(processes, waiting, folder, timeout))
        for rank in waiting:
            if pipes[rank] not in ready:
                continue
            try:
                outcomes[rank] = pipes[rank].recv()
            except EOFError:
                outcomes[rank] = Outcome(rank, exit_code=processes[rank].wait())
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(1.0, deadline - time.monotonic()))
    return [outcomes[rank] for rank in range(len(processes))]


def _rank_main(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    identity: Identity,
    folder: str,
    threads: int,
    backend: str | None,
    stress: simulation.Stress | None,
    report: int,
) -> None:
    import torch

    pipe = Connection(report, readable=False)
    with open(f"{folder}/stack-{identity.rank}", "w") as stack:
        faulthandler.register(_STACKS, file=stack, all_threads=True)
        os.environ.update(identity.to_environment())
        os.environ[knobs.STORE] = f"{folder}/store"
        if backend is not None:
            os.environ[knobs.BACKEND] = backend
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if stress is not None:
            simulation.stress(stress)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # lockstep.init() leaves the choice alone
        seeding.seed()
        try:
            outcome = Outcome(identity.rank, value=fn(*args))
        except BaseException as error:  # noqa: BLE001  (whatever it was, the test wants to see it)
            outcome = Outcome(
                identity.rank, error=type(error).__name__, message=str(error), traceback=traceback.format_exc()
            )
        pipe.send(outcome)
        pipe.close()
        import lockstep

        if outcome.ok:
            lockstep.shutdown()
        faulthandler.unregister(_STACKS)
    if not outcome.ok:
        os._exit(1)


def _stacks(processes: list[warm.Call], waiting: list[int], folder: Path, timeout: float) -> str:
    for process in processes:
        process.send_signal(_STACKS)
    limit = time.monotonic() + 2.0
    files = [folder / f"stack-{rank}" for rank in waiting]
    while time.monotonic() < limit and not all(file.exists() and file.stat().st_size for file in files):
        time.sleep(0.02)
    lines = [f"ranks {waiting} of {len(processes)} did not finish within {timeout:g} s"]
    for rank, file in zip(waiting, files, strict=True):
        lines.append(f"--- rank {rank} ---\n{file.read_text() if file.exists() else '(no stack)'}")
    return "\n".join(lines)


def _describe(outcome: Outcome, world_size: int) -> str:
    if outcome.exit_code is not None:
        return f"--- rank {outcome.rank} of {world_size} ended with exit code {outcome.exit_code} without a report"
    return f"--- rank {outcome.rank} of {world_size} ---\n{outcome.traceback}"
