"""The watcher: starts a job, watches it, and leaves nothing behind. It never imports torch."""

from __future__ import annotations

import os
import resource
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any

from lockstep.errors import LaunchError
from lockstep.launch import ports, processes, program, records, report
from lockstep.launch.handle import ZygoteHandle
from lockstep.launch.logs import LogFolder
from lockstep.launch.output import Relay
from lockstep.launch.policy import Order, Policy
from lockstep.launch.signals import STOPPING, Arrival, SignalQueue, ignored, name
from lockstep.launch.spec import DEFAULT_MASTER_PORT, JobSpec, rank_environment
from lockstep.launch.streams import Streams

#: Open files that a rank needs here while it starts, and that everything else does.
_DESCRIPTORS_PER_RANK = 5
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
    """
    program.check(spec.program)
    _check_descriptors(spec.nproc)
    master = _master(spec)
    with ExitStack() as undo:
        _open_standard_streams()
        signals = SignalQueue(s for s in (*STOPPING, signal.SIGWINCH) if s not in ignored())
        undo.callback(signals.close)
        processes.become_subreaper()
        folder = tempfile.mkdtemp(prefix="lockstep-")
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        logs = LogFolder(spec.log_dir, program=spec.program.name)
        undo.callback(logs.close, [spec.identity(local_rank).rank for local_rank in range(spec.nproc)])
        watcher = Watcher(spec, folder=folder, logs=logs, signals=signals)
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
        self._local_rank = {spec.identity(k).rank: k for k in range(spec.nproc)}
        self._policy = Policy(self._local_rank, grace=spec.grace)
        self._selector = selectors.PollSelector()  # epoll refuses regular files, which standard output may be
        self._relay = Relay(self._selector)
        self._streams = Streams(spec, logs, self._relay)
        self._started: ZygoteHandle | None = None
        #: What to fork once the zygote is ready: rank, environment, job and descriptors.
        self._waiting: list[tuple[int, dict[str, str | None], dict[str, Any], list[int]]] = []
        self._broken: str | None = None
        self._next_look = 0.0

    def start(self, master: tuple[str, int]) -> None:
        """Start the zygote, and prepare the ranks while it imports."""
        self._started = ZygoteHandle(self._folder)
        self._selector.register(self._zygote, selectors.EVENT_READ)
        self._selector.register(self._signals, selectors.EVENT_READ)
        kind = "module" if self._spec.program.is_module else "script"
        for rank, local_rank in self._local_rank.items():
            env = rank_environment(
                self._spec.identity(local_rank),
                nnodes=self._spec.nnodes,
                master=master,
                folder=self._folder,
                loopback=ports.is_loopback(master[0]) and "GLOO_SOCKET_IFNAME" not in os.environ,
            )
            job = {"kind": kind, "target": self._spec.program.target, "args": self._spec.arguments(local_rank)}
            self._waiting.append((rank, env, job, self._streams.open(local_rank)))

    def watch(self) -> int:
        """Wait until everything has ended and all output is shown; report; return the exit code."""
        finishing = False
        while self._zygote_lives:
            if self._policy.done and not finishing:
                finishing = True
                self._zygote.finish()
            self._turn()
        if not finishing:
            self._zygote.wait(limit=1.0)  # its exit code, before the sweep reaps it
            processes.sweep(patience=_PATIENCE)  # see Note [No orphans]
        self._drain()
        code = self._conclude()
        self._name_logs()
        return code

    def close(self) -> None:
        """End whatever is left, on any way out."""
        self._forget_waiting()
        if self._started is not None:
            self._started.close()
        processes.sweep(patience=_PATIENCE)
        self._relay.close()
        self._selector.close()

    @property
    def _zygote(self) -> ZygoteHandle:
        assert self._started is not None, "start() comes first"
        return self._started

    @property
    def _zygote_lives(self) -> bool:
        return self._zygote in self._selector.get_map()

    def _turn(self) -> None:
        """Wait for something to happen, and see to it."""
        ready = {key.fileobj for key, _ in self._selector.select(self._timeout())}
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
        for rank, env, job, fds in self._waiting:
            self._zygote.fork(rank, env, job, fds)
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        for _, _, _, fds in self._waiting:
            for fd in fds:
                os.close(fd)
        self._waiting.clear()

    def _timeout(self) -> float:
        now = time.monotonic()
        deadlines = [self._next_look, *([self._policy.deadline] if self._policy.deadline is not None else [])]
        waits = [max(0.0, deadline - now) for deadline in deadlines]
        return min(waits if self._relay.due is None else [*waits, self._relay.due])

    def _on_signal(self, arrival: Arrival, now: float) -> None:
        if arrival.signum == signal.SIGWINCH:
            self._streams.resize()
        else:
            self._apply(self._policy.signalled(arrival.signum, delivered=arrival.from_terminal, now=now))

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
                self._apply(self._policy.exited(message["rank"], message["code"], message["at"]))
            elif message["is"] == "broken":
                self._broken = message["error"]

    def _apply(self, orders: Iterable[Order]) -> None:
        for order in orders:
            self._zygote.signal(order.ranks, order.signum)

    def _look_for_stuck_failures(self, now: float) -> None:
        """A rank whose exception was recorded but that can't get out, in a thread or a collective, holds up the job."""
        if now < self._next_look:
            return
        self._next_look = now + _HEARTBEAT
        for rank in self._policy.alive:
            record = records.read(self._folder, rank)
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
        codes = {rank: state.exit_code or 0 for rank, state in self._policy.states.items()}
        if any(codes[rank] < 0 and self._streams.shown(self._local_rank[rank]) for rank in codes):
            _show_cursor()
        if self._broken is not None:
            _say(f"the ranks could not be started:\n{self._broken.rstrip()}")
            return 1
        if self._policy.stopped_by is not None and not self._policy.failing:
            _say(self._why_stopped(self._policy.stopped_by))
            return 128 + self._policy.stopped_by
        endings = [self._ending(rank) for rank in self._local_rank]
        first = report.first_failure(endings)
        if first is not None:
            _say(report.describe(endings, first, world_size=self._spec.world_size))
            return first.exit_code
        if not self._policy.done:
            return self._conclude_without_zygote()
        return 0

    def _name_logs(self) -> None:
        """Output that nobody has seen must not be lost for want of knowing where it is."""
        streams = self._streams
        hidden = [rank for rank, k in self._local_rank.items() if streams.logged(k) and not streams.shown(k)]
        unseen = self._logs.unseen(hidden)
        if unseen:
            ranks = f"rank {unseen[0]}" if len(unseen) == 1 else f"ranks {', '.join(map(str, unseen))}"
            _say(f"what {ranks} wrote is in {self._logs.path}")

    def _conclude_without_zygote(self) -> int:
        code = self._zygote.wait(limit=1.0) or 0
        how = f"was killed by signal {-code} ({name(-code)})" if code < 0 else f"ended with exit code {code}"
        _say(f"the process that starts the ranks (process {self._zygote.pid}) {how}; all ranks were stopped")
        return 128 - code if code < 0 else 1

    def _why_stopped(self, signum: signal.Signals) -> str:
        killed = [rank for rank, state in self._policy.states.items() if state.exit_code == -signal.SIGKILL]
        if not killed:
            return f"stopped by {signum.name}"
        ranks = ", ".join(map(str, killed))
        return f"stopped by {signum.name}; rank {ranks} did not leave in time (--grace) and was killed"

    def _ending(self, rank: int) -> report.Ending:
        local_rank = self._local_rank[rank]
        return report.Ending(
            self._policy.states[rank],
            records.read(self._folder, rank),
            log=self._logs.log(rank) if self._streams.logged(local_rank) else None,
            shown=self._streams.shown(local_rank),
        )


def _show_cursor() -> None:
    """A rank that a signal ends in the middle of a progress bar leaves the cursor hidden, at the end of the bar."""
    for fd in (2, 1):
        if os.isatty(fd):
            with suppress(OSError):
                os.write(fd, b"\x1b[?25h\n")
            return


def _say(text: str) -> None:
    """One message of lockstep's own, after everything the ranks wrote."""
    sys.stdout.flush()
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
