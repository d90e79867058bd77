"""The folder of a run, and the checkpoints in it: names, order, drafts, removal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

from lockstep.checkpoint.storage import POSIX, Storage, try_flock

#: The name of the file that lists all others in a checkpoint.
MANIFEST = "manifest.json"

_COMPLETE = re.compile(r"step-(\d{8,18})(?:-r(\d{1,9}))?")
_DRAFT = re.compile(_COMPLETE.pattern + r"\.tmp-[0-9a-f]{16}")


def prepare_root(root: Path, *, on: Storage = POSIX) -> int:
    """Make the folder of a run, and test that it is writable; return the user id that owns new files there.

    It may differ from this process's user: a file server can map root, and every other user, to another one.

    Raises:
        OSError: it is not writable.
    """
    for folder in [*reversed(root.parents), root]:
        if folder.is_dir():
            continue
        try:
            on.make_folder(folder)
        except FileExistsError:
            if not folder.is_dir():  # created concurrently by another process
                raise
        sync_folder(folder.parent, on=on)  # otherwise a power cut could lose the whole run
    probe = f".probe-{secrets.token_hex(8)}"
    opened = on.open_folder(root.resolve())
    try:
        file = on.create(opened, probe)
        owner = on.owner(file)
        on.close(file)
        on.remove(opened, probe)
        return owner
    finally:
        on.close(opened)


def checkpoints(root: Path, *, on: Storage = POSIX) -> list[Path]:
    """List the folders of checkpoints in ``root``, newest first, complete or damaged."""
    return sorted((root / name for name in on.folders(root) if _COMPLETE.fullmatch(name)), key=age, reverse=True)


def step_of(folder: PurePath) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return age(folder)[0]


def step_in(name: str) -> int | None:
    """Return the step in a folder's name, or None if it is not a checkpoint's."""
    matched = _COMPLETE.fullmatch(name)
    return None if matched is None else int(matched[1])


def next_name(root: Path, step: int, *, on: Storage = POSIX) -> str:
    """Return an unused name for a new checkpoint."""
    return unused_name(checkpoints(root, on=on), step)


def unused_name(taken: Iterable[PurePath], step: int) -> str:
    """Return a name for a new checkpoint that none of those ``taken`` has."""
    saves = [age(folder)[1] for folder in taken if step_of(folder) == step]
    return f"step-{step:08d}" + (f"-r{max(saves) + 1}" if saves else "")


def draft_name(name: str) -> str:
    """Return a new name for a draft of the checkpoint ``name``, or for its leftover."""
    return f"{name}.tmp-{secrets.token_hex(8)}"


def name_of_draft(draft: PurePath) -> str:
    """Return the name of the checkpoint that a draft becomes."""
    return draft.name.partition(".tmp-")[0]


def is_locked(folder: Path, *, on: Storage = POSIX) -> bool:
    """Return whether a process holds a draft: its save is under way. False where this user may not look."""
    with _unless_gone(), contextlib.suppress(PermissionError):
        opened = on.open_folder(folder)
        try:
            return try_flock(opened, fcntl.LOCK_SH) is False
        finally:
            on.close(opened)
    return False


def age(folder: PurePath) -> tuple[int, int]:
    """Return the step in the name of a checkpoint's folder, and the number of the save at that step, from 1."""
    matched = _COMPLETE.fullmatch(folder.name)
    if matched is None:
        raise ValueError(f"{folder.name} is not the name of a checkpoint")
    return int(matched[1]), int(matched[2] or 1)


@contextlib.contextmanager
def renamed(folder: Path, *, on: Storage = POSIX) -> Iterator[Path]:
    """Rename a checkpoint to a leftover, and yield that: so it is never seen half removed.

    The new name is on the disk before the first file goes: after a power cut there must be no checkpoint with files
    missing. The folder is locked as a draft's is, so that no save takes it for the leftover of a dead process.

    Raises:
        FileNotFoundError: another process has removed it.
        OSError: it can't be renamed.
    """
    leftover = folder.with_name(draft_name(folder.name))
    opened = on.open_folder(folder)
    try:
        on.lock(opened)  # (where there are no locks, no save removes a leftover)
        on.rename(folder, leftover)
        sync_folder(folder.parent, on=on)
        yield leftover
    finally:
        on.close(opened)


def remove_tree(folder: Path, *, on: Storage = POSIX) -> None:
    """Remove a folder and all that is in it; links are removed, not followed.

    What has gone meanwhile is fine: over NFS, where folders have no locks between hosts, another host may remove it,
    too.
    """
    with _unless_gone():
        opened = on.open_folder(folder)
        try:
            inner = set(on.folders(folder))
            for name in on.names(opened):
                if name not in inner:
                    with _unless_gone():
                        on.remove(opened, name)
        finally:
            on.close(opened)
        for name in inner:
            remove_tree(folder / name, on=on)
        on.remove_folder(folder)


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    """Leave out what has gone, which over NFS is a stale handle where another host has removed an opened folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise


def drafts(root: Path) -> list[Path]:
    """List the folders of checkpoints that are being written, or were never finished."""
    return [path for path in root.iterdir() if _DRAFT.fullmatch(path.name)]


def sweep(root: Path, *, on: Storage = POSIX) -> None:
    """Remove the leftovers of dead saves: this user's drafts in the folder that no process is writing."""
    for name in on.folders(root):
        if not _DRAFT.fullmatch(name):
            continue
        with _unless_gone():  # whoever wrote or removed it may have done so just now
            opened = on.open_folder(root / name)
            try:
                if on.owner(opened) == os.geteuid() and on.lock(opened):
                    remove_tree(root / name, on=on)
            finally:
                on.close(opened)


def sync_folder(path: Path, *, on: Storage = POSIX) -> None:
    """Return once the names in a folder are on the disk itself."""
    opened = on.open_folder(path.resolve())  # the path may lead over links, which are the user's own
    try:
        on.sync(opened)
    finally:
        on.close(opened)
