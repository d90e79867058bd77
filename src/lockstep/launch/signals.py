"""Signals as messages: read from a descriptor, with their origin, instead of interrupting whatever runs."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterable
from dataclasses import dataclass

#: The signals that end a job.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: The signal that asks a job to save and go on.
SAVE = signal.SIGUSR1

_SFD_NONBLOCK = os.O_NONBLOCK
_SFD_CLOEXEC = os.O_CLOEXEC
_SIGINFO_SIZE = 128  # struct signalfd_siginfo
#: si_code of a signal that the kernel sent: from the terminal, it went to the whole foreground process group.
_SI_KERNEL = 0x80

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Arrival:
    """One signal that arrived."""

    signum: signal.Signals
    #: True if it came from the terminal, so that every process of the foreground group has it already.
    from_terminal: bool


class SignalQueue:
    """Blocks signals in this process and hands them over through a descriptor (signalfd).

    Only for a process with a single thread: a thread that does not block a signal would still take it.
    """

    def __init__(self, signums: Iterable[int]) -> None:
        self._signums = set(signums)
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signums)
        mask = ctypes.create_string_buffer(128)  # sigset_t
        _libc.sigemptyset(mask)
        for signum in self._signums:
            _libc.sigaddset(mask, ctypes.c_int(signum))
        self._fd: int = _libc.signalfd(-1, mask, _SFD_NONBLOCK | _SFD_CLOEXEC)
        if self._fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"signalfd: {os.strerror(error)}")

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._fd

    def read(self) -> list[Arrival]:
        """The signals that arrived since the last call."""
        arrivals: list[Arrival] = []
        try:
            while True:
                info = os.read(self._fd, _SIGINFO_SIZE)
                signum, _, code = struct.unpack_from("=Iii", info)
                arrivals.append(Arrival(signal.Signals(signum), code == _SI_KERNEL))
        except BlockingIOError:
            return arrivals

    def close(self, *, unblock: bool = True) -> None:
        """Close the descriptor; ``unblock``: signals interrupt again."""
        os.close(self._fd)
        if unblock:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)


def ignored(signums: Iterable[signal.Signals] = (*STOPPING, SAVE)) -> frozenset[signal.Signals]:
    """**Local.** Those of ``signums`` that this process ignores: nohup ignores SIGHUP, a shell's ``&`` SIGINT."""
    return frozenset(signum for signum in signums if signal.getsignal(signum) == signal.SIG_IGN)


def name(signum: int) -> str:
    """**Local.** ``9`` → ``SIGKILL``; real-time signals have only a number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
