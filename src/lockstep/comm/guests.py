"""Refuse a second process for a rank: a process that a rank starts inherits its variables, and would wait in vain for
other ranks.

Note [Guests]
~~~~~~~~~~~~~
A process that a rank starts has ``RANK`` and the rest in its environment, and there are two reasons why it may call
``lockstep.init()``. The script is a wrapper, on all ranks alike: then its children are the ranks. Or one rank starts an
evaluation, a spawned worker imports the training script again, and so on: then it is a guest, which no other rank will
ever meet. Three signs tell them apart, from the earliest on:

- The process that ``init`` made a rank says so in its environment (``LOCKSTEP_JOINED``), with the place of its world.
  Whoever inherits that and looks for the same place is a guest.
- A rank that the launcher started has trained without ``init``: its optimizer steps are counted (``Cell.STEPS``).
- Else ranks will meet the guest in place of its parent. They compare whether they are what the launcher started
  (``LOCKSTEP_RANK_PROCESS``): all, or none.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from lockstep import knobs
from lockstep.comm.exchange import all_gather_records
from lockstep.errors import EnvironmentMismatch
from lockstep.identity import Identity, place
from lockstep.job.page import Cell, Pages

_ALONE = (
    "each rank is one process. To run on its own, start it without RANK and WORLD_SIZE in its environment: "
    'subprocess.run(…, env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}); '
    'in a script whose workers import it again, call lockstep.init() under if __name__ == "__main__"; to start a next '
    "job's ranks in their place, call lockstep.shutdown() first"
)


def refuse(identity: Identity) -> None:
    """Refuse to be a rank that another process is already. See Note [Guests].

    Raises:
        EnvironmentMismatch: this process's rank has joined the world, or trains without it.
    """
    if identity.world_size == 1:
        return  # a lone rank waits for no other
    who = f"this process ({os.getpid()}) was started by rank {identity.rank} of {identity.world_size}"
    joined = knobs.joined()
    if joined is not None and joined[0] != os.getpid() and joined[1] == place():
        raise EnvironmentMismatch(f"{who} (process {joined[0]}), which has joined the world already, and {_ALONE}")
    folder = knobs.job_dir()
    if _is_child() and folder is not None and os.path.isdir(folder):
        pages = Pages(folder, identity.world_size)
        trains = any(count > 1 for count in pages.all(Cell.STEPS))
        pages.close()
        if trains:
            raise EnvironmentMismatch(
                f"{who}, and the processes that the launcher started as its ranks already train: {_ALONE}"
            )


def compare(group: dist.ProcessGroup, identity: Identity) -> None:
    """**Collective.** Refuse a world in which some ranks are what the launcher started, and others their children.

    Raises:
        EnvironmentMismatch: on all ranks.
    """
    found = all_gather_records([_is_child(), os.getpid()], group)
    children = [rank for rank, (is_child, _) in enumerate(found) if is_child]
    if 0 < len(children) < len(found):
        named = ", ".join(f"rank {rank} (process {found[rank][1]})" for rank in children)
        raise EnvironmentMismatch(
            f"rank {identity.rank} of {identity.world_size}: {named} is not the process that the launcher started but "
            f"a child of it, while the other ranks are; {_ALONE}"
        )


def mark(identity: Identity) -> None:
    """Mark the environment of processes that are started from now on: this rank has joined the world."""
    if identity.launched:
        os.environ[knobs.JOINED] = f"{os.getpid()} {place()}"


def unmark() -> None:
    """Note that this process has left the world, and another may join it as this rank."""
    joined = knobs.joined()
    if joined is not None and joined[0] == os.getpid():
        del os.environ[knobs.JOINED]


def described_anew() -> bool:
    """Return whether another launcher has described this process since its parent was a rank of ours."""
    started = knobs.rank_process()
    return started is not None and started[0] != os.getpid() and started[1] != place()


def _is_child() -> bool:
    """Return whether lockstep's launcher started another process as this rank, from which this one comes."""
    started = knobs.rank_process()
    return started is not None and started[0] != os.getpid() and started[1] == place()
