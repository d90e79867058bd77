"""Every test leaves the process as it found it: environment, threads, children, descriptors, shared memory."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.config import create_terminal_writer

import tests.site.sitecustomize  # noqa: F401  (makes torchvision loadable here; subprocesses get it by PYTHONPATH)
from lockstep import knobs
from lockstep.launch import channel
from lockstep.testing import leaks
from tests import launching, seeding, warm
from tests.device import shared, simulation, start

if TYPE_CHECKING:
    from xdist.remote import Producer

    from tests.faults.jobs import Calm
    from tests.scheduling import Overlapping

# With it, a process's print() hands over a line in pieces, between which other processes' pieces come.
os.environ.pop("PYTHONUNBUFFERED", None)

# Hundreds of processes start here; without their bytecode each of them would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Ranks that tests spawn in this process leave their record here, not with the user's own runs, and say nothing of it.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir(), f"lockstep-tests-{os.getuid()}"))
os.environ[knobs.QUIET] = "1"

# Who runs the tests in the background or under nohup makes them ignore signals, and the jobs they start inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, lambda *_: None)  # which a program that is started does not inherit

with suppress(ImportError):  # which is not there where other libraries are tested
    from hypothesis import settings

    # How long an example takes is the machine's affair: each test has its own limit. Every run has the same examples.
    settings.register_profile("here", deadline=None, derandomize=True)
    settings.load_profile("here")


def pytest_configure(config: pytest.Config) -> None:
    """Let the stacks of a test that takes too long reach the terminal from where the tests run in several processes."""
    if hasattr(config, "workerinput"):  # whose standard output is lost
        writer = create_terminal_writer(config, sys.__stderr__)
        config.get_terminal_writer = lambda: writer  # type: ignore[method-assign]  # (asked by pytest-timeout)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Overlapping | None:
    """Let tests that wait run beside tests that compute, where whole files go to several workers."""
    from tests.scheduling import Overlapping  # here, because the tests run without pytest-xdist, too

    return Overlapping(config, log) if config.getoption("dist") == "loadfile" else None


#: In the environment of every process that the tests start, however it is orphaned later.
_MARK = "TESTS_OF_PROCESS"
os.environ[_MARK] = str(os.getpid())


#: Variables that are not a test's: pytest sets the one, torch the other where something is compiled or traced first.
_OF_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}

#: Seconds that a thread has for its end after the test's.
_ENDING = 5.0
#: Seconds in which others' shared memory is known as theirs, or removed: their tests kill jobs and look what stays.
_OTHERS = 120.0


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Have each file draw the same numbers whenever it is loaded."""
    if isinstance(collector, pytest.Module):
        seeding.seed()


@pytest.fixture(scope="session", autouse=True)
def apart_from_inner_sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give sessions of pytest that tests start a root of their own for temporary folders.

    At its end a session removes others' old folders. Two that remove the same one side by side fail (pytest 9.2.0), and
    the first one of a run would have the thousands of folders of the run before to remove.
    """
    if knobs.rank_process() is not None:
        yield
        return
    tmp_path_factory.getbasetemp()  # of this session, which stays where the user looks for it
    with tempfile.TemporaryDirectory(prefix="pytests-") as root:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = root
        yield
        del os.environ["PYTEST_DEBUG_TEMPROOT"]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Have each test draw the same numbers, whatever ran before it."""
    seeding.seed()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks an environment variable, a thread, a child process, a descriptor or a shared segment.

    Of a test with the mark ``ranks`` the processes and segments that its ranks leave are found by the mark itself.
    """
    if knobs.rank_process() is not None:  # this is such a rank, and goes after the test
        yield
        return
    if getattr(request.node, "callspec", None) is not None and request.node.callspec.params.get("gpus") == "real":
        _open_driver()
    before = _possessions()
    launching.test_ends = time.monotonic() + _seconds_of(request)
    yield
    for thread in threading.enumerate():  # a loader tells its threads to end, and does not wait for it
        if thread.name not in before["threads"]:
            thread.join(_ENDING)
    after = _possessions()
    leaked = {kind: after[kind] - before[kind] for kind in before if after[kind] - before[kind]}
    if "shared memory" in leaked:
        there = frozenset(before["shared memory"])
        leaked["shared memory"] = set(leaks.left_since(there, is_ours=_is_ours, patience=_OTHERS))
    if any(leaked.values()):
        pytest.fail(f"{request.node.nodeid} leaked: {leaked}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Have the ranks of tests with the mark ``ranks`` forked from the session's warm process."""
    cold = channel.start_zygote
    if pyfuncitem.get_closest_marker("ranks") is not None:
        from lockstep.testing import session  # here, because many tests do without

        session._OTHERS = _OTHERS
        channel.start_zygote = warm.start_zygote
    try:
        return (yield)
    finally:
        channel.start_zygote = cold


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """See that the process has ended which has forked them."""
    warm.wait_for_zygotes(launching.LIMIT)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have each test that needs GPUs for each kind of them; this process has one kind, if any."""
    mark = metafunc.definition.get_closest_marker("gpu")
    if mark is not None:
        kinds = [
            pytest.param(kind, marks=pytest.mark.skipif(bool(reason), reason=reason))
            for kind, reason in _without(*mark.args, **mark.kwargs).items()
        ]
        metafunc.parametrize("gpus", kinds, indirect=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it loudly if there were to be simulated GPUs and are none."""
    if start.missing is not None:
        text = f"*** NO SIMULATED GPUS: {start.missing}. Nothing that needs them was run. ***"
        terminalreporter.write_line(text, red=True, bold=True)


def _without(count: int = 1, *, apart: bool = False) -> dict[str, str]:
    """Why this process has not so many GPUs of a kind; empty where it has. ``apart``: none may stand for several."""
    import torch  # here, because many tests do without

    there = torch.accelerator.device_count() if simulation.is_on() else torch.cuda.device_count()
    if there and shared.is_on() and not apart:
        there = shared.STANDS_FOR
    few = "" if there >= count else f"needs {'a CUDA device' if count == 1 else f'{count} CUDA devices'}"
    if simulation.is_on():
        return {"simulated": few, "real": "this process has simulated GPUs"}
    return {"simulated": start.missing or "run by make simulated", "real": few}


@pytest.fixture(autouse=True)
def gpus(request: pytest.FixtureRequest) -> str:
    """Which GPUs a test has that needs some: "simulated" or "real"; see tests/device. Of other tests "none"."""
    kind: str = getattr(request, "param", "none")
    return kind


#: Devices that tests with ranks need which run on GPUs as well: as many as these tests have ranks at most.
_DEVICES = 4


@pytest.fixture(params=[pytest.param("gloo", marks=pytest.mark.campaign), "shm"])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What ``lockstep.init()`` takes on the ranks of this test, unless it is told otherwise; see tests/backends.py.

    On GPUs the ranks take what is for their devices, and the streams of simulated ones are as uneven as the parameter
    says.
    """
    if isinstance(request.param, simulation.Stress):
        missing = _without(_DEVICES)
        if all(missing.values()):
            pytest.skip(" and ".join(missing.values()))
        monkeypatch.delenv(knobs.BACKEND, raising=False)
        monkeypatch.setattr(simulation, "of_ranks", request.param if simulation.is_on() else None)
        return "nccl"
    backend: str = request.param
    monkeypatch.setenv(knobs.BACKEND, backend)
    return backend


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for the TMPDIR of jobs. Its path is short, unlike tmp_path's: sockets there have 108 characters."""
    with tempfile.TemporaryDirectory(prefix="jobs-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Runs of so many epochs that nobody disturbs, one for each number asked for."""
    from tests.faults import jobs  # here, because it imports torch, which many tests do without

    return cache(lambda epochs: jobs.undisturbed(tmp_path_factory.mktemp("calm") / "run", epochs))


def _seconds_of(request: pytest.FixtureRequest) -> float:
    """How long a test may take, by its mark or by pyproject.toml."""
    mark = request.node.get_closest_marker("timeout")
    return float(mark.args[0] if mark is not None and mark.args else request.config.getini("timeout") or "inf")


@cache
def _open_driver() -> None:
    """Have what CUDA opens for a process as a whole before a test begins, whose leak it is not."""
    import torch

    torch.nn.Linear(8, 8, device="cuda")(torch.ones(8, 8, device="cuda")).sum().backward()
    torch.cuda.synchronize()


def _possessions() -> dict[str, set[str]]:
    return {
        "environment": {f"{k}={v}" for k, v in os.environ.items() if k not in _OF_OTHERS},
        "threads": {thread.name for thread in threading.enumerate()},
        "children": _children(),
        "descriptors": _descriptors(),
        "shared memory": set(leaks.files()),
    }


def _is_ours(pid: int) -> bool:
    """Whether a process was started by these tests, however it is orphaned."""
    mark = f"{_MARK}={os.getpid()}".encode()
    return pid == os.getpid() or mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _children() -> set[str]:
    servers = {
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(warm.running(), "pid", None),
    }
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that ends meanwhile
            found |= set((task / "children").read_text().split())
    return found - {str(pid) for pid in servers}


def _descriptors() -> set[str]:
    """Open files, pipes and sockets by name; the resource tracker's own is not counted."""
    tracker = getattr(resource_tracker._resource_tracker, "_fd", None)
    found: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the listing's own descriptor, closed by now
        if int(fd) != tracker and not target.startswith("/dev/"):
            found.add(f"{fd} -> {target}")
    return found
