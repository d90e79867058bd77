"""Write down and read back what the ranks of an observed run note of each optimizer step, in a private folder.

Note [What is kept of a step]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each rank writes one line of JSON for a step: digests of all gradients and parameters, losses, sizes and signatures of
the samples that the model got, and what may explain a difference. A digest is of all bytes, so whether two runs hold
the same bits is known of whole tensors, however large the model. The numbers themselves are written by rank 0 alone,
and of a large tensor only each n-th, the same ones in every run, so that all files of a verification stay within a
limit that the user sets (``--keep``). Sizes of differences are those of the numbers that were kept. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: The version of these files' layout.
VERSION = 1


@dataclass(frozen=True)
class Assignment:
    """The command's instructions for an observer."""

    #: The folder for the run's records: 0700, of this run alone.
    folder: str
    #: Optimizer steps after which the run ends.
    steps: int
    #: The numbers kept of a step's gradients, and as many of its parameters.
    numbers: int
    #: The relative change of parameters before each step, with a sign drawn for each element: see Note [Nudged runs]
    #: in compare.py. 0: none.
    nudge: float = 0.0
    #: True if torch names operations that are not deterministic.
    names_operations: bool = False
    #: True if random numbers are the same for all samples: see Note [Random numbers made alike] in alike.py.
    numbers_alike: bool = False

    def write(self, path: Path) -> None:
        """Write the assignment for the ranks."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: str | Path) -> Assignment:
        """Return the assignment that :meth:`write` has written."""
        return Assignment(**json.loads(Path(path).read_text()))


@dataclass(frozen=True)
class Loss:
    """The loss at which a backward began."""

    #: The loss; None: it was not one number.
    value: float | None
    #: This rank's samples of the global batch in hand, and all of them, where a sharded loader knows them.
    local: float | None = None
    whole: float | None = None
    #: The relative distance between neighbouring numbers of its type.
    spacing: float = 0.0
    #: True if numbers were drawn from torch's generator between the forward and the backward.
    drew: bool = False


@dataclass(frozen=True)
class ForwardRecord:
    """The inputs of a model in one forward for training, and its outputs."""

    module: str
    #: The shape of the first tensor.
    shape: list[int]
    #: A signature for each sample, and the typical size of one; see ``Observer._signatures`` in observe.py.
    samples: list[float]
    size: float
    #: The same for the output of each sample; empty: the output has another first dimension.
    outputs: list[float]
    output_size: float
    #: True if this forward drew numbers from torch's generator.
    drew: bool
    #: True if numbers were drawn before it from this rank's own stream.
    drew_before: bool


@dataclass(frozen=True)
class StepNote:
    """One optimizer step on one rank."""

    #: The number of the step, from 1, over all optimizers.
    step: int
    #: The optimizer, as an index of :attr:`RankNotes.optimizers`.
    optimizer: int
    #: Digests, in the optimizer's order of parameters; None: no gradient.
    gradients: list[str | None]
    parameters: list[str]
    #: Digests of the parameters before the step.
    before: list[str] = field(default_factory=list)
    #: Numbers of each of the optimizer's groups: lr, momentum, ...
    options: list[dict[str, Any]] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    batches: list[ForwardRecord] = field(default_factory=list)
    #: Digests of the generators where the step begins: python, numpy, torch (the stream that all ranks share).
    generators: dict[str, str] = field(default_factory=dict)
    #: The names of batch norms that took statistics of a batch, and of dropouts that dropped.
    norms: list[str] = field(default_factory=list)
    dropouts: list[str] = field(default_factory=list)
    #: Lines of the script that gathered float tensors from all ranks, between a forward and its backward.
    gathers: list[str] = field(default_factory=list)
    #: Lines that added up float tensors of several elements over all ranks there.
    sums: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OptimizerNote:
    """The facts about an optimizer that are the same in all steps."""

    name: str
    names: list[str]
    shapes: list[list[int]]
    #: The relative distance between neighbouring numbers of each parameter's type; 0 for what is not a float.
    spacings: list[float]
    #: For each parameter, True if its module was called for training; empty: no module was.
    called: list[bool] = field(default_factory=list)


@dataclass
class RankNotes:
    """All that a rank has written."""

    rank: int
    #: The files' version, torch's version and threads, the rank's place, and digests of the generators at the start.
    about: dict[str, Any]
    optimizers: list[OptimizerNote]
    steps: list[StepNote]
    #: The largest relative distance between neighbouring numbers of any type that the model computes in.
    spacing: float = 0.0
    #: Operations that torch calls not deterministic, and sentences about anything else.
    operations: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    #: Ranks that the script starts by itself, and its other processes: what started them, and of which function.
    spawned: list[str] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)


class NotesWriter:
    """Writes the notes of one rank, a line at a time, so that the records of a run are whole wherever it ends."""

    def __init__(self, folder: str | Path, *, rank: int) -> None:
        self._folder, self._rank = Path(folder), rank
        self._file = open(_lines(self._folder, rank), "w")  # noqa: SIM115  (until the process ends)

    def add(self, kind: str, content: Mapping[str, Any]) -> None:
        """Write one line."""
        self._file.write(json.dumps({"kind": kind} | dict(content)) + "\n")
        self._file.flush()

    def add_step(self, note: StepNote, numbers: Mapping[str, Array]) -> None:
        """Write a step: first the numbers that are kept of it, then its line, which says that it is complete."""
        if numbers:
            np.savez(_numbers(self._folder, note.step), **numbers)  # type: ignore[arg-type]
        self.add("step", asdict(note))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class Observation:
    """One run of the script, as its ranks have recorded it."""

    folder: Path
    world_size: int
    ranks: list[RankNotes]

    @staticmethod
    def read(folder: str | Path, world_size: int) -> Observation:
        """Read the records of a run's ranks."""
        home = Path(folder)
        ranks = [_read_rank(home, rank) for rank in range(world_size) if _lines(home, rank).exists()]
        return Observation(home, world_size, ranks)

    @cached_property
    def steps(self) -> int:
        """Steps that every rank has taken."""
        return min((len(rank.steps) for rank in self.ranks), default=0) if len(self.ranks) == self.world_size else 0

    @property
    def steps_of_ranks(self) -> list[int]:
        """Steps that each rank has taken, in order of the ranks that have written something."""
        return [len(rank.steps) for rank in self.ranks]

    @property
    def first(self) -> RankNotes:
        """Rank 0, whose numbers are kept."""
        return self.ranks[0]

    def at(self, step: int) -> list[StepNote]:
        """Return every rank's note of ``step``, from 1."""
        return [rank.steps[step - 1] for rank in self.ranks]

    def optimizer(self, step: int) -> OptimizerNote:
        """Return the optimizer of ``step``."""
        return self.first.optimizers[self.first.steps[step - 1].optimizer]

    def numbers(self, step: int) -> dict[str, Array]:
        """Return the numbers kept of ``step``: gradients ``g0``, ``g1``, ..., parameters after it ``p0``, ..., and
        before it ``b0``, ... where it is the first."""
        with np.load(_numbers(self.folder, step), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}


def _lines(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def _numbers(folder: Path, step: int) -> Path:
    return folder / f"step{step:06}.npz"


def _read_rank(folder: Path, rank: int) -> RankNotes:
    notes = RankNotes(rank, {}, [], [])
    for kind, content in _whole_lines(_lines(folder, rank)):
        if kind == "step":
            losses = [Loss(**each) for each in content.pop("losses")]
            batches = [ForwardRecord(**each) for each in content.pop("batches")]
            notes.steps.append(StepNote(**content, losses=losses, batches=batches))
        elif kind == "optimizer":
            index = content.pop("index", len(notes.optimizers))  # told again where parameters were added
            notes.optimizers[index : index + 1] = [OptimizerNote(**content)]
        elif kind == "about":
            notes.about = content
        elif kind == "spacing":
            notes.spacing = max(notes.spacing, content["spacing"])
        elif kind == "operation":
            notes.operations.append(content["text"])
        elif kind == "remark":
            notes.remarks.append(content["text"])
        elif kind == "spawned":
            notes.spawned.append(content["text"])
        elif kind == "process":
            notes.processes.append(content["text"])
    return notes


def _whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # else the rank was killed here
            content = json.loads(line)
            yield content.pop("kind"), content
