"""How the ranks of a new group find its memory, through the rendezvous store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep.comm.shm import semaphore
from lockstep.comm.shm.layout import Layout
from lockstep.comm.shm.segment import Offer, Segment, Whereabouts
from lockstep.errors import LockstepError, RendezvousError

_STEP = timedelta(seconds=1)


def meet(
    store: Store, *, rank: int, size: int, timeout: float, chunk: int
) -> tuple[Segment, Layout, list[Whereabouts]]:
    """**Collective.** Map the group's memory on every rank; on failure of any, an error on all.

    Args:
        timeout: seconds to wait for the other ranks.
        chunk: bytes of a stage; rank 0's counts.

    Returns:
        The segment, its layout, and where each rank's process is.

    Raises:
        ApartError: a rank can't share memory with rank 0; all ranks get it, in the same words, which name the rank.
        RendezvousError: a rank did not come.
    """
    planned = Layout(size, chunk)

    def prepare(segment: Segment) -> None:
        for offset, value in planned.semaphores():
            semaphore.initialise(segment.address + offset, value)

    try:
        segment, offer, whereabouts = _share(
            store, rank=rank, size=size, timeout=timeout, nbytes=planned.size, chunk=chunk, prepare=prepare
        )
    except LockstepError:
        raise
    except (RuntimeError, OSError) as error:  # torch's stores have no type of their own for what goes wrong in them
        raise RendezvousError(f'rank {rank} could not join the process group ("shm"): {error}') from error
    return segment, Layout(size, offer.chunk), whereabouts


class ApartError(RendezvousError):
    """Some ranks can't share memory."""


def say_and_hear(store: Store, key: str, word: Any, rank: int, size: int, timeout: float) -> list[Any]:
    """**Collective.** What every rank says under ``key``, in order of rank: JSON, through the store.

    Raises:
        RendezvousError: a rank did not come within ``timeout`` seconds.
    """
    return _hear(store, key, json.dumps(word), rank, size, time.monotonic() + timeout)


def _hear(store: Store, key: str, said: str, rank: int, size: int, limit: float) -> list[Any]:
    store.set(f"{key}/rank/{rank}", said)
    return [
        json.loads(_get(store, f"{key}/rank/{peer}", limit, f"rank {rank}: rank {peer} did not come"))
        for peer in range(size)
    ]


def _share(
    store: Store,
    *,
    rank: int,
    size: int,
    timeout: float,
    nbytes: int,
    chunk: int,
    prepare: Callable[[Segment], None],
) -> tuple[Segment, Offer, list[Whereabouts]]:
    """Memory that rank 0 makes and prepares, and all map; or the reasons of those that can't, on every rank."""
    # A store may be used again for a group of the same name (init, destroy, init): each meeting has keys of its own.
    meeting = f"{store.add(f'shm/meetings/{rank}', 1)}/shm"
    limit = time.monotonic() + timeout
    offer: Offer | None = None
    segment: Segment | None = None
    where: Whereabouts | None = None
    refusal: str | None = None
    try:
        if rank == 0:
            with _told() as told:
                where = Whereabouts.mine()
                segment, offer = Segment.create(nbytes, chunk=chunk)
                prepare(segment)
            refusal = told.refusal
            store.set(f"{meeting}/offer", "none" if offer is None or refusal else offer.dumps())
        else:
            text = _get(store, f"{meeting}/offer", limit, f"rank {rank}: rank 0 did not come")
            if text != b"none":
                with _told() as told:
                    where = Whereabouts.mine()
                    theirs = Offer.loads(text)
                    segment = Segment.open(theirs)
                refusal = told.refusal
        word = {"where": None if where is None else asdict(where), "refusal": refusal}
        found = _hear(store, meeting, json.dumps(word), rank, size, limit)
    finally:
        if offer is not None:  # every rank has mapped the memory, or has said that it can't: no name is needed any more
            os.close(offer.descriptor)
    refusals = [f"rank {peer}: {each['refusal']}" for peer, each in enumerate(found) if each["refusal"]]
    if refusals:
        raise ApartError("\n".join(refusals))
    assert segment is not None  # somebody would have refused
    return segment, theirs if offer is None else offer, [Whereabouts(**each["where"]) for each in found]


class _told:
    """Keeps what goes wrong inside it, whatever it is, to be told to the others, which would wait for this rank."""

    refusal: str | None = None

    def __enter__(self) -> _told:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.refusal = str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}"
        return True


def _get(store: Store, key: str, limit: float, missing: str) -> bytes:
    """The value of ``key``, when it is there. (Short waits, repeated: a store's own limit may be any.)"""
    begun = time.monotonic()
    while True:
        try:
            store.wait([key], _STEP)
            return bytes(store.get(key))
        except RuntimeError as error:  # torch has no type of its own for "not yet"
            now = time.monotonic()
            if now >= limit or "timeout" not in str(error).lower():
                raise RendezvousError(
                    f'{missing} to the process group ("shm") within {now - begun:.1f} s. The store says: {error}'
                ) from error
