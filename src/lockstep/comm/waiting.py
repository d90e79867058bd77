"""Wait for a collective, and raise an error that says what failed, where, and why."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.errors import CollectiveMismatch, CollectiveTimeout, LockstepError, PeerLost
from lockstep.job import fates, files, flight
from lockstep.text import which_ranks

#: Tag of a barrier's messages, which the script's own do not have.
_TAG = 0x10C5


def wait_for(wait: Callable[[], object], what: Callable[[], str], *, name: str | None = "a collective") -> None:
    """Call ``wait``, which ends within the process group's timeout; if it fails, raise an error that names ``what``.

    Args:
        wait: the ``wait`` method of a work or a future.
        what: describes this rank, its step and the operation; called only after a failure.
        name: the wait's name on the rank's page; None if ``wait`` notes itself there.

    Raises:
        CollectiveTimeout: a rank did not arrive within the process group's timeout.
        PeerLost: a rank is gone.
        LockstepError: any other error of lockstep's own backends, CollectiveMismatch above all.
    """
    try:
        if name is None:
            wait()
        else:
            with flight.waiting(name):
                wait()
    except LockstepError as error:  # one of lockstep's own backends, whose error names ranks and places
        raise type(error)(f"{what()}: {error}") from error
    except RuntimeError as error:
        raise failure(error, what()) from error


def failure(error: RuntimeError, what: str) -> LockstepError:
    """Return the lockstep error for a backend's error."""
    text = str(error)
    for kind in (CollectiveMismatch, CollectiveTimeout, PeerLost):
        # A future tells what its callback raised by the error's text alone, followed by the callback's stack.
        _, raised, told = text.partition(f"error when running the callback: {kind.__name__}: ")
        if raised:
            return kind(f"{what}: {told.partition('At:')[0].rstrip()}")
    if _is_timeout(error):
        return CollectiveTimeout(
            f"{what}: a rank did not arrive in time. It may be stuck or slow, in another collective, or out of data "
            f"(see lockstep.join). The backend says: {text}{files.told()}"
        )
    known = fates.told()
    if known:
        return PeerLost(f"{what}: {known} The backend says: {text}")
    return PeerLost(
        f"{what}: a rank is gone, or sent something else. Look at the first rank that failed for the cause. "
        f"The backend says: {text}"
    )


def _is_timeout(error: RuntimeError) -> bool:
    """Return whether a peer is late rather than lost: backends say so in words only, gloo "Timed out waiting", NCCL
    "timeout"."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def meet_over_gloo(group: dist.ProcessGroup, limit: timedelta) -> None:
    """**Collective.** Wait until all ranks of a gloo group have arrived: they tell rank 0, and it answers.

    torch's ``monitored_barrier`` does the same, but its error does not distinguish ranks that are gone from late ones.

    Raises:
        CollectiveTimeout: a rank did not arrive within ``limit``; on rank 0 it is named.
        PeerLost: a rank is gone; on rank 0 it is named, and so are those that are late as well.
        RuntimeError: rank 0 is late or gone, on all other ranks.
    """
    others, deadline = range(1, dist.get_world_size(group)), time.monotonic() + limit.total_seconds()
    token = torch.zeros(1, device="cpu")
    if dist.get_rank(group):
        group.send([token], 0, _TAG).wait(limit)
        group.recv([token], 0, _TAG).wait(limit)
        return
    missing: dict[int, RuntimeError] = {}
    tokens = {rank: torch.zeros(1, device="cpu") for rank in others}
    arrivals: dict[int, dist.Work] = {}
    for rank, into in tokens.items():
        try:
            arrivals[rank] = group.recv([into], rank, _TAG)
        except RuntimeError as error:  # gloo knows already that the rank is gone
            missing[rank] = error
    for rank, arrival in arrivals.items():
        try:
            arrival.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            missing[rank] = error
    late = [rank for rank in sorted(missing) if _is_timeout(missing[rank])]
    lost = [rank for rank in sorted(missing) if rank not in late]
    told = f"{which_ranks(late)} did not come within {limit.total_seconds():g} s" if late else ""
    if lost:
        known = fates.told(lost) or f"{which_ranks(lost)} ended, or can't be reached any more."
        raise PeerLost(f"{known} {f'And {told}. ' if told else ''}gloo says: {missing[lost[0]]}")
    if late:
        raise CollectiveTimeout(f"{told}. gloo says: {missing[late[0]]}{files.told()}")
    for answer in [group.send([token], rank, _TAG) for rank in others]:
        answer.wait(limit)
