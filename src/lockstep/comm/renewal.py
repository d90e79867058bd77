"""Begin the world anew after its process group has ended, for ranks that stay alive: those of a notebook.

Note [A world begins anew]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that raises, or is interrupted, in the middle of a collective ends the process group on all ranks, since it is
not known which data have been moved. Ranks of a job end then. Ranks that run cells stay alive with everything that they
hold, and the next cell must find a group that works.

So whoever runs the cells (interactive/) asks for :func:`standing` after one that did not end well on all ranks, and if
the ranks differ, or a group has ended, tells all of them to :func:`stop`, waits until all have, tells all of them to
:func:`renew`, and waits again. Between these two waits no rank is in a collective, and no thread of one, so a group in
shared memory needs no meeting: every rank takes the tokens that were posted for it, and counts from the beginning. It
keeps its memory, and with it the buckets of replicas that lie there; replicas, loaders and the World stay as they are.

A group of another backend (gloo, NCCL) can't be repaired. It is destroyed and opened anew, and the World is given the
new one. Objects that hold the old one, replicas above all, have to be made again: :func:`renew` says so.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep import _torch
from lockstep.comm.group.group import open_groups
from lockstep.comm.group.process_group import ProcessGroupLockstep
from lockstep.comm.init import current_world, reopen
from lockstep.errors import LockstepError

#: Seconds for what was issued in the background to end, once its group has ended.
_SETTLING = 10.0


def standing() -> dict[str, list[int]]:
    """Return how far this rank is in each of its groups, for comparison with the other ranks.

    Returns:
        name of the group -> the number of collectives that were begun in it; 1 if it has ended, else 0; 1 if something
        of this rank is under way in it, else 0.
    """
    found = {
        group.name: [group.engine.number, int(group.engine.known() is not None), int(not group.is_at_rest)]
        for group in open_groups()
    }
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is not None and not isinstance(world, ProcessGroupLockstep):
        kinds = map(torch.device, _torch.device_types(world))
        numbers = [_torch.collectives_issued(world, kind) for kind in kinds]
        found["world"] = [sum(number or 0 for number in numbers), 0, 0]
    return found


def free(reason: str) -> None:
    """End all groups of this process, so that no thread waits in them any more; callable from any thread.

    Args:
        reason: the message for the ranks that wait.
    """
    for group in open_groups():
        group.stop(reason, 0.0)
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is not None and not isinstance(world, ProcessGroupLockstep):
        world.abort()


def stop(reason: str) -> None:
    """End all groups of this process, and wait until nothing runs in them. See Note [A world begins anew].

    Raises:
        LockstepError: a collective that was issued does not end.
    """
    groups = open_groups()
    for group in groups:  # all of them first: what runs in one may wait for another
        group.stop(reason, 0.0)
    busy = [group.name for group in groups if not group.stop(reason, _SETTLING)]
    if busy:
        raise LockstepError(
            f"process groups {', '.join(busy)}: a collective that was issued on this rank still runs, "
            f"{_SETTLING:g} s after its group was ended ({reason}). Its data are not safe from it; start the ranks anew"
        )
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is not None and not _is_renewed_in_place(world):
        world.abort()
        dist.destroy_process_group()


def renew() -> str:
    """**Collective.** Make the world usable again, once all ranks have stopped. See Note [A world begins anew].

    Returns:
        the steps that the user has to repeat; empty if there are none.
    """
    for group in open_groups():
        group.renew()
    if current_world() is None or dist.is_initialized():
        return ""
    reopen()
    return (
        "the ranks have opened their process group anew. What was made with the old one has to be made again: run the "
        "cells with lockstep.replicate, lockstep.DistributedDataParallel or lockstep.Checkpointer once more"
    )


def _is_renewed_in_place(world: dist.ProcessGroup) -> bool:
    return isinstance(world, ProcessGroupLockstep) and world.getBackendName() == "shm"
