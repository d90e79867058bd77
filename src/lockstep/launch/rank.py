"""Become, in a forked rank, the process that ``python script.py`` would be, run the job, and leave as Python does."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import io
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from lockstep import knobs, machine, tracebacks
from lockstep.debugger import hook
from lockstep.errors import LaunchError, LockstepError, code_of, named, said
from lockstep.identity import Identity, place
from lockstep.job import flight, terminal, tracing
from lockstep.job.files import EXIT_SAVED, FailureRecord
from lockstep.job.page import Phase
from lockstep.job.stop import interrupt_once
from lockstep.launch import by_value as typed
from lockstep.launch import preload, processes
from lockstep.launch.processes import SAVE, STOPPING
from lockstep.launch.returned import send
from lockstep.topology import format_cpus

#: The exit code that a shell reports for a process that SIGINT ended.
INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True)
class Task:
    """The job of one forked process."""

    rank: int
    #: Variable -> its value; None unsets it.
    env: dict[str, str | None]
    #: What it runs: ``{"kind": "script" | "module", "target": …, "args": […]}``, ``{"kind": "call", …}`` or
    #: ``{"kind": "rendezvous", "options": …}``. ``"logged": True``: files among ``fds`` are the rank's log;
    #: ``"brief": True``: it ends without taking its memory apart; ``"held": True``: an error holds it for a debugger.
    job: dict[str, Any]
    #: Standard input, output and error, then the descriptors that the job needs; None: they stay as they are.
    fds: list[int]
    #: The stopping signals that the user's shell had ignored when it started the job.
    shielded: frozenset[signal.Signals]
    #: The CPUs that it is bound to; None: it is not.
    cpus: Sequence[int] | None = None


def live(task: Task) -> NoReturn:
    """Run the task, and end through Python's own finalization: threads, atexit functions, buffers."""
    brief = task.job.get("brief", False)
    if brief:
        processes.leave_finalizers_to_the_kernel()
    _become(task)
    code = 0
    try:
        _run(
            lambda: _bound(task),
            task.rank,
            silent=task.job["kind"] == "call",
            shared=task.job.get("shared", False),
            held=task.job.get("held", False),
        )
    except SystemExit as stop:
        if not brief:
            raise
        code = _exit_code(stop)
    if brief:
        processes.end_and_leave_memory_to_the_kernel(code)
    raise SystemExit(code)


def _become(task: Task) -> None:
    """Undo what the zygote did to itself, and take this rank's place."""
    # Ctrl-C goes to the whole foreground group: the rendezvous client, which ranks of other machines count on, stays.
    _reset_signals(task.shielded if task.job["kind"] != "rendezvous" else frozenset((*STOPPING, SAVE)))
    _take_streams(task.fds, rank=task.rank if task.job.get("logged") else None)
    for name, value in task.env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ[knobs.RANK_PROCESS] = f"{os.getpid()} {place()}"
    _take_page()
    _keep_temporary_files()
    _reseed()
    _tie_workers_to_this_process()
    preload.listen()


def _reset_signals(shielded: frozenset[signal.Signals]) -> None:
    for signum in (*STOPPING, SAVE):
        if signum not in shielded:
            signal.signal(signum, interrupt_once if signum == signal.SIGINT else signal.SIG_DFL)


def _take_streams(fds: Sequence[int], *, rank: int | None) -> None:
    """Put the first three descriptors in the place of standard input, output and error; ``rank``: as for
    :func:`~lockstep.job.terminal.outlive`."""
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target, inheritable=True)
        os.close(fd)
    # What a rank printed is there when it is killed, up to the last whole line, also where it prints into a file.
    if isinstance(sys.stdout, io.TextIOWrapper) and not os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)
    terminal.outlive(rank=rank)


def _take_page() -> None:
    """Tell the launcher, from now on, what this rank does and how many steps its optimizers take."""
    folder, identity = knobs.job_dir(), Identity.from_environment()
    if folder is None:
        return
    taken = flight.take(folder, rank=identity.rank, world_size=identity.world_size)
    assert taken.pages is not None, "it is among the pages of its job"
    first = identity.rank - identity.local_rank
    terminal.note_lines(taken.pages, identity.rank, beside=range(first, first + identity.local_world_size))
    hook.install(taken.pages, identity.rank)
    optimizers = sys.modules.get("torch.optim.optimizer")  # the zygote's; where it has none, lockstep.init() counts
    if optimizers is not None:
        flight.watch_optimizers(optimizers)
    asked = knobs.trace()
    steps, first = asked or knobs.TRACED_ANYWAY
    tracing.arm(folder, rank=identity.rank, steps=steps, first=first, on_demand=asked is not None)


#: The most characters of a socket's path, and the characters that multiprocessing adds to its folder's path.
_SOCKET_PATH, _LISTENER = 107, len("/listener-12345678")


def _keep_temporary_files() -> None:
    """Have multiprocessing keep its sockets in the job's folder, which goes with the job however its processes end.

    Each process that hands over a descriptor, as a loader's worker does, makes a folder ``pymp-…`` for them, and only
    removes it if it ends normally. Where the job's folder has too long a name for a socket, that stays so.
    """
    folder = knobs.job_dir()
    if folder is None:
        return
    path = os.path.join(folder, "mp")
    if len(os.fsencode(path)) + _LISTENER <= _SOCKET_PATH:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        # Not documented: where multiprocessing.util.get_temp_dir() looks first; what a process starts inherits it.
        multiprocessing.current_process()._config["tempdir"] = path  # type: ignore[attr-defined]


def _reseed() -> None:
    """Give this rank random numbers of its own, as a process of its own has. (Python's ``random`` does it by itself.)

    torch is left alone: its generator starts from the same fixed seed in every process.
    """
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _tie_workers_to_this_process() -> None:
    """Let workers that multiprocessing forks from the main thread die with this rank, however it dies.

    Only multiprocessing's: they never outlive their parent, while a plain ``os.fork`` may be a daemon on its way out.
    Only the main thread's: the kernel sends the parent-death signal when the forking *thread* ends.
    """
    # Not documented, but what multiprocessing's own modules and torch use to act in a forked worker.
    from multiprocessing import util

    util.register_after_fork(_tie_workers_to_this_process, _Tie(os.getpid(), threading.get_ident()))


@dataclass(frozen=True)
class _Tie:
    """Ties a forked worker to the rank that forked it; called in the worker."""

    parent: int
    main_thread: int

    def __call__(self, _key: object) -> None:
        # A forked process keeps its thread's identifier: it tells which thread forked. Which process did is not asked
        # of the kernel: the rank may be gone already, and then this worker is to go as well.
        forked_by = multiprocessing.parent_process()
        if threading.get_ident() == self.main_thread and forked_by is not None and forked_by.pid == self.parent:
            processes.die_with_parent(self.parent)


def _bound(task: Task) -> None:
    """Bind this rank to its cores, and run its program. See Note [Where a rank is bound] in binding.py."""
    if task.cpus is not None:
        try:
            os.sched_setaffinity(0, task.cpus)
        except OSError as error:
            raise LaunchError(
                f"rank {task.rank} can't be bound to the cores {format_cpus(task.cpus)}: {error.strerror}. The job "
                f"had them when it started, and has {format_cpus(os.sched_getaffinity(0))} now: start it again, or "
                "with --bind none"
            ) from error
    _program(task)()


def _program(task: Task) -> Callable[[], None]:
    job = task.job
    if job["kind"] == "call":
        return lambda: _call(task.rank, task.fds[3:], shared_tracker=job["shared_tracker"], by_value=job["by_value"])
    if job["kind"] == "rendezvous":
        return lambda: _meet(task.fds[3], job["options"])
    if job["kind"] == "module":
        return lambda: run_module(job["target"], job["args"])
    return lambda: run_script(job["target"], job["args"], file=job.get("file"))


def _meet(channel: int, options: dict[str, Any]) -> None:
    from lockstep.rendezvous.client import main  # the ranks need none of it

    main(channel, options)


# The program: a script or a module -----------------------------------------------------------------------------------


def run_script(path: str, args: list[str], *, file: str | None = None) -> None:
    """Run ``python path args…``.

    Args:
        path: the program, as the user has named it.
        args: its arguments.
        file: the file with its text; None: ``path``. Otherwise it came through a pipe, and imports from the current
            folder, as under ``python -``.
    """
    _present_as([path, *args])
    if not _safe_path():
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)) if file is None else os.getcwd())
    absolute = os.path.abspath(path if file is None else file)
    with io.open_code(absolute) as opened:
        source = opened.read()
    namespace = _new_main(
        __file__=absolute, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", absolute)
    )
    exec(compile(source, absolute, "exec", dont_inherit=True), namespace)


def run_module(name: str, args: list[str]) -> None:
    """Run ``python -m name args…``."""
    _present_as(["-m", *args])
    if not _safe_path():
        sys.path.insert(0, os.getcwd())
    spec = _find_module(name)
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, importlib.machinery.SourceFileLoader) else None
    if code is None:
        raise ImportError(f"module {name} has no Python code to run", name=name)
    sys.argv[0] = spec.origin or name
    namespace = _new_main(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    exec(code, namespace)


def _find_module(name: str) -> ModuleSpec:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return spec if spec.submodule_search_locations is None else _find_module(f"{name}.__main__")


def _safe_path() -> bool:
    return bool(getattr(sys.flags, "safe_path", False))  # since Python 3.11


def _present_as(argv: list[str]) -> None:
    sys.argv[:] = argv
    sys.orig_argv[:] = [sys.executable, *argv]


def _new_main(**attributes: Any) -> dict[str, Any]:
    """Make a fresh ``__main__``, which stays: runpy's would be gone while atexit functions and threads still use it.

    Multiprocessing finds it by ``__spec__`` or ``__file__``, so that spawned workers can import it again. What they
    send back is of classes in ``__mp_main__``, which was made to mean this process's first ``__main__``.
    """
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    # Scripts see no __builtins__ but the module's, as under python.
    module.__dict__.update(__builtins__=sys.modules["builtins"], **attributes)
    return module.__dict__


# The function of lockstep.spawn --------------------------------------------------------------------------------------

#: The descriptors that came beside the pickled arguments, in the order of their references.
_received: list[int] = []


class SentDescriptor:
    """A placeholder for a descriptor in pickled arguments, like ``DupFd`` of multiprocessing's own spawn."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """Return the descriptor in this process; the caller owns it from now on."""
        return _received[self._place]


def _call(rank: int, fds: Sequence[int], *, shared_tracker: bool, by_value: bool) -> None:
    """Become like a process that multiprocessing spawned, and run the function that the parent packed.

    What is unpickled here comes over an inherited descriptor from the process that called ``lockstep.spawn``: never
    from disk, never from the network.

    Args:
        rank: the function's first argument.
        fds: the packed bytes; where to write what it returns; the resource tracker's pipe if ``shared_tracker``; the
            descriptors among the arguments.
        shared_tracker: the parent has a resource tracker; using the same one keeps shared memory alive that is the
            parent's when this rank ends.
        by_value: the returned value is pickled as by_value.py does.
    """
    from multiprocessing import process, resource_tracker, spawn  # a script's rank needs none of them

    packed, returned, *rest = fds
    if shared_tracker:
        # As multiprocessing's own spawn_main does it; there is no public way to hand a tracker on.
        resource_tracker._resource_tracker._fd = rest.pop(0)  # type: ignore[attr-defined]
    _received[:] = rest
    with os.fdopen(packed, "rb") as file:
        file.seek(0)
        # multiprocessing.spawn._main does exactly this: the mark makes a script without `if __name__ == "__main__"`
        # fail with an explanation, instead of starting ranks from ranks without end.
        process.current_process()._inheriting = True  # type: ignore[attr-defined]
        try:
            spawn.prepare(pickle.load(file))  # noqa: S301  (from the parent, see above)
            fn, args = pickle.load(file)  # noqa: S301
        finally:
            del process.current_process()._inheriting  # type: ignore[attr-defined]
    if by_value:
        typed.note_received()
    pid, value = os.getpid(), fn(rank, *args)
    if os.getpid() == pid:  # a process that it has forked, and that returns as well, is no rank
        send(returned, value, by_value=by_value)


# Its end -------------------------------------------------------------------------------------------------------------


def _run(program: Callable[[], None], rank: int, *, silent: bool, shared: bool = False, held: bool = False) -> None:
    """Run ``program``. On an exception: leave a record, print it as Python would, and exit as Python would.

    ``silent``: print nothing, because the reader of the record raises it as an exception, unless there is no record.
    ``shared``: all ranks print to the same place, where one error of lockstep's that all have is shown once. ``held``:
    an error is first looked at in a debugger.
    """
    this_process = os.getpid()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOPPING, SAVE))  # blocked since before the fork
        program()
        hook.over()
        _begin_to_leave(this_process)
    except SystemExit as stop:
        hook.over()
        code = _exit_code(stop)
        if code in (0, EXIT_SAVED):  # the page of one that failed keeps saying where
            _begin_to_leave(this_process)
        if os.getpid() != this_process or code == 0:
            raise
        _record(stop, rank, code, time.monotonic())
        if not isinstance(stop.code, int):
            raise  # Python prints what it is
        raise SystemExit(code) from None
    except BaseException as error:  # noqa: BLE001  (Python's own top level does the same)
        hook.over()
        quit_at = hook.quit_at(error)
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) or quit_at is not None else 1
        stops = signal.getsignal(signal.SIGTERM)
        if held and code == 1:
            _fold(error)
            hook.hold(error)
        since, undo, recorded = time.monotonic(), contextlib.ExitStack(), False
        if os.getpid() == this_process:  # and not a child that the program forked
            _ignore_deaths_of_workers()
            # If another rank has failed as well, the launcher may stop this one between its record and its printing,
            # and the record's reader would believe that the traceback was shown.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            undo.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL if stops is None else stops)
            recorded = _record(error, rank, code, since, quit_at=quit_at)
        silent = (silent and recorded) or quit_at is not None  # (of a user's own end the user knows)
        if shared and isinstance(error, LockstepError) and not _is_first_to_tell(error, rank):
            print(f"rank {rank} has failed by an error that is shown already: {type(error).__name__}", file=sys.stderr)
        elif not silent:
            _print_exception(error)
        undo.close()
        raise SystemExit(code) from None


def _begin_to_leave(this_process: int) -> None:
    """Say that the program is over. From now on SIGUSR1 could only do harm: it would end an interpreter that is leaving
    and has reset its handlers."""
    flight.current.enter(Phase.LEAVING)
    if os.getpid() == this_process and signal.getsignal(SAVE) == signal.SIG_DFL:
        signal.signal(SAVE, signal.SIG_IGN)


def _exit_code(stop: SystemExit) -> int:
    """Return the code that a process ends with. The kernel keeps eight bits of it, and a code other than 0 must not
    become 0."""
    if stop.code is None:
        return 0
    if not isinstance(stop.code, int):
        return 1
    return stop.code and (stop.code & 0xFF or 1)


def _ignore_deaths_of_workers() -> None:
    """Turn off torch's handler, which raises an error in whatever code runs when a DataLoader worker dies: the first
    error is the one to report."""
    for _ in range(2):
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        except RuntimeError:  # a worker that had died already
            continue
        return


def _record(error: BaseException, rank: int, exit_code: int, at: float, *, quit_at: str | None = None) -> bool:
    """Leave a record of this rank's failure for the launcher, and return whether it is there to be read."""
    folder = knobs.job_dir()
    if folder is None:
        return False
    if quit_at is not None:
        message, text = quit_at, ""
    elif isinstance(error, SystemExit):
        message, text = ("" if isinstance(error.code, int) else said(error.code)), ""
    else:
        _fold(error)
        message, text = said(error), tracebacks.text(error)
    kind, home = type(error).__qualname__, type(error).__module__
    name = kind if home in ("builtins", "__main__", "__mp_main__") else f"{home}.{kind}"
    record = FailureRecord(rank, at, exit_code, name, message, text, code_of(error), machine.shared_memory())
    try:
        record.write(folder)
    except OSError as trouble:
        print(f"lockstep: rank {rank}'s failure record can't be written: {trouble}", file=sys.stderr)
        return False
    return True


def _is_first_to_tell(error: LockstepError, rank: int) -> bool:
    """Return whether no rank of this start has reported the same error; the rank that it begins with does not count."""
    folder = knobs.job_dir()
    if folder is None:
        return True
    text = re.sub(rf"^rank {rank}\b", "rank", said(error))
    digest = hashlib.sha256(f"{type(error).__name__}: {text}".encode(errors="backslashreplace")).hexdigest()[:16]
    try:
        os.close(os.open(os.path.join(folder, f"told-{digest}"), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True  # the folder is gone, or can't be written
    return True


def _print_exception(error: BaseException) -> None:
    """Do what Python's top level does with an uncaught exception, without our frames."""
    _fold(error)
    tb = error.__traceback__
    # For exit functions and debuggers, which look here; last_exc is known to Python 3.12 and later.
    vars(sys).update(last_type=type(error), last_value=error, last_traceback=tb, last_exc=error)
    with contextlib.suppress(Exception):  # it may be closed, None or the program's own, and is not what went wrong
        sys.stdout.flush()
    try:
        sys.excepthook(type(error), error, tb)
    except BaseException as another:  # noqa: BLE001  (a broken hook must not hide the error)
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(another), another, another.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, tb)


def _fold(error: BaseException) -> None:
    try:
        error.__traceback__ = _without_own_frames(error.__traceback__)
        tracebacks.fold(error)
    except Exception as trouble:  # noqa: BLE001  (an error of an odd kind is still the one to tell)
        print(f"lockstep: the traceback is shown with all its frames: {named(trouble)}", file=sys.stderr)


def _without_own_frames(tb: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback from the program's first frame on."""
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return tb
