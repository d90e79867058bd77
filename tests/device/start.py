"""Give this process the simulated device as soon as it imports torch; it pays nothing before."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.device import before, build, plugin

#: Why this process has no simulated device though it was asked for, or None.
missing: str | None = None


def install() -> None:
    """Have torch find the simulated device when it is imported. Where it can't be built, ``missing`` says why.

    Raises:
        ImportError: torch has been imported, and has looked for CUDA.
    """
    global missing
    if "torch" in sys.modules:
        raise ImportError("the simulated device must come before torch: import tests first")
    as_plugin = os.environ.get("SIMULATED_AS") == "plugin"
    try:
        folder = build.libraries(plugin=as_plugin)
    except build.Unavailable as reason:
        missing = str(reason)
        return
    if as_plugin:
        before.install(before.BeforeImports({"torch": lambda: _load_device(folder)}))
        sys.meta_path.append(plugin.Finder)
        return
    actions: dict[str, Callable[[], None]] = {
        "torch": lambda: _load_device(folder),
        "torch.cuda": lambda: _complete_torch(folder),
        "torch.distributed": _complete_cuda,  # which torch imports after torch.cuda
        "torch.distributed.distributed_c10d": _add_nccl,
    }
    before.install(before.BeforeImports(actions))


def _load_device(folder: Path) -> None:
    ctypes.CDLL(str(folder / build.DEVICE), ctypes.RTLD_GLOBAL)


def _complete_torch(folder: Path) -> None:
    """What torch.cuda's Python takes from torch._C; torch._C is there by now."""
    from tests.device import for_torch

    for_torch.complete(_load_bindings(folder))


def _complete_cuda() -> None:
    from tests.device import for_torch

    for_torch.complete_cuda(sys.modules["simulated_bindings"])


def load_plugin() -> None:
    """Register the simulated device as a plugin's; called by torch as it is imported."""
    plugin.install(_load_bindings(build.libraries(plugin=True)))


def _load_bindings(folder: Path) -> Any:
    bindings = _extension(folder / build.BINDINGS)
    sys.modules[bindings.__name__] = bindings
    if not faulthandler.is_enabled():
        faulthandler.enable()  # it shows the line on which the host touches memory of the device
    bindings.tell_of_faults()
    return bindings


def _extension(file: Path) -> Any:
    name = file.name.removesuffix(".so")
    loader = ExtensionFileLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _add_nccl() -> None:
    from tests.device import for_torch

    for_torch.add_nccl()
