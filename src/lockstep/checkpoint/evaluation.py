"""Evaluation: the checkpoint that a script is to evaluate, and what it reports of it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from os import PathLike
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from lockstep import knobs
from lockstep._files import run_path, write_whole
from lockstep.checkpoint import folders
from lockstep.checkpoint.evaluations import PREFIX, is_identity
from lockstep.checkpoint.locks import CheckpointGone
from lockstep.checkpoint.read import newest_complete, read_manifest, read_model_unheld
from lockstep.checkpoint.run_folder import RunFolder, run_folder
from lockstep.checkpoint.weights import LoadedWeights, into, refuse_targets
from lockstep.errors import CheckpointError, LockstepError
from lockstep.identity import Identity

#: The most numbers that are reported of one checkpoint, and the most characters of a name: all of them fit into a
#: result (``_MAX_BYTES`` of evaluations.py), which is no result if it can't be read back.
_MOST = 1000
_MOST_CHARACTERS = 200


@dataclass(frozen=True)
class EvaluationOrder:
    """What ``lockstep evaluate`` tells the script that it starts, in the file that ``LOCKSTEP_EVALUATION`` names."""

    #: The checkpoint's folder or its address in a store, and its identity.
    checkpoint: str
    digest: str
    #: The file for the numbers that the script reports.
    report: str

    @property
    def gone(self) -> str:
        """The file that a script leaves which finds its checkpoint gone."""
        return f"{self.report}.gone"

    def write(self, path: str | PurePath) -> None:
        """Write it to a file (0600)."""
        write_whole(str(path), json.dumps(vars(self)))

    @classmethod
    def read(cls, path: str) -> EvaluationOrder:
        """Read back what :meth:`write` has written.

        Raises:
            LockstepError: it is not there, or not such a file.
        """
        try:
            with open(path) as file:
                read = cls(**json.load(file))
            if not (isinstance(read.checkpoint, str) and is_identity(read.digest) and isinstance(read.report, str)):
                raise ValueError("its fields have other types")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise LockstepError(
                f"{knobs.EVALUATION}={path}: this is not what lockstep evaluate writes ({error}): unset the variable "
                "where it has not started the script"
            ) from error
        return read


class Evaluation:
    """The checkpoint that this script is to evaluate, and its numbers; for a script of ``lockstep evaluate``.

    ::

        evaluation = lockstep.Evaluation()
        evaluation.load(model)
        evaluation.report(accuracy=correct / seen)

    See docs/evaluate.md.

    Args:
        checkpoint: what to evaluate where the script was not started by ``lockstep evaluate``, which otherwise names
            the checkpoint: the folder of a checkpoint or of a run (then its newest complete one), on a disk or in a
            store. :meth:`report` prints the numbers then, and writes nothing.

    Raises:
        LockstepError: neither names a checkpoint.
        CheckpointError: ``checkpoint`` is none, and has none.
    """

    def __init__(self, checkpoint: str | PathLike[str] | None = None) -> None:
        path = knobs.evaluation()
        self._order = None if path is None else EvaluationOrder.read(path)
        if self._order is not None:
            checkpoint = self._order.checkpoint
        if checkpoint is None:
            raise LockstepError(
                "lockstep.Evaluation: no checkpoint: lockstep evaluate, which names it, has not started this script; "
                "by hand, give the folder of a checkpoint or of a run: lockstep.Evaluation('runs/x')"
            )
        given = run_path(checkpoint, "checkpoint")
        #: The checkpoint's folder, or its address in a store.
        self.folder: PurePath = given if self._order is not None else _newest(given)
        self._numbers: dict[str, float] = {}

    @property
    def step(self) -> int:
        """The optimizer steps that the checkpoint's run had taken."""
        return folders.step_of(self.folder)

    def load(
        self,
        model: nn.Module,
        *,
        device: torch.device | str | None = None,
        strict: bool = True,
        prefix: str = "",
    ) -> LoadedWeights:
        """Load the checkpoint's weights into a model, as :func:`lockstep.load_weights` does. Put it into eval mode
        yourself.

        The checkpoint is not held meanwhile: training may remove it while it is read, which is an error here, and one
        line of ``lockstep evaluate``, which goes on with the next one.

        Args:
            model, device, strict, prefix: as for :func:`lockstep.load_weights`.

        Raises:
            CheckpointError: the checkpoint was removed before all of it was read.
            CheckpointMismatch, CheckpointCorrupt: as :func:`lockstep.load_weights`.
        """
        refuse_targets(model)
        try:
            manifest, state = read_model_unheld(self.folder)
            if self._order is not None and manifest.identity != self._order.digest:
                raise CheckpointGone(f"{self.folder}: another checkpoint has taken the place of the one to evaluate")
        except CheckpointGone:
            if self._order is not None:  # so that this is not taken for a failure of the script
                write_whole(self._order.gone, "")
            raise
        return into(model, self.folder, state, device=device, strict=strict, prefix=prefix)

    def report(self, numbers: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Report numbers of the checkpoint; those of rank 0 count, so give means over all ranks (``world.mean``).

        They are in ``metrics.jsonl`` under these names with ``eval/`` before them, once the script has ended without an
        error. A later report adds to the one before, also of another Evaluation in the script; a name that is reported
        again has the later number.

        Args:
            numbers: numbers by name, for names that are not identifiers (``{"top/5": top5}``).
            named: numbers by name. Numbers of Python or NumPy, and tensors with one element of any real dtype, on any
                device. NaN is kept as such, and is never the best.

        Raises:
            TypeError, ValueError: a name is empty, not a text, not printable or longer than 200 characters; or a value
                is no number, or infinite; or there are more than 1000. Nothing of this call is reported then.
        """
        given = {**(numbers or {}), **named}
        read = {_name(name): _number(name, value) for name, value in given.items()}
        is_main = Identity.from_environment().rank == 0
        if is_main and self._order is not None:  # what another Evaluation has reported, which is in the same file
            self._numbers = (read_report(self._order.report) or {}) | self._numbers
        if len(self._numbers | read) > _MOST:
            raise ValueError(
                f"Evaluation.report(): {len(self._numbers | read)} numbers of step {self.step}, at most {_MOST} are "
                "kept: report means"
            )
        self._numbers |= read
        if not is_main:
            return
        if self._order is None:
            words = ", ".join(f"{name} {value:g}" for name, value in read.items())
            print(f"lockstep: step {self.step}: {words}", flush=True)
            return
        told = {name: None if math.isnan(value) else value for name, value in self._numbers.items()}
        write_whole(self._order.report, json.dumps(told, allow_nan=False))


def refuse_evaluated_run(folder: RunFolder) -> None:
    """Refuse to own the folder of the run whose checkpoint this process evaluates.

    Its saves would be evaluated in their turn, without end, and its rule would remove the run's checkpoints; a training
    that is started meanwhile would find that the folder belongs to another job.

    Raises:
        CheckpointError: it is that folder.
        LockstepError: what ``lockstep evaluate`` has told this process can't be read.
    """
    path = knobs.evaluation()
    if path is None:
        return
    checkpoint = run_path(EvaluationOrder.read(path).checkpoint, "checkpoint")
    if folder.resolved().path == run_folder(checkpoint.parent).resolved().path:
        raise CheckpointError(
            f"{folder.path} is the run of which this script evaluates {checkpoint.name}, and only its training may own "
            "it: load weights with lockstep.Evaluation().load(model), and give a Checkpointer another folder"
        )


def read_report(path: str | PurePath) -> dict[str, float] | None:
    """Return the numbers that a script has reported into a file; None if it has not."""
    try:
        with open(os.fspath(path)) as file:
            told = json.load(file)
    except FileNotFoundError:
        return None
    return {str(name): math.nan if value is None else float(value) for name, value in told.items()}


def _newest(path: PurePath) -> PurePath:
    """Return the checkpoint at a path, or the newest complete one of the run there."""
    folder = run_folder(path)
    if folder.exists() and folder.is_checkpoint():
        return path
    search = newest_complete(folder.checkpoints, read_manifest) if folder.exists() else None
    if search is None or search.found is None:
        raise CheckpointError(
            f"lockstep.Evaluation: {path} is neither a checkpoint nor the folder of a run with a complete one"
        )
    return search.found[0]


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"Evaluation.report(): {name!r} is the name of a number: expected a text that is not empty")
    if len(name) > _MOST_CHARACTERS or not name.isprintable():
        raise ValueError(
            f"Evaluation.report(): {ascii(name)[:60]} is the name of a number: expected at most "
            f"{_MOST_CHARACTERS} printable characters"
        )
    return name if name.startswith(PREFIX) else f"{PREFIX}{name}"


def _number(name: str, value: Any) -> float:
    where = f"Evaluation.report(): {name}"
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(
                f"{where} is a tensor of shape {list(value.shape)}, {value.dtype}: expected one real number, such as "
                "its mean()"
            )
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{where} is of the type {type(value).__name__}: expected a number, or a tensor with one")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise ValueError(f"{where} is {number}, or beyond what a float holds: expected a finite number, or NaN")
    return number
