"""The checkpoints from which a run has come, so that results of others count for nothing.

Note [Lineage]
~~~~~~~~~~~~~~
A run that resumes from the checkpoint at step c takes the steps after c again. What an evaluation has found of
checkpoints after c is void then, like the lines of the log after c (Note [Lines that are void] in ``metrics/file.py``);
but it may come later than that, and the checkpoint itself may be gone by then. So rank 0 keeps a list of the
checkpoints that the run has saved or resumed from, by name and identity, and drops those after c when it resumes. A
result counts if its checkpoint is on the list, or lies in the run's folder and is not newer than the one resumed from.

The list is written to ``evaluations/lineage.json`` where somebody evaluates, that is, where this folder is there: when
the run resumes, after each save, and at the end of ``epochs``, with the word that the run has ended. An error there is
a warning: training does not depend on it, and the next save writes the whole list again.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from pathlib import PurePath

from lockstep import callsite, knobs
from lockstep._files import StorePath
from lockstep.checkpoint import folders
from lockstep.checkpoint.evaluations import Evaluated, Evaluations, is_identity
from lockstep.checkpoint.locks import CheckpointGone
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.read import read_manifest_unheld
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.checkpoint.together import describe
from lockstep.errors import CheckpointCorrupt, CheckpointError

FILE = "lineage.json"

_FORMAT = 1
#: The most checkpoints on the list. A result that is later than so many saves counts if its checkpoint is still there.
_MOST = 1000


@dataclass(frozen=True)
class LineageRecord:
    """What ``lineage.json`` says."""

    #: True if the run has done all its epochs.
    ended: bool = False
    #: The name of each checkpoint and its identity, oldest first.
    checkpoints: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> bytes:
        """Return the content of the file."""
        return json.dumps({"format": _FORMAT, **vars(self)}).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes | None) -> LineageRecord:
        """Read back what :meth:`to_json` returned; of anything else, that nothing is known."""
        try:
            fields = json.loads(content or b"{}")
            if fields["format"] != _FORMAT or type(fields["ended"]) is not bool:
                return cls()
            pairs = tuple((name, digest) for name, digest in fields["checkpoints"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls()
        fits = all(isinstance(name, str) and folders.step_in(name) is not None for name, _ in pairs)
        return cls(fields["ended"], pairs) if fits and all(is_identity(digest) for _, digest in pairs) else cls()


class Lineage:
    """**Rank 0.** The checkpoints from which the run in a folder has come. See Note [Lineage].

    Args:
        root: the run's folder.
        on: the file system.
    """

    def __init__(self, root: PurePath, on: Storage = POSIX) -> None:
        self.evaluations = Evaluations(root, on)
        self._root, self._on = root, on
        #: Name -> identity, oldest first.
        self._known: dict[str, str] = {}
        #: True if all epochs are done.
        self._ended = False
        #: The age of the checkpoint that the run has resumed from.
        self._resumed_from = (-1, 0)
        #: The results that were looked up in the folder, by name, and whether they count.
        self._looked_up: dict[str, bool] = {}
        #: The time before which a store is not asked again, and what it has answered.
        self._next_look = 0.0
        self._found: list[Evaluated] = []
        #: A save in the background adds to the list while the loop logs.
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Note that the run begins, with no checkpoint to resume from."""
        with self._lock:
            self._known, self._resumed_from, self._looked_up, self._ended = {}, (-1, 0), {}, False
            self._found = []
            self._write()

    def resume_from(self, folder: PurePath, manifest: Manifest) -> None:
        """Drop what is newer than a checkpoint from which the run resumes."""
        with self._lock:
            self._resumed_from, self._looked_up, self._ended = folders.age(folder), {}, False
            self._found = []
            try:
                told = LineageRecord.from_json(self.evaluations.read(FILE))
            except (OSError, CheckpointError) as error:
                self._warn(error)
                told = LineageRecord()
            known = [*told.checkpoints, *self._known.items(), (folder.name, manifest.identity)]
            self._known = {name: digest for name, digest in known if _age(name) <= self._resumed_from}
            self._write()

    def add(self, folder: PurePath, manifest: Manifest) -> None:
        """Note a checkpoint that the run has saved."""
        with self._lock:
            self._known.pop(folder.name, None)
            self._known[folder.name] = manifest.identity
            while len(self._known) > _MOST:
                self._known.pop(next(iter(self._known)))
            self._write()

    def end(self) -> None:
        """Note that the run has done all its epochs."""
        with self._lock:
            self._ended = True
            self._write()

    def results(self) -> list[Evaluated]:
        """Return the numbers that were found of this run's checkpoints so far, in order of their steps.

        In a store it looks once in some seconds, and in between returns what it has found then: several logs may ask.
        """
        with self._lock:
            if isinstance(self._root, StorePath):  # each look is a request, which a log at its line waits for
                if time.monotonic() < self._next_look:
                    return self._found
                self._next_look = time.monotonic() + knobs.times().evaluate_look_in_store
            try:
                there = self.evaluations.all()
                self._found = [each for each in there if each.numbers is not None and self._counts(each)]
                return self._found
            except (OSError, CheckpointError) as error:
                self._warn(error)
                return []

    def _counts(self, evaluated: Evaluated) -> bool:
        if self._known.get(evaluated.checkpoint) == evaluated.digest:
            return True
        if _age(evaluated.checkpoint) > self._resumed_from:
            return False
        if evaluated.name not in self._looked_up:
            self._looked_up[evaluated.name] = lies_there(self._root, evaluated, on=self._on)
        return self._looked_up[evaluated.name]

    def _write(self) -> None:
        try:
            if self.evaluations.exists():
                self.evaluations.write(FILE, LineageRecord(self._ended, tuple(self._known.items())).to_json())
        except (OSError, CheckpointError) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        callsite.warn(
            f"{self.evaluations.path}: {describe(error)}; training goes on, and results of evaluations may be missing "
            "in metrics.jsonl until the next save",
            RuntimeWarning,
        )


def results_of_a_run_at_rest(root: PurePath) -> list[Evaluated]:
    """Return the numbers that were found of checkpoints of the run in ``root``, in which no job trains.

    Raises:
        OSError, CheckpointError: they can't be read.
    """
    evaluations = Evaluations(root)
    known = dict(LineageRecord.from_json(evaluations.read(FILE)).checkpoints)
    return [
        each
        for each in evaluations.all()
        if each.numbers is not None and (known.get(each.checkpoint) == each.digest or lies_there(root, each))
    ]


def lies_there(root: PurePath, evaluated: Evaluated, *, on: Storage = POSIX) -> bool:
    """Return whether the very checkpoint that was evaluated lies in the run's folder."""
    try:
        return read_manifest_unheld(root / evaluated.checkpoint, on=on).identity == evaluated.digest
    except (CheckpointCorrupt, CheckpointGone):
        return False


def _age(name: str) -> tuple[int, int]:
    return folders.age(PurePath(name))
