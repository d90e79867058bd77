"""Go back to an earlier checkpoint of a run: set the newer ones aside, and lose none.

Note [Rewinding]
~~~~~~~~~~~~~~~~
A run resumes from the newest checkpoint of its folder, so going back is to take the newer ones out of it. They are
renamed into a folder beside them, ``set-aside-1`` and so on, which has the form of a run's folder: commands read it,
and renaming its checkpoints back undoes all. The newest goes first: whatever ends this in the middle, the same command
again does the rest. What a Log has written is copied there as well, since a run that resumes drops the lines of later
steps.

The run's lock (Note [Run lock] in ``locks.py``) is held meanwhile, so no job of any number of ranks writes there, and a
checkpoint that a process reads is left alone, with all that are older.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint import folders
from lockstep.checkpoint.locks import RunLock, taken
from lockstep.checkpoint.read import find_damage, read_manifest, why_unsound
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.errors import CheckpointError
from lockstep.text import listed

_ASIDE = "set-aside-"
_LOG = "metrics.jsonl"


@dataclass(frozen=True)
class Rewound:
    """What a rewinding did, or would do."""

    #: The checkpoint that a run resumes from now.
    target: Path
    #: The newer ones by name, newest first, and the folder in which they are now; None if there are none.
    moved: tuple[str, ...]
    aside: Path | None


def rewind(root: Path, step: int, *, dry_run: bool = False, on: Storage = POSIX) -> Rewound:
    """Have the run in ``root`` resume from ``step``: set aside all checkpoints that are newer.

    Args:
        root: the folder of a run.
        step: that of the checkpoint to resume from; of several saves at this step the last is taken.
        dry_run: True: change nothing.
        on: the file system.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged or not sound, so that no run would resume from
            it; a job owns the folder; or a process reads a checkpoint that is to be set aside.
        OSError: a folder can't be renamed.
    """
    if not root.is_dir():
        raise CheckpointError(f"{root}: no such folder")
    root = root.resolve()
    if dry_run:
        target, newer = _choose(root, step, on)
        return Rewound(target, tuple(each.name for each in newer), _unused(root) if newer else None)
    lock = RunLock(root)
    try:
        target, newer = _choose(root, step, on)
        if not newer:
            return Rewound(target, (), None)
        aside = _unused(root)
        on.make_folder(aside)
        if (root / _LOG).is_file():
            shutil.copyfile(root / _LOG, aside / _LOG)
            os.chmod(aside / _LOG, 0o600)
        folders.sync_folder(root, on=on)
        try:
            for each in newer:
                _set_aside(each, aside, on)
        except CheckpointError:
            if not on.folders(aside):
                folders.remove_tree(aside, on=on)
            raise
        for folder in (aside, root):
            folders.sync_folder(folder, on=on)
        return Rewound(target, tuple(each.name for each in newer), aside)
    finally:
        lock.release()


def _choose(root: Path, step: int, on: Storage) -> tuple[Path, list[Path]]:
    """Return the checkpoint of ``step``, and those that are newer, newest first."""
    found = folders.checkpoints(root, on=on)
    target = next((each for each in found if folders.step_of(each) == step), None)
    if target is None:
        steps = listed([str(folders.step_of(each)) for each in found])
        others = f"; there are checkpoints of the steps {steps}" if found else ""
        raise CheckpointError(f"{root}: no checkpoint there of step {step}{others}")
    damage = find_damage(target)
    if damage:
        raise CheckpointError(f"no run would resume from step {step}, so nothing was set aside: {'; '.join(damage)}")
    manifest = read_manifest(target)
    if not manifest.is_sound:
        raise CheckpointError(
            f"no run would resume from step {step}, so nothing was set aside: {why_unsound(target, manifest)}"
        )
    return target, [each for each in found if folders.age(each) > folders.age(target)]


def _set_aside(folder: Path, aside: Path, on: Storage) -> None:
    with taken(folder) as free:
        if not free:
            raise CheckpointError(
                f"{folder} is being read by another process, so it and those that are older were left where they are: "
                "let it end, and give the command again"
            )
        on.rename(folder, aside / folder.name)


def _unused(root: Path) -> Path:
    number = 1
    while (root / f"{_ASIDE}{number}").exists():
        number += 1
    return root / f"{_ASIDE}{number}"
