"""Make ``torch.distributed.init_process_group("shm")`` work, whichever library opens the group.

torch calls :func:`register` at the end of its import: pyproject.toml names it among the entry points of the group
``torch.backends``. So a program that never imports lockstep has the backend as soon as lockstep is installed. Where it
is not installed (a checkout on ``PYTHONPATH``), or the user has turned that off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``),
``import lockstep`` after torch registers it, and ``lockstep.init()`` always does.

Every process of an environment with lockstep in it pays for this module when it imports torch, so it loads nothing: the
backend itself comes with the first group.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any


def register() -> None:
    """Tell torch about the backend, if torch.distributed is loaded. A second call does nothing.

    Raises nothing: torch would refuse to be imported at all, for the sake of a backend that the program may not use.
    """
    distributed = sys.modules.get("torch.distributed")
    if not hasattr(distributed, "Backend"):  # not loaded yet, or a build of torch without it
        return
    backends: Any = distributed
    for name in _CREATE:
        try:
            if name not in backends.Backend.backend_list:
                backends.Backend.register_backend(name, _CREATE[name], extended_api=True, devices=["cpu"])
        except Exception as error:  # noqa: BLE001  (whatever a torch of the future makes of it)
            warnings.warn(
                f'lockstep\'s backend "{name}" is not available: torch.distributed refuses to register it '
                f'({type(error).__name__}: {error}). Use "gloo", or a version of torch that lockstep was tested with',
                stacklevel=2,
            )


def _create_shm(options: Any, backend_options: Any) -> Any:
    """**Collective.** Make a group over shared memory; torch calls this."""
    from lockstep import knobs
    from lockstep.comm.shm.memory_engine import MemoryEngine

    return _group("shm", options, backend_options) or _over(
        MemoryEngine(
            options.store,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout.total_seconds(),
            chunk=knobs.shm_chunk(),
            members=options.global_ranks_in_group,  # (none for the default group)
        ),
        options,
    )


def _create_hierarchical(options: Any, backend_options: Any) -> Any:
    """**Collective.** Make a group that spans hosts; torch calls this."""
    from lockstep import knobs
    from lockstep.comm.hosts.engine import HostsEngine
    from lockstep.comm.hosts.grouping import my_host

    return _group("hierarchical", options, backend_options) or _over(
        HostsEngine(
            options.store,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout.total_seconds(),
            chunk=knobs.shm_chunk(),
            host=my_host(),
            members=options.global_ranks_in_group,
        ),
        options,
    )


def _create_mpi4py(options: Any, backend_options: Any) -> Any:
    """**Collective.** Make a group over MPI; torch calls this."""
    from lockstep.comm.mpi import MpiEngine

    return _group("mpi4py", options, backend_options) or _over(
        MpiEngine(
            options.store,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout.total_seconds(),
        ),
        options,
    )


def _group(name: str, options: Any, backend_options: Any) -> Any:
    """Return the process group that lockstep.init() has opened, if it has: see Note [All ranks or none]."""
    from lockstep import _torch
    from lockstep.comm.shm.group import Group
    from lockstep.comm.shm.process_group import ProcessGroupLockstep

    _torch.leave_out_of_flight_recorder(name)
    if isinstance(backend_options, Group):
        return ProcessGroupLockstep(options.store, backend_options, name=options.group_id)
    if backend_options is not None:
        raise ValueError(f'the backend "{name}" takes no pg_options')
    return None


def _over(engine: Any, options: Any) -> Any:
    from lockstep.comm.shm.group import Group
    from lockstep.comm.shm.process_group import ProcessGroupLockstep

    group = Group(engine, timeout=options.timeout.total_seconds(), name=options.group_id)
    return ProcessGroupLockstep(options.store, group, name=options.group_id)


_CREATE = {"shm": _create_shm, "hierarchical": _create_hierarchical, "mpi4py": _create_mpi4py}
