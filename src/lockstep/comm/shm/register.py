"""Make ``torch.distributed.init_process_group("shm")`` work, without loading torch for those who do not use it.

``import lockstep`` calls :func:`register_when_loaded`. If torch.distributed is there, the backend is registered at
once; if not, as soon as somebody imports it. (torch has no list of backends that it reads by itself, and the launcher's
watching process must not load torch just to register something.)
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

_TORCH = "torch.distributed"


def register_when_loaded() -> None:
    """**Local.** Register the backend now, or when torch.distributed is imported."""
    if hasattr(sys.modules.get(_TORCH), "Backend"):
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register() -> None:
    """**Local.** Tell torch about the backend. A second call does nothing."""
    backends: Any = sys.modules[_TORCH].Backend
    if "shm" not in backends.backend_list:
        backends.register_backend("shm", _create, extended_api=True, devices=["cpu"])


class _Finder:
    """Sees the import of torch.distributed, lets Python's own finders do it, and registers afterwards."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        if name != _TORCH:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            load = loader.exec_module

            def load_and_register(module: Any) -> None:
                load(module)
                if hasattr(module, "Backend"):  # absent in builds of torch without torch.distributed
                    register()

            loader.exec_module = load_and_register
        return spec


def _create(options: Any, backend_options: Any) -> Any:
    """**Collective.** What torch calls to make a group."""
    from lockstep import _torch, knobs
    from lockstep.comm.shm.group import Group
    from lockstep.comm.shm.process_group import ProcessGroupShm

    _torch.leave_out_of_flight_recorder("shm")
    if isinstance(backend_options, Group):  # lockstep.init() has opened it, see Note [All ranks or none]
        return ProcessGroupShm(options.store, backend_options, name=options.group_id)
    if backend_options is not None:
        raise ValueError('the backend "shm" takes no pg_options')
    group = Group(
        options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=options.timeout.total_seconds(),
        chunk=knobs.shm_chunk(),
        name=options.group_id,
        members=options.global_ranks_in_group,  # (none for the default group)
    )
    return ProcessGroupShm(options.store, group, name=options.group_id)
