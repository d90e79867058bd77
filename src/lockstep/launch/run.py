"""Run a job for a command: with the user's signals, the ranks' streams and logs, restarts, and a last word."""

from __future__ import annotations

import enum
import os
import resource
import selectors
import signal
import time
from contextlib import ExitStack

from lockstep import _proc
from lockstep.errors import LaunchError
from lockstep.job.files import EXIT_SAVED
from lockstep.launch import processes, report
from lockstep.launch.channel import Answer, Cleared, Fork, Ready
from lockstep.launch.folders import JobFolder
from lockstep.launch.launcher import Launcher
from lockstep.launch.output import LogFolder, Relay, Streams, show_cursor
from lockstep.launch.policy import Failure, Restarts
from lockstep.launch.processes import SAVE, STOPPING, Arrival, SignalQueue, ignored
from lockstep.launch.report import say
from lockstep.launch.spec import DEFAULT_MASTER_PORT, JobSpec, check_program, free_port, is_free

#: Open files that a rank needs here while it starts, and that everything else does.
_DESCRIPTORS_PER_RANK = 7
_DESCRIPTORS_BESIDE = 32
#: Seconds that a reader may take for the last output once every process has ended.
_DRAIN = 600.0
#: Seconds that processes which outlived the zygote have to leave by themselves.
_PATIENCE = 0.3


def run(spec: JobSpec) -> int:
    """Run a job to its end and return the exit code for it.

    0, or that of the first rank to fail, or 128 + the signal that stopped the job.

    Raises:
        ValueError: the program can't be run.
        LaunchError: the job can't be started: the port is in use, or the logs can't be written.
    """
    check_program(spec.program)
    _check_descriptors(spec.nproc)
    master = _master(spec)  # refuses a port in use before anything is started
    with ExitStack() as undo:
        _open_standard_streams()
        signals = SignalQueue(s for s in (*STOPPING, SAVE, signal.SIGWINCH) if s not in ignored())
        ended_saved = False
        # After an agreed stop signals stay blocked to the very end: a scheduler that sees one machine's launcher leave
        # may stop the others by a second signal, which would hide that they have saved.
        undo.callback(lambda: signals.close(unblock=not ended_saved))
        processes.become_subreaper()
        folder = JobFolder()
        undo.callback(folder.remove)
        logs = LogFolder(spec.log_dir, program=spec.program.name)
        undo.callback(logs.close, [spec.identity(local_rank).rank for local_rank in range(spec.nproc)])
        job = _Run(Launcher(spec, home=folder.path), logs=logs, signals=signals)
        undo.callback(job.close)
        job.prepare(master)
        code = job.watch()
        ended_saved = code == EXIT_SAVED
        return code


def _check_descriptors(nproc: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = nproc * _DESCRIPTORS_PER_RANK + _DESCRIPTORS_BESIDE
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


class _Stage(enum.Enum):
    """Where a run is."""

    #: The zygote imports what the ranks need, and none is forked yet.
    IMPORTING = enum.auto()
    RUNNING = enum.auto()
    #: An attempt has failed, and the next one waits until nothing of it is left.
    CLEARING = enum.auto()
    #: The zygote was told to leave.
    FINISHING = enum.auto()


class _Run:
    """One machine's part of a job that a command runs.

    Args:
        launcher: the zygote, which imports meanwhile, and the ranks to come; closed with this.
        logs: where the ranks' output goes that the terminal does not show.
        signals: those that the user sends.
    """

    def __init__(self, launcher: Launcher, *, logs: LogFolder, signals: SignalQueue) -> None:
        self._launcher = launcher
        self._spec = launcher.spec
        self._logs = logs
        self._signals = signals
        self._restarts = Restarts(self._spec.max_restarts)
        self._stage = _Stage.IMPORTING
        #: What comes of a failure, for the report.
        self._what_now = ""
        #: Whether the signal that ends the job reached ranks that save and leave by themselves.
        self._asked_listeners = False
        self._relay = Relay(launcher.selector)
        self._streams = Streams(self._spec, logs, self._relay)
        #: What to fork once the zygote is ready, with the descriptors that go with it.
        self._waiting: list[tuple[Fork, list[int]]] = []
        launcher.selector.register(signals, selectors.EVENT_READ)

    def prepare(self, master: tuple[str, int]) -> None:
        """Open the ranks' streams, and write down what to ask the zygote for in this attempt.

        Args:
            master: address and port for scripts that open a process group themselves.

        Raises:
            LaunchError: the logs can't be written.
        """
        attempt, program = self._launcher.attempt, self._spec.program
        kind = "module" if program.is_module else "script"
        for rank, local_rank in attempt.local_rank.items():
            job = {"kind": kind, "target": program.target, "args": self._spec.arguments(local_rank)}
            fork = Fork(rank, attempt.environment(local_rank, master), job)
            self._waiting.append((fork, self._streams.open(local_rank)))
        if self._logs.moved is not None and attempt.restart == 0:
            say(self._logs.moved)

    def watch(self) -> int:
        """Wait until everything has ended and all output is shown; report; return the exit code."""
        launcher = self._launcher
        while launcher.lives:
            if launcher.policy.done and self._stage in (_Stage.IMPORTING, _Stage.RUNNING):
                self._end_attempt()
            self._turn()
            if self._stage is _Stage.IMPORTING and launcher.policy.stopping:
                launcher.zygote.kill()  # it has no ranks yet, and may be busy importing for a while
        if self._stage is not _Stage.FINISHING:
            launcher.zygote.wait(limit=1.0)  # its exit code, before the sweep reaps it
            processes.sweep(patience=_PATIENCE)  # see Note [No orphans]
        self._drain()
        code = self._conclude()
        for text in launcher.attempt.hangs.ended(launcher.policy.states):
            say(text)
        unseen = self._streams.unseen()
        if unseen:
            say(report.unseen(unseen, self._logs.path))
        return code

    def close(self) -> None:
        """End whatever is left, on any way out."""
        self._forget_waiting()
        self._launcher.zygote.close()
        processes.sweep(patience=_PATIENCE)
        self._relay.close()
        self._launcher.close()

    def _turn(self) -> None:
        """Wait for something to happen, and act on it. Signals first: they explain the deaths that come with them."""
        launcher, held = self._launcher, self._relay.due
        ready = launcher.wait(None if held is None else time.monotonic() + held)
        now = time.monotonic()
        if self._signals in ready:
            for arrival in self._signals.read():
                self._on_signal(arrival, now)
        for answer in launcher.hear(ready):
            self._on_answer(answer)
        self._relay.pump({fd for fd in ready if isinstance(fd, int)}, now)
        launcher.act(now)

    def _on_answer(self, answer: Answer) -> None:
        match answer:
            case Ready():
                if not self._launcher.policy.stopping:  # else a signal came with this message: nothing is to be started
                    self._fork_all()
            case Cleared():
                self._restart()

    def _on_signal(self, arrival: Arrival, now: float) -> None:
        if arrival.signum == signal.SIGWINCH:
            self._streams.resize()
        elif arrival.signum == SAVE:
            self._ask_to_save(arrival)
        elif self._launcher.attempt.stop_note() is None:  # else all ranks have saved, and leave by themselves
            self._announce(arrival.signum)
            orders = self._launcher.policy.signalled(arrival.signum, delivered=arrival.from_terminal, now=now)
            self._launcher.apply(orders)

    def _fork_all(self) -> None:
        self._stage = _Stage.RUNNING
        for fork, fds in self._waiting:
            self._launcher.zygote.fork(fork, fds)
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        for _, fds in self._waiting:
            for fd in fds:
                os.close(fd)
        self._waiting.clear()

    def _end_attempt(self) -> None:
        """Ask the zygote, now that all ranks have ended, to make room for a restart or to leave."""
        if self._may_restart():
            self._stage = _Stage.CLEARING
            self._launcher.zygote.clear()
        else:
            self._stage = _Stage.FINISHING
            self._launcher.zygote.finish()

    def _may_restart(self) -> bool:
        """Decide whether a restart may help against the failure of the attempt that has ended, if it has failed."""
        policy, attempt, restarts = self._launcher.policy, self._launcher.attempt, self._restarts
        outcome = attempt.outcome(self._streams)
        first = outcome.first
        if not policy.failing or policy.stopped_by is not None or policy.gave_up or first is None:
            return False
        step, taken = attempt.steps(first.rank)
        failure = Failure.of(first, step=step, taken=taken, out_of_memory=outcome.out_of_memory)
        refusal = restarts.refusal(failure)
        if refusal is not None:
            self._what_now = report.not_restarted(refusal, failure, limit=restarts.limit)
        return refusal is None

    def _restart(self) -> None:
        """Say what happened, and start all ranks again, now that nothing of the failed attempt is left."""
        self._stage = _Stage.RUNNING
        if self._launcher.policy.stopped_by is not None:
            return  # a signal came meanwhile: the job ends as it stands
        self._relay.finish_sources()
        self._relay.pump(set(), time.monotonic())
        self._say_failure(report.restarted(self._restarts.used, self._restarts.limit))
        self._logs.restart = self._launcher.renew().restart
        self.prepare(_master(self._spec))
        self._fork_all()

    def _ask_to_save(self, arrival: Arrival) -> None:
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
        policy = self._launcher.policy
        if policy.stopping or policy.stopped_by is not None or not self._launcher.attempt.listening:
            return
        if signum in (signal.SIGINT, signal.SIGTERM):
            self._asked_listeners = True
            what = "Ctrl-C" if signum == signal.SIGINT else signum.name
            say(f"{what}: the ranks finish a step, save and leave (within --grace); a second one stops them at once")

    def _drain(self) -> None:
        """Show what is still in the pipes when every process has ended, for as long as the reader needs."""
        deadline = time.monotonic() + _DRAIN
        self._relay.pump(set(), time.monotonic())
        while self._relay.open and time.monotonic() < deadline:
            ready = {key.fileobj for key, _ in self._launcher.selector.select(0.1)}
            if self._signals in ready and any(a.signum != signal.SIGWINCH for a in self._signals.read()):
                return  # nobody reads, and the user has had enough
            self._relay.pump({fd for fd in ready if isinstance(fd, int)}, time.monotonic())

    def _conclude(self) -> int:
        """Say how the job ended, unless all is well, and return its exit code."""
        launcher, policy = self._launcher, self._launcher.policy
        outcome = launcher.attempt.outcome(self._streams)
        if any(ending.shown and (ending.state.exit_code or 0) < 0 for ending in outcome.endings):
            show_cursor()
        if launcher.broken is not None:
            say(report.not_started(launcher.broken))
            return 1
        if outcome.note is not None and outcome.saved:
            say(report.saved(outcome.note, policy.stopped_by))
            return EXIT_SAVED
        signum = policy.stopped_by
        if signum is not None and not policy.failing:
            late = self._asked_listeners and outcome.completed
            say(report.came_late(signum) if late else report.stopped(outcome, signum))
            return 0 if late else 128 + signum
        if outcome.first is not None:
            self._say_failure(self._what_now)
            return outcome.first.exit_code
        if not policy.done:
            code = launcher.zygote.wait(limit=1.0)
            say(report.lost(launcher.zygote.pid, code))
            return 128 - code if code is not None and code < 0 else 1
        return 0

    def _say_failure(self, what_now: str) -> None:
        """Name the first rank to fail, what killed it, and what comes of it."""
        outcome = self._launcher.attempt.outcome(self._streams)
        say("\n".join(line for line in (report.describe(outcome), what_now) if line))
