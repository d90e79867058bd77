"""Ranks succeed together or fail together, with the same words."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, TypeVar

from lockstep import errors
from lockstep.comm import together as comm
from lockstep.comm.peers import OverGroup, Peers
from lockstep.comm.world import World

Result = TypeVar("Result")

_ADVICE = {
    errno.ENOSPC: "the disk is full: free space, or choose another folder",
    errno.EDQUOT: "the disk quota is used up: free space, or choose another folder",
    errno.EFBIG: "the file is larger than this file system or this user's limits allow (ulimit -f)",
    errno.EACCES: "this user may not write there: change the permissions, or choose another folder",
    errno.EPERM: "this user may not write there: change the permissions, or choose another folder",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EIO: "the disk or the network to it fails: look at the kernel's log, and choose another folder",
    errno.EMFILE: "too many open files in this process: raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENOTDIR: "part of the path is a file, not a folder: choose another folder",
    errno.EEXIST: "the path is a file, not a folder: choose another folder",
}


def together(
    peers: World | Peers, attempt: Callable[[], Result], tell: Callable[[Result], Any]
) -> tuple[Result, list[Any]]:
    """**Collective.** Do as :func:`lockstep.comm.together.together`, with every error as a CheckpointError that
    advises.

    Args:
        peers: the ranks, and how they talk; a World's process group if it is a World.
        attempt: what this rank does.
        tell: what the others are told of its result, in JSON types.

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
    if isinstance(error, OSError) and error.errno is not None:
        advice = _ADVICE.get(error.errno)
        where = f"{os.fspath(error.filename)}: " if isinstance(error.filename, (str, os.PathLike)) else ""
        return f"{where}{os.strerror(error.errno)}" + (f"; {advice}" if advice else "")
    return f"{type(error).__name__}: {error}"
