"""Looking at a run's checkpoints from outside: what there is, whether it is whole, what may go. Needs no world."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint import folders, load, pruning
from lockstep.checkpoint.guard import CheckpointGone, reading
from lockstep.checkpoint.manifest import MANIFEST, Manifest
from lockstep.checkpoint.retention import Entry, Retention, superfluous
from lockstep.checkpoint.tensors import Described
from lockstep.errors import CheckpointCorrupt, CheckpointError


@dataclass(frozen=True)
class Seen:
    """A checkpoint at first sight: its manifest, or what is wrong with that."""

    folder: Path
    manifest: Manifest | None
    damage: str | None = None

    @property
    def size(self) -> int:
        """Bytes of its files, by its manifest."""
        return 0 if self.manifest is None else sum(entry.size for entry in self.manifest.files.values())


def find(path: Path, *, step: int | None = None) -> list[Path]:
    """**Local.** The checkpoints that a path means, newest first: those of a run's folder, or the one that it is.

    Args:
        path: the folder of a run or of one checkpoint.
        step: only those of this step.

    Raises:
        CheckpointError: there are none.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    path = path.resolve()
    found = [path] if _is_checkpoint(path) else folders.checkpoints(path)
    wanted = [folder for folder in found if step is None or folders.step_of(folder) == step]
    if not wanted:
        steps = ", ".join(str(folders.step_of(folder)) for folder in found[:8]) + (" …" if len(found) > 8 else "")
        others = f"; there are those of the steps {steps}" if found else ""
        raise CheckpointError(f"{path}: no checkpoint there{'' if step is None else f' of step {step}'}{others}")
    return wanted


def _is_checkpoint(path: Path) -> bool:
    try:
        folders.age(path)
    except ValueError:
        return False
    return not folders.checkpoints(path) or (path / MANIFEST).exists()


def glance(folder: Path) -> Seen:
    """**Local.** Read the manifest of a checkpoint, and nothing else.

    Raises:
        CheckpointGone: it has just been removed.
    """
    with reading(folder):
        try:
            return Seen(folder, load.read_manifest(folder))
        except CheckpointCorrupt as error:
            return Seen(folder, None, str(error))


def damages(folder: Path) -> list[str]:
    """**Local.** Read every byte of a checkpoint: a line for all that is wrong; none if it is whole.

    Raises:
        CheckpointGone: it has just been removed.
    """
    with reading(folder):
        return load.damages(folder)


def tensors(folder: Path) -> tuple[Described, ...]:
    """**Local.** The tensors of a checkpoint's model, in the order of their bytes.

    Raises:
        CheckpointCorrupt: the header is damaged.
        CheckpointGone: it has just been removed.
    """
    with reading(folder):
        return load.read_header(folder)


@dataclass(frozen=True)
class Plan:
    """What a pruning is going to do."""

    #: The newest checkpoint that is whole, which stays whatever the rule says.
    newest: Path
    #: Newer ones, which are damaged and stay as well: what is wrong with each.
    damaged: tuple[str, ...]
    #: Those that the rule keeps besides.
    kept: tuple[Entry, ...]
    superfluous: tuple[Entry, ...]


def plan_pruning(root: Path, rule: Retention) -> Plan:
    """**Local.** What may go, once the newest whole checkpoint has been found by reading every byte of it.

    Raises:
        CheckpointError: no checkpoint there is whole, so nothing may go.
    """
    damaged: dict[str, str] = {}
    for folder in find(root):
        wrong = _damages_if_there(folder)
        if wrong:
            damaged[folder.name] = "; ".join(wrong)
            continue
        entries = pruning.entries(folder.parent, good=(folder.name,), damaged=damaged)
        gone = superfluous(entries, rule)
        kept = tuple(entry for entry in entries if entry not in gone)
        return Plan(folder, tuple(damaged.values()), kept, tuple(gone))
    raise CheckpointError(f"{root}: no checkpoint there is whole, so nothing is removed: {'; '.join(damaged.values())}")


def _damages_if_there(folder: Path) -> list[str]:
    try:
        return damages(folder)
    except CheckpointGone as error:
        return [str(error)]


def leftovers(root: Path) -> Iterator[Path]:
    """**Local.** Drafts that a save is writing, or that a killed one left; the next save removes the latter."""
    return (path for path in sorted(root.glob("step-*.tmp-*")) if path.is_dir())
