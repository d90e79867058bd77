"""Compare the ranks' replicas at the end of a job: the last rank to leave compares, and no rank waits.

A rank that waited at its exit for another one might wait for ever. So each leaves its digests in the process group's
store, and then looks whether all ranks have: the last one finds everything there and compares. If the store is gone by
then (its rank has ended first, or its folder was removed), nothing is compared.
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
    store = store_that_is_there()
    if store is None:
        return
    try:
        store.set(_key(dist.get_rank()), json.dumps(told))
        if not store.check([_key(rank) for rank in range(world_size)]):
            return
        everyones = [json.loads(store.get(_key(rank))) for rank in range(world_size)]
    except RuntimeError:
        return  # the rank that served the store has ended
    for number in sorted(told):
        _warn_of_difference([each.get(str(number)) for each in everyones])


def store_that_is_there() -> Any:
    """Return the default group's store; None: it is a file whose folder is gone, and torch would wait for that to come
    back for as long as for a rank."""
    path = knobs.store()
    if path is not None and not os.path.isdir(os.path.dirname(path)):
        return None
    return _torch.default_store()


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


def _key(rank: int) -> str:
    return f"lockstep/end/{rank}"
