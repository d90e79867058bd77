"""The ranks' side of ``lockstep.spawn``: unpack the function that the parent packed, and call it.

What is unpickled here comes over an inherited descriptor from this process's own parent: never from disk, never from
the network.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from multiprocessing import process, resource_tracker, spawn

#: The descriptors that travelled beside the pickled arguments, by their place there.
_received: list[int] = []


class SentDescriptor:
    """Stands for a descriptor in pickled arguments; where multiprocessing's own spawn has ``DupFd``."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """The descriptor in this process; the caller owns it from now on."""
        return _received[self._place]


def call(rank: int, fds: Sequence[int], *, shared_tracker: bool) -> None:
    """Become what a process that multiprocessing spawned is, and run the packed function.

    Args:
        rank: the function's first argument.
        fds: the packed bytes; the resource tracker's pipe if ``shared_tracker``; the descriptors among the arguments.
        shared_tracker: the parent has a resource tracker; using the same one keeps shared memory alive that is the
            parent's when this rank ends.
    """
    packed, *rest = fds
    if shared_tracker:
        # As multiprocessing's own spawn_main does it; there is no public way to hand a tracker on.
        resource_tracker._resource_tracker._fd = rest.pop(0)  # type: ignore[attr-defined]
    _received[:] = rest
    with os.fdopen(packed, "rb") as file:
        file.seek(0)
        # multiprocessing.spawn._main does exactly this: the mark makes a script without `if __name__ == "__main__"`
        # fail with an explanation, instead of starting ranks from ranks without end.
        process.current_process()._inheriting = True  # type: ignore[attr-defined]
        try:
            spawn.prepare(pickle.load(file))  # noqa: S301  (from the parent, see above)
            fn, args = pickle.load(file)  # noqa: S301
        finally:
            del process.current_process()._inheriting  # type: ignore[attr-defined]
    fn(rank, *args)
