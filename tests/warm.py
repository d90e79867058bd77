"""Start Python programs without importing torch again: forks of one process that has imported what they need.

A test of a job costs what its fresh interpreters import, three to four seconds, and a hundredth of that for what it is
about. Here one server, started once per session of the tests, forks for each program a process that becomes what
``python -m module`` or ``python script.py`` would be, and beside it the one that is to be the program's zygote. From
there on everything is as it is for users: a launcher, a zygote below it, ranks that are forked from the zygote. Tests
of what only a cold start shows (``-X`` flags, what imports what, orphans of a start that fails) start their
interpreters themselves. The ranks that harness.py calls functions on are forked from the same server.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import io
import os
import pickle
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TextIO, cast

from lockstep.job.messages import Channel
from lockstep.launch import preload
from lockstep.launch.processes import SAVE, STOPPING, die_with_parent

_ROOT = Path(__file__).parents[1]

#: What jobs and ranks import: torch, what its first optimizer and what compiles imports, lockstep's rooms, what the
#: examples read, and what the tests' own modules do.
_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.algorithms.join",
    "torch.distributed.optim",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "numpy.random",
    "safetensors.torch",
    "sklearn.datasets",
    "sklearn.model_selection",
    "tests.site.sitecustomize",  # before torchvision: makes it loadable
    "torchvision.transforms.v2",
    "torchvision.datasets",
    "tensorboard.backend.event_processing.event_accumulator",
    "hypothesis",
    "pytest",
    "lockstep.cli",
    "lockstep.checkpoint.api",
    "lockstep.comm.init",
    "lockstep.comm.group.process_group",
    "lockstep.comm.shm.memory_engine",
    "lockstep.data_parallel.api",
    "lockstep.ddp.wrapper",
    "lockstep.launch.hosted",
    "lockstep.launch.hosts",
    "lockstep.launch.run",
    "lockstep.launch.spawn",
    "lockstep.testing.on_rank",
    "lockstep.testing.plugin",
    "lockstep.progress",
    "lockstep.data.shard",
    "lockstep.tools.evaluate.follow",
    "lockstep.tools.verify.runs",
    "lockstep.tools.verify.report",
    "lockstep.tools.verify.observe",
    "lockstep.tools.port.verification",
    "lockstep.tools.port.report",
    "tests.backends",
    "tests.harness",
]

#: What only the examples read, or tests that run elsewhere: the environments of other versions and libraries lack it.
_OPTIONAL = ["sklearn", "torchvision", "hypothesis"]


def import_also(*modules: str) -> None:
    """Let the server import these as well. Before it starts; what is not installed is left out."""
    _PRELOAD.extend(modules)
    _OPTIONAL.extend(module.split(".")[0] for module in modules)


@dataclass
class _Asked:
    """What a process is asked for."""

    fields: dict[str, Any]


# --- in the tests ----------------------------------------------------------------------------------------------------


class _Forked:
    """A process of the server's.

    Args:
        request: what the process is to do.
        fds: its standard streams, and then those that only the request knows of.
    """

    def __init__(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        self.returncode: int | None = None
        self._status = server().ask(request, fds)
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        """The exit code (negative: a signal), or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its exit code is on the way
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Call(_Forked):
    """A call of ``function`` in a process of its own, which ends with the tests; module-level, as for pickle.

    Its last arguments are what ``fds`` are there: descriptors.
    """

    def __init__(self, function: Callable[..., object], *args: object, fds: Sequence[int]) -> None:
        call = base64.b64encode(pickle.dumps((function, args))).decode()
        with open(os.devnull) as nothing:
            modules = [each.__module__ for each in (function, *args) if inspect.isfunction(each)]
            request = {"path": sys.path, "call": call, "modules": modules}
            super().__init__(request, [nothing.fileno(), 1, 2, *fds])


class Zygote(_Forked):
    """A zygote for who calls ``lockstep.spawn`` in the tests' own process.

    Args:
        argv, control, env: as ``lockstep.launch.channel.start_zygote`` gets them.
    """

    def __init__(self, argv: Sequence[str], control: int, env: Mapping[str, str]) -> None:
        with open(os.devnull) as nothing:
            super().__init__({"zygote": _order(argv, env)}, [nothing.fileno(), 1, 2, control])


#: The zygotes that :func:`start_zygote` has started, and that were not waited for.
_zygotes: list[Zygote] = []


def start_zygote(argv: list[str], control: int, env: dict[str, str]) -> int:
    """Start a zygote that need not import torch; takes the place of ``lockstep.launch.channel.start_zygote``."""
    _zygotes.append(Zygote(argv, control, env))
    return _zygotes[-1].pid


def wait_for_zygotes(limit: float) -> list[int]:
    """Wait for the end of all zygotes that were started so, and return their exit codes."""
    codes = [zygote.wait(limit) for zygote in _zygotes]
    _zygotes.clear()
    return codes


class Process(_Forked):
    """A program that runs, as :class:`subprocess.Popen` with text pipes has it.

    Args:
        argv: what would follow ``python``: ``-m module …`` or ``script.py …``.
        cwd: the folder it starts in.
        env: its whole environment.
        stdin: text for its standard input; None: /dev/null.
        before: Python that the process runs before it begins, for all its own as well: limits, mounts.
    """

    def __init__(
        self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: str | None = None, before: str = ""
    ) -> None:
        out, child_out = os.pipe()
        err, child_err = os.pipe()
        if stdin is None:
            child_in = os.open(os.devnull, os.O_RDONLY)
        else:
            child_in, feed = os.pipe()
            with os.fdopen(feed, "w") as pipe:  # (what fits into a pipe)
                pipe.write(stdin)
        given = [child_in, child_out, child_err]
        try:
            super().__init__({"argv": list(argv), "cwd": str(cwd), "env": dict(env), "before": before}, given)
        finally:
            for fd in given:
                os.close(fd)
        self.stdout, self.stderr = _Stream(out), _Stream(err)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All it printed from here on, once it has ended. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for stream in (self.stdout, self.stderr):
                if not stream.ended:
                    selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
                for key, _ in ready:
                    stream = cast("_Stream", key.fileobj)
                    stream.read_some()
                    if stream.ended:
                        selector.unregister(key.fd)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self.stdout.take(), self.stderr.take()


class _Stream:
    """The reading end of a pipe, line by line or all that is left."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._bytes = bytearray()
        self.ended = False

    def fileno(self) -> int:
        return self._fd

    def readline(self) -> str:
        """The next line, or what is left when the other end is closed."""
        while b"\n" not in self._bytes and not self.ended:
            self.read_some()
        line, newline, rest = self._bytes.partition(b"\n")
        self._bytes = rest
        return (line + newline).decode()

    def read_some(self) -> None:
        """Wait for bytes, or the end."""
        data = os.read(self._fd, 65536)
        self._bytes += data
        if not data:
            self.close()

    def take(self) -> str:
        """All that was read and not taken yet."""
        text = self._bytes.decode()
        self._bytes.clear()
        return text

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            os.close(self._fd)


class Server:
    """The process that forks; ends with the tests."""

    def __init__(self) -> None:
        #: The folder of the socket on which it hears requests, 0700.
        self._folder = tempfile.mkdtemp(prefix="lockstep-warm-")
        self.path = f"{self._folder}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen()
            env = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(listener.fileno()), ",".join(_PRELOAD), ",".join(_OPTIONAL)],
                env=env | {"PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [env.get("PYTHONPATH")])])},
                cwd=_ROOT,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.commands  # noqa: B018  (programs here use them as well)
        atexit.register(self._close)

    def ask(self, request: dict[str, Any], fds: Sequence[int]) -> TextIO:
        """Have a program started; on what is returned come lines with its process and, at its end, its exit code."""
        connection = socket.socket(socket.AF_UNIX)
        with connection:
            connection.connect(self.path)
            Channel(connection, [_Asked]).send(_Asked(request), fds)
            return connection.makefile("r")

    @functools.cached_property
    def commands(self) -> Path:
        """A folder for shells' PATH, with ``python`` and ``lockstep`` that start programs here."""
        folder = Path(self._folder, "commands")
        folder.mkdir()
        for name, first in (("python", []), ("lockstep", ["-m", "lockstep"])):
            command = folder / name
            command.write_text(_COMMAND.format(python=sys.executable, path=self.path, first=first))
            command.chmod(0o700)
        return folder

    def _close(self) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._folder)


#: Speaks Channel's language in the few modules that load in milliseconds.
_COMMAND = """\
#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
socket.send_fds(server, [b" "], [0, 1, 2])
request = {{"argv": {first!r} + sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
server.sendall(json.dumps({{"is": "_Asked", "fields": request, "fds": 3}}).encode() + b"\\n")
sys.exit(int(server.makefile().read().split()[1]) & 0xFF)
"""


#: In the environment of a command whose hosts are to start fresh interpreters.
COLD_HOSTS = {"TESTS_COLD_HOSTS": "1"}

_HUGE = 2 << 20
#: Linux 6.1 and newer; others say that they have no such advice (linux/mman.h).
_MADV_COLLAPSE = 25

_lock = threading.Lock()
_server: Server | None = None


def join(path: str) -> None:
    """Have programs here started by the server of another process of the tests, which listens at ``path``."""
    global _server
    _server = Server.__new__(Server)
    _server.path = path


def server() -> Server:
    """The session's server; started when first asked for."""
    global _server
    with _lock:
        if _server is None:
            _server = Server()
        return _server


def running() -> Server | None:
    """The session's server, if anything has needed it."""
    return _server


# --- in the server ---------------------------------------------------------------------------------------------------


class _Forker:
    """Forks a process for each request and tells how it ended; in such a process, :meth:`serve` returns its request."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        #: Tells when the tests' process is gone.
        self._tests = os.pidfd_open(os.getppid())
        self._selector.register(self._tests, selectors.EVENT_READ)
        #: pidfd -> (process, where its end is told)
        self._running: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> dict[str, Any]:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._tests:
                    os._exit(0)
                if key.fileobj is not self._listener:
                    self._bury(key.fd)
                    continue
                connection, _ = self._listener.accept()
                channel = Channel(connection, [_Asked])
                asked: list[tuple[_Asked, list[int]]] = []
                try:
                    while not asked:
                        asked = channel.receive()
                except EOFError:  # it was killed before it had asked
                    channel.close()
                    continue
                ((request, fds),) = asked
                for module in request.fields.get("modules", ()):
                    _import_once(module)
                if self._fork(fds, connection):
                    return request.fields | {"fds": fds[3:]}

    def _fork(self, streams: list[int], connection: socket.socket) -> bool:
        pid = os.fork()
        if pid == 0:
            self._leave()
            connection.close()
            os.setsid()
            for target, fd in enumerate(streams[:3]):
                os.dup2(fd, target, inheritable=True)
                os.close(fd)
            return True
        for fd in streams:
            os.close(fd)
        try:
            connection.sendall(f"{pid}\n".encode())
        except ConnectionError:  # who asked was killed meanwhile, and nobody else knows of it
            os.kill(pid, signal.SIGKILL)
        end = os.pidfd_open(pid)
        self._running[end] = (pid, connection)
        self._selector.register(end, selectors.EVENT_READ)
        return False

    def _bury(self, end: int) -> None:
        self._selector.unregister(end)
        pid, connection = self._running.pop(end)
        _, how = os.waitpid(pid, 0)
        with connection, contextlib.suppress(BrokenPipeError):  # the test has ended without it
            connection.sendall(f"{os.waitstatus_to_exitcode(how)}\n".encode())
        os.close(end)

    def _leave(self) -> None:
        self._selector.close()
        self._listener.close()
        os.close(self._tests)
        for end, (_, connection) in self._running.items():
            os.close(end)
            connection.close()


def _become(request: dict[str, Any]) -> None:
    """Have the environment and the streams of a process of one's own."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # else it would be that of the tests' own environment
    own = [entry for entry in sys.path if entry not in ("", str(_ROOT))]
    sys.path[:] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry] + own
    _open_streams()


def _open_streams() -> None:
    """Let Python's streams be those of this process."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = io.TextIOWrapper(
            open(fd, "wb", closefd=False),  # noqa: SIM115
            errors="backslashreplace" if fd == 2 else "strict",
            line_buffering=fd == 2 or os.isatty(fd),
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _fork_zygote() -> tuple[dict[str, Any], list[int]] | None:
    """Fork what is to be this program's zygote, for when it asks for one. In that process: what it asked."""
    from lockstep.launch import channel as zygotes
    from lockstep.launch import processes

    ours, theirs = socket.socketpair()
    program = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        processes.die_with_parent(program)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        channel = Channel(theirs, [_Asked])
        try:
            asked: list[tuple[_Asked, list[int]]] = []
            while not asked:
                asked = channel.receive()
        except EOFError:
            os._exit(0)  # the program has ended, or has its zygote from elsewhere
        channel.close()
        processes._prctl(processes._PR_SET_PDEATHSIG, 0)  # a zygote outlives its launcher, to end what it started
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return asked[0][0].fields, asked[0][1]
    theirs.close()
    channel = Channel(ours, [_Asked])
    cold = zygotes.start_zygote

    def start(argv: list[str], control: int, env: dict[str, str]) -> int:
        zygotes.start_zygote = cold  # there is one; what a program spawns later starts as users have it
        channel.send(_Asked(_order(argv, env)), [control])
        channel.close()
        return pid

    zygotes.start_zygote = start
    return None


def _main(listener: int, modules: Sequence[str], optional: Sequence[str]) -> None:
    with preload.asking_softly():
        for name in modules:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if (error.name or "").split(".")[0] not in optional:
                    raise
    gc.collect()
    gc.freeze()
    for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]  # (private)
        info.atexit = False  # torch undoes thousands of registrations, for longer than most programs here take
    _use_huge_pages()
    here = os.getpid()
    hearing = socket.socket(fileno=listener)
    commands = Path(hearing.getsockname()).parent / "commands"
    request = _Forker(hearing).serve()
    if "call" in request:
        die_with_parent(here)
        _end_after(lambda: _call(request))
    if "zygote" in request:
        _end_after(lambda: _be_zygote(request["zygote"], request["fds"]))
    sys.modules["lockstep.tools.evaluate.attempt"].COMMAND = (str(commands / "lockstep"),)  # type: ignore[attr-defined]
    sys.modules["lockstep.tools.verify.runs"].COMMAND = (str(commands / "lockstep"),)  # type: ignore[attr-defined]
    sys.modules["lockstep.tools.port.verification"].COMMAND = (str(commands / "lockstep"),)  # type: ignore[attr-defined]
    # What a program changes before it begins, a process that is forked elsewhere would lack.
    if not COLD_HOSTS.keys() & request["env"].keys() and not request.get("before"):
        sys.modules["lockstep.remote.ssh"].PYTHON = str(commands / "python")  # type: ignore[attr-defined]
    _end_after(lambda: _live(request))


def _import_once(module: str) -> None:
    """Import what many processes are going to need before they are forked. Where that fails, each of them says so."""
    if module not in sys.modules:
        with (
            contextlib.suppress(Exception),
            preload.asking_softly(),
        ):  # the process imports it again and raises what it raises
            importlib.import_module(module)
            gc.freeze()


def _use_huge_pages() -> None:
    """Have what is loaded lie in pages of 2 MiB where the kernel can do that: a fork copies the table of all pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, _, *name = line.split()
        if rights != "rw-p" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in place.split("-"))
        start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
        if start < end:
            libc.madvise(ctypes.c_size_t(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def _call(request: dict[str, Any]) -> None:
    _open_streams()
    sys.path[:] = request["path"]
    function, args = pickle.loads(base64.b64decode(request["call"]))  # noqa: S301  (of the tests' own)
    function(*args, *request["fds"])


def _live(request: dict[str, Any]) -> None:
    _become(request)
    exec(request.get("before", ""), {})
    if "--hosted" in request["argv"]:
        _prepare_guard()
    else:
        _prepare_zygote()
    _run(request["argv"])


def _prepare_zygote() -> None:
    """Have a zygote ready for this process. In the zygote this does not return."""
    asked = _fork_zygote()
    if asked is not None:
        _end_after(lambda: _be_zygote(*asked))


def _prepare_guard() -> None:
    """Have a zygote ready for the launcher that this process will fork, once it is another host's."""
    from lockstep.launch import hosted

    obey = hosted.obey

    def obey_and_prepare() -> hosted.Order:
        order = obey()  # returns in the launcher
        _prepare_zygote()
        return order

    hosted.obey = obey_and_prepare


def _order(argv: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """What a zygote is to know, of what a fresh interpreter would be started with; see channel.py."""
    launcher, folder, modules, _ = argv[-4:]
    return {"launcher": int(launcher), "folder": folder, "modules": modules, "env": dict(env), "cwd": os.getcwd()}


def _be_zygote(order: dict[str, Any], fds: list[int]) -> None:
    from lockstep.launch import zygote

    signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPPING, SAVE))  # as a zygote is started
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal():  # OpenMP read it when this process's ancestor was started
        sys.modules["torch"].set_num_threads(min(int(threads), sys.modules["torch"].get_num_threads()))
    zygote.main(fds[0], order["launcher"], order["folder"], [name for name in order["modules"].split(",") if name])


def _run(argv: list[str]) -> None:
    from lockstep.launch import rank

    if argv[0] == "-m":
        rank.run_module(argv[1], argv[2:])
    elif argv[0] == "-c":
        rank._present_as(["-c", *argv[2:]])
        sys.path.insert(0, "")
        exec(compile(argv[1], "<string>", "exec", dont_inherit=True), rank._new_main())
    else:
        rank.run_script(argv[0], argv[1:])


def _end_after(program: Callable[[], None]) -> NoReturn:
    """Run ``program`` and end as Python does: threads, exit functions, buffers, exit code; but leave the memory to the
    kernel, since taking torch's modules apart object by object takes longer than most programs here."""
    code, interrupted = 0, False
    try:
        program()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if not isinstance(stop.code, (int, NoneType)):
            print(stop.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  (as Python's top level)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
        traceback.print_exception(error)
    threading._shutdown()  # type: ignore[attr-defined]  # (private: waits for threads that are no daemons)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError, ValueError):  # nobody reads; the program closed it
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(","))
