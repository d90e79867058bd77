"""Let the ranks of a new group find its memory, through the rendezvous store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep.comm.group.meeting import ApartError, Whereabouts, get, hear
from lockstep.comm.shm import semaphore
from lockstep.comm.shm.layout import Layout
from lockstep.comm.shm.segment import Offer, Segment
from lockstep.errors import LockstepError, RendezvousError

T = TypeVar("T")


def meet(
    store: Store, *, rank: int, size: int, timeout: float, chunk: int
) -> tuple[Segment, Layout, list[Whereabouts]]:
    """**Collective.** Map the group's memory, which rank 0 makes, on every rank; on failure of any, an error on all.

    Args:
        timeout: seconds to wait for the other ranks.
        chunk: bytes of a stage; rank 0's counts.

    Returns:
        The segment, its layout, and where each rank's process is.

    Raises:
        ApartError: a rank can't share memory with rank 0; all ranks get it, in the same words, which name the rank.
        RendezvousError: a rank did not come.
    """
    layout = Layout(size, chunk)
    limit = time.monotonic() + timeout
    try:
        # A store may be used again for a group of the same name (init, destroy, init): each meeting has its own keys.
        meeting = f"{store.add(f'shm/meetings/{rank}', 1)}/shm"
        if rank == 0:
            found = _make_and_offer(store, meeting, layout, limit)
        else:
            found = _take_offer(store, meeting, rank, size, limit)
    except LockstepError:
        raise
    except (RuntimeError, OSError) as error:  # torch's stores have no type of their own for what goes wrong in them
        raise RendezvousError(f'rank {rank} could not join the process group ("shm"): {error}') from error
    return found


def _make_and_offer(
    store: Store, meeting: str, layout: Layout, limit: float
) -> tuple[Segment, Layout, list[Whereabouts]]:
    made, refusal = _attempt(lambda: Segment.create(layout.size, chunk=layout.chunk))
    try:
        if made is not None:
            segment, offer = made
            _, refusal = _attempt(lambda: _prepare(segment, layout))
        store.set(f"{meeting}/offer", "none" if made is None or refusal else offer.dumps())
        where = _tell(store, meeting, 0, layout.world_size, limit, offer.where if made else None, refusal)
    finally:
        if made is not None:  # every rank has mapped the memory, or has said that it can't: it needs no name any more
            os.close(made[1].descriptor)
    assert made is not None  # else rank 0 has refused
    return made[0], layout, where


def _take_offer(
    store: Store, meeting: str, rank: int, size: int, limit: float
) -> tuple[Segment, Layout, list[Whereabouts]]:
    text = get(store, f"{meeting}/offer", limit, f"rank {rank}: rank 0 did not come")
    if text == b"none":  # rank 0's refusal says why, in what all tell each other
        _tell(store, meeting, rank, size, limit, None, None)
    offer = Offer.loads(text)
    opened, refusal = _attempt(lambda: (Segment.open(offer), Whereabouts.mine()))
    where = _tell(store, meeting, rank, size, limit, opened[1] if opened else None, refusal)
    assert opened is not None  # else this rank has refused
    return opened[0], Layout(size, offer.chunk), where


def _attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return what ``action`` returns, or what went wrong in it, which the waiting ranks are told."""
    try:
        return action(), None
    except LockstepError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001  (whatever it is: it is raised on every rank)
        return None, f"{type(error).__name__}: {error}"


def _prepare(segment: Segment, layout: Layout) -> None:
    for offset, value in layout.semaphores():
        semaphore.initialise(segment.address + offset, value)


def _tell(
    store: Store, meeting: str, rank: int, size: int, limit: float, where: Whereabouts | None, refusal: str | None
) -> list[Whereabouts]:
    """**Collective.** Tell the others whether this rank has the memory, and return where all ranks' processes are.

    Raises:
        ApartError: some rank has refused.
    """
    word = {"where": None if where is None else asdict(where), "refusal": refusal}
    found = hear(store, meeting, word, rank, size, limit)
    refusals = [f"rank {peer}: {each['refusal']}" for peer, each in enumerate(found) if each["refusal"]]
    if refusals:
        raise ApartError("\n".join(refusals))
    return [Whereabouts(**each["where"]) for each in found]
