"""Leave no process behind: inherit orphans, die with the parent, end a whole tree, read signals from a descriptor.

Note [No orphans]
~~~~~~~~~~~~~~~~~
Launcher and zygote are child subreapers: a process whose parent dies becomes theirs, so everything a job ever started
stays below one of them, also what left its process group or session. Children that the launcher has from the start are
the user's: of a shell that has become the launcher (``exec``), or a reader of its output (``> >(tee log)``).

If one of them dies:

- The launcher dies: the zygote sees the control socket close, ends everything below itself, and leaves. (Ranks of
  ``lockstep.spawn`` have some seconds to save.)
- The zygote dies: its ranks die by the parent-death signal, the rest becomes the launcher's, which ends it.
- Both die at once: the ranks die with the zygote, and workers that a rank's main thread forked die with the rank.

Note [Asked while leaving]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank is asked for its stacks by a signal that ends a process without a handler. The handler is faulthandler's, and
goes before its process does: when the interpreter is taken down, when a program resets it or executes another one. To
look for it first is not enough, since it may go between the look and the signal. So the zygote ignores the signal
before there are ranks: faulthandler restores the state that it found, so an interpreter that is leaving can't be killed
by the signal. Processes that ranks start inherit that, as all ignored signals; a program that uses this one sets a
handler. An exec turns a handler into the default and not into what was below it, so the zygote looks for the handler at
the last moment, as it does for SIGUSR1, and a rank that is known to be leaving is not asked.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import os
import re
import signal
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from lockstep import _proc
from lockstep.job.page import STACK_SIGNAL

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

#: Seconds that multiprocessing's resource trackers have to remove the shared memory that their process left.
_TRACKERS_PATIENCE = 3.0

_libc = ctypes.CDLL(None, use_errno=True)


# Note [Torn down by the kernel]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Once Python is finalized, exit() calls what C and C++ libraries have registered, the last first. torch takes its
# tables of operators apart then, entry by entry, though all of the memory goes anyway: 0.15 s of the 0.27 s of
# processor time that a rank takes to leave. What a forked rank registers here is called after what its own program's
# libraries have registered (HDF5 closes files there), and before all that the zygote has loaded: C's streams are
# written out, and the process ends, with the exit code that it had. Not where the zygote may hold a library that has
# something to do at the end: one that the user has it import, or that an environment injects (profilers, allocators
# that count).
#
# Python itself takes all modules apart, object by object, and by that copies most of the memory that a forked rank
# shares with its zygote: 0.3 s of processor time. Ranks that live for one test end without it; threads, exit functions,
# buffers and the exit code are as ever.
_INJECTED = ("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH", "ROCP_TOOL_LIB", "HSA_TOOLS_LIB", "GCOV_PREFIX")


def leave_teardown_to_the_kernel() -> None:
    """Skip at this process's end what libraries have registered so far; see Note [Torn down by the kernel]."""
    if any(os.environ.get(name) for name in _INJECTED):
        return
    failed = _libc.on_exit(_libc._exit, None) or _libc.__cxa_atexit(_libc.fflush, None, None)
    assert not failed, "there is memory for two entries"


def leave_finalizers_to_the_kernel() -> None:
    """Skip at this process's end the finalizers (``weakref.finalize``) that exist so far. torch registers thousands
    when it is imported, to undo things that end with the process anyway."""
    for info in getattr(weakref.finalize, "_registry", {}).values():  # (private; without it they only take their time)
        info.atexit = False


def end_and_leave_memory_to_the_kernel(code: int) -> NoReturn:
    """End this process as Python does, but for its objects; see Note [Torn down by the kernel]."""
    threading._shutdown()  # type: ignore[attr-defined]  # (private: waits for threads that are no daemons)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # (Nobody reads it any more; it was closed; or it is None.)
        with contextlib.suppress(BrokenPipeError, ValueError, AttributeError):
            stream.flush()
    os._exit(code & 0xFF)


def become_subreaper() -> None:
    """Make this process the new parent of orphans below it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when the thread that forked it ends.

    Args:
        parent: the process that forked this one. If it is gone already, this process ends here and now.
        by: the signal; SIGTERM for a process that has something to put back.
    """
    _prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


#: errno -> the reason why the kernel makes no process, and what to do.
_NO_PROCESS = {
    errno.EAGAIN: "the limit on processes is reached: raise it (ulimit -u, or pids.max of the container's cgroup), or "
    "start fewer ranks and loader workers",
    errno.ENOMEM: "there is no memory for it: free some, or start fewer ranks and loader workers",
}


def no_process(error: OSError) -> str:
    """Return why a process could not be made, and what to do."""
    advice = _NO_PROCESS.get(error.errno or 0)
    return f"{error.strerror or error}" + (f"; {advice}" if advice else "")


#: The number of the system call, where glibc (before 2.30) has no function for it.
_TGKILL = {"x86_64": 234, "aarch64": 131, "ppc64le": 250, "s390x": 241}


def signal_thread(pid: int, thread: int, signum: int) -> None:
    """Send a signal to one thread of a process.

    Args:
        pid: the process.
        thread: as /proc numbers it; ``pid`` is the main one.
        signum: which signal.

    Raises:
        ProcessLookupError: there is no such process, or no such thread of it.
        BlockingIOError: so many signals wait already that this user's limit (``ulimit -i``) allows no more.
    """
    if hasattr(_libc, "tgkill"):
        failed = _libc.tgkill(pid, thread, int(signum))
    else:
        failed = _libc.syscall(_TGKILL[os.uname().machine], pid, thread, int(signum))
    if failed:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def ask_for_stack(pid: int, thread: int | None = None) -> bool:
    """Ask one thread of a rank for its Python stack; see Note [Each thread for itself] in thread_stacks.py.

    Args:
        pid: the rank's process.
        thread: as /proc numbers it; None: the main one.

    Returns:
        Whether it was asked. It is not if it has no handler for the signal (Note [Asked while leaving]), blocks it, is
        asked already, or has ended.
    """
    thread = pid if thread is None else thread
    if _proc.signal_sets(pid, STACK_SIGNAL, thread=thread) & {"SigCgt", "SigBlk", "SigPnd"} != {"SigCgt"}:
        return False
    try:
        signal_thread(pid, thread, STACK_SIGNAL)
    except OSError:  # it has just ended, or more signals wait than this user's limit allows (EAGAIN)
        return False
    return True


def _prctl(option: int, value: int) -> None:
    unused = ctypes.c_ulong(0)
    if _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), unused, unused, unused) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


@dataclass(frozen=True)
class Swept:
    """What has become of the processes below this one."""

    #: Those that were reaped, also some to spare that have ended: their numbers may be others' now.
    dead: set[int]
    #: Those that are still there because they belong to another user (a program that root owns and that sets its user,
    #: as sudo), and the names of their programs.
    kept: dict[int, str]


def sweep(*, patience: float, limit: float = 5.0, spare: Iterable[int] = ()) -> Swept:
    """End every process below this one that this user may end, and reap them.

    Multiprocessing's resource tracker ignores SIGTERM and leaves by itself once its process is gone, after it removed
    the shared memory left there. So processes get SIGTERM first, and SIGKILL only after ``patience``.

    Args:
        patience: seconds between SIGTERM and SIGKILL; resource trackers have 3 s at least.
        limit: seconds after which to give up on processes that even SIGKILL does not end.
        spare: children of this process that stay, with all below them, if they are there.
    """
    start = time.monotonic()
    asked: set[int] = set()
    dead: set[int] = set()
    kept: dict[int, str] = {}
    spared = set(spare)
    while True:
        dead.update(one.pid for one in reap())
        left = _proc.descendants(os.getpid())
        stay = spared.union(*(_proc.descendants(pid) for pid in spared))
        left = [pid for pid in left if pid not in stay]
        waited = time.monotonic() - start
        awaited = [pid for pid in left if pid not in kept]
        # A process that became ours while /proc was read may be missing in ``left``; the kernel knows all our children.
        if not (awaited or _has_children(spared.union(kept))) or waited > limit:
            remove_shared_memory(dead)
            return Swept(dead, {pid: kept[pid] for pid in left if pid in kept})
        if waited < patience:
            fresh = [pid for pid in left if pid not in asked]
            _signal_all(fresh, signal.SIGTERM)
            asked.update(fresh)
        else:
            # Again in each round: a process may have forked meanwhile. On a busy machine a tracker takes its time, and
            # nobody else knows what it would have removed.
            due = [pid for pid in left if waited > _TRACKERS_PATIENCE or not _is_tracker(pid)]
            kept.update((pid, _proc.read(pid, "comm").strip()) for pid in _signal_all(due, signal.SIGKILL))
        time.sleep(0.005)


@dataclass(frozen=True)
class Dead:
    """A child that ended."""

    pid: int
    #: The exit code; negative for a signal.
    code: int
    #: Peak physical memory in bytes, including memory shared with other processes.
    peak: int


def reap() -> list[Dead]:
    """Collect dead children."""
    dead: list[Dead] = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                break
            dead.append(Dead(pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024))
    return dead


def _has_children(spared: set[int]) -> bool:
    """Return whether this process has children beside ``spared``, including dead ones that were not waited for."""
    if spared:
        return bool(set(_proc.children(os.getpid())) - spared)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def remove_shared_memory(dead: set[int]) -> None:
    """Remove what loader workers had named in /dev/shm and not yet unlinked at the moment they were killed.

    torch names such memory ``torch_<process>_<random>_<count>`` and unlinks it a few instructions later.

    Args:
        dead: the process ids that the workers had. If another process has one of them by now, files that are older than
            that process, and not open in it, are removed as well.
    """
    with contextlib.suppress(OSError):  # no /dev/shm here
        for name in os.listdir("/dev/shm"):
            match = re.fullmatch(r"torch_(\d+)_\d+_\d+", name)
            if match and int(match[1]) in dead:
                path = f"/dev/shm/{name}"
                with contextlib.suppress(OSError):
                    if not _may_be_of(int(match[1]), path):
                        os.unlink(path)


def _may_be_of(pid: int, path: str) -> bool:
    """Return whether a file may have been made by the process that has this id now; False without such a process.

    Raises:
        OSError: the file is gone, or the process may not be looked at.
    """
    started = _proc.started(pid)
    if started is None:
        return False
    if time.time() - os.stat(path).st_mtime < _proc.age(started) + 1.0:  # (which is right to a hundredth of a second)
        return True
    return path in _proc.read(pid, "maps") or path in _proc.open_files(pid)  # the clock may have been set


def _is_tracker(pid: int) -> bool:
    """Return whether a process is multiprocessing's resource tracker, or loky's, which joblib and scikit-learn use."""
    return "resource_tracker import main" in _proc.read(pid, "cmdline")


def send(pid: int, signum: int) -> bool:
    """Send a signal to a process, if it is still there; False: it belongs to another user, and gets none."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True


def _signal_all(pids: list[int], signum: int) -> list[int]:
    """Send a signal to all of these processes, and return those that belong to another user."""
    return [pid for pid in pids if not send(pid, signum)]


def left_behind(pid: int, program: str) -> str:
    """Say that a process is left that could not be ended."""
    return f"process {pid} ({program}) belongs to another user, so it can't be ended from here"


# Signals, read from a descriptor with their origin, instead of interrupting whatever runs ----------------------------

#: The signals that end a job.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: The signal that asks a job to save and continue.
SAVE = signal.SIGUSR1

_SFD_NONBLOCK = os.O_NONBLOCK
_SFD_CLOEXEC = os.O_CLOEXEC
_SIGINFO_SIZE = 128  # struct signalfd_siginfo
#: si_code of a signal that the kernel sent: from the terminal, it went to the whole foreground process group.
_SI_KERNEL = 0x80


@dataclass(frozen=True)
class SignalArrival:
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
        """Return the descriptor to wait on."""
        return self._fd

    def read(self) -> list[SignalArrival]:
        """Return the signals that arrived since the last call."""
        arrivals: list[SignalArrival] = []
        try:
            while True:
                info = os.read(self._fd, _SIGINFO_SIZE)
                signum, _, code = struct.unpack_from("=Iii", info)
                arrivals.append(SignalArrival(signal.Signals(signum), code == _SI_KERNEL))
        except BlockingIOError:
            return arrivals

    def close(self, *, keep: Iterable[int] = ()) -> None:
        """Close the descriptor. The signals interrupt again, but those of ``keep`` stay blocked, now without a reader,
        and so do others that were blocked meanwhile."""
        os.close(self._fd)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signums - self._old_mask - set(keep))


def ignored(signums: Iterable[signal.Signals] = (*STOPPING, SAVE)) -> frozenset[signal.Signals]:
    """Return those of ``signums`` that this process ignores: nohup ignores SIGHUP, a shell's ``&`` SIGINT."""
    return frozenset(signum for signum in signums if signal.getsignal(signum) == signal.SIG_IGN)


def name(signum: int) -> str:
    """Return the name of a signal: ``9`` → ``SIGKILL``; real-time signals have only a number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
