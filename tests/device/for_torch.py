"""What torch's Python takes from torch._C where torch is built with CUDA, on the simulated device.

Everything above stays torch's own: ``torch.cuda``, its streams, events, random numbers, memory and graphs.
"""

from __future__ import annotations

import datetime
import os
import sys
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_CUDA = 1  # torch's number of the device type


def complete(bindings: Any) -> None:
    """Put into torch._C what a build for the CPU lacks. Before torch.cuda is imported."""
    import torch

    core: Any = torch._C
    core._has_cuda = True
    for name, value in _functions(bindings).items():
        setattr(core, name, value)
    core._CudaStreamBase, core._CudaEventBase = _stream_class(bindings), _event_class(bindings)
    core._CUDAGraph = _graph_class(bindings)
    core._graph_pool_handle = lambda: (0, 1)
    core._cudart = types.SimpleNamespace()
    core._host_emptyCache = lambda: None
    core._scatter, core._gather = _scatter, _gather
    core._broadcast, core._broadcast_coalesced = _broadcast, _broadcast_coalesced
    core._nccl_all_reduce, core._nccl_reduce = None, _nccl_reduce  # (whether there is the first one is asked)
    _give_storages(torch.storage.UntypedStorage)


def complete_cuda(bindings: Any) -> None:
    """Have torch.cuda count the devices without CUDA's runtime, as it does by NVIDIA's management library."""
    import torch.cuda

    torch.cuda._device_count_nvml = bindings.device_count


def _functions(bindings: Any) -> dict[str, Any]:
    def init() -> None:
        import torch.cuda

        torch.cuda.default_generators = tuple(map(bindings.default_generator, range(bindings.device_count())))
        torch.cuda._get_device_properties = _properties  # type: ignore[attr-defined]  # (torch's C++ sets it)

    def exchange(index: int) -> int:
        before: int = bindings.current_device()
        if index >= 0:
            bindings.set_device(index)
        return before

    def statistics(index: int) -> dict[str, Any]:
        now, peak = bindings.memory(index)
        numbers = {"current": now, "peak": peak, "allocated": 0, "freed": 0}
        return {kind: {"all": numbers} for kind in ("allocated_bytes", "reserved_bytes", "active_bytes")}

    asked: int | None = None

    def ask_the_runtime() -> int:
        """Count the devices as CUDA's runtime does: processes forked from one that has asked can't use them."""
        nonlocal asked
        asked = asked or os.getpid()
        count: int = bindings.device_count()
        return count

    def stream(index: int, number: int) -> tuple[int, int, int]:
        return number, index, _CUDA

    return {
        "_cuda_init": init,
        "_cuda_getDeviceCount": ask_the_runtime,
        "_cuda_isInBadFork": lambda: bindings.is_in_bad_fork() or asked not in (None, os.getpid()),
        "_cuda_getDevice": bindings.current_device,
        "_cuda_setDevice": bindings.set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": lambda index: exchange(index),  # (torch's compiler tells the two apart)
        "_cuda_canDeviceAccessPeer": lambda _one, _other: True,
        "_cuda_getArchFlags": lambda: None,
        "_cuda_getCurrentStream": lambda index: stream(index, bindings.current_stream(index)),
        "_cuda_getDefaultStream": lambda index: stream(index, 0),
        "_cuda_getCurrentRawStream": bindings.current_stream,
        "_cuda_setStream": lambda stream_id, device_index, device_type: bindings.set_stream(device_index, stream_id),  # noqa: ARG005
        "_cuda_synchronize": bindings.synchronize,
        "_cuda_set_sync_debug_mode": bindings.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": bindings.get_sync_debug_mode,
        "_cuda_memoryStats": statistics,
        "_cuda_resetPeakMemoryStats": bindings.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda _index: None,
        "_cuda_emptyCache": lambda: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_isCurrentStreamCapturing": bindings.capturing,
        "_cuda_sleep": lambda cycles: bindings.delay(
            bindings.current_device(), bindings.current_stream(-1), max(1, cycles // 1_000_000)
        ),
    }


def _properties(index: int) -> Any:
    """What torch.cuda.get_device_properties returns: an H100's numbers, with the memory that is simulated."""
    return types.SimpleNamespace(
        name="Simulated",
        major=9,
        minor=0,
        total_memory=16 << 30,
        multi_processor_count=132,
        clock_rate=1_980_000,
        uuid=f"53494d55-0000-0000-0000-{_numbers()[index]:012d}",
        gcnArchName="",
    )


def _numbers() -> list[int]:
    """The devices of the machine that this process sees, in its order."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [*range(16)] if visible is None else [int(entry) for entry in visible.split(",")]


def _stream_class(bindings: Any) -> type:
    import torch

    class CudaStreamBase(torch.Stream):
        def __new__(cls, priority: int = 0, **numbers: int) -> CudaStreamBase:
            if "stream_id" in numbers:
                return super().__new__(cls, **numbers)
            return super().__new__(cls, device=torch.device("cuda", bindings.current_device()), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    return CudaStreamBase


def _event_class(bindings: Any) -> type:
    import torch

    class CudaEventBase(torch.Event):
        def __new__(cls, *, enable_timing: bool, **_options: bool) -> CudaEventBase:
            device = torch.device("cuda", bindings.current_device())
            return super().__new__(cls, device=device, enable_timing=enable_timing)

        def elapsed_time(self, end_event: Any) -> float:
            found: float = bindings.elapsed_milliseconds(self.event_id, end_event.event_id)
            return found

    return CudaEventBase


def _graph_class(bindings: Any) -> type:
    class CUDAGraph:
        def __new__(cls, _keep_graph: bool = False) -> CUDAGraph:
            made = super().__new__(cls)
            made._graph = None
            return made

        _graph: Any

        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:  # noqa: ARG002
            self._graph = bindings.begin_capture()

        def capture_end(self) -> None:
            bindings.end_capture(self._graph)

        def replay(self) -> None:
            bindings.replay(self._graph)

        def reset(self) -> None:
            self._graph = None

        def pool(self) -> tuple[int, int]:
            return (0, self._graph.id)

    return CUDAGraph


def _give_storages(storage: Any) -> None:
    """Let storages be made and copied on the device, which torch's C++ does only where it is built with CUDA."""
    import torch

    plain_new, plain_clone = storage.__new__, storage.clone

    def new(cls: type, *args: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return plain_new(cls, *args, device=device, **options)
        size = args[0] if args else 0
        if not isinstance(size, int):
            raise TypeError(
                f"simulated: an UntypedStorage on a device is made of its size, not of {type(size).__name__}"
            )
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    def clone(self: Any) -> Any:
        if self.device.type != "cuda":
            return plain_clone(self)
        return _bytes_of(self).clone().untyped_storage()

    storage.__new__, storage.clone = new, clone


def _bytes_of(storage: Any) -> Tensor:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


# What torch.nn.DataParallel calls, for comparisons with it.


def _scatter(
    tensor: Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, _streams: object = None
) -> tuple[Tensor, ...]:
    parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(list(sizes), dim)
    return tuple(part.to(_device(index)).contiguous() for part, index in zip(parts, devices, strict=False))


def _gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    import torch

    device = _device(torch.cuda.current_device() if destination is None else destination)
    return torch.cat([each.to(device) for each in tensors], dim)


def _nccl_reduce(inputs: Sequence[Tensor], output: Tensor, root: int, *_more: object) -> None:  # noqa: ARG001
    total = inputs[0].to(output.device)
    for each in inputs[1:]:
        total = total + each.to(output.device)
    output.copy_(total)


def _broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    return [tensor.to(_device(index)) for index in devices]


def _broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], _size: int) -> list[list[Tensor]]:
    return [[each.to(_device(index)) for each in tensors] for index in devices]


def _device(index: int) -> Any:
    import torch

    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


# torch.distributed's NCCL.


class _Recognised(type):
    """torch asks whether a backend is NCCL's by its class; what C++ hands to Python here is its base class."""

    def __instancecheck__(cls, instance: object) -> bool:
        import torch

        return type(instance) is torch._C._distributed_c10d.Backend


class ProcessGroupNCCL(metaclass=_Recognised):
    """A process group with NCCL's manners, of which a gloo group moves the bytes."""

    class Options:
        """What torch sets for a group."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = datetime.timedelta(minutes=10)
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""

    def __new__(cls, store: Any, rank: int, size: int, options: Any = None, **_more: Any) -> Any:
        import torch
        import torch.distributed as dist

        timeout = options._timeout if options is not None else datetime.timedelta(minutes=10)
        inside = torch._C._distributed_c10d.PrefixStore("simulated", store)
        inner = dist.ProcessGroupGloo(inside, rank, size, timeout)
        return sys.modules["simulated_bindings"].collectives(inner, round(timeout.total_seconds() * 1e3))


def add_nccl() -> None:
    """Let torch.distributed find NCCL. Before its distributed_c10d is imported."""
    import torch

    torch._C._distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc]
    core: Any = torch._C
    core._nccl_version = lambda: (2 << 32) | (0 << 16) | 0
    core._nccl_version_suffix = lambda: b""
