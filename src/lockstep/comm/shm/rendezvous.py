"""How the ranks of a new group find its memory, through the rendezvous store."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep.comm.shm import semaphore
from lockstep.comm.shm.layout import Layout
from lockstep.comm.shm.segment import Offer, Segment, Whereabouts
from lockstep.errors import RendezvousError

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
        RendezvousError: a rank did not come, or can't share memory with rank 0; the message names it and says why.
    """
    # A store may be used again for a group of the same name (init, destroy, init): each meeting has keys of its own.
    meeting = f"{store.add(f'shm/meetings/{rank}', 1)}/shm"
    limit = time.monotonic() + timeout
    if rank == 0:
        layout = Layout(size, chunk)
        segment, offer = Segment.create(layout.size, chunk=chunk)
        try:
            for offset, value in layout.semaphores():
                semaphore.initialise(segment.address + offset, value)
            store.set(f"{meeting}/offer", offer.dumps())
            return segment, layout, _gather(store, meeting, rank, size, limit, None)
        finally:
            # Every rank has mapped the memory, or has said that it can't: the name is not needed any more.
            os.close(offer.descriptor)
    offer = Offer.loads(_get(store, f"{meeting}/offer", limit, f"rank {rank}: rank 0 did not come"))
    layout = Layout(size, offer.chunk)
    refusal = None
    opened = None
    try:
        opened = Segment.open(offer)
    except RendezvousError as error:
        refusal = str(error)
    whereabouts = _gather(store, meeting, rank, size, limit, refusal)
    assert opened is not None  # _gather raises if any rank refused
    return opened, layout, whereabouts


def _gather(store: Store, meeting: str, rank: int, size: int, limit: float, refusal: str | None) -> list[Whereabouts]:
    """Say that this rank is there (or why it can't be), and hear the same of all others."""
    store.set(f"{meeting}/rank/{rank}", json.dumps({"where": asdict(Whereabouts.mine()), "refusal": refusal}))
    found = []
    for peer in range(size):
        text = _get(store, f"{meeting}/rank/{peer}", limit, f"rank {rank}: rank {peer} did not come")
        found.append(json.loads(text))
    refusals = [f"rank {peer}: {each['refusal']}" for peer, each in enumerate(found) if each["refusal"]]
    if refusals:
        raise RendezvousError("\n".join(refusals))
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
