"""``lockstep.spawn``: run a function on N ranks from a running program, as ``torch.multiprocessing.spawn`` does."""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import spawn as multiprocessing_spawn
from operator import itemgetter
from typing import Any, Literal, overload

from lockstep import callsite
from lockstep.errors import LaunchError, RankFailed
from lockstep.launch import by_value
from lockstep.launch.called import CalledRanks
from lockstep.launch.packed_call import PackedCall
from lockstep.launch.policy import Policy
from lockstep.launch.returned import NotReturned, Returned
from lockstep.launch.spec import is_read_once


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
        fn: a function at the top level of a module, ``__main__`` included; or one that was typed at a prompt or in a
            notebook, which is sent by value, with the globals that it uses, if the extra ``notebook`` is installed.
        args: arguments after the rank; anything that multiprocessing can send. CPU tensors arrive in shared memory.
        nprocs: the number of ranks.
        join: wait for all of them. Otherwise return at once.
        daemon: what happens to ranks that were not joined when this process ends: True: they are ended, as by SIGTERM,
            False: they are waited for. (Unlike multiprocessing's daemons, they may have children in any case.)
        start_method: ``"spawn"``; there is no other.

    Returns:
        If ``join``, what the ranks returned, in order of rank; otherwise a
        :class:`~lockstep.launch.spawn.SpawnContext`. Returned values are pickled; tensors arrive as copies, on the CPU.
        A value that can't be pickled, or not be read here, is replaced by None, and a ``RuntimeWarning`` says why; the
        value of a rank that left by ``sys.exit(0)`` is None.

    Raises:
        RankFailed: a rank raised or died; the others were stopped. The message holds the rank's traceback.
        LaunchError: the ranks could not be started, or could not import ``__main__`` again.
        EnvironmentMismatch: ``MASTER_PORT`` is not a port.
        TypeError: ``fn`` is a coroutine or generator function, which runs nothing when it is called.
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
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(
            f"a call of {getattr(fn, '__qualname__', fn)} only makes a coroutine or a generator, and the ranks of "
            "lockstep.spawn would end without having run it: spawn a function that calls asyncio.run, or loops over it"
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
        self._name = str(getattr(fn, "__qualname__", type(fn).__name__))
        self._returned: list[Returned] = []
        # Raises RuntimeError in a rank that is importing __main__ again, before anything is started.
        preparation = multiprocessing_spawn.get_preparation_data("rank")
        _check_main(preparation)
        self._by_value = _is_typed(fn, preparation)
        self._ranks = CalledRanks(["lockstep.spawn", self._name], nprocs, lends=True)
        try:
            self._ranks.let_save()
            self._fork(preparation, fn, args)
        except BaseException:
            self._ranks.close()
            self._drop()
            raise
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for all ranks, and say on standard error which rank holds up the others, if one does.

        Ctrl-C, SIGTERM and SIGHUP, unless the program handles or ignores them itself, ask the ranks to stop, as under
        ``lockstep run``: those that train with a Checkpointer save. Once they have ended, within ten seconds, the
        signal has its usual effect here. A second Ctrl-C or SIGTERM ends the ranks at once.

        Args:
            timeout: seconds to wait at most; None: until all have ended.

        Returns:
            True when all ranks have succeeded, False if some still run after ``timeout``.

        Raises:
            RankFailed: a rank failed; the others were stopped.
            LaunchError: the process that forks the ranks died.
            KeyboardInterrupt: Ctrl-C; the ranks have ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ranks.closed:
            if self._ranks.asked.first is not None:
                deadline = None  # all ranks end soon
            if deadline is not None and time.monotonic() >= deadline and not self._policy.done:
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
        waiting = dict(self._policy.states)
        while True:
            for rank in [rank for rank, state in waiting.items() if state.exit_code == 0]:
                del waiting[rank]
                yield rank, self._take(rank)
            if self._ranks.closed:
                break
            self._advance(None)
        self._raise()

    def pids(self) -> list[int]:
        """Return the ranks' process ids, in order of rank; waits until all are started.

        Raises:
            LaunchError: the ranks could not be started.
            RankFailed: they were asked to stop before they were.
        """
        states = self._policy.states.values()
        while any(state.pid is None for state in states) and not self._ranks.closed:
            self._ranks.turn()
        has_started = all(state.pid is not None for state in states)
        if self._ranks.error is not None and not (has_started and isinstance(self._ranks.error, RankFailed)):
            raise self._ranks.error
        return [state.pid for state in states if state.pid is not None]

    def _fork(self, preparation: dict[str, Any], fn: Callable[..., object], args: tuple[Any, ...]) -> None:
        for rank in self._policy.states:
            self._returned.append(Returned())
            prepared, returned = {**preparation, "name": f"rank-{rank}"}, self._returned[-1]
            with PackedCall(prepared, fn, args, returned, by_value=self._by_value) as packed:
                self._ranks.fork(rank, packed)

    def _raise(self) -> None:
        """Raise the error with which the ranks have ended, if there is one; but first do what a signal has asked for
        meanwhile."""
        if self._ranks.error is not None or self._ranks.asked.first is not None:
            self._drop()
        self._ranks.asked.pass_on()
        if self._ranks.error is not None:
            raise self._ranks.error

    def _drop(self) -> None:
        """Drop the values that no caller has asked for."""
        for returned in self._returned:
            returned.close()

    def _take(self, rank: int) -> Any:
        try:
            return self._returned[rank].take()
        except NotReturned as why:
            callsite.warn(
                f"what rank {rank} returned from {self._name} did not arrive, and is replaced by None: {why}",
                RuntimeWarning,
            )
            return None

    def _advance(self, deadline: float | None) -> None:
        """Act on what happens next, up to the deadline; once all ranks have ended, close."""
        try:
            with self._ranks.asked.noted():
                if self._policy.done:
                    self._ranks.conclude()
                else:
                    self._ranks.turn(deadline)
        except BaseException:  # mostly of a signal's handler that is the program's own; nobody waits for the ranks now
            self._ranks.close(saves=True)
            self._drop()
            raise
        finally:
            if self._ranks.closed:
                atexit.unregister(self._at_exit)

    @property
    def _policy(self) -> Policy:
        return self._ranks.launcher.policy

    def _at_exit(self) -> None:
        if self._ranks.closed or os.getpid() != self._pid:  # a fork of the program ends, whose ranks these are not
            return
        if self._daemon:
            self._ranks.close(saves=True)
            return
        try:
            self.join()
        except LaunchError as error:
            print(f"lockstep.spawn: {error}", file=sys.stderr)


def _is_typed(fn: Callable[..., object], preparation: dict[str, Any]) -> bool:
    """Return whether the caller's ``__main__`` is a prompt or a notebook, which the ranks can't import again.

    Raises:
        LaunchError: the function was typed there, and can't be sent.
    """
    is_of_main = getattr(fn, "__module__", None) == "__main__"
    is_at_prompt = hasattr(sys, "ps1")  # where classes of the arguments may have been typed as well
    if any(key.startswith("init_main") for key in preparation) or not (is_of_main or is_at_prompt):
        return False
    if by_value.is_available():
        return True
    if is_of_main:
        raise LaunchError(
            f"{getattr(fn, '__qualname__', fn)} was typed at a prompt, so the ranks of lockstep.spawn can't import it: "
            "pip install 'torch-lockstep[notebook]', whose cloudpickle sends it, or put it into a module"
        )
    return False


def _check_main(preparation: dict[str, Any]) -> None:
    """Refuse a program that came through a pipe: ranks import ``__main__`` again, and it is gone by then."""
    path = preparation.get("init_main_from_path")
    if path is not None and (not os.path.exists(path) or is_read_once(path)):
        raise LaunchError(
            f"the ranks of lockstep.spawn import the main program again, and {os.path.basename(path)} is not a file "
            "that they can read: save the program to a file and run that"
        )
