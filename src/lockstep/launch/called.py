"""Ranks on which a program calls a function: started, watched, and closed; for ``lockstep.spawn`` and for cells."""

from __future__ import annotations

import os
import selectors
import signal
import time
from pathlib import Path

from lockstep import knobs
from lockstep.errors import EnvironmentMismatch, LaunchError, RankFailed
from lockstep.job.files import EXIT_SAVED
from lockstep.launch import console, report
from lockstep.launch.asked import AskedMeanwhile
from lockstep.launch.channel import Broken
from lockstep.launch.console import say
from lockstep.launch.folders import JobFolder
from lockstep.launch.launcher import Launcher
from lockstep.launch.logs import LogFolder
from lockstep.launch.packed_call import PackedCall
from lockstep.launch.policy import failure_facts
from lockstep.launch.ports import free_port
from lockstep.launch.spec import JobSpec, Program
from lockstep.runs.record import Recorder, RunEnd

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
            if self.error is None:
                self.error = LaunchError(report.lost(launcher.zygote.pid, launcher.zygote.wait(limit=1.0)))
            self.close()
        return ready

    def _ask_to_stop(self, signum: signal.Signals) -> None:
        """Pass on to the ranks that this program is asked to end: they save if they can, and have some seconds for
        that. A second request ends them at once."""
        launcher, policy = self.launcher, self.launcher.policy
        has_saved = launcher.attempt.stop_note() is not None
        if policy.stopped_by is None and launcher.attempt.listening and (has_saved or not policy.stopping):
            say(report.asked(signum, grace=policy.grace, has_saved=has_saved))
        launcher.apply(policy.signalled(signum, delivered=False, now=time.monotonic()))
        if all(state.pid is None for state in policy.states.values()):
            launcher.zygote.kill()  # it may be busy importing for a while

    def conclude(self) -> None:
        """Find out how the ranks have ended, print the messages about that, and close."""
        attempt = self.launcher.attempt
        outcome = attempt.outcome()
        first, policy = outcome.first, self.launcher.policy
        asked = policy.stopped_by
        if outcome.saved:
            code, end, text = EXIT_SAVED, RunEnd.SAVED, report.stopped(outcome, asked)
        elif outcome.quit_by is not None:
            code, end, text = 128 + signal.SIGINT, RunEnd.STOPPED, outcome.quit
            self.error = RankFailed(text, rank=outcome.quit_by[0], exit_code=code)
        elif asked is not None and not policy.failing:
            first, code, end, text = None, 128 + asked, RunEnd.STOPPED, report.stopped(outcome, asked)
        elif first is not None:
            code, end, text = first.exit_code, RunEnd.FAILED, report.describe(outcome)
            step, taken = attempt.steps(first.rank)
            failure = failure_facts(first, step=step, taken=taken, out_of_memory=outcome.out_of_memory)
            self.launcher.recorder.event("failed", text, failure=failure, again=False)
        else:
            code, end, text = 0, RunEnd.DONE, ""
        if first is not None and self.error is None:
            traceback = None if first.record is None else first.record.traceback or None
            self.error = RankFailed(text, rank=first.rank, exit_code=code, traceback=traceback)
        if asked is not None and outcome.quit_by is None:
            say(text)  # since the signal has its effect next, whatever the error
            # It has none on the first process of a container; and who waits again is to hear the same.
            self.error = self.error or RankFailed(text, rank=attempt.round.local_ranks[0], exit_code=code)
        for said in self.launcher.conclude(code, end=end, word=text if outcome.saved else ""):
            say(said)
        self.close()

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
