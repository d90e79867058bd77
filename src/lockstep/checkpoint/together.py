"""Let ranks succeed together or fail together, with the same message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lockstep import _files, errors
from lockstep.comm import together as comm
from lockstep.comm.peers import OverGroup, Peers
from lockstep.comm.world import World

Result = TypeVar("Result")


def together(
    peers: World | Peers, attempt: Callable[[], Result], tell: Callable[[Result], Any]
) -> tuple[Result, list[Any]]:
    """**Collective.** Do as :func:`lockstep.comm.together.together`, with every error as a CheckpointError that
    advises.

    Args:
        peers: the ranks, and the way they talk; a World stands for its process group.
        attempt: does this rank's part.
        tell: returns what the others learn of its result, in JSON types.

    Raises:
        CheckpointError: ``attempt`` failed on a rank: the error of the first such rank, of the same class on all.
    """

    def advised() -> Result:
        try:
            return attempt()
        except Exception as error:
            known = type(error) if isinstance(error, (errors.CheckpointCorrupt, errors.CheckpointMismatch)) else None
            raise (known or errors.CheckpointError)(describe(error)) from error

    if isinstance(peers, World):
        peers = OverGroup(peers)
    return comm.together(peers, advised, tell, what="the checkpoint")


def describe(error: Exception) -> str:
    """Say what went wrong and what to do about it."""
    if isinstance(error, errors.CheckpointError):
        return str(error)
    return _files.describe(error)
