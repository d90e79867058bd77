"""Removing what a run does not keep: the rule of :mod:`retention`, applied to a folder that others may be reading."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lockstep import caller
from lockstep.checkpoint import folders
from lockstep.checkpoint.guard import taken
from lockstep.checkpoint.load import read_manifest
from lockstep.checkpoint.manifest import MANIFEST
from lockstep.checkpoint.retention import Entry, Retention, superfluous
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.checkpoint.together import describe
from lockstep.errors import CheckpointCorrupt


@dataclass(frozen=True)
class Pruned:
    """What became of a run's superfluous checkpoints."""

    removed: tuple[Path, ...] = ()
    #: Those that someone is reading; the next pruning finds them again.
    being_read: tuple[Path, ...] = ()
    #: Those that can't be removed, and why.
    failed: tuple[tuple[Path, str], ...] = ()


def entries(
    root: Path,
    *,
    good: Collection[str] = (),
    damaged: Collection[str] = (),
    metrics: bool = True,
    on: Storage = POSIX,
) -> list[Entry]:
    """**Local.** The checkpoints of a run as the rule sees them.

    Args:
        root: the run's folder.
        good, damaged: names of the folders that are known to be so. One without a manifest is damaged.
        metrics: read each manifest, for its metric; one that can't be read is damaged.
        on: the file system.
    """
    found = []
    for folder in folders.checkpoints(root, on=on):
        known = True if folder.name in good else False if folder.name in damaged else None
        metric = None
        try:
            if metrics:
                metric = read_manifest(folder, on=on).metric
            elif not (folder / MANIFEST).is_file():
                known = False
        except CheckpointCorrupt:
            known = False
        found.append(Entry(folder.name, *folders.age(folder), metric, known))
    return found


def remove(root: Path, superfluous_ones: Collection[Entry], *, on: Storage = POSIX) -> Pruned:
    """**Local.** Remove checkpoints, except those that are being read. See Note [Readers and pruning]."""
    removed: list[Path] = []
    being_read: list[Path] = []
    failed: list[tuple[Path, str]] = []
    for entry in superfluous_ones:
        folder = root / entry.name
        try:
            with taken(folder) as free:
                if free:
                    folders.remove(folder, on=on)
            (removed if free else being_read).append(folder)
        except FileNotFoundError:
            continue  # someone else has removed it
        except OSError as error:
            failed.append((folder, describe(error)))
    return Pruned(tuple(removed), tuple(being_read), tuple(failed))


def prune(root: Path, newest: Path, rule: Retention, *, damaged: Collection[str] = (), on: Storage = POSIX) -> None:
    """**Rank 0.** Remove what the checkpoint ``newest``, just written, makes superfluous under the rule.

    Those of later steps are left alone, and so are those that someone is reading. What fails is a warning: the new
    checkpoint is safe, and failing the save for an old one's sake would be wrong.
    """
    try:
        there = entries(root, good=(newest.name,), damaged=damaged, metrics=rule.best > 0, on=on)
        gone = remove(root, superfluous(there, rule), on=on)
    except OSError as error:
        caller.warn(f"could not look through the old checkpoints in {root}: {describe(error)}", RuntimeWarning)
        return
    for folder, why in gone.failed:
        caller.warn(f"could not remove the old checkpoint {folder}: {why}", RuntimeWarning)
