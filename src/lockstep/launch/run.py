"""Run a job for a command: with the user's signals, the ranks' streams and logs, restarts, and a last word."""

from __future__ import annotations

import copy
import enum
import os
import resource
import selectors
import signal
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep import _proc, knobs
from lockstep._files import describe, write_whole
from lockstep.errors import LaunchError
from lockstep.job import terminal
from lockstep.job.page import Phase
from lockstep.job.stop_signals import TIME_LIMIT
from lockstep.launch import closing, console, processes, report
from lockstep.launch.channel import CLIENT, Answer, Broken, Cleared, Fork, Ready, Started
from lockstep.launch.closing import JobEnd, LastWord, why_over
from lockstep.launch.console import say
from lockstep.launch.folders import JobFolder
from lockstep.launch.hangs import ReportedHang
from lockstep.launch.launcher import Launcher
from lockstep.launch.logs import LogFolder
from lockstep.launch.notify import Notice
from lockstep.launch.output import Relay, Streams
from lockstep.launch.policy import HUNG, Failure, Restarts, failure_facts, hang_facts
from lockstep.launch.ports import free_port, is_free
from lockstep.launch.processes import SAVE, STOPPING, SignalArrival, SignalQueue, ignored
from lockstep.launch.report import Outcome
from lockstep.launch.screen import RunScreen
from lockstep.launch.spec import DEFAULT_MASTER_PORT, JobSpec, Output, check_program
from lockstep.rendezvous.handle import Rendezvous
from lockstep.rendezvous.messages import (
    Alive,
    End,
    Ended,
    EndKind,
    Event,
    Leave,
    Looking,
    Looks,
    Meet,
    Met,
    Refused,
    Round,
    Verdict,
)
from lockstep.runs.record import Recorder, RunEnd
from lockstep.text import counted

#: Open files that each starting rank needs in the launcher, and that everything else needs.
_DESCRIPTORS_PER_RANK = 7
_DESCRIPTORS_BESIDE = 32
#: Seconds that a reader may take for the last output after every process has ended.
_DRAIN = 600.0
#: Rendezvous clients that may be lost in a row before the machines count as unable to meet.
_CLIENTS = 3
#: Seconds that processes which outlived the zygote have to leave by themselves.
_PATIENCE = 0.3


def run(spec: JobSpec) -> int:
    """Run a job to its end and return the exit code for it.

    0; 75 (``EXIT_SAVED``) if the ranks were asked to stop and have saved; the exit code of the first rank to fail; or
    128 + the signal that stopped the job.

    Raises:
        ValueError: the program can't be run.
        LaunchError: the job can't be started: the port is in use, or the logs can't be written.
    """
    check_program(spec.program)
    _check_descriptors(spec.nproc)
    master = _master(spec)  # refuses a port in use before anything is started
    with ExitStack() as undo:
        _open_standard_streams()
        terminal.outlive()
        signals = SignalQueue(s for s in (*STOPPING, SAVE, signal.SIGWINCH) if s not in ignored(STOPPING))
        # A request to save in a job's last moment must not end a launcher that has nothing left to save. Once it is
        # recorded how the job has ended, all signals stay blocked to the very end: a scheduler that sees one machine's
        # launcher leave may stop the others by a second signal, which would hide that they have saved, or are done.
        over = {SAVE}
        undo.callback(lambda: signals.close(keep=over))
        users = set(_proc.children(os.getpid()))  # see Note [No orphans]
        processes.become_subreaper()
        folder = JobFolder()
        undo.callback(folder.remove)
        logs = LogFolder(spec.log_dir, program=spec.program.name)
        undo.callback(logs.close)
        recorder = Recorder(logs.make, program=spec.program.words, tell=say)
        file = None if spec.program.text is None else _write_program(Path(folder.path), spec.program.text)
        launcher = Launcher(spec, spec.round(*master), home=folder.path, recorder=recorder, lends=True)
        job = _Run(launcher, logs=logs, signals=signals, users=users, file=file)
        undo.callback(job.close)
        code = job.watch()
        over.update(STOPPING)
        return code


def _write_program(folder: Path, text: bytes) -> Path:
    """Keep a program that came through a pipe, for each start of the ranks and for tracebacks to show its lines."""
    path = folder / "program.py"
    try:
        write_whole(path, text)
    except OSError as error:
        raise LaunchError(f"the program can't be kept for the ranks: {describe(error)}") from error
    return path


def descriptors(nproc: int) -> int:
    """Return how many open files a launcher of ``nproc`` ranks needs."""
    return nproc * _DESCRIPTORS_PER_RANK + _DESCRIPTORS_BESIDE


def _check_descriptors(nproc: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = descriptors(nproc)
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise LaunchError(
            f"{nproc} ranks on this machine need about {needed} open files, and the limit is {limit}: start fewer "
            "ranks with -n, or raise the limit with ulimit -n"
        )


def _master(spec: JobSpec) -> tuple[str, int]:
    """Return where scripts that open their own process group meet, and several nodes in any case."""
    address = spec.master_addr or "127.0.0.1"
    if spec.nnodes == 1 and spec.master_port is None:
        return address, free_port()
    port = spec.master_port or DEFAULT_MASTER_PORT
    if spec.node_rank == 0 and not is_free(port):
        raise LaunchError(f"port {port} is in use on this machine: choose another with --master_port")
    return address, port


def _open_standard_streams() -> None:
    """Fill the places of closed standard streams, so that no socket of ours lands there."""
    while True:
        fd = os.open(os.devnull, os.O_RDWR)
        if fd > 2:
            os.close(fd)
            return
        os.set_inheritable(fd, True)


def _is_left_by(verdict: Verdict) -> bool:
    """Return whether this machine leaves a job that goes on without it, by a verdict as it concerns this machine."""
    return bool(verdict.leave) and not verdict.again


class _Stage(enum.Enum):
    """Where a run is."""

    #: The zygote imports the ranks' modules; no rank is forked yet.
    IMPORTING = enum.auto()
    #: The launchers of several machines wait for each other; there are no ranks.
    MEETING = enum.auto()
    RUNNING = enum.auto()
    #: This machine's ranks have ended; the consequence depends on the other machines and is not known yet.
    ENDED = enum.auto()
    #: An attempt is over; the next one waits until nothing of it is left.
    CLEARING = enum.auto()
    #: The rendezvous client was told to leave; the machine that serves the others waits for them.
    LEAVING = enum.auto()
    #: The zygote was told to leave.
    FINISHING = enum.auto()


class _Run:
    """One machine's part of a job that a command runs.

    An attempt ends by a verdict. On one machine it is made here, from how the ranks have ended; where several machines
    have met, it is the first that any of them wrote down (see Note [A round] in ``rendezvous/client.py``).

    Args:
        launcher: the zygote, which imports meanwhile, and the ranks to come; closed with this.
        logs: where the ranks' output goes that the terminal does not show.
        signals: those that the user sends.
        users: children that this process had before the job, which are left alone.
        file: where the program's text is, if it came through a pipe.
    """

    def __init__(
        self, launcher: Launcher, *, logs: LogFolder, signals: SignalQueue, users: set[int], file: Path | None = None
    ) -> None:
        self._launcher = launcher
        self._users = users
        self._file = file
        self._spec = launcher.spec
        self._logs = logs
        self._signals = signals
        self._restarts = Restarts(self._spec.max_restarts)
        self._stage = _Stage.IMPORTING
        #: The verdict on this attempt, common to all machines; None: it is not over.
        self._verdict: Verdict | None = None
        #: The verdict on the last start, if the ranks are to start again; None: it is their first start.
        self._before: Verdict | None = None
        #: True if the signal that ends the job reached ranks that save and leave by themselves.
        self._asked_listeners = False
        #: The monotonic time at which ranks that were asked to save should have come to a step; None: this is done.
        self._warn_at: float | None = None
        self._steps_when_asked: dict[int, int | None] = {}
        self._relay = Relay(launcher.selector)
        self._streams = Streams(self._spec, logs, self._relay)
        self._screen = RunScreen(launcher, self._streams, self._relay)
        console.say_on(self._screen)
        self._others = None if self._spec.rendezvous is None else Rendezvous(self._spec.meeting())
        #: The monotonic time at which the search for the other machines ends; None: it has not begun.
        self._meet_by: float | None = None
        #: The number of the last round, and the identity of the job that met in it.
        self._last_round, self._job = -1, ""
        #: True if ranks of this machine have taken a step in a round before.
        self._stepped = False
        #: Why this machine could not go on with the last round; empty: it could.
        self._lost = ""
        #: Why the machines will not meet again, or not start their ranks, and the exit code for that; empty: they may.
        self._refused, self._refused_with = "", 1
        #: Rendezvous clients that were lost since the machines last met.
        self._lost_clients = 0
        #: The monotonic time by which a client that was told to leave must have left; None: none was told.
        self._patience: float | None = None
        self._told_of_waiting = self._is_hurried = False
        self._has_told_of_quit = False
        #: The monotonic time at which the last turn of the loop began to act.
        self._turned = time.monotonic()
        #: The rank whose log the report of the first start's failure has named; None: there is none.
        self._named: int | None = None
        #: The warnings about the machines that were shown already.
        self._warned: set[str] = set()
        self._told_of_machines = ""
        #: The monotonic time at which the job is asked to stop, since its time is over; None: never, or it was asked.
        self._stop_at: float | None = None
        if self._spec.max_time is not None:
            self._stop_at = self._turned + self._spec.max_time - self._spec.grace
        launcher.selector.register(signals, selectors.EVENT_READ)

    def watch(self) -> int:
        """Wait until everything has ended and all output is shown; report; return the exit code.

        Raises:
            LaunchError: the logs can't be written.
        """
        launcher = self._launcher
        while launcher.lives:
            if launcher.policy.done and self._stage in (_Stage.IMPORTING, _Stage.RUNNING):
                self._end_attempt()
            if self._stage is _Stage.ENDED and self._verdict is not None:
                self._settle(self._verdict)
            self._turn()
            if launcher.policy.stopped_by is not None and self._stage in (_Stage.IMPORTING, _Stage.MEETING):
                self._leave_early(launcher.policy.stopped_by)
        if self._stage is not _Stage.FINISHING:
            launcher.finish_notices()  # the sweep ends them, too
            launcher.zygote.wait(limit=1.0)  # its exit code, before the sweep reaps it
            swept = processes.sweep(patience=_PATIENCE, spare=self._users)  # see Note [No orphans]
            self._users -= swept.dead
            for pid, program in swept.kept.items():
                say(processes.left_behind(pid, program))
        self._drain()
        code, end, word, told = self._conclude()
        last = launcher.conclude(code, end=end, word=word)
        for text in last:
            say(text)
        told = "\n".join([told or f"the job is over: {end.value}", *last])
        if self._verdict is not None and _is_left_by(self._verdict):
            launcher.notify(Notice.RESTART, told, code=self._verdict.failure.get("code"))
        else:
            launcher.notify(
                Notice.FAILED if end is RunEnd.FAILED else Notice.ENDED, told, code=end.code, exit_code=code
            )
        unseen = self._streams.unseen()
        if self._logs.lost:
            say(f"the folder of the ranks' logs, {self._logs.path}, was removed while the job ran")
        elif unseen and unseen != [self._named]:
            say(report.unseen(unseen, self._logs.path))
        self._drain()
        launcher.finish_notices()
        return code

    def close(self) -> None:
        """End whatever is left, on any way out."""
        console.say_on(None)
        console.drop()  # nobody has taken it for as long as may be
        self._launcher.zygote.close()
        processes.sweep(patience=_PATIENCE, spare=self._users)
        self._relay.close()
        self._forget_client()
        self._launcher.close()

    def _turn(self) -> None:
        """Wait for something to happen, and act on it. Signals first: they explain the deaths that come with them."""
        launcher, held = self._launcher, self._relay.due
        due = self._patience if self._others is None or self._others.due is None else self._others.due
        ready = launcher.wait(None if held is None else time.monotonic() + held, due, self._warn_at, self._stop_at)
        now = time.monotonic()
        still, self._turned = now - self._turned - knobs.times().still, now
        if still > 0:
            self._excuse(still)
        if self._signals in ready:
            terminal.let_go()  # see Note [A dead terminal]
            for arrival in self._signals.read():
                self._on_signal(arrival, now)
        if self._stop_at is not None and now >= self._stop_at:
            self._end_in_time(now)
        for answer in launcher.hear(ready):
            self._on_answer(answer)
        if self._others is not None:
            self._hear_others(self._others, ready, now)
        self._relay.pump({fd for fd in ready if isinstance(fd, int)}, now)
        launcher.act(now)
        if launcher.policy.has_quit:
            self._tell_of_quit()
        self._screen.release()
        if self._warn_at is not None and now >= self._warn_at:
            self._warn_of_those_outside_a_step(now)

    def _excuse(self, seconds: float) -> None:
        """Leave out of all limits a time in which this process, and most likely the whole machine, stood still: what it
        waits for may come now."""
        self._launcher.policy.excuse(seconds)
        if self._others is not None:
            self._others.excuse(seconds)
        if self._patience is not None:
            self._patience += seconds

    def _on_answer(self, answer: Answer) -> None:
        match answer:
            case Ready():
                if not self._launcher.policy.stopping:  # else a signal came with this message: nothing is to be started
                    self._begin()
            case Cleared():
                self._restart()
            case Broken(error):
                self._stay_down(error if self._before else report.not_started(error), self._launcher.attempt.round)
            case Started(number, pid) if number == CLIENT and self._others is not None:
                self._others.pid = pid

    def _on_signal(self, arrival: SignalArrival, now: float) -> None:
        if arrival.signum == signal.SIGWINCH:
            self._streams.resize()
        elif arrival.signum == SAVE:
            self._ask_to_save(arrival)
        else:
            # Of a hang-up the kernel tells the leader of the session, which may be this process, and not the ranks.
            delivered = arrival.from_terminal and arrival.signum != signal.SIGHUP
            self._end_by(arrival.signum, delivered=delivered, now=now)

    def _end_in_time(self, now: float) -> None:
        """Ask the ranks to stop, unless they are asked already: the time that the job was given is over soon."""
        self._stop_at = None
        if self._launcher.policy.stopped_by is None:
            self._end_by(TIME_LIMIT, delivered=False, now=now)

    def _end_by(self, signum: signal.Signals, *, delivered: bool, now: float) -> None:
        """End the job on all machines."""
        self._stop(signum, delivered=delivered, now=now)
        node = self._launcher.attempt.round.node_rank
        # A failure of this machine ends the job itself, unless it is held back as another's consequence.
        is_held_back = self._stage is _Stage.ENDED and self._verdict is None
        if self._others is not None and (is_held_back or not self._launcher.policy.failing):
            self._others.end(End(Verdict(EndKind.STOPPED, node, signum=signum).to_json()))

    def _stop(self, signum: signal.Signals, *, delivered: bool, now: float) -> None:
        self._announce(signum)
        self._launcher.apply(self._launcher.policy.signalled(signum, delivered=delivered, now=now))

    def _tell_of_quit(self) -> None:
        """Tell the other machines once that a user has ended the job from a debugger."""
        node = self._launcher.attempt.round.node_rank
        if self._others is not None and not self._has_told_of_quit:
            self._others.end(End(Verdict(EndKind.STOPPED, node, signum=signal.SIGINT).to_json()))
        self._has_told_of_quit = True

    # From one attempt to the next --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the ranks, or first meet the other machines."""
        if self._others is None:
            self._fork_all()
        else:
            self._meet(self._others)

    def _fork_all(self) -> None:
        """Start the ranks of this attempt."""
        attempt, program = self._launcher.attempt, self._spec.program
        self._stage, self._verdict = _Stage.RUNNING, None
        job: dict[str, Any]
        kind = "module" if program.is_module else "script"
        for rank, local_rank in attempt.local_rank.items():
            job = {"kind": kind, "target": program.target, "args": self._spec.arguments(local_rank)}
            if self._spec.output is Output.SHARED and self._spec.log_dir is None:
                job["shared"] = True
            if self._file is not None:
                job["file"] = str(self._file)
            if self._spec.hold:
                job["held"] = True
            fds = self._streams.open(local_rank, rank)
            if self._streams.log(local_rank) is not None:
                job["logged"] = True
            self._fork(attempt.fork(rank, job), fds)
        if self._logs.moved is not None and self._logs.restart == 0:
            say(self._logs.moved)

    def _fork(self, fork: Fork, fds: list[int]) -> None:
        self._launcher.zygote.fork(fork, fds)
        for fd in fds:
            os.close(fd)

    def _end_attempt(self) -> None:
        """Find out why the attempt is over, now that all ranks of this machine have ended."""
        self._relay.finish_sources()  # what they wrote last may say it
        if self._verdict is None:
            verdict = self._judge()
            if self._others is None or self._stage is _Stage.IMPORTING:
                self._verdict = verdict
            else:
                self._others.end(End(verdict.to_json()))
        self._stage = _Stage.ENDED

    def _judge(self) -> Verdict:
        """Return the verdict on the attempt, as far as this machine can know."""
        policy, attempt = self._launcher.policy, self._launcher.attempt
        restarts = copy.copy(self._restarts)  # counted once it is the verdict
        node = attempt.round.node_rank
        outcome = attempt.outcome(self._streams)
        first = outcome.first
        hung = attempt.stopped_for if first is None else None
        kind = why_over(
            stopped_by=policy.stopped_by, failing=policy.failing, failed=bool(first or hung), saved=outcome.saved
        )
        if hung is not None and kind is EndKind.FAILED:
            return self._judge_hang(hung, outcome)
        if first is None or kind is not EndKind.FAILED:
            return Verdict(kind, node, signum=(policy.stopped_by or 0) if not policy.failing else 0)
        step, taken = attempt.steps(first.rank)
        failure = Failure.of(first, step=step, taken=taken, out_of_memory=outcome.out_of_memory)
        again, what_now = self._ask_for_restart(restarts, failure)
        verdict = Verdict(
            kind,
            node,
            report.describe(outcome, elsewhere=True),
            again=again,
            what_now=what_now,
            exit_code=first.exit_code,
            echo=first.is_echo,
            history=restarts.history,
            failure=failure_facts(first, step=step, taken=taken, out_of_memory=outcome.out_of_memory),
        )
        if again or first.is_echo:
            return verdict
        mutual = failure.by_itself and not failure.from_outside
        return self._spare(verdict, report.in_brief(outcome), attempt.round, mutual=mutual)

    def _spare(self, verdict: Verdict, why: str, round_: Round, *, mutual: bool) -> Verdict:
        """Return a verdict on a failure here that would end the job, or one by which only those leave who can be
        spared; see Note [Machines that can be spared] in policy.py.

        Args:
            verdict: that would end it.
            why: in brief.
            round_: that of the machines that have met.
            mutual: as for :meth:`Round.to_spare`.
        """
        launcher = self._launcher
        if self._others is None or launcher.policy.stopped_by is not None or launcher.attempt.has_stepped:
            return verdict
        leave = round_.to_spare(round_.node_rank, least=self._others.options.min_nodes, mutual=mutual)
        if not leave:
            return verdict
        restarts = copy.copy(self._restarts)
        restarts.spared += 1
        what_now = report.spared([round_.host(node) for node in leave], restarts.spared, closed=restarts.closed)
        return replace(verdict, text=why, again=True, what_now=what_now, history=restarts.history, leave=leave)

    def _judge_hang(self, hung: ReportedHang, outcome: Outcome) -> Verdict:
        """Return the verdict on an attempt whose ranks were stopped because one held up the others."""
        attempt, restarts = self._launcher.attempt, copy.copy(self._restarts)
        rank = next((rank for rank in hung.verdict.late if rank in attempt.local_rank), next(iter(attempt.local_rank)))
        step, taken = attempt.steps(rank)
        again, what_now = self._ask_for_restart(restarts, Failure.of_hang(rank, step=step, taken=taken))
        return Verdict(
            EndKind.FAILED,
            attempt.round.node_rank,
            report.stopped_for_hang(outcome, hung.text, self._spec.on_hang.seconds),
            again=again,
            what_now=what_now,
            exit_code=HUNG,
            history=restarts.history,
            failure=hang_facts(rank, step=step, taken=taken),
        )

    def _ask_for_restart(self, restarts: Restarts, failure: Failure) -> tuple[bool, str]:
        """Return whether the job starts again after ``failure``, which uses up a restart, and what to say of that."""
        policy = self._launcher.policy
        if not policy.failing or policy.stopped_by is not None or policy.gave_up:
            return False, ""
        refusal = restarts.refusal(failure)
        if refusal is None:
            return True, report.restarted(restarts.used, restarts.limit)
        return False, report.not_restarted(refusal, failure, limit=restarts.limit)

    def _settle(self, verdict: Verdict) -> None:
        """Start again or finish, now that this machine's ranks have ended and it is known why."""
        self._restarts.adopt(verdict.history)
        outcome = self._launcher.attempt.outcome(self._streams)
        # Those who have read LOST start again together, whether or not their own ranks had ended. One that has only
        # lost its connection may have missed that all is done, or that the job was asked to stop.
        done = outcome.completed and (verdict.kind is EndKind.JOINING or bool(self._lost))
        done = done or (outcome.saved and verdict.kind is not EndKind.JOINING)
        again = (
            verdict.again
            if verdict.kind is EndKind.FAILED and not outcome.saved
            else verdict.kind in (EndKind.LOST, EndKind.JOINING) and not done
        )
        if again and self._launcher.policy.stopped_by is None:
            self._stage = _Stage.CLEARING
            pid = None if self._others is None else self._others.pid
            self._launcher.zygote.clear([] if pid is None else [pid])
        elif self._others is not None and self._others.pid is not None:
            self._leave(self._others, verdict, meanwhile=again)
        else:
            self._finish()

    def _leave_early(self, signum: signal.Signals) -> None:
        """End this machine's part of the job while it has no ranks, because of a signal."""
        if self._stage is _Stage.MEETING and self._others is not None and self._last_round >= 0:
            self._verdict = Verdict(EndKind.STOPPED, self._launcher.attempt.round.node_rank, signum=signum)
            self._leave(self._others, self._verdict, meanwhile=True)
        else:
            self._launcher.zygote.kill()  # it may be busy importing for a while

    def _leave(self, others: Rendezvous, verdict: Verdict, *, meanwhile: bool) -> None:
        """Have the client tell the other machines that the job is over, unless it is this one alone that leaves it, and
        then leave.

        Args:
            others: the client.
            verdict: of this machine's last round.
            meanwhile: they may be about to start again, since the signal came after the verdict.
        """
        signum, why = self._launcher.policy.stopped_by, ""
        if self._refused:
            why = f"on {socket.gethostname()}: {self._refused}"
        elif signum is not None and meanwhile:
            why = f"stopped by {report.cause(signum)} on {socket.gethostname()}, while the machines met again"
        self._stage = _Stage.LEAVING
        self._patience = time.monotonic() + knobs.times().leaving
        outcome = self._launcher.attempt.outcome(self._streams)
        over = not _is_left_by(verdict)
        others.leave(Leave(over=over, exit_code=closing.for_the_others(self._end(verdict, outcome)), why=why))

    def _end(self, verdict: Verdict | None, outcome: Outcome) -> JobEnd:
        """Gather what decides how this machine's part of the job ends."""
        end = self._launcher.job_end(
            outcome,
            None if verdict is None else verdict.kind,
            failed_with=1 if verdict is None else verdict.exit_code,
            asked_listeners=self._asked_listeners,
        )
        return replace(
            end,
            meeting=self._stage is _Stage.MEETING,
            refused_with=self._refused_with if self._refused else None,
        )

    def _finish(self) -> None:
        self._stage = _Stage.FINISHING
        self._launcher.zygote.finish()

    def _restart(self) -> None:
        """Say what happened, and start all ranks again, now that every process of the last attempt has ended."""
        verdict, attempt = self._verdict, self._launcher.attempt
        assert verdict is not None, "an attempt is over"
        if self._launcher.policy.stopped_by is not None:
            self._stage = _Stage.RUNNING
            return  # a signal came meanwhile: the job ends as it stands
        self._before = verdict
        self._relay.finish_sources()
        self._relay.pump(set(), time.monotonic())
        if verdict.kind is EndKind.LOST:
            verdict = replace(verdict, what_now="all ranks start again when there are enough machines")
        told = self._say_verdict(verdict)
        self._launcher.notify(Notice.RESTART, told, code=verdict.failure.get("code"))
        if self._others is not None:
            self._meet(self._others)
            return
        try:
            round_ = self._spec.round(*_master(self._spec), number=attempt.round.number + 1)
            self._logs.restart = self._launcher.renew(round_).number
            self._fork_all()
        except LaunchError as error:
            self._stay_down(str(error), attempt.round)

    def _stay_down(self, why: str, round_: Round) -> None:
        """End the job, or this machine's part in it, since its ranks can't be started.

        Args:
            why: they can't.
            round_: that of the machines that have met, which are told of it.
        """
        self._refused = why
        if self._before is not None:
            self._refused, self._refused_with = f"not restarted: {why}", self._before.exit_code
        if self._others is None or self._others.pid is None:
            self._finish()
            return
        code = self._refused_with
        verdict = Verdict(EndKind.FAILED, round_.node_rank, self._refused, again=False, exit_code=code)
        verdict = self._spare(verdict, self._refused, round_, mutual=False)
        if verdict.leave:
            self._refused = f"{self._refused}\n{verdict.what_now}"
        self._others.end(End(verdict.to_json()))
        self._verdict = replace(verdict, again=False)
        self._leave(self._others, self._verdict, meanwhile=False)

    # The other machines ------------------------------------------------------------------------------------------

    def _meet(self, others: Rendezvous) -> None:
        """Take part in the next round; the client is started where there is none."""
        self._stage = _Stage.MEETING
        if others.pid is None:
            job, fds = others.start()
            self._launcher.selector.register(others, selectors.EVENT_READ)
            self._fork(Fork(CLIENT, {}, job), fds)
        self._stepped = self._stepped or self._launcher.attempt.has_stepped
        left = None if self._meet_by is None else max(0.0, self._meet_by - time.monotonic())
        others.meet(
            Meet(
                self._last_round,
                self._job,
                self._restarts.history,
                self._lost,
                left,
                alike=self._spec.alike(),
                stepped=self._stepped,
                closed=self._restarts.closed,
            )
        )

    def _hear_others(self, others: Rendezvous, ready: set[object], now: float) -> None:
        """Act on what the client says, or on its silence."""
        if others in ready:
            try:
                events = others.receive()
            except EOFError:
                self._on_lost_client(others, "the rendezvous client of this machine has ended")
                return
            for event in events:
                self._on_event(event, now)
        if others.due is not None and now >= others.due:
            self._on_lost_client(
                others, f"this machine has lost its connection to the others ({others.options.endpoint})"
            )
        elif self._patience is not None and now >= self._patience:
            self._on_lost_client(others, "")

    def _on_event(self, event: Event, now: float) -> None:
        policy = self._launcher.policy
        match event:
            case Looking(seconds, text):
                self._meet_by = now + seconds
                if text:
                    say(text)
            case Met():
                self._on_round(event)
            case Alive(waiting, ranks, refused):
                for text in refused:
                    say(text)
                self._launcher.attempt.hangs.hear(ranks, now)
                if self._others is not None:
                    self._others.tell(Looks(self._launcher.attempt.hangs.told()))
                self._on_waiting(waiting, now)
            case Refused(error, exit_code, again):
                if self._stage is _Stage.MEETING and again and self._others is not None:
                    self._lost_clients -= 1  # it has not died, and what it has lost may come back in time
                    self._on_lost_client(self._others, error)
                elif self._stage is _Stage.MEETING:
                    self._refused, self._refused_with = error, exit_code
                    self._finish()
                else:
                    self._lose(error, now)
            case Ended():
                verdict = Verdict.from_json(event.verdict)
                if self._launcher.attempt.round.node_rank in verdict.leave:
                    verdict = replace(verdict, again=False)  # it is the others that start again
                if self._verdict is None:
                    self._verdict = verdict
                    if verdict.kind in (EndKind.FAILED, EndKind.LOST):
                        self._launcher.apply(policy.failed(now))
                    elif verdict.kind is EndKind.JOINING:
                        self._launcher.apply(policy.leave(now))
                    elif verdict.kind is EndKind.STOPPED and verdict.signum and policy.stopped_by is None:
                        self._stop(signal.Signals(verdict.signum), delivered=False, now=now)

    def _on_round(self, met: Met) -> None:
        round_ = met.place
        self._lost_clients, self._lost, self._meet_by = 0, "", None
        self._last_round, self._job = round_.number, round_.job
        self._restarts.adopt(round_.history)
        for warning in met.warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                say(warning, once=warning)
        machines = report.machines(round_)
        if machines != self._told_of_machines:
            self._told_of_machines = machines
            say(machines, once=machines)
        console.met()
        if self._launcher.policy.stopped_by is not None:
            return
        try:
            self._logs.restart = self._launcher.renew(round_).number - 1
            self._fork_all()
        except LaunchError as error:
            self._stay_down(str(error), round_)

    def _on_waiting(self, waiting: int, now: float) -> None:
        """Let machines that wait join, if the ranks can save before, and if it is time."""
        attempt, policy = self._launcher.attempt, self._launcher.policy
        if not waiting or now - attempt.began < self._spec.regroup_after or self._stage is not _Stage.RUNNING:
            return
        if self._verdict is not None or policy.stopping or self._others is None:
            return
        if len(attempt.round.ranks) >= self._others.options.max_nodes:
            return  # they are spare
        machines = counted(waiting, "machine wants", "machines want")
        if attempt.listening:
            text = f"{machines} to join: the ranks finish a step, save, and start again together"
            self._others.end(End(Verdict(EndKind.JOINING, attempt.round.node_rank, text).to_json()))
        elif not self._told_of_waiting:
            self._told_of_waiting = True
            say(f"{machines} to join, and will at the next restart: there is no Checkpointer that could save now")

    def _on_lost_client(self, others: Rendezvous, why: str) -> None:
        """Go on without the client that has died or does not answer, if possible with another one."""
        self._forget_client()
        self._launcher.zygote.signal([CLIENT], signal.SIGKILL)
        self._patience = None
        if self._stage is _Stage.LEAVING:
            self._finish()
        elif self._stage is _Stage.MEETING:
            self._lost_clients += 1
            is_late = self._meet_by is not None and time.monotonic() >= self._meet_by
            if is_late or self._lost_clients > _CLIENTS:
                self._refused = why
                self._finish()
            else:
                self._meet(others)
        elif self._stage in (_Stage.RUNNING, _Stage.ENDED):
            self._lose(why, time.monotonic())

    def _lose(self, why: str, now: float) -> None:
        """End this machine's part of a round that it has lost the connection to."""
        why = why.partition(". ")[0]  # what to do about it is for a job that ends by it
        self._lost = self._lost or why
        if self._verdict is None:
            self._verdict = Verdict(EndKind.LOST, self._launcher.attempt.round.node_rank, why)
            attempt, policy = self._launcher.attempt, self._launcher.policy
            if all(attempt.look(rank).mark.phase is Phase.LEAVING for rank in policy.alive):
                policy.let_end(now)  # their result is there, and needs no other machine
            else:
                self._launcher.apply(policy.failed(now))

    def _forget_client(self) -> None:
        if self._others is not None and self._others.is_open:
            self._launcher.selector.unregister(self._others)
            self._others.close()

    # What the user asks for --------------------------------------------------------------------------------------

    def _ask_to_save(self, arrival: SignalArrival) -> None:
        """Pass SIGUSR1 on to the ranks that have a use for it; the others would die of it."""
        policy = self._launcher.policy
        willing = [rank for rank in policy.alive if _proc.catches(policy.states[rank].pid or 0, arrival.signum)]
        if willing and not policy.stopping:
            self._launcher.zygote.signal(willing, arrival.signum)
        else:
            name = arrival.signum.name
            say(f"{name}: no rank can save now; only a Checkpointer with the training loader can, in its loop")

    def _announce(self, signum: signal.Signals) -> None:
        """Say that the ranks take a moment to stop, which a user at the keyboard might take for a hang."""
        policy, attempt = self._launcher.policy, self._launcher.attempt
        if policy.stopped_by is not None or not attempt.listening or signum == signal.SIGQUIT:
            return
        has_saved = attempt.stop_note() is not None
        text = report.asked(signum, grace=self._spec.grace, option="--grace", has_saved=has_saved)
        if has_saved:
            say(text)
        elif not policy.stopping:
            self._asked_listeners = True
            self._look_for_steps(time.monotonic())
            say(text, once=text)

    def _look_for_steps(self, now: float) -> None:
        """Note the ranks' steps, and look in a while whether one has taken a step since."""
        self._warn_at = now + min(knobs.times().to_a_step, self._spec.grace / 4)
        alive = self._launcher.policy.alive
        self._steps_when_asked = {rank: self._launcher.attempt.steps(rank)[1] for rank in alive}

    def _warn_of_those_outside_a_step(self, now: float) -> None:
        """Say what will become of ranks that were asked to save, and are where they can't."""
        self._warn_at = None
        attempt, policy = self._launcher.attempt, self._launcher.policy
        looks = {rank: attempt.look(rank) for rank in policy.alive}
        if policy.deadline is None or attempt.stop_note() is not None or not attempt.listening:
            return
        if any(look.steps != self._steps_when_asked.get(rank) for rank, look in looks.items()):
            self._look_for_steps(now)  # one has just finished its step, and may be the only one
            return
        outside = {rank: look for rank, look in looks.items() if report.is_outside_a_step(look)}
        if outside and policy.stopped_by is not None:
            left = max(0.0, policy.deadline - now)
            say(report.outside_a_step(outside, policy.stopped_by, left=left))

    def _drain(self) -> None:
        """Show what is still in the pipes when every process has ended, for as long as the reader needs, or the user
        has patience."""
        deadline = time.monotonic() + (0.0 if self._is_hurried else _DRAIN)
        self._relay.pump(set(), time.monotonic())
        while (self._relay.open or console.waits()) and time.monotonic() < deadline:
            ready = {key.fileobj for key, _ in self._launcher.selector.select(0.1)}
            if self._signals in ready and any(a.signum != signal.SIGWINCH for a in self._signals.read()):
                self._is_hurried = True  # no reader takes the output, and the user wants an end
                return
            self._relay.pump({fd for fd in ready if isinstance(fd, int)}, time.monotonic())
            console.push()

    def _conclude(self) -> tuple[int, RunEnd, str, str]:
        """Say how the job ended, unless all is well.

        Returns:
            Its exit code; how it ended; what was said of it, empty: what the verdict said, or nothing; and the same
            with what the verdict said.
        """
        launcher, policy, verdict = self._launcher, self._launcher.policy, self._verdict
        outcome = launcher.attempt.outcome(self._streams)
        if any(ending.shown and (ending.state.exit_code or 0) < 0 for ending in outcome.endings):
            self._screen.show_cursor()
        if verdict is None and outcome.first is not None:  # the zygote has ended as well, so nothing starts again
            verdict = self._judge()
        closed = closing.decide(self._end(verdict, outcome))
        text = once = told = ""
        match closed.word:
            case LastWord.REFUSED:
                text = once = self._refused
            case LastWord.CAME_LATE if policy.stopped_by is not None:
                text = once = report.came_late(policy.stopped_by)
            case LastWord.SAVED | LastWord.STOPPED:
                text = once = report.stopped(outcome, policy.stopped_by)
            case LastWord.VERDICT | LastWord.VERDICT_AND_ZYGOTE_LOST if verdict is not None:
                # A signal, or the end of the zygote, may have come before what was to come of it.
                is_final = self._verdict is not None and not verdict.again
                told = self._say_verdict(verdict if is_final else replace(verdict, what_now=""))
        if text:
            say(text, once=once)
        if closed.exit_code is not None:
            return closed.exit_code, closed.end, text, text or told
        code = launcher.zygote.wait(limit=1.0)
        text = report.lost(launcher.zygote.pid, code)
        say(text)
        return 128 - code if code is not None and code < 0 else 1, closed.end, text, text

    def _own_cause(self, text: str) -> str:
        """Put this machine's own failure before the failure that it caused on another machine, whose ranks ended first,
        so that its verdict came before this machine's."""
        outcome = self._launcher.attempt.outcome(self._streams)
        if outcome.first is None or outcome.first.is_echo:
            return text
        return f"{report.describe(outcome)}\nand its consequence {text}"

    def _say_verdict(self, verdict: Verdict) -> str:
        """Say why an attempt is over, and what comes of it; return what was said."""
        round_ = self._launcher.attempt.round
        text, mine = verdict.text, True
        if verdict.kind is EndKind.FAILED:
            mine = verdict.node == round_.node_rank
            outcome = self._launcher.attempt.outcome(self._streams)
            if mine and outcome.first is not None:
                text = report.describe(outcome)
                self._named = report.log_named_by(outcome) if self._launcher.attempt.number == 0 else None
            if not mine or self._spec.one_terminal:
                text = f"on {round_.host(verdict.node)}: {text}"
            if not mine and verdict.echo:
                text = self._own_cause(text)
        elif not verdict.what_now and self._launcher.attempt.outcome(self._streams).completed:
            text = report.lost_when_done(text)
        text = "\n".join(line for line in (text, verdict.what_now) if line)
        say(text, once=f"end of round {round_.number}", later=not mine)
        about = (
            {"failure": verdict.failure, "again": bool(verdict.again and verdict.what_now)} if verdict.failure else {}
        )
        self._launcher.recorder.event(verdict.kind.value, text, **about)
        return text
