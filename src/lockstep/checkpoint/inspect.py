"""Inspect a run's checkpoints from outside: list, verify, and prune them.

``lockstep checkpoint`` is made of these functions, which need no world.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from lockstep.checkpoint import folders
from lockstep.checkpoint.locks import Owner
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.read import (
    Unsound,
    find_damage,
    newest_complete,
    read_manifest,
    why_unsound,
)
from lockstep.checkpoint.retention import Entry, Retention, entries, superfluous
from lockstep.checkpoint.run_folder import run_folder
from lockstep.errors import CheckpointCorrupt, CheckpointError
from lockstep.text import listed


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint's manifest, or the damage to it."""

    folder: PurePath
    manifest: Manifest | None
    damage: str | None = None

    @property
    def unsound(self) -> str:
        """Why no run resumes from it by itself, as its manifest says; empty if it is sound."""
        return "" if self.manifest is None else why_unsound(self.folder, self.manifest)

    @property
    def size(self) -> int:
        """The total bytes of its files, from its manifest."""
        return 0 if self.manifest is None else sum(entry.size for entry in self.manifest.files.values())


def find(path: PurePath, *, step: int | None = None) -> list[PurePath]:
    """List the checkpoints at a path, newest first: those in a run's folder, or the one whose folder it is.

    Args:
        path: the folder of a run or of one checkpoint.
        step: list only checkpoints of this step.

    Raises:
        CheckpointError: there are none.
    """
    folder = run_folder(path)
    if not folder.exists():
        raise CheckpointError(f"{path}: no such folder")
    folder = folder.resolved()
    path = folder.path
    found = [path] if folder.is_checkpoint() else folder.checkpoints()
    wanted = [folder for folder in found if step is None or folders.step_of(folder) == step]
    if not wanted:
        steps = listed([str(folders.step_of(folder)) for folder in found])
        others = f"; there are checkpoints of the steps {steps}" if found else ""
        raise CheckpointError(f"{path}: no checkpoint there{'' if step is None else f' of step {step}'}{others}")
    return wanted


def is_checkpoint(path: PurePath) -> bool:
    """Return whether a folder is a checkpoint, rather than a run's with several."""
    return run_folder(path).resolved().is_checkpoint()


def glance(folder: PurePath) -> CheckpointSummary:
    """Read the manifest of a checkpoint, and nothing else.

    Raises:
        CheckpointGone: it has just been removed.
    """
    try:
        return CheckpointSummary(folder, read_manifest(folder))
    except CheckpointCorrupt as error:
        return CheckpointSummary(folder, None, str(error))


@dataclass(frozen=True)
class PruningPlan:
    """The checkpoints that a pruning keeps and removes."""

    #: The newest checkpoint that is complete, and sound if one is, which stays whatever the rule says.
    newest: PurePath
    #: Descriptions of newer checkpoints, which are damaged or not sound and stay as well.
    damaged: tuple[str, ...]
    unsound: tuple[str, ...]
    #: The checkpoints that stay.
    kept: tuple[Entry, ...]
    superfluous: tuple[Entry, ...]


def plan_pruning(root: PurePath, rule: Retention) -> PruningPlan:
    """Plan a pruning, after finding the newest complete checkpoint by reading every byte of it.

    Raises:
        CheckpointError: there are no checkpoints, or none is complete, so that none may be removed.
    """

    def refuse_damage(folder: PurePath) -> None:
        found = find_damage(folder)
        if found:
            raise CheckpointCorrupt("; ".join(found))

    def refuse_unsound(folder: PurePath) -> None:
        manifest = read_manifest(folder)
        if not manifest.is_sound:
            raise Unsound(folder, manifest)
        refuse_damage(folder)

    search = newest_complete(lambda: find(root), refuse_unsound)
    if search.found is None and search.unsound:
        search = newest_complete(lambda: find(root), refuse_damage)
    wrong = tuple(search.damaged.values())
    if search.found is None:
        raise CheckpointError(f"{root}: no checkpoint there is complete, so nothing is removed: {'; '.join(wrong)}")
    folder = search.found[0]
    listed = entries(folder.parent, good=(folder.name,), damaged=[other.name for other in search.damaged], by=rule.by)
    gone = superfluous(listed, rule)
    kept = tuple(entry for entry in listed if entry not in gone)
    return PruningPlan(folder, wrong, tuple(search.unsound.values()), kept, tuple(gone))


def leftovers(root: PurePath) -> list[PurePath]:
    """List the drafts that a save is writing or a killed save has left; the next save removes the latter."""
    return run_folder(root).leftovers()


def owner(root: PurePath) -> Owner | None:
    """Return the owner that holds a run's folder now, as far as can be known, or None."""
    return run_folder(root).owner_now()
