"""Run the replicas, each in its own thread, under the caller's modes; errors say which replica they come from.

Note [Cores]
~~~~~~~~~~~~
An operator on the CPU uses as many threads as there are cores. Two replicas side by side would use twice as many, and
the threads of one operator wait for each other by spinning: measured on two cores, a step with 200 small operators then
takes ten times as long. So while CPU replicas run side by side, the cores are divided among them. torch keeps a number
of threads for each thread, and one that later threads begin with; both are restored.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from lockstep import accelerator
from lockstep.step import flops

Result = TypeVar("Result")


@dataclass(frozen=True)
class Location:
    """A replica and its device."""

    replica: int
    replicas: int
    device: torch.device

    def __str__(self) -> str:
        return f"replica {self.replica} of {self.replicas} on {self.device}"


@dataclass(frozen=True)
class Modes:
    """The modes that torch keeps for each thread, as they are in the calling thread."""

    grad: bool
    inference: bool
    #: Device type -> dtype, where autocast is on.
    autocast: dict[str, torch.dtype]
    autocast_cache: bool
    #: Number of threads for one operator if several replicas share the cores: see Note [Cores]. None: unchanged.
    operator_threads: int | None

    @classmethod
    def of_this_thread(cls, device_type: str, *, sharing: int) -> Modes:
        """Return the present modes, for ``sharing`` replicas side by side."""
        types = {"cpu", device_type}
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast={each: torch.get_autocast_dtype(each) for each in types if torch.is_autocast_enabled(each)},
            autocast_cache=torch.is_autocast_cache_enabled(),
            operator_threads=torch.get_num_threads() // sharing or 1 if device_type == "cpu" and sharing > 1 else None,
        )

    def enter(self, stack: ExitStack) -> None:
        """Set the modes in this thread until ``stack`` closes."""
        if self.operator_threads is not None:
            torch.set_num_threads(self.operator_threads)  # of this thread, which ends with the replica's work
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for device_type, dtype in self.autocast.items():
            stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=self.autocast_cache))


class ReplicaThread(Generic[Result]):
    """A function that runs in its own thread; :meth:`result` returns its result or raises its error.

    A Ctrl-C may come at any place. So whoever starts the thread knows it before, and waits for it in any case.
    """

    def __init__(self, fn: Callable[[], Result], location: Location, modes: Modes) -> None:
        self._fn, self._location, self._modes = fn, location, modes
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._started = self._begun = self._called_off = False
        self._ended = threading.Event()
        context = contextvars.copy_context()
        self._stream = stream_of(location.device)
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=f"lockstep {location}")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        self._started = True

    def _run(self) -> None:
        with self._lock:
            if self._called_off:
                return
            self._begun = True
        try:
            with ExitStack() as stack:
                self._modes.enter(stack)
                if self._stream is not None:
                    stack.enter_context(accelerator.on(self._location.device))
                    stack.enter_context(self._stream)
                self._result.append(self._fn())
        except BaseException as error:  # noqa: BLE001  (it is raised where the result is waited for)
            self._error = error
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Wait until the thread has ended, with a result or an error; one that was not started is called off."""
        if not self._started:  # or Ctrl-C came meanwhile, most likely while Python waited for the thread to begin
            with self._lock:
                self._called_off = True
            if not self._begun:
                return
        # A join alone is not enough: if Ctrl-C interrupts it, Python takes the thread as ended and waits no more.
        self._ended.wait()
        self._thread.join()

    def result(self) -> Result:
        """Wait for the result.

        Raises:
            Exception: what the function raised, with the replica and its device added to its message.
        """
        self.wait()
        if self._error is not None:
            try:
                raise located(self._error, self._location)
            finally:
                self._error = None  # the traceback holds this frame, and no reference cycle may stay
        return self._result.pop()


def stream_of(device: torch.device) -> Any:
    """Return the caller's current stream of an accelerator, which the replica's thread uses too."""
    return None if device.type == "cpu" else accelerator.current_stream(device)


def run_replicas(
    calls: Sequence[Callable[[], Result]], locations: Sequence[Location], modes: Modes, *, in_turn: bool
) -> list[Result]:
    """Return the results of the calls: the first runs in this thread, each other in its own thread.

    Args:
        in_turn: run one after the other.

    Raises:
        Exception: what the first call that failed raised, with the replica and its device added to its message; the
            others have ended by then.
    """
    running: list[ReplicaThread[Result]] = []
    cores = Cores(None if in_turn else modes.operator_threads)
    if len(calls) > 1:
        flops.compute_unseen("lockstep.DataParallel has replicas in threads, and one thread alone is seen")
    try:
        if not in_turn:
            cores.divide()
            for call, location in zip(calls[1:], locations[1:], strict=True):
                running.append(ReplicaThread(call, location, modes))
                running[-1].start()
        first = run_here(calls[0], locations[0])
        if in_turn:
            for call, location in zip(calls[1:], locations[1:], strict=True):
                running.append(ReplicaThread(call, location, modes))
                running[-1].start()
                running[-1].wait()
        return [first, *(each.result() for each in running)]
    finally:
        for each in running:
            each.wait()
        cores.restore()


class Cores:
    """The calling thread's part of the cores while its replica runs beside others: see Note [Cores]."""

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self._before: int | None = None

    def divide(self) -> None:
        """Leave the other replicas their part of the cores."""
        if self._threads is not None and self._before is None:
            self._before = torch.get_num_threads()
            torch.set_num_threads(self._threads)

    def restore(self) -> None:
        """Take back the cores of the replicas, which have ended."""
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None


def run_here(call: Callable[[], Result], location: Location) -> Result:
    """Run ``call`` in this thread; errors are marked as in :func:`run_replicas`."""
    try:
        if location.device.type == "cpu":
            return call()
        with accelerator.on(location.device):
            return call()
    except Exception as error:
        located(error, location)
        raise


def located(error: BaseException, location: Location) -> BaseException:
    """Return the same error, whose text says where it happened.

    The object stays the same, and so do its type, its attributes and its traceback.
    """
    text = f"(in {location})"
    if error.args and isinstance(error.args[0], str) and not isinstance(error, KeyError):
        error.args = (f"{error.args[0]} {text}", *error.args[1:])
    elif sys.version_info >= (3, 11):
        error.add_note(text)
    elif not error.args:
        error.args = (text,)
    return error
