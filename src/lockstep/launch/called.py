"""Ranks on which a program calls a function: started, watched, and closed; for ``lockstep.spawn`` and for cells."""

from __future__ import annotations

import os
import selectors
import signal
import time
from pathlib import Path

from lockstep import knobs
from lockstep.errors import EnvironmentMismatch, LaunchError, RankFailed
from lockstep.launch import closing, console, report
from lockstep.launch.asked import AskedMeanwhile
from lockstep.launch.channel import Broken
from lockstep.launch.closing import JobEnd, LastWord, why_over
from lockstep.launch.console import say
from lockstep.launch.folders import JobFolder
from lockstep.launch.launcher import Launcher
from lockstep.launch.logs import LogFolder
from lockstep.launch.packed_call import PackedCall
from lockstep.launch.policy import failure_facts
from lockstep.launch.ports import free_port
from lockstep.launch.report import Outcome
from lockstep.launch.spec import JobSpec, Program
from lockstep.runs.record import Recorder

#: Seconds that the zygote has to end what ranks have left, after the time that they had to save.
_ENDING = 10.0
#: Seconds for a reader to take the last messages before the program goes on; what is left is shown later.
_LAST_WORD = 1.0


class CalledRanks:
    """The ranks, their launcher in this process, and everything that both need. To be used by one thread at a time.

    Args:
        program: the words that name it in the run's record; the first is what the user has called.
        nprocs: the number of ranks.
        quiet: leave out the summary at the end, whatever ``LOCKSTEP_QUIET`` says.
        lends: whether this program's terminal, if it has one, is lent to ranks at a breakpoint.

    Raises:
        LaunchError: the ranks can't be started.
        EnvironmentMismatch: ``MASTER_PORT`` is not a port.
        ValueError: the ranks can't be bound to cores as ``LOCKSTEP_BIND`` says.
    """

    def __init__(self, program: list[str], nprocs: int, *, quiet: bool = False, lends: bool = False) -> None:
        #: The error with which the ranks ended, or could not be started; None: they run, or have succeeded.
        self.error: LaunchError | None = None
        #: True once all is given back.
        self.closed = False
        master = _master()
        self._folder = JobFolder()
        try:
            spec = JobSpec(Program(program[0]), nproc=nprocs, quiet=quiet or knobs.quiet())
            self._logs = LogFolder(None, program=spec.program.name)
            recorder = Recorder(self._logs.make, program=program, tell=say)
            self.launcher = Launcher(spec, spec.round(*master), home=self._folder.path, recorder=recorder, lends=lends)
        except BaseException:
            self._folder.remove()
            raise
        #: The signals that ask this program to end, where its owner has them noted: the ranks are asked first.
        self.asked = AskedMeanwhile()
        self.launcher.selector.register(self.asked, selectors.EVENT_READ)
        #: True if they were asked when there were ranks that save and leave by themselves.
        self._asked_listeners = False

    @property
    def folder(self) -> Path:
        """The private folder of this start."""
        return self.launcher.attempt.folder

    def fork(self, rank: int, packed: PackedCall) -> None:
        """Start a rank, which makes the packed call."""
        self.launcher.zygote.fork(self.launcher.attempt.fork(rank, packed.job), packed.descriptors())

    def let_save(self) -> None:
        """Let the ranks save, if they can, should this program be gone before them."""
        self.launcher.zygote.let_save(self.launcher.policy.grace)

    def turn(self, *moments: float | None) -> set[object]:
        """Wait for a message of the zygote, or for the time to act, and act on it.

        Args:
            moments: as for :meth:`Launcher.wait`.

        Returns:
            the files in the launcher's selector that are ready.
        """
        launcher = self.launcher
        ready = launcher.wait(*moments)
        for signum in self.asked.read():  # first: they explain the deaths that come with them
            self._ask_to_stop(signum)
        for answer in launcher.hear(ready):
            if isinstance(answer, Broken) and self.error is None:
                self.error = LaunchError(report.not_started(answer.error))
        launcher.act(time.monotonic())
        if not launcher.lives:
            self.conclude()
        return ready

    def _ask_to_stop(self, signum: signal.Signals) -> None:
        """Pass on to the ranks that this program is asked to end: they save if they can, and have some seconds for
        that. A second request ends them at once."""
        launcher, policy = self.launcher, self.launcher.policy
        has_saved = launcher.attempt.stop_note() is not None
        if policy.stopped_by is None and launcher.attempt.listening and (has_saved or not policy.stopping):
            self._asked_listeners = self._asked_listeners or not has_saved
            say(report.asked(signum, grace=policy.grace, has_saved=has_saved))
        launcher.apply(policy.signalled(signum, delivered=False, now=time.monotonic()))
        if all(state.pid is None for state in policy.states.values()):
            launcher.zygote.kill()  # it may be busy importing for a while

    def conclude(self) -> None:
        """Find out how the ranks have ended, print the messages about that, and close."""
        launcher, policy = self.launcher, self.launcher.policy
        outcome, asked = launcher.attempt.outcome(), policy.stopped_by
        closed = closing.decide(self._end(outcome))
        code, text = closed.exit_code, ""
        match closed.word:
            case LastWord.SAVED | LastWord.STOPPED:
                text = report.stopped(outcome, asked)
            case LastWord.CAME_LATE if asked is not None:
                text = report.came_late(asked)
            case LastWord.VERDICT:
                text = self._record_failure(outcome)
            case LastWord.ZYGOTE_LOST:
                left = launcher.zygote.wait(limit=1.0)
                code = 128 - left if left is not None and left < 0 else 1
                self.error = self.error or LaunchError(report.lost(launcher.zygote.pid, left))
                text = str(self.error)
        self.error = self.error or self._error(closed.word, code or 0, text, outcome)
        if asked is not None and text and outcome.quit_by is None:
            say(text)  # since the signal has its effect next, whatever the error
        word = "" if closed.word is LastWord.VERDICT else text  # a failure is an event
        for said in launcher.conclude(code or 0, end=closed.end, word=word):
            say(said)
        self.close()

    def _end(self, outcome: Outcome) -> JobEnd:
        """Gather what decides how the ranks have ended."""
        policy, first = self.launcher.policy, outcome.first
        kind = why_over(
            stopped_by=policy.stopped_by, failing=policy.failing, failed=first is not None, saved=outcome.saved
        )
        return self.launcher.job_end(
            outcome,
            kind if policy.done or first is not None else None,
            failed_with=1 if first is None else first.exit_code,
            asked_listeners=self._asked_listeners,
        )

    def _record_failure(self, outcome: Outcome) -> str:
        """Note in the record of the run which rank has failed first, and return the report on it."""
        first, text = outcome.first, report.describe(outcome)
        assert first is not None, "that is the verdict"
        step, taken = self.launcher.attempt.steps(first.rank)
        failure = failure_facts(first, step=step, taken=taken, out_of_memory=outcome.out_of_memory)
        self.launcher.recorder.event("failed", text, failure=failure, again=False)
        return text

    def _error(self, word: LastWord, code: int, text: str, outcome: Outcome) -> RankFailed | None:
        """Return what who waits for the ranks is to hear; None: all have succeeded.

        A signal that has asked them to end ends this program, too; but not the first process of a container, and who
        waits again is to hear the same.
        """
        if code == 0:
            return None
        if outcome.quit_by is not None:
            return RankFailed(text, rank=outcome.quit_by[0], exit_code=code)
        first = None if word is LastWord.STOPPED else outcome.first
        if first is None:
            return RankFailed(text, rank=self.launcher.attempt.round.local_ranks[0], exit_code=code)
        traceback = None if first.record is None else first.record.traceback or None
        return RankFailed(text, rank=first.rank, exit_code=code, traceback=traceback)

    def close(self, *, saves: bool = False) -> None:
        """End what is left and release everything. A second call does nothing.

        Not by a kill of the zygote: ranks may run, and only the zygote ends what they have started.

        Args:
            saves: the ranks are to save first, if they can; they have the time that ``LetSave`` gives them.
        """
        if self.closed:
            return
        self.closed = True
        launcher = self.launcher
        if saves:
            launcher.zygote.close(limit=launcher.policy.grace + _ENDING)
        elif launcher.policy.alive:
            launcher.zygote.signal(launcher.policy.alive, signal.SIGKILL)
        launcher.close()
        self._logs.close()
        self._folder.remove()
        console.flush(_LAST_WORD)  # a signal that has come may end this program next
        self.asked.close()


def _master() -> tuple[str, int]:
    """Return where a function that opens torch's process group meets: as the caller set it, or any free port."""
    if "RANK" not in os.environ and "MASTER_PORT" in os.environ:
        text = os.environ["MASTER_PORT"]
        if not (text.isdecimal() and 0 < int(text) < 65536):
            raise EnvironmentMismatch(f"MASTER_PORT={text!r}: expected 1 to 65535, or leave it unset for any free port")
        return os.environ.get("MASTER_ADDR", "127.0.0.1"), int(text)
    return "127.0.0.1", free_port()
