"""Wait for a collective, and say something useful if it fails."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.errors import CollectiveMismatch, CollectiveTimeout, LockstepError, PeerLost
from lockstep.job import fates, files, flight


def wait_for(wait: Callable[[], object], what: Callable[[], str], *, name: str | None = "a collective") -> None:
    """Call ``wait``, which ends within the process group's timeout, and name ``what`` failed if it does.

    Args:
        wait: the ``wait`` method of a work or a future.
        what: describes this rank, its step and the operation; called only after a failure.
        name: what the recorder calls it; None if ``wait`` tells the recorder itself.

    Raises:
        CollectiveTimeout: a rank did not arrive within the process group's timeout.
        PeerLost: a rank is gone.
    """
    try:
        if name is None:
            wait()
        else:
            with flight.waiting(name):
                wait()
    except LockstepError as error:  # of a backend that knows more than its words: it names ranks and places
        raise type(error)(f"{what()}: {error}") from error
    except RuntimeError as error:
        raise failure(error, what()) from error


def failure(error: RuntimeError, what: str) -> LockstepError:
    """Return the lockstep error for a backend's error."""
    # Backends tell a late peer from a lost one only by their words: gloo "Timed out waiting", NCCL "timeout".
    text = str(error)
    for kind in (CollectiveMismatch, CollectiveTimeout, PeerLost):
        # And a future tells what its callback raised only by its words, followed by the callback's stack.
        _, raised, told = text.partition(f"error when running the callback: {kind.__name__}: ")
        if raised:
            return kind(f"{what}: {told.partition('At:')[0].rstrip()}")
    if "timed out" in text.lower() or "timeout" in text.lower():
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
