"""The zygote: imports torch once, then forks ranks from itself on request. The launcher decides.

It reads requests from its control socket and answers on it; channel.py has both.

Note [Fork before threads]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Only the forking thread exists in a forked child, so a lock held by any other stays held for ever. The zygote imports
and never computes: it starts no thread and opens no CUDA context. (NumPy's OpenBLAS starts its threads when loaded, and
registers fork handlers that stop them first.) That is why the zygote is a process of its own, fresh from exec, and why
it waits in one loop without a thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable

from lockstep import _proc, knobs
from lockstep.job import workers
from lockstep.job.messages import Channel
from lockstep.job.page import STACK_SIGNAL
from lockstep.launch import preload, processes, rank
from lockstep.launch.channel import (
    CLIENT,
    Broken,
    Clear,
    Cleared,
    Exited,
    Finish,
    Fork,
    LetSave,
    Ready,
    Request,
    Signal,
    Started,
)
from lockstep.launch.console import flush, say
from lockstep.launch.folders import hold
from lockstep.launch.processes import SAVE, STOPPING, SignalQueue, ask_for_stack, ignored

#: Seconds that processes which outlived their rank have to leave by themselves.
LEFTOVER_PATIENCE = 0.3
#: Seconds in which the machine has to have room for one more process, and between two attempts to make it.
_ROOM, _PAUSE = 1.0, 0.02
#: Seconds for a reader to take what the zygote has to say before it leaves.
_LAST_WORD = 1.0


def main(control: int, launcher: int, folder: str, modules: list[str]) -> None:
    """Serve until told to finish. In a forked rank: run its job, and leave as Python does.

    Args:
        control: the inherited descriptor of the control socket.
        launcher: the launcher's process id. (This process's parent may be another by now.)
        folder: the job's private folder, removed here if the launcher is gone.
        modules: what to import before forking.
    """
    # The signals arrive blocked, so that none can hit before this line; a signal to the whole process group is the
    # launcher's business.
    shielded = ignored()
    for signum in (*STOPPING, SAVE):
        signal.signal(signum, signal.SIG_IGN)
    # Below the ranks' own handlers: see Note [Asked while leaving] in processes.py.
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPPING, SAVE))
    processes.become_subreaper()
    # A process that the launcher forked meanwhile may hold its end of the socket open; this can't be held.
    try:
        end = os.pidfd_open(launcher)
    except ProcessLookupError:  # it was killed as this process was started
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    channel: Channel[Request] = Channel(socket.socket(fileno=control), Request.__args__)
    try:
        preload.load(modules)
    except Exception:  # noqa: BLE001  (whatever an import raises, the launcher tells the user)
        with contextlib.suppress(OSError):
            channel.send(Broken(traceback.format_exc()))
        os._exit(1)
    task = _Zygote(channel, folder, shielded, launcher=end).serve()
    if task is None:
        os._exit(0)  # nothing here needs torch's teardown, which takes a third of a second
    if knobs.preload() is None:
        processes.leave_teardown_to_the_kernel()
    rank.live(task)


class _Zygote:
    """Forks ranks, and tells of their ends.

    Args:
        channel: to the launcher.
        folder: the job's.
        shielded: signals that ranks ignore.
        launcher: a pidfd of the launcher.
    """

    def __init__(
        self, channel: Channel[Request], folder: str, shielded: frozenset[signal.Signals], *, launcher: int
    ) -> None:
        # Answers are posted: the launcher may be sending requests for hundreds of ranks, and reads nothing meanwhile.
        self._channel = channel
        self._folder = folder
        #: Holds the folder: Note [Abandoned folders] in folders.py. None: the launcher is gone, as the channel tells.
        self._lock = hold(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._shielded = shielded
        self._ranks: dict[int, int] = {}  # pid -> rank
        #: Seconds that ranks have to save should the launcher be gone.
        self._grace = 0.0
        #: The processes that have ended since the last sweep.
        self._ended: set[int] = set()
        #: Processes that can't be ended, and of which the user was told.
        self._told_of: set[int] = set()
        #: True once there was no process for a rank.
        self._is_broken = False
        self._requests: deque[tuple[Request, list[int]]] = deque()
        self._deaths = SignalQueue([signal.SIGCHLD])
        self._launcher = launcher
        self._selector = selectors.DefaultSelector()
        for source in (self._channel, self._deaths, self._launcher):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self) -> rank.Task | None:
        """Work until told to finish or no rank can be forked (None), or until this process is a rank (its task)."""
        try:
            self._channel.post(Ready())
            while True:
                ready = self._wait()
                if self._deaths in ready:
                    self._deaths.read()
                    self._report_deaths()
                if self._channel in ready:
                    self._requests.extend(self._channel.receive())
                while self._requests:
                    request, fds = self._requests.popleft()
                    if isinstance(request, Finish):
                        self._sweep()
                        self._say_all()
                        return None
                    task = self._handle(request, fds)
                    if task is not None:
                        return task
                if self._is_broken and CLIENT not in self._ranks.values():  # the other machines have been told
                    self._sweep()
                    self._say_all()
                    return None
                if self._launcher in ready and self._channel not in ready:
                    raise EOFError
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._end_abandoned_job()
            return None

    def _wait(self) -> set[object]:
        """Send answers that have found no room, until there is something to read; return what can be read."""
        while True:
            ready = self._select(is_behind=not self._channel.push())
            if ready:
                return ready

    def _say_all(self) -> None:
        """Send the last answers. Requests that come meanwhile come too late."""
        while not self._channel.push():
            ready = self._select(is_behind=True)
            if self._deaths in ready:
                self._deaths.read()
            if self._channel in ready:
                for _, fds in self._channel.receive():
                    for fd in fds:
                        os.close(fd)
            elif self._launcher in ready:
                raise EOFError

    def _select(self, *, is_behind: bool) -> set[object]:
        """Wait once, also for room if answers wait for it, and return what can be read."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_behind else 0)
        if self._selector.get_key(self._channel).events != wanted:
            self._selector.modify(self._channel, wanted)
        return {key.fileobj for key, events in self._selector.select() if events & selectors.EVENT_READ}

    def _handle(self, request: Request, fds: list[int]) -> rank.Task | None:
        match request:
            case Fork():
                task = None if self._is_broken else self._fork(request, fds)
                if task is None:
                    for fd in fds:
                        os.close(fd)
                return task
            case LetSave(grace):
                self._grace = grace
            case Clear(spare):
                dead = self._sweep(spare)
                self._ranks = {pid: self._ranks[pid] for pid in set(spare) - dead if pid in self._ranks}
                self._channel.post(Cleared())
            case Signal(ranks, signum):
                pids = {number: pid for pid, number in self._ranks.items()}
                for pid in (pids[number] for number in ranks if number in pids):  # (others have ended meanwhile)
                    if signum == STACK_SIGNAL:
                        ask_for_stack(pid)
                    elif signum != SAVE or _proc.catches(pid, signum):  # else it listens no longer
                        processes.send(pid, signum)
        return None

    def _fork(self, request: Fork, fds: list[int]) -> rank.Task | None:
        zygote = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal that comes before the rank has its own handlers waits until then.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPPING, SAVE))
        try:
            pid = self._make_process()
        except OSError as error:
            self._channel.post(Broken(f"no process could be forked for {_ROOM:g} s: {processes.no_process(error)}"))
            self._give_up()
            return None
        if pid == 0:
            processes.die_with_parent(zygote)
            self._leave_to_the_zygote()
            return rank.Task(request.rank, request.env, request.job, fds, self._shielded, request.cpus)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPPING, SAVE))
        self._ranks[pid] = request.rank
        self._channel.post(Started(request.rank, pid))
        return None

    def _give_up(self) -> None:
        """End the ranks, since one of them can't be forked."""
        self._is_broken = True
        for pid, number in self._ranks.items():
            if number != CLIENT:
                processes.send(pid, signal.SIGKILL)

    def _make_process(self) -> int:
        """Fork as :func:`os.fork` does, once there is room: dead ranks may have workers that are about to leave.

        Raises:
            OSError: there was no room in time.
        """
        limit = time.monotonic() + _ROOM
        while True:
            try:
                return os.fork()
            except OSError:
                if time.monotonic() >= limit:
                    raise
            time.sleep(_PAUSE)
            self._report_deaths()  # the dead count until they are reaped

    def _leave_to_the_zygote(self) -> None:
        """In a forked rank: close everything that is the zygote's, other ranks' descriptors included."""
        self._selector.close()
        self._deaths.close()
        self._channel.close()
        os.close(self._launcher)
        if self._lock is not None:
            os.close(self._lock)
        for _, fds in self._requests:
            for fd in fds:
                os.close(fd)

    def _report_deaths(self) -> None:
        for exited in self._reap():
            self._channel.post(exited)

    def _reap(self) -> list[Exited]:
        """Collect the children that have ended, and return those that were ranks; others were somebody's orphans."""
        at, dead = time.monotonic(), processes.reap()
        self._ended.update(one.pid for one in dead)
        return [Exited(self._ranks.pop(one.pid), one.code, at, one.peak) for one in dead if one.pid in self._ranks]

    def _sweep(self, spare: Iterable[int] = ()) -> set[int]:
        """End and reap what the ranks have left running; return the processes reaped.

        What was left in /dev/shm is removed, also by processes that had ended before: workers end with a rank that is
        killed, and some are reaped by their ranks.
        """
        swept = processes.sweep(patience=LEFTOVER_PATIENCE, spare=spare)
        for pid, program in swept.kept.items():
            if pid not in self._told_of:
                self._told_of.add(pid)
                say(processes.left_behind(pid, program))
        flush(_LAST_WORD)
        ended, self._ended = self._ended, set()
        with contextlib.suppress(OSError):  # the folder may be gone
            ended |= workers.processes(self._folder)
        processes.remove_shared_memory(ended)
        return swept.dead

    def _end_abandoned_job(self) -> None:
        """End what is left, since the launcher is gone and nobody waits for the ranks. See Note [No orphans]."""
        if self._grace:
            self._end_ranks(signal.SIGTERM)
            self._await_ranks(self._grace)
        self._end_ranks(signal.SIGKILL)
        self._sweep()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_ranks(self, signum: signal.Signals) -> None:
        for pid in self._ranks:
            processes.send(pid, signum)

    def _await_ranks(self, seconds: float) -> None:
        """Wait until all ranks have ended, for so long at most."""
        limit = time.monotonic() + seconds
        for ended in (self._channel, self._launcher):
            self._selector.unregister(ended)
        while self._ranks and (left := limit - time.monotonic()) > 0:
            self._selector.select(left)
            self._deaths.read()
            self._reap()
