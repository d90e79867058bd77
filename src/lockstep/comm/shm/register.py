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
    try:
        if "shm" not in backends.Backend.backend_list:
            backends.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu"])
    except Exception as error:  # noqa: BLE001  (whatever a torch of the future makes of it)
        warnings.warn(
            f'lockstep\'s backend "shm" is not available: torch.distributed refuses to register it '
            f'({type(error).__name__}: {error}). Use "gloo", or the versions of torch that lockstep was tested with',
            stacklevel=2,
        )


def _create(options: Any, backend_options: Any) -> Any:
    """**Collective.** Make a group; torch calls this."""
    from lockstep import _torch, knobs
    from lockstep.comm.shm.group import Group
    from lockstep.comm.shm.memory_engine import MemoryEngine
    from lockstep.comm.shm.process_group import ProcessGroupLockstep

    _torch.leave_out_of_flight_recorder("shm")
    if isinstance(backend_options, Group):  # lockstep.init() has opened it, see Note [All ranks or none]
        return ProcessGroupLockstep(options.store, backend_options, name=options.group_id)
    if backend_options is not None:
        raise ValueError('the backend "shm" takes no pg_options')
    engine = MemoryEngine(
        options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=options.timeout.total_seconds(),
        chunk=knobs.shm_chunk(),
        members=options.global_ranks_in_group,  # (none for the default group)
    )
    group = Group(engine, timeout=options.timeout.total_seconds(), name=options.group_id)
    return ProcessGroupLockstep(options.store, group, name=options.group_id)
