"""The rule, over steps and metrics, that decides which checkpoints a run keeps; and the removal of the others.

The rule itself is pure (:func:`superfluous`); it is applied to a folder that other processes may be reading.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from lockstep import callsite
from lockstep.checkpoint import folders
from lockstep.checkpoint.evaluations import PREFIX, Evaluations
from lockstep.checkpoint.locks import CheckpointGone
from lockstep.checkpoint.read import read_manifest
from lockstep.checkpoint.run_folder import run_folder
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.checkpoint.together import describe
from lockstep.errors import CheckpointCorrupt, CheckpointError
from lockstep.text import joined


@dataclass(frozen=True)
class Retention:
    """The rule for which checkpoints a run keeps. A checkpoint stays if any of these criteria keeps it.

    The newest one that is good always stays, whatever the rule says. A checkpoint that is not sound, because it is not
    finite (Note [Finite] in ``checkpoint/finite.py``) or the ranks differed in it, takes no other's place: the rule
    chooses among the sound ones as if it were not there. Of those that are not sound the newest stays, or as many as
    sound ones are missing from ``last``, until they are older than the last sound ones.
    """

    #: Number of the last steps with checkpoints that are kept. None: all of them; 0: only the newest.
    last: int | None = 3
    #: Checkpoints whose step is a multiple of this are kept for good. None: no such rule.
    every: int | None = None
    #: Number of the best that are kept, by the metric of ``save(metric=…)`` or the number that ``by`` names; of two
    #: equal ones the newer.
    best: int = 0
    #: "min" if the best metric is the smallest (a loss), "max" if it is the largest (an accuracy).
    mode: Literal["min", "max"] = "min"
    #: The name of a number of ``lockstep evaluate`` by which the best are kept, such as ``"eval/accuracy"``. None: the
    #: metric of ``save``. A checkpoint is among the best once its number is known, and till then it stays only if
    #: another criterion keeps it.
    by: str | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 0:
            raise ValueError(f"last={self.last}: expected 0 or more, or None to keep all checkpoints")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every={self.every}: expected at least 1, or None")
        if self.best < 0:
            raise ValueError(f"best={self.best}: expected 0 or more")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode={self.mode!r}: expected 'min' or 'max'")
        if self.by is not None and not (isinstance(self.by, str) and self.by.startswith(PREFIX)):
            raise ValueError(
                f"by={self.by!r}: expected the name of a number as metrics.jsonl has it, such as '{PREFIX}accuracy' "
                "for evaluation.report(accuracy=…)"
            )
        if self.by is not None and not self.best:
            raise ValueError(f"by={self.by!r} without best=: say how many of the best are kept")


def rule_of(keep: int | Retention | None) -> Retention:
    """Return the rule that a user gives, as such or as the number of checkpoints to keep.

    Raises:
        TypeError, ValueError: it is neither.
    """
    if isinstance(keep, Retention):
        return keep
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int)):
        raise TypeError(f"keep={keep!r}: expected a number of checkpoints, None, or a lockstep.Retention")
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep}: expected at least 1, or None to keep all checkpoints")
    return Retention(last=keep)


@dataclass(frozen=True)
class Entry:
    """One checkpoint, as the rule sees it."""

    #: The name of its folder.
    name: str
    step: int
    #: The number of this save among those of the same step, from 1; the last one replaces the others.
    revision: int = 1
    #: The metric it was saved with, or what an evaluation has found. With None or a number that is not finite it is
    #: never the best.
    metric: float | None = None
    #: True if it is complete, False if it is damaged, None if it was not checked.
    good: bool | None = None
    #: False if its manifest says that it is not: values that are not finite, ranks that differed.
    sound: bool = True


def superfluous(entries: Iterable[Entry], rule: Retention) -> list[Entry]:
    """Choose the checkpoints that may go, oldest first.

    The newest sound one known to be good never goes, nor does any newer than it: whether those are good is not known,
    or they are damaged, which someone may want to look at. Without any known to be good, nothing goes. A damaged one
    takes no place among the kept; it goes once it is older than the last ``rule.last``. Those that are not sound go as
    :class:`Retention` says, once there is a newer one that is known to be good.
    """
    oldest_first = sorted(entries, key=_age)
    usable = [entry for entry in oldest_first if entry.sound or entry.good is False]
    lost = [entry for entry in oldest_first if not entry.sound and entry.good is not False]
    return sorted([*_superfluous_among(usable, rule), *_superfluous_lost(lost, usable, rule)], key=_age)


def _age(entry: Entry) -> tuple[int, int]:
    return entry.step, entry.revision


def _superfluous_among(oldest_first: list[Entry], rule: Retention) -> list[Entry]:
    """Choose among the checkpoints that are sound or damaged."""
    good = [number for number, entry in enumerate(oldest_first) if entry.good]
    if not good:
        return []
    older, newest = oldest_first[: good[-1]], oldest_first[good[-1]]
    candidates = [*_latest_of_each_step([entry for entry in older if entry.good is not False], newest), newest]
    kept = _wanted(candidates, rule)
    oldest_of_the_last = _oldest_of_the_last(candidates, rule)
    return [
        entry
        for entry in older
        if entry.name not in kept and (entry.good is not False or entry.step < oldest_of_the_last)
    ]


def _superfluous_lost(lost: list[Entry], usable: list[Entry], rule: Retention) -> list[Entry]:
    """Choose among the checkpoints that are not sound.

    Args:
        lost: the checkpoints that are not sound, oldest first.
        usable: all others, oldest first.
    """
    known = max((_age(entry) for entry in (*lost, *usable) if entry.good), default=(-1, 0))
    sound = list({entry.step: entry for entry in usable if entry.good is not False}.values())
    places = len(lost) if rule.last is None else max(1, rule.last - len(sound))
    kept = {entry.name for entry in list({entry.step: entry for entry in lost}.values())[-places:]}
    if rule.every is not None:
        kept |= {entry.name for entry in lost if entry.step % rule.every == 0}
    oldest_of_the_last = _oldest_of_the_last(sound, rule) if sound else -math.inf
    replaced = {entry.step: _age(entry) for entry in sound if _age(entry) <= known}  # by a later save of that step
    return [
        entry
        for entry in lost
        if _age(entry) < known
        and (
            entry.name not in kept
            or _age(entry) < replaced.get(entry.step, (-1, 0))
            or (entry.step < oldest_of_the_last and (rule.every is None or entry.step % rule.every != 0))
        )
    ]


def _latest_of_each_step(entries: list[Entry], newest: Entry) -> list[Entry]:
    """Return the checkpoints that no later save of the same step replaces."""
    latest = {entry.step: entry for entry in entries}
    latest.pop(newest.step, None)
    return list(latest.values())


def _wanted(candidates: list[Entry], rule: Retention) -> set[str]:
    """Name the candidates (oldest first) that the rule keeps."""
    last = candidates if rule.last is None else candidates[len(candidates) - min(rule.last, len(candidates)) :]
    every = [entry for entry in candidates if rule.every is not None and entry.step % rule.every == 0]
    measured = [entry for entry in reversed(candidates) if entry.metric is not None and math.isfinite(entry.metric)]
    sign = 1 if rule.mode == "min" else -1
    best = sorted(measured, key=lambda entry: sign * (entry.metric or 0.0))[: rule.best]  # stable: newer first
    return {entry.name for entry in (*last, *every, *best)}


def _oldest_of_the_last(candidates: list[Entry], rule: Retention) -> float:
    if rule.last is None:
        return -math.inf
    return candidates[-min(max(rule.last, 1), len(candidates))].step


# The folder.


@dataclass(frozen=True)
class Pruned:
    """The outcome of a pruning: what became of each superfluous checkpoint."""

    removed: tuple[PurePath, ...] = ()
    #: Checkpoints that a process is reading; the next pruning finds them again.
    being_read: tuple[PurePath, ...] = ()
    #: Checkpoints that can't be removed, and why.
    failed: tuple[tuple[PurePath, str], ...] = ()


def entries(
    root: PurePath,
    *,
    good: Collection[str] = (),
    damaged: Collection[str] = (),
    enough: int | None = None,
    by: str | None = None,
    on: Storage = POSIX,
) -> list[Entry]:
    """List the checkpoints of a run as the rule sees them.

    Args:
        root: the run's folder.
        good, damaged: names of the folders that are known to be so. One without a manifest is damaged.
        enough: once this many steps of sound ones have been seen, newest first, read no manifest that a rule by steps
            alone can do without; None: read them all. A checkpoint whose manifest can't be read is damaged.
        by: the rule's.
        on: the file system.
    """
    found = []
    run = run_folder(root, on)
    listed = run.checkpoints()
    saves = Counter(map(folders.step_of, listed))
    newest = max((folders.age(folder) for folder in listed if folder.name in good), default=(-1, 0))
    evaluated = {} if by is None else _evaluated(root, listed, by, on)
    seen: set[int] = set()  # steps of the sound checkpoints that the rule chooses among
    for folder in listed:
        known = True if folder.name in good else False if folder.name in damaged else None
        step, revision = folders.age(folder)
        metric, sound = None, True
        try:
            if enough is None or len(seen) < enough or saves[step] > 1:  # to decide which save of a step counts
                manifest = read_manifest(folder, on=on)
                sound = manifest.is_sound
                metric = manifest.metric if by is None else evaluated.get((folder.name, manifest.identity))
            elif not run.has_manifest(folder.name):
                known = False
        except CheckpointCorrupt:
            known = False
        except CheckpointGone:
            continue  # another process has removed it
        if sound and known is not False and (step, revision) <= newest:
            seen.add(step)
        found.append(Entry(folder.name, step, revision, metric, known, sound))
    return found


def _evaluated(root: PurePath, listed: Collection[PurePath], by: str, on: Storage) -> dict[tuple[str, str], float]:
    """Return the number called ``by`` of each checkpoint that has been evaluated, by name and identity."""
    found = Evaluations(root, on).of({folder.name for folder in listed})
    numbers = {(each.checkpoint, each.digest): each.numbers for each in found if each.numbers is not None}
    names = {name for each in numbers.values() for name in each}
    if names and by not in names:
        callsite.warn(
            f"lockstep.Retention: by={by!r}, but lockstep evaluate has found only {joined(sorted(names))} of the "
            f"checkpoints in {root}, so none is kept as the best",
            RuntimeWarning,
        )
    return {key: each[by] for key, each in numbers.items() if by in each}


def remove(root: PurePath, superfluous_ones: Collection[Entry], *, on: Storage = POSIX) -> Pruned:
    """Remove checkpoints, except those that are being read. See Note [Readers and pruning]."""
    run = run_folder(root, on)
    removed: list[PurePath] = []
    being_read: list[PurePath] = []
    failed: list[tuple[PurePath, str]] = []
    for entry in superfluous_ones:
        folder = root / entry.name
        try:
            (removed if run.remove(entry.name) else being_read).append(folder)
        except FileNotFoundError:
            continue  # another process has removed it
        except (OSError, CheckpointError) as error:
            failed.append((folder, describe(error)))
    return Pruned(tuple(removed), tuple(being_read), tuple(failed))


def prune(
    root: PurePath, newest: PurePath, rule: Retention, *, damaged: Collection[str] = (), on: Storage = POSIX
) -> None:
    """**Rank 0.** Remove what the checkpoint ``newest``, just written, makes superfluous under the rule.

    Checkpoints of later steps are left alone, and so are those that a process is reading. A failure is a warning: the
    new checkpoint is safe, and failing the save for an old one's sake would be wrong.
    """
    # Checkpoints older than the last sound ones go, sound or not, unless their step says otherwise.
    enough = None if rule.best > 0 else 0 if rule.last is None else max(1, rule.last)
    try:
        there = entries(root, good=(newest.name,), damaged=damaged, enough=enough, by=rule.by, on=on)
        gone = remove(root, superfluous(there, rule), on=on)
    except (OSError, CheckpointError) as error:
        callsite.warn(f"could not list the old checkpoints in {root}: {describe(error)}", RuntimeWarning)
        return
    for folder, why in gone.failed:
        callsite.warn(f"could not remove the old checkpoint {folder}: {why}", RuntimeWarning)
