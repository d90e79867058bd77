"""How the ranks of a new group find its memory, through the rendezvous store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep.comm.shm import semaphore
from lockstep.comm.shm.layout import PAGE, Layout
from lockstep.comm.shm.segment import Offer, Segment, Whereabouts
from lockstep.errors import LockstepError, RendezvousError

_STEP = timedelta(seconds=1)


def why_apart(store: Store, *, rank: int, size: int, timeout: float) -> str | None:
    """**Collective.** Why the ranks can't share memory, in the same words on every rank; None if they can.

    They try it: rank 0 makes a page of shared memory, and every other rank opens it.

    Raises:
        RendezvousError: a rank did not come within ``timeout`` seconds.
    """
    try:
        _share(store, "probe", rank=rank, size=size, timeout=timeout, nbytes=PAGE, chunk=0, prepare=lambda _: None)
    except _ApartError as error:
        return str(error)
    return None


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
        RendezvousError: a rank did not come, or can't share memory with rank 0; the message names it and says why.
    """
    planned = Layout(size, chunk)

    def prepare(segment: Segment) -> None:
        for offset, value in planned.semaphores():
            semaphore.initialise(segment.address + offset, value)

    try:
        segment, offer, whereabouts = _share(
            store, "shm", rank=rank, size=size, timeout=timeout, nbytes=planned.size, chunk=chunk, prepare=prepare
        )
    except LockstepError:
        raise
    except (RuntimeError, OSError) as error:  # torch's stores have no type of their own for what goes wrong in them
        raise RendezvousError(f'rank {rank} could not join the process group ("shm"): {error}') from error
    return segment, Layout(size, offer.chunk), whereabouts


class _ApartError(RendezvousError):
    """Some ranks can't share memory."""


def _share(
    store: Store,
    purpose: str,
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
    meeting = f"{store.add(f'shm/{purpose}/meetings/{rank}', 1)}/{purpose}"
    limit = time.monotonic() + timeout
    offer: Offer | None = None
    segment: Segment | None = None
    refusal: str | None = None
    try:
        if rank == 0:
            try:
                segment, offer = Segment.create(nbytes, chunk=chunk)
                prepare(segment)
            except LockstepError as error:
                refusal = str(error)
            store.set(f"{meeting}/offer", "none" if offer is None or refusal else offer.dumps())
        else:
            text = _get(store, f"{meeting}/offer", limit, f"rank {rank}: rank 0 did not come")
            if text != b"none":
                try:
                    theirs = Offer.loads(text)
                    segment = Segment.open(theirs)
                except RendezvousError as error:
                    refusal = str(error)
        whereabouts = _gather(store, meeting, rank, size, limit, refusal)
    finally:
        if offer is not None:  # every rank has mapped the memory, or has said that it can't: no name is needed any more
            os.close(offer.descriptor)
    assert segment is not None  # _gather raises if any rank refused
    return segment, theirs if offer is None else offer, whereabouts


def _gather(store: Store, meeting: str, rank: int, size: int, limit: float, refusal: str | None) -> list[Whereabouts]:
    """Say that this rank is there (or why it can't be), and hear the same of all others."""
    store.set(f"{meeting}/rank/{rank}", json.dumps({"where": asdict(Whereabouts.mine()), "refusal": refusal}))
    found = []
    for peer in range(size):
        text = _get(store, f"{meeting}/rank/{peer}", limit, f"rank {rank}: rank {peer} did not come")
        found.append(json.loads(text))
    refusals = [f"rank {peer}: {each['refusal']}" for peer, each in enumerate(found) if each["refusal"]]
    if refusals:
        raise _ApartError("\n".join(refusals))
    return [Whereabouts(**each["where"]) for each in found]


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
