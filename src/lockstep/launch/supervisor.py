"""The watcher: starts a job, watches it, and leaves nothing behind. It never imports torch."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import time
from collections.abc import Iterable
from contextlib import ExitStack

from lockstep import _proc
from lockstep.errors import LaunchError
from lockstep.identity import refuse_to_launch
from lockstep.job.files import EXIT_SAVED
from lockstep.launch import farewell, ports, processes, program, report
from lockstep.launch.attempt import Attempt, Fork
from lockstep.launch.farewell import say
from lockstep.launch.folders import JobFolder
from lockstep.launch.handle import ZygoteHandle
from lockstep.launch.logs import LogFolder
from lockstep.launch.output import Relay
from lockstep.launch.policy import Order, Policy
from lockstep.launch.restarts import Failure, Restarts
from lockstep.launch.signals import SAVE, STOPPING, Arrival, SignalQueue, ignored
from lockstep.launch.spec import DEFAULT_MASTER_PORT, JobSpec
from lockstep.launch.streams import Streams

#: Open files that a rank needs here while it starts, and that everything else does.
_DESCRIPTORS_PER_RANK = 7
_DESCRIPTORS_BESIDE = 32
#: Seconds between looks for a rank that left a failure record but does not end.
_HEARTBEAT = 1.0
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
    program.check(spec.program)
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
        watcher = Watcher(spec, folder=folder.path, logs=logs, signals=signals)
        undo.callback(watcher.close)
        watcher.start(master)
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
        return address, ports.free_port()
    port = spec.master_port or DEFAULT_MASTER_PORT
    if spec.node_rank == 0 and not ports.is_free(port):
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


class Watcher:
    """One node's part of a job: the zygote, the ranks' streams, and the loop that applies the policy."""

    def __init__(self, spec: JobSpec, *, folder: str, logs: LogFolder, signals: SignalQueue) -> None:
        self._spec = spec
        self._folder = folder
        self._logs = logs
        self._signals = signals
        self._attempt = Attempt(spec, home=folder, restart=0)
        self._restarts = Restarts(spec.max_restarts)
        #: Where this attempt is: True once its ranks have ended and the next one waits for their leftovers to go.
        self._clearing = False
        #: True once the zygote was told to leave.
        self._finishing = False
        #: Why there is no restart, for the report.
        self._refusal = ""
        #: Whether this attempt's ranks were told that one of them failed.
        self._marked = False
        #: Whether the signal that ends the job reached ranks that save and leave by themselves.
        self._asked_listeners = False
        self._selector = selectors.PollSelector()  # epoll refuses regular files, which standard output may be
        self._relay = Relay(self._selector)
        self._streams = Streams(spec, logs, self._relay)
        self._started: ZygoteHandle | None = None
        #: What to fork once the zygote is ready.
        self._waiting: list[Fork] = []
        self._broken: str | None = None
        self._next_look = 0.0

    def start(self, master: tuple[str, int]) -> None:
        """Start the zygote, and prepare the ranks while it imports."""
        self._started = ZygoteHandle(self._folder, ranks=self._spec.nproc, restarts=self._spec.max_restarts > 0)
        self._selector.register(self._zygote, selectors.EVENT_READ)
        self._selector.register(self._signals, selectors.EVENT_READ)
        self._waiting = self._attempt.forks(master, self._streams)
        if self._logs.moved is not None:
            say(self._logs.moved)

    def watch(self) -> int:
        """Wait until everything has ended and all output is shown; report; return the exit code."""
        while self._zygote_lives:
            if self._policy.done and not (self._finishing or self._clearing):
                self._clearing = self._may_restart()
                self._finishing = not self._clearing
                (self._zygote.clear if self._clearing else self._zygote.finish)()
            self._turn()
        if not self._finishing:
            self._zygote.wait(limit=1.0)  # its exit code, before the sweep reaps it
            processes.sweep(patience=_PATIENCE)  # see Note [No orphans]
        self._drain()
        code = self._conclude()
        for text in (*self._attempt.hangs.ended(self._policy.states), self._attempt.hangs.laggard()):
            if text:
                say(text)
        farewell.name_logs(self._attempt, self._streams, self._logs)
        return code

    def close(self) -> None:
        """End whatever is left, on any way out."""
        self._forget_waiting()
        if self._started is not None:
            self._started.close()
        processes.sweep(patience=_PATIENCE)
        self._attempt.close()
        self._relay.close()
        self._selector.close()

    @property
    def _policy(self) -> Policy:
        return self._attempt.policy

    @property
    def _zygote(self) -> ZygoteHandle:
        assert self._started is not None, "start() comes first"
        return self._started

    @property
    def _zygote_lives(self) -> bool:
        return self._zygote in self._selector.get_map()

    def _may_restart(self) -> bool:
        """Whether the attempt that has ended failed in a way that a restart may help against."""
        policy = self._policy
        first = report.first_failure(self._endings())
        if not policy.failing or policy.stopped_by is not None or policy.gave_up or first is None:
            return False
        step, taken = self._attempt.steps(first.rank)
        out_of_memory = self._attempt.facts.out_of_memory(first)
        failure = Failure.of(first, step=step, taken=taken, out_of_memory=out_of_memory)
        refusal = self._restarts.refusal(failure)
        self._refusal = refusal or ""
        return refusal is None

    def _restart(self) -> None:
        """Nothing of the failed attempt is left: say what happened, and start all ranks again."""
        self._clearing = False
        if self._policy.stopped_by is not None:
            return  # a signal came meanwhile: the job ends as it stands
        self._relay.finish_sources()
        self._relay.pump(set(), time.monotonic())
        self._say_failure(f"restart {self._restarts.used} of {self._restarts.limit}: all ranks start again")
        self._attempt.close()
        self._attempt = Attempt(self._spec, home=self._folder, restart=self._restarts.used)
        self._marked = False
        self._logs.restart = self._restarts.used
        self._waiting = self._attempt.forks(_master(self._spec), self._streams)
        self._fork_all()

    def _turn(self) -> None:
        """Wait for something to happen, and see to it. Meanwhile look at the ranks' pages."""
        ready = self._wait()
        now = time.monotonic()
        if self._signals in ready:
            for arrival in self._signals.read():
                self._on_signal(arrival, now)
        if self._zygote in ready:
            self._on_messages()
        self._relay.pump({fd for fd in ready if isinstance(fd, int)}, now)
        self._look_for_stuck_failures(now)
        self._apply(self._policy.tick(now))
        if self._waiting and self._policy.stopping:
            self._zygote.kill()  # it has no ranks yet, and may be busy importing for a while

    def _fork_all(self) -> None:
        for fork in self._waiting:
            self._zygote.fork(fork.rank, fork.env, fork.job, fork.fds)
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        for fork in self._waiting:
            for fd in fork.fds:
                os.close(fd)
        self._waiting.clear()

    def _wait(self) -> set[object]:
        """What is ready to be read, once something is or the time has come to act."""
        hangs, select, clock = self._attempt.hangs, self._selector.select, time.monotonic
        end = clock() + self._timeout()
        while True:
            now = clock()
            ready = select(max(0.0, min(end, hangs.due) - now))
            now = clock()
            if now >= hangs.due:
                hangs.glance(now)
            if ready or now >= end:
                return {key.fileobj for key, _ in ready}

    def _timeout(self) -> float:
        now = time.monotonic()
        deadlines = [self._next_look, *([self._policy.deadline] if self._policy.deadline is not None else [])]
        waits = [max(0.0, deadline - now) for deadline in deadlines]
        return min(waits if self._relay.due is None else [*waits, self._relay.due])

    def _on_signal(self, arrival: Arrival, now: float) -> None:
        if arrival.signum == signal.SIGWINCH:
            self._streams.resize()
        elif arrival.signum == SAVE:
            self._ask_to_save(arrival)
        else:
            self._announce(arrival.signum)
            self._apply(self._policy.signalled(arrival.signum, delivered=arrival.from_terminal, now=now))

    def _ask_to_save(self, arrival: Arrival) -> None:
        """Pass SIGUSR1 on to the ranks that have a use for it; the others would die of it."""
        states = self._policy.states
        willing = [rank for rank in self._policy.alive if _proc.catches(states[rank].pid or 0, arrival.signum)]
        if willing and not self._policy.stopping:
            self._zygote.signal(willing, arrival.signum)
        else:
            say(
                f"{arrival.signum.name}: no rank can save now: a Checkpointer with the training loader does in its loop"
            )

    def _announce(self, signum: signal.Signals) -> None:
        """Say that the ranks take a moment to stop, which a user at the keyboard might take for a hang."""
        if self._policy.stopping or self._policy.stopped_by is not None or not self._attempt.listening:
            return
        if signum in (signal.SIGINT, signal.SIGTERM):
            self._asked_listeners = True
            what = "Ctrl-C" if signum == signal.SIGINT else signum.name
            say(f"{what}: the ranks finish a step, save and leave (within --grace); a second one stops them at once")

    def _on_messages(self) -> None:
        try:
            messages = self._zygote.receive()
        except EOFError:
            self._selector.unregister(self._zygote)
            return
        for message in messages:
            if message["is"] == "ready":
                if not self._policy.stopping:  # else a signal came with this message, and there is nothing to start
                    self._fork_all()
            elif message["is"] == "started":
                self._policy.started(message["rank"], message["pid"])
            elif message["is"] == "exited":
                rank, code, at = message["rank"], message["code"], message["at"]
                agreed = code == EXIT_SAVED and self._attempt.stop_note() is not None
                self._apply(self._policy.exited(rank, code, at, peak=message["peak"], agreed=agreed))
            elif message["is"] == "cleared":
                self._restart()
            elif message["is"] == "broken":
                self._broken = message["error"]

    def _apply(self, orders: Iterable[Order]) -> None:
        if self._policy.failing and not self._marked:
            self._marked = True
            self._attempt.mark_failed()
        for order in orders:
            self._zygote.signal(order.ranks, order.signum)

    def _look_for_stuck_failures(self, now: float) -> None:
        """A rank whose exception was recorded but that can't get out, in a thread or a collective, holds up the job;
        so does one that is late, which is only said."""
        if now < self._next_look:
            return
        self._next_look = now + _HEARTBEAT
        if not (self._policy.stopping or self._policy.done):
            for text in self._attempt.hangs.look(self._policy.states, now, ask=self._zygote.signal):
                say(text)
        for rank in self._policy.alive:
            record = self._attempt.record(rank)
            if record is not None and now - record.at > self._spec.grace:
                self._apply(self._policy.failed(now))

    def _drain(self) -> None:
        """Every process has ended: show what is still in the pipes, for as long as the reader needs."""
        deadline = time.monotonic() + _DRAIN
        self._relay.pump(set(), time.monotonic())
        while self._relay.open and time.monotonic() < deadline:
            ready = {key.fileobj for key, _ in self._selector.select(0.1)}
            if self._signals in ready and any(a.signum != signal.SIGWINCH for a in self._signals.read()):
                return  # nobody reads, and the user has had enough
            self._relay.pump({fd for fd in ready if isinstance(fd, int)}, time.monotonic())

    def _conclude(self) -> int:
        """Say what went wrong, if anything did, and return the job's exit code."""
        states, local_rank = self._policy.states, self._attempt.local_rank
        if any((states[rank].exit_code or 0) < 0 and self._streams.shown(local_rank[rank]) for rank in states):
            farewell.show_cursor()
        if self._broken is not None:
            say(f"the ranks could not be started:\n{self._broken.rstrip()}")
            return 1
        saved = farewell.saved(self._attempt)
        if saved is not None:
            return saved
        if self._policy.stopped_by is not None and not self._policy.failing:
            return farewell.stopped(self._attempt, self._policy.stopped_by, listened=self._asked_listeners)
        if report.first_failure(self._endings()) is not None:
            return self._say_failure(self._refusal)
        if not self._policy.done:
            return farewell.without_zygote(self._zygote)
        return 0

    def _say_failure(self, what_now: str) -> int:
        return farewell.failure(self._attempt, self._endings(), world_size=self._spec.world_size, what_now=what_now)

    def _endings(self) -> list[report.Ending]:
        return self._attempt.endings(self._streams, self._logs)
