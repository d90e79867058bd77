"""``lockstep.spawn``: run a function on N ranks from a running program, as ``torch.multiprocessing.spawn`` does."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import spawn as multiprocessing_spawn
from operator import itemgetter
from typing import Any, Literal, overload

from lockstep import callsite
from lockstep.errors import EnvironmentMismatch, LaunchError, RankFailed
from lockstep.job.files import EXIT_SAVED
from lockstep.launch import report
from lockstep.launch.folders import JobFolder
from lockstep.launch.launcher import Launcher
from lockstep.launch.output import LogFolder
from lockstep.launch.parcel import Parcel
from lockstep.launch.policy import failure_facts
from lockstep.launch.ports import free_port
from lockstep.launch.report import say
from lockstep.launch.returned import NotReturned, Returned
from lockstep.launch.spec import JobSpec, Program, is_read_once
from lockstep.runs.record import Recorder, RunEnd


@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: Literal[True] = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> list[Any]: ...


@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    *,
    join: Literal[False],
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext: ...


@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | list[Any]: ...


def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | list[Any]:
    """Call ``fn(rank, *args)`` on ``nprocs`` new ranks, and return what each returned; the arguments are those of
    torch's.

    The ranks are forked from a fresh process that imported torch once, so the second rank costs milliseconds. In each,
    the caller's ``__main__`` is imported again (under the name ``__mp_main__``, so keep ``if __name__ == "__main__":``)
    and ``lockstep.init()`` finds the rank's place. The ranks share this process's standard output and error.

    Args:
        fn: a function at the top level of a module, ``__main__`` included.
        args: what to pass after the rank; anything that multiprocessing can send. CPU tensors arrive as shared memory.
            A function or class that was typed at a prompt can't be found again by the ranks.
        nprocs: how many ranks.
        join: wait for all of them. Otherwise return at once.
        daemon: what happens to ranks that were not joined when this process ends: True: they are ended, False: they
            are waited for. (Unlike multiprocessing's daemons, they may have children in any case.)
        start_method: ``"spawn"``; there is no other.

    Returns:
        If ``join`` what the ranks returned, in order of rank, else a :class:`~lockstep.launch.spawn.SpawnContext`. What
        a rank returns is pickled; tensors arrive as copies, on the CPU. In place of what can't be pickled, or not be
        read here, stands None, and a ``RuntimeWarning`` says why; a rank that left by ``sys.exit(0)`` returned None.

    Raises:
        RankFailed: a rank raised or died; the others were stopped. The message holds the rank's traceback.
        LaunchError: the ranks could not be started, or could not import ``__main__`` again.
        EnvironmentMismatch: ``MASTER_PORT`` is not a port.
        ValueError: ``nprocs`` is less than 1, ``start_method`` is another, or the ranks can't be bound to cores as
            ``LOCKSTEP_BIND`` says.
    """
    if nprocs < 1:
        raise ValueError(f"nprocs={nprocs}: expected at least 1")
    if start_method != "spawn":
        raise ValueError(
            f"start_method={start_method!r}: lockstep.spawn has only 'spawn', which forks ranks from a fresh process; "
            "for another, use torch.multiprocessing.start_processes"
        )
    ranks = SpawnContext(fn, args, nprocs, daemon=daemon)
    if not join:
        return ranks
    ranks.join()
    return [value for _, value in sorted(ranks.results(), key=itemgetter(0))]


class SpawnContext:
    """Ranks that run; returned by ``lockstep.spawn(…, join=False)``. To be used by one thread at a time."""

    def __init__(self, fn: Callable[..., object], args: tuple[Any, ...], nprocs: int, *, daemon: bool) -> None:
        self._daemon = daemon
        self._error: LaunchError | None = None
        self._closed = False
        self._name = str(getattr(fn, "__qualname__", type(fn).__name__))
        self._returned: list[Returned] = []
        # Raises RuntimeError in a rank that is importing __main__ again, before anything is started.
        preparation = multiprocessing_spawn.get_preparation_data("rank")
        _check_main(preparation)
        master = _master()
        self._folder = JobFolder()
        try:
            spec = JobSpec(Program("lockstep.spawn"), nproc=nprocs)
            self._logs = LogFolder(None, program=spec.program.name)
            recorder = Recorder(self._logs.make, program=["lockstep.spawn", self._name], tell=say)
            self._launcher = Launcher(spec, spec.round(*master), home=self._folder.path, recorder=recorder)
        except BaseException:
            self._folder.remove()
            raise
        try:
            self._fork(preparation, fn, args)
        except BaseException:
            self._close()  # not by a kill: ranks may run already, and only the zygote ends what they have started
            self._drop()
            raise
        atexit.register(self._at_exit)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for all ranks, and say on standard error which rank holds up the others, if one does.

        Args:
            timeout: seconds to wait at most; None: until all have ended.

        Returns:
            True when all ranks have ended well, False if some still run after ``timeout``.

        Raises:
            RankFailed: a rank failed; the others were stopped.
            LaunchError: the process that forks the ranks died.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._closed:
            if deadline is not None and time.monotonic() >= deadline and not self._launcher.policy.done:
                return False
            self._advance(deadline)
        self._raise()
        return True

    def results(self) -> Iterator[tuple[int, Any]]:
        """Yield (rank, what it returned) as ranks end, as :func:`lockstep.spawn` returns it; others run on meanwhile.

        Raises:
            RankFailed: a rank failed; the others were stopped. What ranks have returned before has been yielded.
            LaunchError: the process that forks the ranks died.
        """
        waiting = dict(self._launcher.policy.states)
        while True:
            for rank in [rank for rank, state in waiting.items() if state.exit_code == 0]:
                del waiting[rank]
                yield rank, self._take(rank)
            if self._closed:
                break
            self._advance(None)
        self._raise()

    def pids(self) -> list[int]:
        """Return the ranks' process ids, in order of rank; waits until all are started.

        Raises:
            LaunchError: the ranks could not be started.
        """
        states = self._launcher.policy.states.values()
        while any(state.pid is None for state in states) and not self._closed:
            self._turn(None)
        if self._error is not None and not isinstance(self._error, RankFailed):
            raise self._error
        return [state.pid for state in states if state.pid is not None]

    def _fork(self, preparation: dict[str, Any], fn: Callable[..., object], args: tuple[Any, ...]) -> None:
        attempt = self._launcher.attempt
        for rank in attempt.local_rank:
            self._returned.append(Returned())
            with Parcel({**preparation, "name": f"rank-{rank}"}, fn, args, self._returned[-1]) as parcel:
                job = {"kind": "call", "shared_tracker": parcel.tracker is not None}
                self._launcher.zygote.fork(attempt.fork(rank, job), parcel.descriptors())

    def _raise(self) -> None:
        """Raise what the ranks have ended with, if it is an error."""
        if self._error is not None:
            self._drop()
            raise self._error

    def _drop(self) -> None:
        """Give up what nobody has asked for."""
        for returned in self._returned:
            returned.close()

    def _take(self, rank: int) -> Any:
        try:
            return self._returned[rank].take()
        except NotReturned as why:
            callsite.warn(
                f"what rank {rank} returned from {self._name} did not arrive, and None stands in its place: {why}",
                RuntimeWarning,
            )
            return None

    def _advance(self, deadline: float | None) -> None:
        """Act on what happens next, up to the deadline; once all ranks have ended, close."""
        try:
            if self._launcher.policy.done:
                self._conclude()
            else:
                self._turn(deadline)
        except BaseException:  # mostly KeyboardInterrupt, after which nobody waits for the ranks
            self._close()
            self._drop()
            raise

    def _turn(self, deadline: float | None) -> None:
        """Wait for the zygote to say something, or for the time to act, and act on it."""
        launcher = self._launcher
        launcher.hear(launcher.wait(deadline))
        launcher.act(time.monotonic())
        if launcher.broken is not None and self._error is None:
            self._error = LaunchError(report.not_started(launcher.broken))
        if not launcher.lives:
            if self._error is None:
                self._error = LaunchError(report.lost(launcher.zygote.pid, launcher.zygote.wait(limit=1.0)))
            self._close()

    def _conclude(self) -> None:
        """Find out how the ranks have ended, and close."""
        attempt = self._launcher.attempt
        outcome = attempt.outcome()
        first = outcome.first
        if outcome.saved:
            code, end, text = EXIT_SAVED, RunEnd.SAVED, report.stopped(outcome, None)
        elif first is not None:
            code, end, text = first.exit_code, RunEnd.FAILED, report.describe(outcome)
            step, taken = attempt.steps(first.rank)
            failure = failure_facts(first, step=step, taken=taken, out_of_memory=outcome.out_of_memory)
            self._launcher.recorder.event("failed", text, failure=failure, again=False)
        else:
            code, end, text = 0, RunEnd.DONE, ""
        if first is not None:
            traceback = None if first.record is None else first.record.traceback or None
            self._error = RankFailed(text, rank=first.rank, exit_code=code, traceback=traceback)
        for said in self._launcher.conclude(code, end=end, word=text if outcome.saved else ""):
            say(said)
        self._close()

    def _close(self) -> None:
        """End what is left and give everything back. Does nothing the second time."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        launcher = self._launcher
        if launcher.policy.alive:
            launcher.zygote.signal(launcher.policy.alive, signal.SIGKILL)
        launcher.close()
        self._logs.close()
        self._folder.remove()

    def _at_exit(self) -> None:
        if self._daemon:
            self._close()
            return
        try:
            self.join()
        except LaunchError as error:
            print(f"lockstep.spawn: {error}", file=sys.stderr)


def _master() -> tuple[str, int]:
    """Return where a function that opens torch's process group meets: as the caller set it, or any free port."""
    if "RANK" not in os.environ and "MASTER_PORT" in os.environ:
        text = os.environ["MASTER_PORT"]
        if not (text.isdecimal() and 0 < int(text) < 65536):
            raise EnvironmentMismatch(f"MASTER_PORT={text!r}: expected 1 to 65535, or leave it unset for any free port")
        return os.environ.get("MASTER_ADDR", "127.0.0.1"), int(text)
    return "127.0.0.1", free_port()


def _check_main(preparation: dict[str, Any]) -> None:
    """Refuse a program that came through a pipe: ranks import ``__main__`` again, and it is gone by then."""
    path = preparation.get("init_main_from_path")
    if path is not None and (not os.path.exists(path) or is_read_once(path)):
        raise LaunchError(
            f"the ranks of lockstep.spawn import the main program again, and {os.path.basename(path)} is not a file "
            "that they can read: save the program to a file and run that"
        )
