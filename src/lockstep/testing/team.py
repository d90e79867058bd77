"""Call a function on N ranks, again and again: the ranks are forked from one process that has imported torch.

See Note [Ranks for one test] in ``lockstep/testing/__init__.py``.
"""

from __future__ import annotations

import contextlib
import enum
import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from typing import Any

from lockstep import _proc, knobs, machine
from lockstep.errors import LaunchError
from lockstep.job.files import FailureRecord
from lockstep.job.page import STACK_SIGNAL, Phase
from lockstep.launch import evidence, lateness, report
from lockstep.launch.binding import Binding
from lockstep.launch.channel import Answer, Broken, Cleared, Exited, Ready, Started, ZygoteHandle
from lockstep.launch.folders import JobFolder
from lockstep.launch.launcher import Attempt
from lockstep.launch.packed_call import PackedCall, preparation_without_main
from lockstep.launch.ports import free_port
from lockstep.launch.returned import NotReturned, Returned
from lockstep.rendezvous.messages import Round

#: Seconds that the other ranks have to end by themselves once one has ended badly.
FOLLOWING = 5.0
#: Seconds for the zygote's imports, on a slow disk.
_IMPORTS = 300.0
#: Seconds for ranks that are killed, or for what they have left behind to be ended.
_ENDING = 30.0
#: Seconds that processes which outlive their rank have to leave by themselves.
_LEAVING = 1.0


@dataclass(frozen=True)
class RankCall:
    """The call that each rank makes: ``function(rank, *args)``, which is at the top level of a module."""

    function: Callable[..., object]
    args: tuple[Any, ...]
    world_size: int
    #: The seconds that the whole call may take.
    limit: float
    #: Returns whether a rank's value says that it has failed.
    is_failure: Callable[[Any], bool]
    #: Variables that the ranks see changed, beside this process's own.
    env: Mapping[str, str] = field(default_factory=dict)
    #: True if what the ranks print is kept for :class:`RankEnd`; else it goes where this process's output goes.
    captured: bool = True


class EndedFor(enum.Enum):
    """The reason why ranks were ended from outside."""

    #: They had not ended at the call's limit.
    LIMIT = "limit"
    #: They waited for what could not come any more.
    HANG = "hang"
    #: They were still there some seconds after another rank had ended badly.
    FAILURE = "failure"


@dataclass(frozen=True)
class RankEnd:
    """The outcome of one rank."""

    rank: int
    pid: int | None
    #: The exit code; negative for a signal.
    exit_code: int | None
    #: The time of its end, on the monotonic clock.
    at: float
    #: What the function returned; None: nothing, or see ``problem``.
    value: Any = None
    #: The reason why there is no value, though the function may have returned; empty: there is one.
    problem: str = ""
    #: What it left of an exception that ended it.
    record: FailureRecord | None = None
    #: The reason why it was ended from outside; None: it ended by itself.
    stopped: EndedFor | None = None
    #: The place where it was then, in words.
    where: str = ""
    out: str = ""
    err: str = ""


@dataclass(frozen=True)
class TeamResult:
    """The outcome of a call."""

    ranks: tuple[RankEnd, ...]
    #: The reason why the call was ended from outside, and what the launcher's watch says of it.
    stopped: EndedFor | None
    finding: str
    #: The processes that have outlived the ranks, in words. They have been ended.
    left: tuple[str, ...]


class Team:
    """A zygote that stays, and the ranks of one call at a time. To be closed.

    Args:
        also: modules that the zygote is to import beside torch and lockstep.

    Raises:
        LaunchError: no folder for the ranks' files can be written.
    """

    def __init__(self, also: Sequence[str] = ()) -> None:
        self._calls = 0
        self._base = dict(os.environ)
        # Ranks share it: shared memory that one leaves behind stays to be found, as it would in a job that is killed.
        resource_tracker.ensure_running()
        self._folder = JobFolder()
        try:
            self._zygote = ZygoteHandle(
                self._folder.path, ranks=machine.visible_cores(), threads=1, restarts=True, also=also
            )
        except BaseException:
            self._folder.remove()
            raise
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._zygote, selectors.EVENT_READ)
        self._ready = False

    @property
    def pid(self) -> int:
        """The zygote's process id."""
        return self._zygote.pid

    def run(self, call: RankCall) -> TeamResult:
        """Have the ranks make a call, and return the outcome of each, once all have ended.

        Raises:
            LaunchError: the zygote could not import the modules, or is gone.
        """
        self._await_imports()
        round_ = Round(0, (call.world_size,), "127.0.0.1", free_port())
        attempt = Attempt(
            round_,
            home=self._folder.path,
            number=self._calls,
            grace=FOLLOWING,
            binding=Binding((), threads=1, cores=machine.visible_cores()),
            warming_up=knobs.late(),
        )
        self._calls += 1
        try:
            return _CallUnderWay(self, attempt, call).result()
        finally:
            attempt.close()
            shutil.rmtree(attempt.folder, ignore_errors=True)

    def close(self) -> None:
        """End the zygote and all that is left below it. Does nothing the second time."""
        self._selector.close()
        self._zygote.close()
        self._folder.remove()

    def fork(self, attempt: Attempt, call: RankCall, rank: int, returned: Returned, output: tuple[int, int]) -> None:
        """Have one rank forked, with this process's environment, paths and folder as they are now."""
        now = dict(os.environ)
        changed: dict[str, str | None] = dict.fromkeys(self._base.keys() - now.keys())
        changed |= {name: value for name, value in now.items() if self._base.get(name) != value}
        with PackedCall(preparation_without_main(rank), call.function, call.args, returned, output=output) as packed:
            fork = attempt.fork(rank, packed.job | {"brief": True})
            env = changed | fork.env | dict(call.env)
            self._zygote.fork(replace(fork, env=env), packed.descriptors())

    def signal(self, ranks: Sequence[int], signum: int) -> None:
        """Have a signal sent to ranks of the call under way."""
        self._zygote.signal(ranks, signum)

    def hear(self, until: float) -> list[Answer]:
        """Return the zygote's next messages, up to ``until`` on the monotonic clock; empty if there are none.

        Raises:
            LaunchError: the zygote is gone, or can't fork the ranks.
        """
        if not self._selector.select(max(0.0, until - time.monotonic())):
            return []
        try:
            answers = self._zygote.receive()
        except EOFError:
            raise LaunchError(report.lost(self._zygote.pid, self._zygote.wait(limit=1.0))) from None
        for answer in answers:
            if isinstance(answer, Broken):
                raise LaunchError(report.not_started(answer.error))
            self._ready |= isinstance(answer, Ready)
        return answers

    def clear(self) -> tuple[str, ...]:
        """End the processes that ranks have left running, and return them. Resource trackers leave by themselves,
        later."""
        deadline = time.monotonic() + _LEAVING
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if left:
            self._zygote.clear()
            end = time.monotonic() + _ENDING
            while not any(isinstance(answer, Cleared) for answer in self.hear(end)):
                if time.monotonic() > end:
                    raise LaunchError(f"what ranks have left running did not end within {_ENDING:g} s: {left}")
        return tuple(left.values())

    def _left(self) -> dict[int, str]:
        found = {}
        for pid in _proc.descendants(self._zygote.pid):
            words = _proc.read(pid, "cmdline").replace("\0", " ").strip()
            if "resource_tracker import main" not in words:
                found[pid] = f"process {pid}: {words[-200:] or 'without a command line'}"
        return found

    def _await_imports(self) -> None:
        end = time.monotonic() + _IMPORTS
        while not self._ready:
            if not self.hear(end) and time.monotonic() > end:
                raise LaunchError(f"the process that forks the ranks did not import torch within {_IMPORTS:g} s")


class _CallUnderWay:
    """One call under way."""

    def __init__(self, team: Team, attempt: Attempt, call: RankCall) -> None:
        self._team, self._attempt, self._call = team, attempt, call
        self._returned = [Returned() for _ in range(call.world_size)]
        self._output = [_Output() if call.captured else None for _ in range(call.world_size)]
        #: The ranks that were asked for, the first ones.
        self._forked = 0
        self._ended: dict[int, RankEnd] = {}
        self._where: dict[int, str] = {}
        self._stopped: EndedFor | None = None
        self._finding = ""

    def result(self) -> TeamResult:
        """Start the ranks, wait for their end, and return their outcomes."""
        try:
            for rank in range(self._call.world_size):
                output = self._output[rank]
                fds = (1, 2) if output is None else output.descriptors
                self._team.fork(self._attempt, self._call, rank, self._returned[rank], fds)
                self._forked += 1
            self._wait()
            left = self._team.clear()
            return TeamResult(
                tuple(self._end_of(rank) for rank in range(self._call.world_size)), self._stopped, self._finding, left
            )
        finally:
            with contextlib.suppress(LaunchError):  # what raises here has told of it
                self._kill()
            for returned in self._returned:
                returned.close()
            for each in self._output:
                if each is not None:
                    each.close()

    @property
    def _alive(self) -> list[int]:
        return [rank for rank in self._attempt.policy.alive if rank < self._forked]

    def _wait(self) -> None:
        """Wait until all ranks have ended: by themselves, or because they had to be."""
        hangs, states = self._attempt.hangs, self._attempt.policy.states
        limit = time.monotonic() + self._call.limit
        follow = sure = float("inf")
        look = time.monotonic()
        while self._alive:
            now = time.monotonic()
            if now >= hangs.due:
                hangs.glance(now)
            if now >= look:
                look = now + knobs.times().heartbeat
                hangs.look(states, now, ask=lambda ranks, signum: self._team.signal(list(ranks), signum))
            # On a busy machine a rank may only not have run for some seconds, so a hang has to last.
            sure = min(sure, now + knobs.late()) if self._can_not_end() else float("inf")
            is_over = now >= min(limit, follow, sure)
            answers = self._team.hear(now if is_over else min(limit, follow, sure, look, hangs.due))
            if is_over and not answers:  # (what came while this process stood still counts)
                failed = follow < float("inf")
                self._stop(EndedFor.LIMIT if now >= limit else EndedFor.FAILURE if failed else EndedFor.HANG)
                return
            if self._take(answers):
                follow = min(follow, time.monotonic() + FOLLOWING)

    def _can_not_end(self) -> bool:
        """Return whether ranks wait in vain: for ranks that have ended, or all for each other."""
        facts, states = self._attempt.hangs.facts(), self._attempt.policy.states
        return not facts["over"] and all(states[rank].exit_code is not None for rank in facts["ranks"])

    def _take(self, answers: Sequence[Answer]) -> bool:
        """Note the zygote's messages, and return whether a rank has failed."""
        policy, bad = self._attempt.policy, False
        for answer in answers:
            if isinstance(answer, Started):
                policy.started(answer.rank, answer.pid)
            elif isinstance(answer, Exited):
                policy.exited(answer.rank, answer.code, answer.at, peak=answer.peak, agreed=True)
                bad |= self._note(answer)
        return bad

    def _note(self, ended: Exited) -> bool:
        value, problem = None, ""
        try:
            value = self._returned[ended.rank].take()
        except NotReturned as why:
            problem = str(why)
        self._ended[ended.rank] = RankEnd(
            ended.rank,
            self._attempt.policy.states[ended.rank].pid,
            ended.code,
            ended.at,
            value=value,
            problem=problem,
            record=self._attempt.record(ended.rank),
            stopped=self._stopped if ended.rank in self._where else None,
            where=self._where.get(ended.rank, ""),
        )
        return ended.code != 0 or bool(problem) or self._call.is_failure(value)

    def _stop(self, why: EndedFor) -> None:
        """Find out where the ranks are that still run, and end them."""
        self._stopped, self._finding = why, self._attempt.hangs.finding
        ranks, folder = self._alive, self._attempt.folder
        pids = {rank: self._attempt.policy.states[rank].pid for rank in ranks}
        asked = {
            rank: pid
            for rank, pid in pids.items()
            if pid is not None and self._attempt.look(rank).mark.phase is not Phase.LEAVING
        }
        answers = evidence.Answers(folder, ranks, asked=asked, now=time.monotonic())
        self._team.signal([*asked], STACK_SIGNAL)
        while not answers.are_in(time.monotonic()):
            time.sleep(0.02)
        for rank in ranks:
            self._where[rank] = self._describe(rank, answers.begins[rank])
        self._kill()

    def _describe(self, rank: int, begin: int) -> str:
        state, folder = self._attempt.policy.states[rank], self._attempt.folder
        stack = evidence.read_stack(folder, rank, start=begin)
        facts = None if state.pid is None else evidence.facts(state.pid)
        known = lateness.Known(rank, state.pid, None, self._attempt.look(rank), 0.0, facts, stack)
        return "\n".join(lateness.describe_rank(known, None))

    def _kill(self) -> None:
        """End the ranks that are still there.

        Raises:
            LaunchError: they do not end.
        """
        end = time.monotonic() + _ENDING
        if self._alive:
            self._team.signal(self._alive, signal.SIGKILL)
        while self._alive:
            answers = self._team.hear(end)
            self._take(answers)
            if not answers and time.monotonic() > end:
                raise LaunchError(f"ranks {self._alive} did not end within {_ENDING:g} s of SIGKILL")

    def _end_of(self, rank: int) -> RankEnd:
        output = self._output[rank]
        end = self._ended[rank]
        return end if output is None else replace(end, out=output.text(0), err=output.text(1))


class _Output:
    """The output of a rank, in memory files: nothing has to be read meanwhile, and nothing is lost with a rank."""

    def __init__(self) -> None:
        self.descriptors = os.memfd_create("lockstep-out"), os.memfd_create("lockstep-err")

    def text(self, place: int) -> str:
        """Return the text that was printed to standard output (0) or error (1)."""
        fd = self.descriptors[place]
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        for fd in self.descriptors:
            os.close(fd)
