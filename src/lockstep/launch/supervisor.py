"""The watcher: starts a job, watches it, and leaves nothing behind. It never imports torch."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import time
from contextlib import ExitStack

from lockstep import _proc
from lockstep.errors import LaunchError
from lockstep.identity import refuse_to_launch
from lockstep.launch import farewell, processes, report
from lockstep.launch.attempt import Attempt
from lockstep.launch.channel import Answer, Cleared, Fork, Ready
from lockstep.launch.farewell import say
from lockstep.launch.folders import JobFolder
from lockstep.launch.launcher import Launcher
from lockstep.launch.output import LogFolder, Relay, Streams
from lockstep.launch.processes import SAVE, STOPPING, Arrival, SignalQueue, ignored
from lockstep.launch.restarts import Failure, Restarts
from lockstep.launch.spec import DEFAULT_MASTER_PORT, JobSpec, check_program, free_port, is_free

#: Open files that a rank needs here while it starts, and that everything else does.
_DESCRIPTORS_PER_RANK = 7
_DESCRIPTORS_BESIDE = 32
#: Seconds that a reader may take for the last output once every process has ended.
_DRAIN = 600.0
#: Seconds that processes which outlived the zygote have to leave by themselves.
_PATIENCE = 0.3


def run(spec: JobSpec) -> int:
    """**Local.** Run a job to its end and return the exit code for it.

    0, or that of the first rank to fail, or 128 + the signal that stopped the job.

    Raises:
        ValueError: the program can't be run.
        LaunchError: the job can't be started: the port is in use, or the logs can't be written.
        EnvironmentMismatch: srun started several of this launcher, and each would start the whole job.
    """
    if spec.nnodes == 1:
        refuse_to_launch()
    check_program(spec.program)
    _check_descriptors(spec.nproc)
    master = _master(spec)  # refuses a port in use before anything is started
    with ExitStack() as undo:
        _open_standard_streams()
        signals = SignalQueue(s for s in (*STOPPING, SAVE, signal.SIGWINCH) if s not in ignored())
        undo.callback(signals.close)
        processes.become_subreaper()
        folder = JobFolder()
        undo.callback(folder.remove)
        logs = LogFolder(spec.log_dir, program=spec.program.name)
        undo.callback(logs.close, [spec.identity(local_rank).rank for local_rank in range(spec.nproc)])
        watcher = Watcher(spec, master, home=folder.path, logs=logs, signals=signals)
        undo.callback(watcher.close)
        return watcher.watch()


def _check_descriptors(nproc: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = nproc * _DESCRIPTORS_PER_RANK + _DESCRIPTORS_BESIDE
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise LaunchError(
            f"{nproc} ranks on this machine need about {needed} open files, and the limit is {limit}: start fewer "
            "ranks with -n, or raise the limit with ulimit -n"
        )


def _master(spec: JobSpec) -> tuple[str, int]:
    """Where scripts that open their own process group meet, and several nodes in any case."""
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


class Watcher(Launcher):
    """One node's part of a job that a command runs: with signals, the ranks' streams, restarts, and a last word."""

    def __init__(
        self, spec: JobSpec, master: tuple[str, int], *, home: str, logs: LogFolder, signals: SignalQueue
    ) -> None:
        """Start the zygote, and prepare the ranks while it imports."""
        super().__init__(spec, home=home)
        self._logs = logs
        self._signals = signals
        self._restarts = Restarts(spec.max_restarts)
        #: Where this attempt is: True once its ranks have ended and the next one waits for their leftovers to go.
        self._clearing = False
        #: True once the zygote was told to leave.
        self._finishing = False
        #: Why there is no restart, for the report.
        self._refusal = ""
        #: Whether the signal that ends the job reached ranks that save and leave by themselves.
        self._asked_listeners = False
        self._relay = Relay(self.selector)
        self._streams = Streams(spec, logs, self._relay)
        #: What to fork once the zygote is ready, with the descriptors that go with it.
        self._waiting: list[tuple[Fork, list[int]]] = []
        self.selector.register(signals, selectors.EVENT_READ)
        try:
            self._prepare(master)
        except BaseException:
            self.close()
            raise
        if logs.moved is not None:
            say(logs.moved)

    def watch(self) -> int:
        """Wait until everything has ended and all output is shown; report; return the exit code."""
        while self.lives:
            if self.policy.done and not (self._finishing or self._clearing):
                self._clearing = self._may_restart()
                self._finishing = not self._clearing
                (self.zygote.clear if self._clearing else self.zygote.finish)()
            self.turn()
            if self._waiting and self.policy.stopping:
                self.zygote.kill()  # it has no ranks yet, and may be busy importing for a while
        if not self._finishing:
            self.zygote.wait(limit=1.0)  # its exit code, before the sweep reaps it
            processes.sweep(patience=_PATIENCE)  # see Note [No orphans]
        self._drain()
        code = self._conclude()
        for text in (*self.attempt.hangs.ended(self.policy.states), self.attempt.hangs.laggard()):
            if text:
                say(text)
        farewell.name_logs(self.attempt, self._streams, self._logs)
        return code

    def close(self) -> None:
        """End whatever is left, on any way out."""
        self._forget_waiting()
        self.zygote.close()
        processes.sweep(patience=_PATIENCE)
        self.attempt.close()
        self._relay.close()
        self.selector.close()

    def _prepare(self, master: tuple[str, int]) -> None:
        """What to ask the zygote for in this attempt."""
        kind = "module" if self.spec.program.is_module else "script"
        for rank, local_rank in self.attempt.local_rank.items():
            job = {"kind": kind, "target": self.spec.program.target, "args": self.spec.arguments(local_rank)}
            fork = Fork(rank, self.attempt.environment(local_rank, master), job)
            self._waiting.append((fork, self._streams.open(local_rank)))

    def _fork_all(self) -> None:
        for fork, fds in self._waiting:
            self.zygote.fork(fork, fds)
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        for _, fds in self._waiting:
            for fd in fds:
                os.close(fd)
        self._waiting.clear()

    def _may_restart(self) -> bool:
        """Whether the attempt that has ended failed in a way that a restart may help against."""
        policy, outcome = self.policy, self._outcome()
        first = outcome.first
        if not policy.failing or policy.stopped_by is not None or policy.gave_up or first is None:
            return False
        step, taken = self.attempt.steps(first.rank)
        refusal = self._restarts.refusal(Failure.of(first, step=step, taken=taken, out_of_memory=outcome.out_of_memory))
        self._refusal = refusal or ""
        return refusal is None

    def _restart(self) -> None:
        """Nothing of the failed attempt is left: say what happened, and start all ranks again."""
        self._clearing = False
        if self.policy.stopped_by is not None:
            return  # a signal came meanwhile: the job ends as it stands
        self._relay.finish_sources()
        self._relay.pump(set(), time.monotonic())
        restarts = self._restarts
        self._say_failure(f"restart {restarts.used} of {restarts.limit}: all ranks start again")
        self.renew(Attempt(self.spec, home=self.home, restart=restarts.used))
        self._logs.restart = restarts.used
        self._prepare(_master(self.spec))
        self._fork_all()

    def _due(self, now: float) -> list[float]:
        relay = [] if self._relay.due is None else [now + self._relay.due]
        return [*super()._due(now), *relay]

    def _see_to(self, ready: set[object], now: float) -> None:
        if self._signals in ready:
            for arrival in self._signals.read():
                self._on_signal(arrival, now)
        super()._see_to(ready, now)
        self._relay.pump({fd for fd in ready if isinstance(fd, int)}, now)

    def _hear(self, answer: Answer) -> None:
        match answer:
            case Ready():
                if not self.policy.stopping:  # else a signal came with this message, and there is nothing to start
                    self._fork_all()
            case Cleared():
                self._restart()
            case _:
                super()._hear(answer)

    def _on_signal(self, arrival: Arrival, now: float) -> None:
        if arrival.signum == signal.SIGWINCH:
            self._streams.resize()
        elif arrival.signum == SAVE:
            self._ask_to_save(arrival)
        else:
            self._announce(arrival.signum)
            self.apply(self.policy.signalled(arrival.signum, delivered=arrival.from_terminal, now=now))

    def _ask_to_save(self, arrival: Arrival) -> None:
        """Pass SIGUSR1 on to the ranks that have a use for it; the others would die of it."""
        states = self.policy.states
        willing = [rank for rank in self.policy.alive if _proc.catches(states[rank].pid or 0, arrival.signum)]
        if willing and not self.policy.stopping:
            self.zygote.signal(willing, arrival.signum)
        else:
            say(
                f"{arrival.signum.name}: no rank can save now: a Checkpointer with the training loader does in its loop"
            )

    def _announce(self, signum: signal.Signals) -> None:
        """Say that the ranks take a moment to stop, which a user at the keyboard might take for a hang."""
        if self.policy.stopping or self.policy.stopped_by is not None or not self.attempt.listening:
            return
        if signum in (signal.SIGINT, signal.SIGTERM):
            self._asked_listeners = True
            what = "Ctrl-C" if signum == signal.SIGINT else signum.name
            say(f"{what}: the ranks finish a step, save and leave (within --grace); a second one stops them at once")

    def _drain(self) -> None:
        """Every process has ended: show what is still in the pipes, for as long as the reader needs."""
        deadline = time.monotonic() + _DRAIN
        self._relay.pump(set(), time.monotonic())
        while self._relay.open and time.monotonic() < deadline:
            ready = {key.fileobj for key, _ in self.selector.select(0.1)}
            if self._signals in ready and any(a.signum != signal.SIGWINCH for a in self._signals.read()):
                return  # nobody reads, and the user has had enough
            self._relay.pump({fd for fd in ready if isinstance(fd, int)}, time.monotonic())

    def _conclude(self) -> int:
        """Say what went wrong, if anything did, and return the job's exit code."""
        states, local_rank = self.policy.states, self.attempt.local_rank
        if any((states[rank].exit_code or 0) < 0 and self._streams.shown(local_rank[rank]) for rank in states):
            farewell.show_cursor()
        if self.broken is not None:
            say(f"the ranks could not be started:\n{self.broken.rstrip()}")
            return 1
        saved = farewell.saved(self.attempt)
        if saved is not None:
            return saved
        if self.policy.stopped_by is not None and not self.policy.failing:
            return farewell.stopped(self.attempt, self.policy.stopped_by, listened=self._asked_listeners)
        first = self._outcome().first
        if first is not None:
            self._say_failure(self._refusal)
            return first.exit_code
        if not self.policy.done:
            return farewell.without_zygote(self.zygote)
        return 0

    def _say_failure(self, what_now: str) -> None:
        """Name the first rank to fail, what killed it, and what comes of it."""
        say("\n".join(line for line in (report.describe(self._outcome()), what_now) if line))

    def _outcome(self) -> report.Outcome:
        return self.attempt.outcome(self._streams, self._logs)
