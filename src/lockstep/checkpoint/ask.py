"""Ask the job that trains in a folder to save now."""

from __future__ import annotations

import os
import signal
import time
from pathlib import PurePath

from lockstep import _proc
from lockstep.checkpoint.locks import Owner
from lockstep.checkpoint.run_folder import RunFolder, run_folder
from lockstep.errors import CheckpointError
from lockstep.text import as_duration

#: Seconds between two looks for the checkpoint.
_PAUSE = 0.1


def save_now(root: PurePath, *, limit: float) -> PurePath:
    """Have the job that owns a run's folder save, wherever its loop is, and return the new checkpoint.

    Args:
        root: the folder of the run's checkpoints, or its address in a store.
        limit: seconds to wait for the checkpoint.

    Raises:
        CheckpointError: no job of this machine trains there, it takes no requests, or it did not save in time.
    """
    folder = run_folder(root)
    owner = _owner_here(folder)
    before = folder.under_way()  # of an earlier moment than the request; and then, so that none is missed:
    before |= {path.name for path in folder.checkpoints()}
    _ask(owner, root)
    deadline = time.monotonic() + limit
    while not (
        new := [each for each in folder.checkpoints() if each.name not in before and folder.has_manifest(each.name)]
    ):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{owner} has not saved within {as_duration(limit)}; what keeps it is in its output, and "
                "lockstep runs stack shows where its ranks are"
            )
        if not _is_there(owner):
            raise _ended(owner)
        time.sleep(_PAUSE)
    return new[0]


def _owner_here(folder: RunFolder) -> Owner:
    owner = folder.owner_now()
    if owner is None:
        raise CheckpointError(f"no job trains in {folder.path}, so there is nothing to save")
    if (owner.boot, owner.namespace) != (_proc.boot_id(), _proc.pid_namespace()):
        raise CheckpointError(
            f"{folder.path} belongs to {owner}: give the command there, where its processes can be seen"
        )
    return owner


def _ask(owner: Owner, root: PurePath) -> None:
    """Send the owner the request. A loop that ends in this moment ignores it."""
    try:
        process = os.pidfd_open(owner.pid)  # unlike a process id, it never comes to mean another process
    except ProcessLookupError:
        raise _ended(owner) from None
    try:
        takes_requests = _proc.catches(owner.pid, signal.SIGUSR1)
        if not _is_there(owner):
            raise _ended(owner)
        if not takes_requests:
            raise CheckpointError(
                f"{root} belongs to {owner}, which takes no requests: only a loop over its Checkpointer's epochs does, "
                "in a program that has no handler of its own for SIGUSR1"
            )
        signal.pidfd_send_signal(process, signal.SIGUSR1)
    except ProcessLookupError:
        raise _ended(owner) from None
    except PermissionError:
        raise CheckpointError(f"{root} belongs to {owner}: only that user can ask it to save") from None
    finally:
        os.close(process)


def _ended(owner: Owner) -> CheckpointError:
    return CheckpointError(f"{owner} has ended, and has not saved")


def _is_there(owner: Owner) -> bool:
    return _proc.lives(owner.pid, owner.start)
