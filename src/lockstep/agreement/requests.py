"""Signals to a rank as requests that it sees to between two steps, instead of dying in the middle of one."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import current_process, util
from types import FrameType
from typing import Any

from lockstep import knobs
from lockstep.agreement import note, standing
from lockstep.agreement.board import Kind

_STOP = (signal.SIGTERM, signal.SIGINT)
_SAVE = signal.SIGUSR1
#: Two signals closer than this are one: "timeout" signals its child and then the whole group.
_SAME_SIGNAL = 0.25


def interrupt_once(_signum: int, _frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once: a Ctrl-C can come twice, from the terminal and passed on, or from ``timeout``.

    The second would hit the clean-up that the first one started. (SIG_IGN would be inherited by programs started from
    here on; a function is not.)
    """
    signal.signal(signal.SIGINT, lambda _signum, _frame: None)
    raise KeyboardInterrupt


class Requests:
    """What this process was asked for by signals since :meth:`listen`.

    SIGTERM and SIGINT ask it to save and leave, SIGUSR1 to save. Signals that the program handles itself, or that are
    ignored (nohup, a shell's ``&``), are left alone.
    """

    def __init__(self) -> None:
        #: The signal that asked to leave, or None.
        self.stop: signal.Signals | None = None
        self.save = False
        #: Whether the request to leave is being seen to.
        self.leaving = False
        self._asked_at = 0.0
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    @property
    def wanted(self) -> Kind | None:
        """**Local.** The most urgent request."""
        if self.stop is not None:
            return Kind.STOP
        return Kind.SAVE if self.save else None

    @property
    def listening(self) -> bool:
        """**Local.** Whether signals are requests now."""
        return bool(self._before)

    def listen(self) -> None:
        """**Local.** From now on signals are requests. Does nothing outside the main thread, where Python has none."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for signum in (*_STOP, _SAVE):
            before = signal.getsignal(signum)
            if before in (signal.SIG_DFL, signal.default_int_handler, interrupt_once):
                self._before[signum] = before
                signal.signal(signum, self._on_signal)
        # Not documented, but what multiprocessing's own modules and torch use to act in a forked worker.
        util.register_after_fork(self, _spare_daemons)
        self._tell_watcher()

    def leave(self) -> None:
        """**Local.** The request to leave is seen to: what comes now does not hit the way out."""
        self.leaving = True

    def close(self) -> None:
        """**Local.** Signals are again what they were, from the next one on."""
        if not self._before or self.leaving or self._process != os.getpid():
            return
        if threading.current_thread() is not threading.main_thread():
            return  # a finalizer; only the main thread may change what signals do
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._on_signal:  # else the program has taken it over meanwhile
                signal.signal(signum, before)
        self._before.clear()
        self._tell_watcher()

    def _tell_watcher(self) -> None:
        own = standing.own()
        if own is not None:
            own.listens(any(signum in self._before for signum in _STOP))

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child has this function too, and none of the steps
            _as_by_default(signum, frame)
        elif signum == _SAVE:
            self.save = True
        elif self._of_a_failed_job():
            _as_by_default(signum, frame)
        elif self.stop is None:
            self.stop, self._asked_at = signal.Signals(signum), time.monotonic()
        elif knobs.job_dir() is None and time.monotonic() - self._asked_at > _SAME_SIGNAL:
            _as_by_default(signum, frame)  # asked again; where there is a watcher, it knows echoes, and kills

    def _of_a_failed_job(self) -> bool:
        folder = knobs.job_dir()
        return folder is not None and note.has_failed(folder)


def _as_by_default(signum: int, frame: FrameType | None) -> None:
    if signum == signal.SIGINT:
        interrupt_once(signum, frame)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _spare_daemons(requests: Requests) -> None:
    """In a worker that multiprocessing forked: a Ctrl-C at the terminal reaches it too, and its rank still needs it."""
    if requests.listening and current_process().daemon:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
