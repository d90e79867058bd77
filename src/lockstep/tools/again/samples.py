"""Which samples a step of a recorded run had, by rank and slice.

Note [Samples of a step]
~~~~~~~~~~~~~~~~~~~~~~~~
A record knows which batch of which epoch a step took (``runs/loaders.py``) and what the loader's settings were. Where
lockstep ordered the samples, the rest is arithmetic, the same as in the run: the epoch's order from (seed, epoch,
length), the batch out of it, and each rank's part or each slice of the batch. No sample is read and the program is not
looked at.

Decisions of a user's object are not in the record: a sampler's order, a batch sampler's batches, costs. The program has
these objects, so it is run up to its loader, which then draws the epoch again, in one process and before anything is
trained. The state of a batch sampler with a memory is not known there, and a stream's samples have no indices: both are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lockstep.data.batches import GlobalBatch
from lockstep.data.costs import ByCost, ByNumber, Division
from lockstep.data.order import EpochOrder, epoch_order, sequential_order
from lockstep.data.slicing import Slicing
from lockstep.errors import LockstepError
from lockstep.runs import loaders
from lockstep.runs.history import Run
from lockstep.runs.loaders import StepBatches
from lockstep.text import counted, sentence, wrapped
from lockstep.tools.again.shown import in_words

#: The most batches of one loader that are told of a step, or from which one can be chosen.
_MOST = 64


class UnknownBatch(LockstepError):
    """A record does not tell which samples a step had."""

    code = "unknown-batch"


@dataclass(frozen=True)
class Part:
    """The samples of a global batch that one rank had, or one slice."""

    #: None: the record does not tell which rank.
    rank: int | None
    #: The number of the slice; None: the batch was not sliced.
    slice: int | None
    #: The positions of the samples in the epoch's order, and their indices.
    positions: list[int]
    indices: list[int]
    #: The value that the dataset returns for each of them; None: it was not asked.
    samples: list[dict[str, Any]] | None = None

    def describe(self) -> list[str]:
        """Return lines for people."""
        who = "a rank that is not known" if self.rank is None else f"rank {self.rank}"
        name = who if self.slice is None else f"slice {self.slice}, {who}"
        if self.samples is None:
            return wrapped(f"{name}: {' '.join(map(str, self.indices)) or 'none'}", later="  ")
        lines = [f"{name}: {counted(len(self.indices), 'sample')}"]
        for index, sample in zip(self.indices, self.samples, strict=True):
            lines.append(f"  {index}: {'; '.join(map(in_words, sample['values']))}")
        return lines


@dataclass(frozen=True)
class RecordedBatch:
    """A global batch of a recorded run."""

    #: The number of the loader, and the kind of its order.
    loader: int
    order: str
    seed: int
    epoch: int
    batch: int
    #: True if it is certain that the step took the batch.
    is_certain: bool
    #: The position of its first sample in the epoch's order, and how many samples it has.
    position: int
    samples: int
    parts: list[Part] = field(default_factory=list)

    def describe(self) -> list[str]:
        """Return lines for people."""
        last = self.position + self.samples - 1
        places = f"position {self.position:,}" if self.samples == 1 else f"positions {self.position:,} to {last:,}"
        seen = {"shuffled": f"shuffled by seed {self.seed}", "sequential": "in the order of the dataset"}
        lines = [
            f"loader {self.loader}: batch {self.batch:,} of epoch {self.epoch:,}, {counted(self.samples, 'sample')}: "
            f"{places} of the epoch, {seen.get(self.order, f'drawn with seed {self.seed}')}"
        ]
        for part in self.parts:
            lines += part.describe()
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the batch in JSON's types."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> RecordedBatch:
        """Return what :meth:`to_json` has written."""
        return cls(**{**told, "parts": [Part(**each) for each in told["parts"]]})


@dataclass(frozen=True)
class Wanted:
    """The batches of one loader that are asked for, and all that decides their samples."""

    #: The settings of the loader, as recorded.
    settings: dict[str, Any]
    world_size: int
    epoch: int
    #: The numbers of the first of the batches, and of the one after the last.
    first: int
    end: int
    is_certain: bool
    #: The position of the first one's first sample; None: it is not known without drawing.
    position: int | None
    #: The rank whose parts are wanted; None: all.
    rank: int | None = None

    @property
    def why_program(self) -> str:
        """What the program must be asked, because the record does not tell it; empty: nothing."""
        drawn_by = self.settings["drawn_by"]
        if self.settings["order"] == "sampler":
            return f"the sampler {drawn_by} drew the order of the epoch"
        if self.settings["order"] == "batches":
            return f"the batch sampler {drawn_by} drew the batches"
        return "" if self.settings["costs"] is None else f"the parts were cut by costs ({self.settings['costs']})"

    @property
    def batches(self) -> range:
        """The numbers of the batches."""
        return range(self.first, self.end)


@dataclass(frozen=True)
class StepSamples:
    """The samples of a step of a run, or of a batch that was named."""

    run: Run
    #: The number of the step, from 1; None: a batch was named.
    step: int | None
    #: The number of the start that took it.
    start: int
    world_size: int
    batches: list[RecordedBatch]
    remarks: list[str]

    def describe(self) -> str:
        """Return the result for people."""
        which = "a batch that was named" if self.step is None else f"step {self.step:,}"
        lines = [f"{self.run.name}: {self.run.program}, {which}, {counted(self.world_size, 'rank')}"]
        for batch in self.batches:
            lines += batch.describe()
        return "\n".join([*lines, *(f"note: {remark}" for remark in self.remarks)])

    def to_json(self) -> dict[str, Any]:
        """Return the result in JSON's types."""
        return {
            "name": self.run.name,
            "folder": self.run.path.parent,
            "program": self.run.about["program"],
            "step": self.step,
            "start": self.start,
            "ranks": self.world_size,
            "batches": [each.to_json() for each in self.batches],
            "remarks": self.remarks,
        }


@dataclass(frozen=True)
class Question:
    """What is wanted of which start of a run."""

    run: Run
    step: int | None
    start: int
    wanted: list[Wanted]
    remarks: list[str]

    def request(self) -> dict[str, Any]:
        """Return what the program is asked, in JSON's types."""
        return {"wanted": [asdict(each) for each in self.wanted]}

    def answered(self, batches: Sequence[RecordedBatch]) -> StepSamples:
        """Return the result."""
        return StepSamples(self.run, self.step, self.start, self.wanted[0].world_size, [*batches], self.remarks)


def ask_step(run: Run, step: int, *, rank: int | None = None) -> Question:
    """Return the question about the samples of a step.

    Args:
        run: the record.
        step: its number, from 1, as messages, logs and checkpoints count.
        rank: the rank whose parts are wanted; None: all.

    Raises:
        UnknownBatch: the record does not tell.
        ValueError: there is no such step or rank.
    """
    if step < 1:
        raise ValueError(f"--step {step}: expected 1 or more, the first step is 1")
    found = [(start, loaders.taken(start.get("loaders", ()), step)) for start in run.about["starts"]]
    # (Of a step that failed the batch was handed out, and the step is not counted.)
    found = [(start, each) for start, each in found if each and step <= (_last_step(start) or step) + 1]
    if not found:
        raise UnknownBatch(_why_nothing(run, step))
    certain = [each for each in found if each[1][0].is_certain]
    start, taken = (certain or found)[-1]
    remarks = []
    if len(found) > 1:
        starts = ", ".join(str(each["number"]) for each, _ in found)
        remarks.append(
            f"the step was taken in the starts {starts} of this run: this is that of start {start['number']}"
        )
    for each in taken:
        if len(each.batches) > _MOST or (each.is_one_of and len(each.batches) > 1):
            raise UnknownBatch(_several(run, step, each))
        if not each.is_certain:
            remarks.append(
                f"loader {each.loader['loader']}: inferred, since the pass was not over or is not in the record: "
                "as many batches to each step as in the steps that were noted"
            )
    return Question(run, step, start["number"], [_wanted(run, start, each, rank) for each in taken], remarks)


def ask_batch(run: Run, epoch: int, batch: int, *, loader: int | None = None, rank: int | None = None) -> Question:
    """Return a batch of an epoch of a loader in the run's last start.

    Args:
        run: the record.
        epoch: its number, from 0.
        batch: that in its epoch, from 0.
        loader: the number of the loader; None: there is only one.
        rank: the rank whose parts are wanted; None: all.

    Raises:
        UnknownBatch: the record has no such loader.
        ValueError: there is no such epoch, batch or rank.
    """
    if epoch < 0 or batch < 0:
        raise ValueError(f"--epoch {epoch} --batch {batch}: expected 0 or more, both are counted from 0")
    start = run.start
    known = {each["loader"]: each for each in start.get("loaders", ())}
    if not known:
        raise UnknownBatch(_without_loaders(run))
    if loader is None and len(known) > 1:
        names = ", ".join(f"{number} ({each['dataset']})" for number, each in known.items())
        raise ValueError(f"the run has several loaders: name one of them by --loader: {names}")
    if loader is not None and loader not in known:
        raise UnknownBatch(f"{run.name} has no loader {loader}: it has {', '.join(map(str, known))}")
    found = known[loader if loader is not None else next(iter(known))]
    return Question(run, None, start["number"], [_wanted(run, start, loaders.at(found, epoch, batch), rank)], [])


def compute(wanted: Wanted) -> list[RecordedBatch]:
    """Return batches whose samples follow from the record alone. Reads nothing but the record.

    Raises:
        UnknownBatch: they do not, or the epoch has no such batch.
    """
    if wanted.why_program:
        raise UnknownBatch(
            f"{wanted.why_program}, which the record does not repeat: with --show the program is run up to its loader "
            "in one process, which draws them again"
        )
    settings = wanted.settings
    length, seed = settings["length"], settings["seed"]
    order = (
        epoch_order(length, seed=seed, epoch=wanted.epoch)
        if settings["order"] == "shuffled"
        else sequential_order(length)
    )
    return [described(batch, wanted) for batch in cut(order, wanted)]


def cut(order: EpochOrder, wanted: Wanted) -> list[GlobalBatch]:
    """Return the batches that are wanted out of the order of their epoch.

    Raises:
        UnknownBatch: the epoch has no such batch.
    """
    size, drop_last = wanted.settings["batch_size"], wanted.settings["drop_last"]
    assert wanted.position is not None  # a batch that is cut out of an order has one size
    batches = []
    for number in wanted.batches:
        position = wanted.position + (number - wanted.first) * size
        indices = order[position : position + size]
        if not len(indices) or (drop_last and len(indices) < size):
            raise UnknownBatch(f"epoch {wanted.epoch} has no batch {number}: it has {counted(len(order), 'sample')}")
        batches.append(GlobalBatch(number, position, indices))
    return batches


def described(batch: GlobalBatch, wanted: Wanted) -> RecordedBatch:
    """Return a batch with its parts."""
    return RecordedBatch(
        loader=wanted.settings["loader"],
        order=wanted.settings["order"],
        seed=wanted.settings["seed"],
        epoch=wanted.epoch,
        batch=batch.number,
        is_certain=wanted.is_certain,
        position=batch.position,
        samples=len(batch.indices),
        parts=[part for part in parts_of(batch, wanted) if wanted.rank is None or part.rank in (wanted.rank, None)],
    )


def parts_of(batch: GlobalBatch, wanted: Wanted) -> list[Part]:
    """Return the part of each rank, or each slice that has samples, of a batch."""
    settings, ranks = wanted.settings, wanted.world_size
    shares = None if settings["shares"] is None else tuple(settings["shares"])
    division: Division = (ByNumber if batch.costs is None else ByCost)(ranks, shares)
    count = len(batch.indices)
    if settings["slices"] is None:
        places = [division.among_ranks(count, batch.costs, rank=rank)[0] for rank in range(ranks)]
        return [_part(batch, places[rank], rank=rank, slice=None) for rank in range(ranks)]
    size = settings["batch_size"] or 0
    bounds = Slicing(settings["slices"], shares=[1.0] * ranks, ahead=0, batch_size=size).cut(count)
    runs = settings["runs"]
    owner = {number: rank for rank, run in enumerate(runs or ()) for number in range(*run)}
    slices = division.in_slices(bounds, batch.costs, runs=runs or [(0, len(bounds))])
    return [_part(batch, each, rank=owner.get(number), slice=number) for number, each in enumerate(slices) if len(each)]


def _part(batch: GlobalBatch, places: Sequence[int], *, rank: int | None, slice: int | None) -> Part:
    indices = batch.indices[torch.tensor([*places], dtype=torch.int64, device="cpu")].tolist()
    return Part(rank, slice, [batch.position + place for place in places], indices)


def _wanted(run: Run, start: Mapping[str, Any], taken: StepBatches, rank: int | None) -> Wanted:
    settings = {name: value for name, value in taken.loader.items() if name not in ("passes", "until")}
    world_size = int(start["world_size"])
    if rank is not None and not 0 <= rank < world_size:
        raise ValueError(f"--rank {rank}: {run.name} had the ranks 0 to {world_size - 1} in this step")
    if settings["order"] == "stream":
        raise UnknownBatch(
            f"the dataset {settings['dataset']} is a stream: its samples have no indices, and come only by reading it "
            "from its beginning"
        )
    batches = taken.batches
    return Wanted(
        settings, world_size, taken.epoch, batches.start, batches.stop, taken.is_certain, taken.position, rank
    )


def _last_step(start: Mapping[str, Any]) -> int | None:
    """Return the number of the last step that a start has taken; None: it goes on, or was killed with its launcher."""
    return int(start["steps"]) + int(start.get("before") or 0) if "steps" in start else None


def _why_nothing(run: Run, step: int) -> str:
    starts = [start for start in run.about["starts"] if start.get("loaders")]
    if not starts:
        return _without_loaders(run)
    first = min(each["step"] for start in starts for loader in start["loaders"] for each in loader["passes"])
    last = _last_step(starts[-1])
    if step < first:
        return (
            f"{run.name} begins at step {first:,}: it was resumed there, and step {step:,} was taken by an earlier "
            "run, whose record tells of it: see lockstep runs"
        )
    if last is not None and step > last + 1:
        return f"{run.name} has no step {step:,}: the last one it has taken is {last:,}"
    return f"{run.name}: no batch of a sharded loader is known for step {step:,}"


def _without_loaders(run: Run) -> str:
    if run.about.get("node"):
        return f"{run.name} was recorded on machine {run.about['node']} of its job; rank 0's machine has the record"
    return (
        f"{run.name} has no loader: batches are known of loaders that lockstep.shard made, in runs of this "
        "version of lockstep or a later one"
    )


def _several(run: Run, step: int, taken: StepBatches) -> str:
    first, last = taken.batches.start, taken.batches.stop - 1
    which = f"the batches {first:,} to {last:,} of epoch {taken.epoch}"
    remedy = f"--epoch {taken.epoch} --batch {first} shows one of them"
    if taken.is_one_of:
        why = "the pass had not as many steps as batches, as where a GradScaler leaves steps out"
        return f"{run.name}: step {step:,} took one of {which}, but which one is not known: {sentence(why)} {remedy}"
    return f"{run.name}: step {step:,} took {which}, too many to show: {remedy}"
