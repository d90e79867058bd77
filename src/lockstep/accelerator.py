"""The accelerator of this process (a CUDA or ROCm GPU, an XPU, an NPU): all that lockstep asks torch about one.

Note [One path for all accelerators]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch has at most one kind of accelerator in a process, and a name for it: "cuda" for NVIDIA's and AMD's GPUs, "xpu",
"npu", or what a plugin has called its own. What torch has for all kinds alike is taken from there:
``torch.accelerator``, ``torch.Stream``, ``torch.Event``. What only the module of a kind has (seeds, properties) is
asked of ``torch.get_device_module``. Which backend carries a kind's tensors from rank to rank is in the table of
torch.distributed, in which plugins enter theirs. So no other file names a kind: it asks whether a device is the CPU, or
calls this one.

A kind without a backend for its tensors (MPS) has no ranks of its own: the ranks of a job train on the CPU, and
``init`` says so. What is CUDA's alone stands at the end of this file.

Nothing in a step on the CPU comes here. What a step has to know of a device its owner asks for once, and keeps.
A test holds both (tests/contracts/test_accelerators.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from lockstep import _torch

CPU = torch.device("cpu")

#: The exit code of a process that finds itself refused.
_REFUSED = 3
#: Kind -> the variables by which its driver hides devices from a process. These are the drivers' names.
_HIDING = {"cuda": ("CUDA_VISIBLE_DEVICES",), "npu": ("ASCEND_RT_VISIBLE_DEVICES",), "xpu": ("ZE_AFFINITY_MASK",)}
#: AMD's, whose GPUs are of the kind "cuda" as well.
_HIDING_ROCM = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


# Which one there is ---------------------------------------------------------------------------------------------------


def kind() -> str | None:
    """Return the kind of accelerator that this process sees ("cuda", "xpu", ...); None if it sees no device."""
    built_for = torch.accelerator.current_accelerator()
    return built_for.type if built_for is not None and torch.accelerator.device_count() else None


def count() -> int:
    """Count the accelerators that this process sees."""
    return torch.accelerator.device_count()


def is_usable() -> bool:
    """Return whether this process can compute on an accelerator; asks the driver, which warns if it can't."""
    return torch.accelerator.is_available()


def devices() -> list[torch.device]:
    """Return the accelerators that this process sees, with their indices."""
    found = kind()
    return [] if found is None else [torch.device(found, index) for index in range(count())]


def initialised() -> str | None:
    """Return the kind of accelerator that this process has begun to use, which no process forked from it could; None if
    it has not, or its module does not tell. Opens no driver."""
    built_for = torch.accelerator.current_accelerator()
    if built_for is None:
        return None
    is_initialised = getattr(torch.get_device_module(built_for), "is_initialized", None)
    return built_for.type if is_initialised is not None and is_initialised() else None


def refused_in_forks() -> str | None:
    """Return the kind of accelerator that torch refuses in processes forked from this one; None if it refuses none.

    That a program has asked CUDA's runtime how many devices there are is enough, and only a forked process can tell: so
    this one forks one, if torch has a word for it. Where there is no device, nothing is lost by that (a build for GPUs
    asks the runtime on a machine without NVIDIA's library, too). Opens no driver that is not open.
    """
    built_for = torch.accelerator.current_accelerator()
    is_refused = None if built_for is None else _torch.is_in_bad_fork(torch.get_device_module(built_for))
    if built_for is None or is_refused is None:
        return initialised()
    child = os.fork()
    if child == 0:
        try:
            os._exit(_REFUSED if is_refused() else 0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return built_for.type if (code == _REFUSED and count()) or initialised() else None


def title(of: str) -> str:
    """Return the name of a kind as people write it: ``CUDA`` for "cuda"."""
    return of.upper()


def noun(of: str) -> str:
    """Return what a device of a kind is called: ``GPU`` for CUDA's, ``NPU device`` for those of "npu"."""
    return "GPU" if of == "cuda" else f"{title(of)} device"


def hiding_variables(of: str) -> tuple[str, ...]:
    """Return the environment variables by which devices of a kind are hidden from a process; none if none is known."""
    return _HIDING_ROCM if of == "cuda" and torch.version.hip else _HIDING.get(of, ())


# Collectives ----------------------------------------------------------------------------------------------------------


def backend_for(of: str) -> str | None:
    """Return the torch.distributed backend for tensors of a kind of device, from torch's own table: "nccl" for "cuda".

    None: there is none, or the one that the table has does not carry such tensors (it has gloo for "mps", which
    carries none of them).
    """
    name = dist.Backend.default_device_backend_map.get(of)
    carried = [] if name is None else dist.Backend.backend_capability.get(name, [])
    return name if of in carried and name != "fake" else None


def kind_of(backend: str) -> str | None:
    """Return the kind of accelerator whose tensors ``backend`` is for: "cuda" for "nccl"; None for the CPU's."""
    for of in dist.Backend.default_device_backend_map:
        if of != "cpu" and backend_for(of) == backend:
            return of
    return None


# The current device ---------------------------------------------------------------------------------------------------


def use(device: torch.device) -> None:
    """Make ``device``, which has an index, the current one of this thread."""
    torch.accelerator.set_device_index(device)


def current(of: str) -> torch.device:
    """Return the current device of a kind, with its index; for a kind that is no accelerator's, the kind alone."""
    built_for = torch.accelerator.current_accelerator()
    if built_for is None or built_for.type != of:
        return torch.device(of)
    return torch.device(of, torch.accelerator.current_device_index())


def with_index(device: torch.device) -> torch.device:
    """Return ``device`` with its index: the current one's if it has none. The CPU has none."""
    if device.type == "cpu":
        return CPU
    return device if device.index is not None else current(device.type)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which ``device``, an accelerator with an index, is the current one of this thread."""
    return torch.accelerator.device_index(device.index)


# Streams and events ---------------------------------------------------------------------------------------------------


def new_stream(device: torch.device) -> torch.Stream:
    """Return a stream of ``device``, an accelerator, beside the current one."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream to which this thread's work on ``device``, an accelerator, goes."""
    return torch.accelerator.current_stream(device)


@contextmanager
def beside(device: torch.device, *, after: torch.Event | None = None) -> Iterator[None]:
    """Return a context in which this thread's work on ``device`` goes to a stream of its own; nothing on the CPU.

    Args:
        after: the work begins when this is reached; None: at once.
    """
    if device.type == "cpu":
        yield
        return
    stream = new_stream(device)
    if after is not None:
        stream.wait_event(after)
    with on(device), stream:
        yield


def new_event(device: torch.device, *, timed: bool = False) -> torch.Event:
    """Return an event of ``device``, an accelerator, that is nowhere yet; ``timed`` as for :func:`mark`."""
    return torch.Event(device, enable_timing=timed)


def mark(device: torch.device, *, timed: bool = False) -> torch.Event:
    """Return an event after the work queued so far in the current stream of ``device``, an accelerator.

    Args:
        timed: whether ``elapsed_time`` is to be asked of it.
    """
    event = new_event(device, timed=timed)
    event.record(current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait for all that is queued on ``device``; on the CPU there is nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@cache
def has_times(device: torch.device) -> bool:
    """Return whether events of ``device`` tell how long work took. Waits for the device when it is first asked."""
    if device.type == "cpu":
        return False
    try:
        begun, ended = mark(device, timed=True), mark(device, timed=True)
        ended.synchronize()
        begun.elapsed_time(ended)
    except (RuntimeError, NotImplementedError):  # torch's way to say that a kind of device has no such events
        return False
    return True


class HostCopy:
    """The values of a tensor on their way to the host. Nothing waits for the device until they are read.

    Args:
        values: of any shape, dtype and device; on the CPU it is not copied.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values.detach()
        self._copied: torch.Event | None = None
        if values.device.type != "cpu":
            pinned = torch.empty(values.shape, dtype=values.dtype, device=CPU, pin_memory=True)
            self._values = pinned.copy_(values.detach(), non_blocking=True)
            self._copied = mark(values.device)

    def read(self) -> torch.Tensor:
        """Return the values, on the CPU. Waits for the work that was queued when this was made, and for no later."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values


class Stopwatch:
    """Times the work that is queued from here until :meth:`stop`, without waiting for it.

    Args:
        device: an accelerator whose events tell times (:func:`has_times`); its current stream counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun = self._ended = mark(device, timed=True)

    def stop(self) -> None:
        """Note that all the work is queued."""
        self._ended = mark(self._device, timed=True)

    def seconds(self) -> float:
        """Return the time that the work took. Waits for the work if it is not done."""
        self._ended.synchronize()
        return self._begun.elapsed_time(self._ended) / 1e3


def capture_test(used: Iterable[torch.device]) -> Callable[[], bool] | None:
    """Return the function that tells whether a graph of device work is being captured, in which nothing may be read.

    Args:
        used: the devices that are used.

    Returns:
        None if nothing can be captured: all devices are CPUs, or of a kind that has no graphs.
    """
    for device in used:
        if device.type != "cpu":
            test: Callable[[], bool] | None = getattr(
                torch.get_device_module(device), "is_current_stream_capturing", None
            )
            return test
    return None


# Memory ---------------------------------------------------------------------------------------------------------------


def memory_size(device: torch.device) -> int:
    """Return the capacity of ``device``, an accelerator, in bytes; 0 if its module does not tell."""
    return int(getattr(properties(device), "total_memory", 0))


def peak_memory(device: torch.device) -> Callable[[], int] | None:
    """Return the function that returns the most bytes that tensors on ``device`` have had at a time; None if its
    allocator keeps no such count."""
    counted = getattr(torch.get_device_module(device), "max_memory_allocated", torch.accelerator.max_memory_allocated)
    try:
        counted(device)
    except (RuntimeError, NotImplementedError):  # torch's way to say so
        return None
    return partial(counted, device)


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of ``device``, an accelerator, that no process uses; None if its module does not tell."""
    told = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if told is None else int(told(device)[0])


def free_cached(device: torch.device) -> None:
    """Give memory that the allocator of ``device`` keeps back to its driver; on the CPU it keeps none."""
    if device.type != "cpu":
        getattr(torch.get_device_module(device), "empty_cache", torch.accelerator.empty_cache)()


# Random numbers -------------------------------------------------------------------------------------------------------


def rng_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the generator of ``device`` (uint8, on the CPU); None for the CPU, whose generator is no
    device's."""
    if device.type == "cpu":
        return None
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Put the generator of ``device``, an accelerator, back to a state of :func:`rng_state`."""
    torch.get_device_module(device).set_rng_state(state, device)


def seed(value: int, device: torch.device) -> None:
    """Seed the generator of ``device``, an accelerator.

    Args:
        value: 0 <= value < 2**63.
    """
    with on(device):
        torch.get_device_module(device).manual_seed(value)


# What a device is -----------------------------------------------------------------------------------------------------


def properties(device: torch.device) -> Any:
    """Return what the module of ``device``, an accelerator, says of it; None if it has no such function.

    Kinds describe their devices in different words, so each field has to be looked for.
    """
    told = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if told is None else told(device)


def identity(device: torch.device) -> str | None:
    """Return words that tell ``device``, an accelerator, from all others of its machine, whatever index it has in which
    process: its UUID and its place on the PCI bus. None if its module tells neither."""
    told = properties(device)
    uuid = str(getattr(told, "uuid", None) or "")
    place: list[Any] = [getattr(told, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    found = [uuid] if uuid.strip("0-") else []  # some drivers have no numbers for their devices
    if None not in place:
        found.append("PCI {:04x}:{:02x}:{:02x}".format(*place))
    return ", ".join(found) or None


def name_of(device: torch.device) -> str:
    """Return the model's name of ``device``, an accelerator; that of its kind if its module does not tell."""
    told = getattr(torch.get_device_module(device), "get_device_name", None)
    return title(device.type) if told is None else str(told(device))


# What is CUDA's alone -------------------------------------------------------------------------------------------------


def cuda_libraries(device: torch.device) -> str | None:
    """Return the versions of CUDA and cuDNN by which ``device`` computes; None if it is not CUDA's."""
    if device.type != "cuda":
        return None
    return f"{torch.version.cuda} with cuDNN {torch.backends.cudnn.version()}"


def cudnn_rounds_to_tf32(of: str) -> bool:
    """Return whether cuDNN may round float32 to TF32 on devices of this kind: never on any but CUDA's."""
    return of == "cuda" and torch.backends.cudnn.allow_tf32


def cuda_capability(device: torch.device) -> list[int] | None:
    """Return the capability of a CUDA device, major and minor; None if it is not CUDA's."""
    return list(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None


def cuda_architectures() -> list[str]:
    """Return the GPU architectures for which this torch has kernels ("sm_90"); none if there is no CUDA device."""
    return torch.cuda.get_arch_list() if kind() == "cuda" else []


def nccl_version() -> str:
    """Return the version of NCCL; empty if there is no CUDA device, or no NCCL in this torch."""
    if kind() != "cuda" or not dist.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))
