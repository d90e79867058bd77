"""once_per_machine(): data in memory once for all ranks of a machine, not once for each.

Note [One copy a machine]
~~~~~~~~~~~~~~~~~~~~~~~~~
One rank of each machine loads, and packs what it has loaded into memory without a name (Note [Parcels] in
``comm/parcels.py``); all of them map that, the one that has loaded as well, and let go of everything else. So while it
packs, that rank has the data twice. The kernel frees the memory when the last rank that holds a part of it has let go
of it or has ended, however it ended.

No rank can write to the memory, since a write would change the data of all. Arrays are marked as read-only, so that
NumPy raises an error. torch has no such mark for tensors, so a write to one of them reaches the kernel, which ends the
rank with SIGSEGV; Python's faulthandler is switched on to show the line.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from lockstep import callsite
from lockstep.comm.calls import of_all_ranks
from lockstep.comm.init import current_world
from lockstep.comm.local_ranks import LocalRanks, connect
from lockstep.comm.parcels import Handed, Parcel, Unpackable
from lockstep.comm.peers import OverGroup
from lockstep.comm.together import together
from lockstep.comm.world import World
from lockstep.errors import LockstepError

Loaded = TypeVar("Loaded")

_NAME = "lockstep.once_per_machine"
#: True while this rank is in the ``load`` of a call.
_loading: ContextVar[bool] = ContextVar("loading", default=False)


@of_all_ranks(f"{_NAME}()")
def once_per_machine(load: Callable[[], Loaded]) -> Loaded:
    """**Collective.** Return what ``load()`` returns, in memory that all ranks of a machine share, to be read only.

    ::

        images, labels = lockstep.once_per_machine(lambda: (np.load("images.npy"), np.load("labels.npy")))
        dataset = TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))

    One rank of each machine calls ``load``; the others wait for it, at most for the world's timeout
    (``lockstep.init(timeout=…)``). The rank that loads holds the data twice for a while. The memory is freed when no
    rank uses any of the data any more, and when the ranks end.

    A write to an array is a ValueError. torch can't refuse a write to a tensor, so a write ends the rank with SIGSEGV,
    after a stack that shows the line; write to ``tensor.clone()`` instead. The same holds in a world of one rank.

    Args:
        load: returns tensors on the CPU, arrays of numbers, texts or dates, and plain values (None, bool, numbers, str,
            bytes), in tuples, lists, dicts, named tuples, dataclasses and mappings. Tensors and arrays are shared;
            everything else is copied to each rank, so put many texts into an array. It is called once on each machine,
            and must not be collective. A call of ``once_per_machine`` in it just loads.

    Raises:
        LockstepError: ``lockstep.init()`` has not been called, or ``load`` failed on another rank.
        TypeError: ``load`` returned something else; the message says what. On every rank.
        Exception: what ``load`` raised, on the rank that called it; a ValueError or TypeError on every rank.
        CollectiveTimeout, PeerLost: another rank is late or gone.
    """
    world = current_world()
    if world is None:
        raise LockstepError(f"{_NAME}: no world yet; call lockstep.init() first")
    if _loading.get():  # (the other ranks are in the outer call, which hands over all that it returns)
        return load()
    local = connect(world, (Handed,))
    try:
        if local.why_not and local.leads:
            callsite.warn(
                f"rank {world.rank}: {_NAME}: every rank of this machine loads, and has a copy of its own, since they "
                f"can't share memory: {local.why_not}"
            )
        loads = local.leads or not local.lines
        parcel, _ = together(OverGroup(world), lambda: _packed(load) if loads else None, lambda _: None, what=_NAME)
        result: Loaded = _received(local, world) if parcel is None else _handed_over(local, parcel)
        return result
    finally:
        local.close()


def _packed(load: Callable[[], Any]) -> Parcel:
    token = _loading.set(True)
    try:
        return Parcel.of([load()])
    except Unpackable as error:
        raise TypeError(
            f"{_NAME}: load() has returned {error}, which can't be shared: return tensors on the CPU, arrays of "
            "numbers, and plain values, in lists, tuples, dicts, named tuples or dataclasses"
        ) from None
    finally:
        _loading.reset(token)


def _handed_over(local: LocalRanks, parcel: Parcel) -> Any:
    message = Handed.of(parcel, 0)
    for line in local.lines:
        line.send(message, [parcel.descriptor])
    _show_lines_of_crashes()
    return message.opened(parcel.descriptor, writable=False)


def _received(local: LocalRanks, world: World) -> Any:
    message, descriptors = local.lines[0].wait(
        f"rank {local.leader}, which has loaded for this machine, has not handed the data over", world.timeout
    )
    _show_lines_of_crashes()
    return message.taken(descriptors[0], writable=False)


def _show_lines_of_crashes() -> None:
    if not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__ or 2)
