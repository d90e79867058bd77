"""The processes of ranks that run cells, as the program holds them: their sockets, their pipes, their end."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from lockstep.errors import LaunchError, RankFailed
from lockstep.interactive.messages import Report
from lockstep.interactive.output import CellText, RankPipe
from lockstep.job.messages import Channel
from lockstep.job.page import Look
from lockstep.launch.called import CalledRanks
from lockstep.launch.packed_call import PackedCall, preparation_without_main
from lockstep.launch.returned import Returned
from lockstep.text import which_ranks

#: Seconds that ranks have to leave by themselves once they are told that no cell will come.
_LEAVING = 5.0


class RankPool:
    """Ranks that stay alive between cells. To be used by one thread at a time.

    Args:
        nprocs: the number of ranks.

    Raises:
        LaunchError, EnvironmentMismatch, ValueError: as :class:`~lockstep.launch.called.CalledRanks`.
    """

    def __init__(self, nprocs: int) -> None:
        self.ranks = range(nprocs)
        #: Rank -> the socket to it.
        self.channels: dict[int, Channel[Report]] = {}
        self._pipes: list[RankPipe] = []
        self._returned: list[Returned] = []
        #: The reason why all ranks were ended, and for the sake of which; empty: they were not.
        self._given_up, self._culprit = "", 0
        self._closed = False
        self._calls = CalledRanks(["lockstep.InteractiveRanks"], nprocs, quiet=True)
        try:
            for rank in self.ranks:
                self._start(rank)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int) -> None:
        from lockstep.interactive.serve import serve

        preparation = preparation_without_main(rank)
        ours, theirs = socket.socketpair()
        out, err = RankPipe(rank, 1), RankPipe(rank, 2)
        self._returned.append(Returned())
        self.channels[rank] = Channel(ours, Report.__args__)
        self._pipes += [out, err]
        with theirs:
            output = out.writing, err.writing
            with PackedCall(preparation, serve, (theirs,), self._returned[-1], output=output) as packed:
                self._calls.fork(rank, packed)
        for pipe in (out, err):
            pipe.hand_over()
        for source in (self.channels[rank], out, err):
            self._selector.register(source, selectors.EVENT_READ)

    @property
    def _selector(self) -> Any:
        return self._calls.launcher.selector

    @property
    def is_closed(self) -> bool:
        """Whether there are no ranks any more."""
        return self._calls.closed

    @property
    def is_dead(self) -> bool:
        """Whether a rank has ended, so that the others can't be used either."""
        states = self._calls.launcher.policy.states.values()
        return self.is_closed or bool(self._given_up) or any(state.exit_code is not None for state in states)

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have ended."""
        return self.is_closed or self._calls.launcher.policy.done

    def pids(self) -> dict[int, int | None]:
        """Return the ranks' process ids; None: it is not started yet."""
        return {rank: state.pid for rank, state in self._calls.launcher.policy.states.items()}

    def look(self, rank: int) -> Look:
        """Return a rank's page as it is now."""
        return self._calls.launcher.attempt.look(rank)

    def steps(self, rank: int) -> int:
        """Return the optimizer steps that a rank has taken."""
        return self._calls.launcher.attempt.steps(rank)[1] or 0

    def turn(self, deadline: float) -> set[object]:
        """Do as :meth:`CalledRanks.turn`, if there are ranks."""
        return set() if self.is_closed else self._calls.turn(deadline)

    def send(self, rank: int, message: object, fds: Sequence[int] = ()) -> None:
        """Send a message to a rank. A rank that has ended does not get it; :meth:`turn` notices its end."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.channels[rank].send(message, fds)

    def receive(self, channel: Channel[Report]) -> list[tuple[int, Report]]:
        """Return the messages of a rank that is ready."""
        rank = next(rank for rank, each in self.channels.items() if each is channel)
        try:
            return [(rank, told) for told, _ in channel.receive()]
        except EOFError:
            self._forget(channel)
            return []

    def read(self, pipe: RankPipe) -> list[CellText]:
        """Return the output from a pipe that is ready."""
        written, goes_on = pipe.read()
        if not goes_on:
            self._forget(pipe)
        return written

    def drain(self) -> list[CellText]:
        """Return all that ranks have written so far."""
        return [written for pipe in self._pipes for written in pipe.drain()]

    def _forget(self, source: RankPipe | Channel[Report]) -> None:
        if not self.is_closed and source in self._selector.get_map():
            self._selector.unregister(source)

    # The end --------------------------------------------------------------------------------------------------------

    def end_all(self, now: float) -> None:
        """End all ranks, since one has ended."""
        if not self.is_closed:
            self._calls.launcher.apply(self._calls.launcher.policy.failed(now))

    def give_up(self, why: str, *, rank: int, now: float) -> None:
        """End all ranks at once, because one must be ended."""
        self._given_up, self._culprit = why, rank
        if not self.is_closed:
            launcher = self._calls.launcher
            launcher.apply(launcher.policy.failed(now))
            launcher.zygote.signal(launcher.policy.alive, signal.SIGKILL)

    def conclude(self) -> LaunchError:
        """Return the error with which the ranks have ended, once all have, and release everything."""
        if not self._calls.closed:
            left = [rank for rank, state in self._calls.launcher.policy.states.items() if state.exit_code == 0]
            self._calls.conclude()
            if self._given_up:
                self._calls.error = RankFailed(
                    f"{self._given_up}: all ranks were ended", rank=self._culprit, exit_code=128 + signal.SIGKILL
                )
            elif self._calls.error is None:
                text = f"{which_ranks(left)} left with exit code 0 in the middle of the cells; the others were ended"
                self._calls.error = RankFailed(text, rank=left[0] if left else 0, exit_code=0)
        self.close()
        assert self._calls.error is not None, "ranks that live on end by an error, or by close()"
        return self._calls.error

    def ended(self) -> LaunchError:
        """Return the error with which the ranks have ended; those that still run are ended first."""
        if self._calls.error is None and self._closed:
            return LaunchError("the ranks were closed: make new ones with lockstep.InteractiveRanks")
        while not self.has_ended:
            self.end_all(time.monotonic())
            self._calls.turn(time.monotonic() + _LEAVING)
        return self.conclude()

    def close(self) -> None:
        """End the ranks, which exit like programs that have ended, and release everything. A second call does
        nothing."""
        self._closed = True
        for channel in self.channels.values():
            if channel.fileno() >= 0:
                self._forget(channel)
                channel.close()
        by = time.monotonic() + _LEAVING
        while not self.has_ended and time.monotonic() < by:
            for each in self._calls.turn(by):
                if isinstance(each, RankPipe):
                    self.read(each)
        while not self.has_ended:
            self.end_all(time.monotonic())
            self._calls.turn(time.monotonic() + _LEAVING)
        if not self.is_closed:
            self._calls.conclude()  # the run's record ends as well
        for pipe in self._pipes:
            pipe.close()
        for returned in self._returned:
            returned.close()
        self._pipes.clear()
