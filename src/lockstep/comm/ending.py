"""Compare the ranks' replicas at the end of a job: the last rank to leave compares, and no rank waits.

A rank that waited at its exit for another one might wait for ever. So each leaves its digests in the process group's
store, and the last one to do so finds everything there and compares. If the store is gone by then (its rank has ended
first, or its folder was removed), nothing is compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch.distributed as dist

from lockstep import _torch, callsite, knobs
from lockstep.text import which_ranks


class Compared(Protocol):
    """An object, such as a replica, that has something to compare at the end."""

    def at_end(self) -> tuple[str, Sequence[Sequence[str]]] | None:
        """Return what it is, and the names and digests of its parts; None: nothing is to be compared."""
        ...


_living: WeakValueDictionary[int, Any] = WeakValueDictionary()
#: Number of an object that is gone already -> what it said before.
_said: dict[int, tuple[str, Sequence[Sequence[str]]]] = {}


def follow(number: int, ending: Compared) -> None:
    """Compare what ``ending`` says at the end with what the objects of the same number say on the other ranks. It is
    held weakly."""
    _living[number] = ending


def leave(number: int) -> None:
    """Stop following the object of this number: nothing of it is compared."""
    _living.pop(number, None)
    _said.pop(number, None)


def say_now(number: int, ending: Compared) -> None:
    """Ask ``ending`` now, since it will be gone at the end."""
    if number in _living:
        leave(number)
        said = ending.at_end()
        if said is not None:
            _said[number] = said


def compare() -> None:
    """Leave for the other ranks what this one holds, and compare if all have done so. Warns if they differ."""
    told = dict(_said)
    for number, ending in sorted(_living.items()):
        said = ending.at_end()
        if said is not None:
            told[number] = said
    _living.clear()
    _said.clear()
    world_size = dist.get_world_size()
    if world_size == 1 or not told:
        return
    everyones = left_by_all("lockstep/end", told)
    if everyones is None:
        return
    for number in sorted(told):
        _warn_of_difference([each.get(str(number)) for each in everyones])


def left_by_all(key: str, told: object) -> list[Any] | None:
    """Leave ``told``, in JSON types, for the other ranks. No rank waits.

    Args:
        key: names it in the process group's store; each rank leaves one thing under it.
        told: what this rank tells.

    Returns:
        What the ranks have told, in order, on the rank that comes last; None: another one is to come, or the store has
        gone with the rank that served it, or with its folder.
    """
    store_file = knobs.store()
    if store_file is not None and not os.path.isdir(os.path.dirname(store_file)):
        return None  # torch would wait for the folder as long as for a rank
    rank, world_size, store = dist.get_rank(), dist.get_world_size(), _torch.default_store()
    try:
        store.set(f"{key}/{rank}", json.dumps(told))
        if store.add(key, 1) != world_size:
            return None
        return [json.loads(store.get(f"{key}/{each}")) for each in range(world_size)]
    except RuntimeError:
        return None


def _warn_of_difference(told: Sequence[Any]) -> None:
    if any(each is None for each in told):
        return  # some rank has let go of it
    what, parts = told[0]
    others = [rank for rank, each in enumerate(told) if each != told[0]]
    if not others:
        return
    differing = next((one[0] for one, two in zip(parts, told[others[0]][1], strict=False) if one != two), "")
    callsite.warn(
        f"{what} is not the same on all ranks at the end of the job: rank 0 differs from {which_ranks(others)}, in "
        f"'{differing}' for example. If a line that only some ranks run has changed it since the last step (the best "
        "weights, loaded on rank 0), nothing is wrong; otherwise the ranks have trained different models from some "
        "step on. compare_every= of lockstep.replicate compares more often while they train"
    )
