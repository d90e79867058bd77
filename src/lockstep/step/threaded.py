"""A forward whose replicas run in threads of one rank: nothing in it may need all ranks.

``data_parallel`` runs such forwards, and what would call the other ranks from one is in ``comm`` and ``ddp``, which
know nothing of it. They meet here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

from lockstep.errors import LockstepError

#: The devices of the DataParallel whose forward runs here; 0 outside of one. A thread has what its starter had.
_devices: ContextVar[int] = ContextVar("devices", default=0)


@contextmanager
def replicas(devices: int) -> Iterator[None]:
    """Run a forward of replicas on so many devices, of which a small batch uses fewer."""
    token = _devices.set(devices)
    try:
        yield
    finally:
        _devices.reset(token)


def refuse_in_replicas(what: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise if a forward of replicas on several devices runs here, and there are several ranks.

    The replicas call in no fixed order, and as many as the batch has parts for: replicas of other ranks would answer
    that have nothing to do with them, or none. So this depends on the devices, and not on how many of them are used.

    Args:
        what: the call, for the error.
        group: the ranks that it needs; those of the default group if None.

    Raises:
        LockstepError: that is so.
    """
    devices = _devices.get()
    if devices < 2 or not dist.is_initialized() or dist.get_world_size(group) < 2:
        return
    raise LockstepError(
        f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}: {what} needs all ranks, and was called in a "
        f"forward of lockstep.DataParallel on {devices} devices, whose replicas are threads that would each call it, "
        "in no fixed order: start a rank for each device instead, or take it out of the forward"
    )
