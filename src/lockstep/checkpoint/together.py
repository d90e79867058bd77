"""Ranks succeed together or fail together, with the same words."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, TypeVar

from lockstep import errors
from lockstep.checkpoint.peers import OverGroup, Peers
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
    peers: World | Peers, attempt: Callable[[], Result], share: Callable[[Result], Any]
) -> tuple[Result, list[Any]]:
    """**Collective.** The result of ``attempt`` on this rank, and what ``share`` made of each rank's, if all succeeded.

    Args:
        peers: the ranks, and how they talk; a World's process group if it is a World.
        attempt: what this rank does.
        share: what the others are told of its result, as JSON can say it.

    Raises:
        CheckpointError: ``attempt`` failed on a rank: the error of the first such rank, of the same class on all.
    """
    if isinstance(peers, World):
        peers = OverGroup(peers)
    mine: Exception | None = None
    record: dict[str, Any]
    try:
        result = attempt()
        record = {"shared": share(result)}
    except Exception as error:  # noqa: BLE001  (the other ranks wait: they must hear of any failure)
        mine = error
        record = {"error": describe(error), "class": _class_of(error)}
    records = peers.gather(record)
    for rank, other in enumerate(records):
        if "error" in other:
            where = "" if peers.world_size == 1 else f"rank {rank}: "
            failure: errors.CheckpointError = getattr(errors, other["class"])(where + other["error"])
            raise failure from mine
    return result, [other["shared"] for other in records]


def _class_of(error: Exception) -> str:
    for known in (errors.CheckpointCorrupt, errors.CheckpointMismatch):
        if isinstance(error, known):
            return known.__name__
    return errors.CheckpointError.__name__


def describe(error: Exception) -> str:
    """**Local.** What went wrong and what to do about it."""
    if isinstance(error, errors.CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.errno is not None:
        advice = _ADVICE.get(error.errno)
        place = f"{os.fspath(error.filename)}: " if isinstance(error.filename, (str, os.PathLike)) else ""
        return f"{place}{os.strerror(error.errno)}" + (f"; {advice}" if advice else "")
    return f"{type(error).__name__}: {error}"
