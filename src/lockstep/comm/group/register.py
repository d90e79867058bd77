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
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.comm.group.engine import Engine


def register() -> None:
    """Tell torch about the backend, if torch.distributed is loaded. A second call does nothing.

    Raises nothing: torch would refuse to be imported at all, for the sake of a backend that the program may not use.
    """
    distributed = sys.modules.get("torch.distributed")
    if not hasattr(distributed, "Backend"):  # not loaded yet, or a build of torch without it
        return
    backends: Any = distributed
    for name in _NAMES:
        try:
            if name not in backends.Backend.backend_list:
                backends.Backend.register_backend(name, partial(_create, name), extended_api=True, devices=["cpu"])
        except Exception as error:  # noqa: BLE001  (whatever a torch of the future makes of it)
            warnings.warn(
                f'lockstep\'s backend "{name}" is not available: torch.distributed refuses to register it '
                f'({type(error).__name__}: {error}). Use "gloo", or a version of torch that lockstep was tested with',
                stacklevel=2,
            )


def make_engine(name: str, store: Any, *, rank: int, size: int, timeout: float, members: Sequence[int] = ()) -> Engine:
    """**Collective.** Make the engine of a backend.

    Args:
        name: the backend.
        store: where the ranks of the group meet.
        rank: this process's rank in the group.
        size: how many ranks it has.
        timeout: how long a wait may take, in seconds.
        members: the group's ranks in the world; none: all of them.
    """
    from lockstep import knobs

    if name == "shm":
        from lockstep.comm.shm.memory_engine import MemoryEngine

        return MemoryEngine(store, rank=rank, size=size, timeout=timeout, chunk=knobs.shm_chunk(), members=members)
    if name == "hierarchical":
        from lockstep.comm.hosts.engine import HostsEngine
        from lockstep.comm.hosts.grouping import my_host

        return HostsEngine(
            store,
            rank=rank,
            size=size,
            timeout=timeout,
            chunk=knobs.shm_chunk(),
            host=my_host(),
            members=members,
        )
    from lockstep.comm.mpi import MpiEngine

    return MpiEngine(store, rank=rank, size=size, timeout=timeout)


def _create(name: str, options: Any, backend_options: Any) -> Any:
    """**Collective.** Make a process group over a backend, or wrap what lockstep.init() has opened (see Note [All ranks
    or none]); torch calls this."""
    from lockstep import _torch
    from lockstep.comm.group.group import Group
    from lockstep.comm.group.process_group import ProcessGroupLockstep

    _torch.leave_out_of_flight_recorder(name)
    group = backend_options
    if group is None:
        timeout = options.timeout.total_seconds()
        engine = make_engine(
            name,
            options.store,
            rank=options.group_rank,
            size=options.group_size,
            timeout=timeout,
            members=options.global_ranks_in_group,  # none for the default group
        )
        group = Group(engine, timeout=timeout, name=options.group_id)
    if not isinstance(group, Group):
        raise ValueError(f'the backend "{name}" takes no pg_options')
    return ProcessGroupLockstep(options.store, group, name=options.group_id)


_NAMES = ("shm", "hierarchical", "mpi4py")
