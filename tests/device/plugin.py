"""The simulated device as a plugin's, of a kind that torch knows nothing of: "sim", with the backend "simccl".

It comes as such plugins do: torch finds it by the entry points of installed distributions when it is imported, and it
brings what torch asks a kind's module for. In this process torch has no CUDA.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KIND, BACKEND = "sim", "simccl"


class Distribution(importlib.metadata.Distribution):
    """An installed distribution that does no more than to say what torch is to load."""

    def read_text(self, filename: str) -> str | None:
        """Return one of the files that describe it."""
        return {
            "METADATA": "Name: simulated-device\nVersion: 1.0\n",
            "entry_points.txt": "[torch.backends]\nsim = tests.device.start:load_plugin\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Path:
        """Return where a file of it would lie."""
        return Path(__file__).parent.joinpath(path)


class Finder:
    """Finds the distribution, for ``importlib.metadata``, and no modules."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Find no module."""

    @staticmethod
    def find_distributions(
        context: importlib.metadata.DistributionFinder.Context | None = None,
    ) -> Iterable[importlib.metadata.Distribution]:
        """Return the distribution if it is, or may be, what is looked for."""
        return [Distribution()] if context is None or context.name in (None, "simulated-device") else []


class Module(types.ModuleType):
    """What ``torch.sim`` is."""

    def __init__(self, bindings: Any) -> None:
        super().__init__(f"torch.{KIND}")
        self._bindings = bindings
        self._used = False

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        return int(self._bindings.device_count())

    def is_initialized(self) -> bool:
        return self._used

    def _lazy_init(self) -> None:
        if self._is_in_bad_fork():
            raise RuntimeError("Cannot re-initialize the simulated device in a forked process")
        self._used = True

    def _is_in_bad_fork(self) -> bool:
        return bool(self._bindings.is_in_bad_fork())

    def current_device(self) -> int:
        return int(self._bindings.current_device())

    def set_device(self, device: Any) -> None:
        self._bindings.set_device(self._index(device))

    def synchronize(self, device: Any = None) -> None:
        with self.device(device):
            self._bindings.synchronize()

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self._bindings.set_device(before)

    def manual_seed(self, seed: int) -> None:
        self._bindings.default_generator(self.current_device()).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self._bindings.default_generator(index).manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        state: torch.Tensor = self._bindings.default_generator(self._index(device)).get_state()
        return state

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self._bindings.default_generator(self._index(device)).set_state(state)

    def get_device_name(self, device: Any = None) -> str:
        return f"Simulated {self._index(device)}"

    def get_device_properties(self, device: Any = None) -> Any:
        return types.SimpleNamespace(name=self.get_device_name(device), total_memory=16 << 30)

    def max_memory_allocated(self, device: Any = None) -> int:
        return int(self._bindings.memory(self._index(device))[1])

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._bindings.reset_peak(self._index(device))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        free, total = self._bindings.memory_info(self._index(device))
        return int(free), int(total)

    def empty_cache(self) -> None:
        """Give nothing back: nothing is kept."""

    def is_current_stream_capturing(self) -> bool:
        return bool(self._bindings.capturing())

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        import torch

        return [torch.bfloat16, torch.float16]

    def _index(self, device: Any) -> int:
        import torch

        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.current_device() if index is None else index


def install(bindings: Any) -> None:
    """Register the kind and its backend. With torch imported, and before anything is made on a device."""
    import torch
    import torch.distributed as dist
    from torch.utils import backend_registration

    backend_registration.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, Module(bindings))
    backend_registration.generate_methods_for_privateuse1_backend()

    def make(store: Any, rank: int, size: int, limit: datetime.timedelta) -> Any:
        inside = torch._C._distributed_c10d.PrefixStore("simulated", store)
        inner = dist.ProcessGroupGloo(inside, rank, size, limit)
        return bindings.collectives(inner, round(limit.total_seconds() * 1e3))

    dist.Backend.register_backend(BACKEND, make, devices=[KIND])
