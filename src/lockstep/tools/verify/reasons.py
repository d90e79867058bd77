"""Find out why a run on several ranks differs from that on one, from the ranks' records. Pure.

Note [Where a difference comes in]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A step is a chain: parameters and samples make outputs, these a loss, that gradients, and these other parameters. Up to
the first step that differs the parameters are equal, so the cause lies at the first link that differs in that step, and
each link has few causes. Samples, and the model's outputs for them, are identified by signatures, whatever their order
and however they are cut. Equality is evidence as well: if every sample has the output that it has on one rank, neither
a batch norm nor a dropout is the reason, though the model may have both.

Some causes come before the chain: two runs on one rank that differ from each other as much (then nothing is to be
learned of ranks), first parameters that differ, and gradients that differ between ranks: those that a replica averages
do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.codes import CodedEnum
from lockstep.text import counted, joined, listed
from lockstep.tools.verify.compare import (
    Distance,
    Judgement,
    Nudged,
    Stage,
    combined_loss,
    expected,
    summed_loss,
    weighted_loss,
)
from lockstep.tools.verify.records import Observation, StepNote

#: Relative differences up to which numbers count as equal: of samples, which nothing computes; of outputs, losses and
#: gradients' directions where no nudged run says what rounding does to them, and the least where one does.
_SAMPLE, _UNKNOWN, _LEAST = 1e-6, 1e-3, 1e-6
_LEAST_OUTPUT = 3e-5
#: The same for sums over a batch's samples, and for the residuals of a straight line through a batch.
_SUM = 1e-5


class Cause(CodedEnum):
    """The reasons why N ranks train something else than one."""

    UNSEEDED = "random numbers without a seed", "unseeded"
    OPERATION = "an operation that is not deterministic", "nondeterministic-operation"
    START = "initial parameters that depend on the number of ranks", "first-parameters-by-rank-count"
    OUTSIDE = "a parameter outside the replica", "parameter-outside-replica"
    BATCH_PER_RANK = "a batch size per rank", "batch-per-rank"
    DATA = "data that depends on the rank", "data-by-rank"
    APART = "random numbers drawn apart", "random-numbers-apart"
    PER_RANK = "random numbers drawn per rank", "random-numbers-per-rank"
    DROPOUT = "dropout per rank", "dropout-per-rank"
    BATCH_NORM = "plain batch norm", "batch-norm-per-rank"
    MIXED = "samples mixed within each rank's part", "samples-mixed-per-rank"
    STATISTICS = "statistics of each rank's part of the batch", "statistics-per-rank"
    PADDED = "samples padded to the longest of each rank's part", "padded-per-rank"
    TOGETHER = "samples that depend on each other", "samples-depend-on-each-other"
    SUM = "a loss that is a sum, or divided by the number of ranks", "loss-is-sum"
    LOSS = "a loss that is not a mean over samples", "loss-not-mean-over-samples"
    GATHERED = "a loss over what is gathered from all ranks", "loss-over-gathered"
    WEIGHTS = "ranks of unequal batches that count alike", "unequal-batches-alike"
    SCALE = "gradients that are scaled by the number of ranks", "gradients-scaled"
    OPTIMIZER = "options of the optimizer that depend on the number of ranks", "optimizer-options-by-rank-count"
    OPTIONS = "options of the optimizer that differ between the ranks", "optimizer-options-by-rank"
    ALONE = "a step that is not the same on all ranks", "step-not-on-all-ranks"
    LAYOUT = "other parameters in the optimizer", "other-parameters"
    UNKNOWN = "unknown", "cause-unknown"


#: Numbers that each rank draws for itself, as it should: no mistake, but one may lie beneath.
_RANDOM = {Cause.DROPOUT, Cause.PER_RANK}


@dataclass(frozen=True)
class Reason:
    """Why runs differ."""

    cause: Cause
    #: The evidence, as a sentence.
    evidence: str
    #: The advice, as a sentence.
    advice: str
    #: True if the evidence suffices to explain the difference; False: it is likely.
    sure: bool = True

    @property
    def is_random(self) -> bool:
        """Whether the ranks differ in random numbers that each draws for itself."""
        return self.cause in _RANDOM


def explain(
    judgement: Judgement,
    difference: Distance,
    repeat: Distance | None = None,
    operations: Sequence[str] = (),
    *,
    nudged: Sequence[Nudged] = (),
) -> list[Reason]:
    """Return why a run on several ranks differs, the likeliest reason first; there is always one.

    Args:
        judgement: the verdict that they differ, with the step since which they do.
        difference: how far that run is from the one on one rank.
        repeat: how far a second run on one rank is from the first.
        operations: those of a run on one rank that torch calls not deterministic.
        nudged: how far rounding takes runs apart, as for :func:`compare.judge`.
    """
    if judgement.stage is Stage.LAYOUT:
        return [_layout(difference)]
    one, many = difference.first, difference.other
    last = min(one.steps, many.steps)
    step = min(max(judgement.step or 1, 1), last)
    note, notes = one.at(step)[0], many.at(step)
    repeated = list(_repeated(judgement, repeat, step, operations))
    if repeated:
        return repeated
    found = [
        *_start(judgement, difference, step),
        *_outside(many, step),
        *_samples(one, many, step),
    ]
    if not found and judgement.stage is Stage.APART:
        return [_alone(notes)]
    if not found and judgement.stage is not Stage.COUNT:
        found = _outputs(difference, step, nudged) or _loss(difference, step, nudged) or _gradient(difference, step)
        found = found or _all_alike(judgement, difference, nudged)
    if not any(each.cause is Cause.OPTIMIZER for each in found):
        found += _options(note, notes, sure=judgement.stage is Stage.UPDATE)
    if judgement.stage is Stage.UPDATE:
        found.sort(key=lambda each: each.cause is not Cause.OPTIMIZER)
    return found or [_unknown(judgement, difference)]


# Before the chain ----------------------------------------------------------------------------------------------------


def _repeated(judgement: Judgement, repeat: Distance | None, step: int, operations: Sequence[str]) -> Iterable[Reason]:
    """Check whether two runs on one rank differ as well."""
    if repeat is None or repeat.same_bits or not repeat.steps:
        return
    first = next((each.step for each in repeat.steps if not each.same_bits), None)
    until = [each for each in repeat.steps if each.step <= step]
    most = max((max(each.gradient, each.parameter) for each in until), default=0.0)
    if first is None or first > step or most <= judgement.allowed:
        return
    one, again = repeat.first.first, repeat.other.first
    names = [
        name
        for name in ("python", "numpy", "torch")
        if _drawn(repeat.first, name) and one.steps[0].generators.get(name) != again.steps[0].generators.get(name)
    ]
    what = f"two runs on one rank differ from step {first} on, by up to {most:.1e} of a step's gradients"
    if names:
        yield Reason(
            Cause.UNSEEDED,
            f"{what}, and {joined(_GENERATORS[name] for name in names)} had other states in them when step 1 began",
            "seed them at the top of the script: lockstep.init() seeds Python's, NumPy's and torch's",
        )
        return
    if not _same_samples(one.steps[first - 1], [again.steps[first - 1]]):
        yield Reason(
            Cause.UNSEEDED,
            f"{what}, and the model got other samples in step {first}",
            "seed the generators that draw and change the samples; a generator of your own needs a seed as well",
        )
        return
    named = f": {listed(operations, most=4)}" if operations else ""
    yield Reason(
        Cause.OPERATION,
        f"{what}, with the same samples and numbers" + (f"; torch names{named}" if named else ""),
        "torch.use_deterministic_algorithms(True) takes deterministic ones if torch has them; verify again after that",
        sure=bool(operations),
    )


def _start(judgement: Judgement, difference: Distance, step: int) -> Iterable[Reason]:
    if judgement.stage is not Stage.START:
        return
    names = _apart(difference.other)
    drawn = f"; {joined(_GENERATORS[name] for name in names)} differ between the ranks" if names else ""
    yield Reason(
        Cause.APART if names else Cause.START,
        f"before step {step} the parameters differ by {judgement.relative:.1e}{drawn}",
        "draw initial parameters from the same seed on any number of ranks",
        sure=not names,
    )


def _outside(many: Observation, step: int) -> Iterable[Reason]:
    """Look for gradients that differ between ranks."""
    for each in range(1, step + 1):
        notes = many.at(each)
        count = len(notes[0].gradients)
        apart = [i for i in range(count) if len({note.gradients[i] for note in notes}) > 1]
        if not apart:
            continue
        names = many.optimizer(each).names
        if len(apart) == sum(1 for gradient in notes[0].gradients if gradient is not None) and len(apart) > 1:
            evidence = f"no gradient is averaged: in step {each} all differ between the ranks"
            advice = "call lockstep.replicate(model), and leave no_sync() before the last backward of a step"
        else:
            evidence = f"in step {each} these have other gradients on each rank: {listed([names[i] for i in apart])}"
            advice = "replicate the module that holds them as well, or make them part of the model that is replicated"
        yield Reason(Cause.OUTSIDE, evidence, advice)
        return


def _alone(notes: Sequence[StepNote]) -> Reason:
    """Look at a step before or after which the ranks' parameters differ, though their gradients are equal."""
    first = notes[0]
    if len({tuple(note.before) for note in notes}) > 1:
        return Reason(
            Cause.ALONE,
            f"all ranks have the same parameters after step {first.step - 1}, and others when step {first.step} begins",
            "look for a line that writes to the model on one rank alone, as one under `if rank == 0`, or with values "
            "that each rank has of its own: let all ranks write the same (world.broadcast)",
        )
    for note in notes[1:]:
        for group, (ours, theirs) in enumerate(zip(first.options, note.options, strict=False)):
            other = [name for name in ours if name in theirs and ours[name] != theirs[name]]
            if other:
                rank = notes.index(note)
                words = [f"{name} is {ours[name]} on rank 0 and {theirs[name]} on rank {rank}" for name in other]
                return Reason(
                    Cause.OPTIONS,
                    f"in step {first.step} all ranks have the same gradients, and in group {group} {listed(words)}",
                    "give the optimizer the same options on every rank, and let a scheduler use a value that is the "
                    "same on all ranks (world.mean of a validation loss)",
                )
    return Reason(
        Cause.ALONE,
        f"in step {first.step} all ranks have the same gradients, and other parameters after it",
        "look for code that one rank runs alone: a step that is left out, a line under `if rank == 0` that writes to "
        "the model, an optimizer that draws random numbers or uses the rank's own loss (LBFGS: return world.mean(loss) "
        "from its closure)",
        sure=False,
    )


def _layout(difference: Distance) -> Reason:
    one, many = difference.first.first.optimizers, difference.other.first.optimizers
    counts = [sum(len(each.shapes) for each in optimizers) for optimizers in (one, many)]
    return Reason(
        Cause.LAYOUT,
        f"the optimizers hold {counts[0]} parameters on one rank and {counts[1]} on {difference.other.world_size}, or "
        "ones of other shapes, or step in another order",
        "parameters that are held in parts (FSDP, tensor parallelism) can't be compared; else build the same model",
    )


# Samples -------------------------------------------------------------------------------------------------------------


def _samples(one: Observation, many: Observation, step: int) -> list[Reason]:
    """Look whether the model got the same samples."""
    for each in range(1, step + 1):
        ours, theirs = one.at(each)[0], many.at(each)
        count, counts = _count(ours), [_count(rank) for rank in theirs]
        if not count or _whole_batch_each(ours, theirs) or _is_cut_elsewhere(ours, theirs):
            continue
        total, ranks = sum(counts), many.world_size
        if total == ranks * count and all(n == count for n in counts):
            return [
                Reason(
                    Cause.BATCH_PER_RANK,
                    f"a step trains on {total} samples on {ranks} ranks, {count} on each, and on {count} on one rank",
                    "divide the batch size by the world size, or let lockstep.shard cut the global batch",
                )
            ]
        if _same_samples(ours, theirs):
            continue
        if total != count:
            return [_other_count(each, ranks, count, total)]
        worked = _worked_on(one, many, each)
        if worked is not None:
            return [worked]
        return [_other_samples(one, many, each, ours, theirs)]
    return []


def _worked_on(one: Observation, many: Observation, step: int) -> Reason | None:
    """Look whether samples differ because something works on each rank's part of a batch as a whole.

    A sample's signature is linear in it. So mixing the samples of a batch (each comes as often as before) keeps the sum
    of their signatures; subtracting the mean makes the sum 0; and shifting and scaling all of them alike puts the
    signatures on a straight line over those on one rank, where the factors differ.
    """
    note, notes = one.at(step)[0], many.at(step)
    evidence = f"in step {step} {_unmatched(note, notes)} samples of {_count(note)} are not those on one rank"
    if _apart(many, until=step):
        return None
    ours, theirs = _of_first(note), [_of_first(each) for each in notes]
    size = max((batch.size for each in (note, *notes) for batch in each.batches), default=0.0)
    padded = _padded(note, notes, evidence)
    if padded is not None or not size or len(ours) != sum(map(len, theirs)):
        return padded
    limit = _SUM * size * math.sqrt(len(ours))
    sums = [math.fsum(each) for each in (ours, *theirs)]
    centred = (
        "subtract the mean of the data set, computed once, or of the global batch (world.all_reduce of sums and "
        "counts); lockstep.shard(loader, slices=8) takes those of the same slices on any number of ranks"
    )
    if all(abs(each) <= limit for each in sums):
        return Reason(
            Cause.STATISTICS,
            f"{evidence}, and those of each rank have a mean of 0: they are normalised by the mean of the rank's own "
            "part",
            centred,
        )
    if abs(sums[0] - math.fsum(sums[1:])) <= limit:
        return Reason(
            Cause.MIXED,
            f"{evidence}, and their sum is the same: samples are mixed (mixup, cutmix) with others of the rank's own "
            "part",
            "nothing is wrong with it: samples meet others of a smaller batch. Mix in the dataset, which can reach all "
            "samples, or cut slices (lockstep.shard(loader, slices=8)): within them any number of ranks mixes alike",
        )
    if not _drew(one, many, step) and _on_lines(ours, theirs):
        return Reason(
            Cause.STATISTICS,
            f"{evidence}, and each rank's are those on one rank, shifted or scaled by a number of its own: by a mean, "
            "a standard deviation or a maximum of the rank's part, if not by what depends on the rank itself",
            centred,
        )
    return None


def _on_lines(ours: Sequence[float], theirs: Sequence[Sequence[float]]) -> bool:
    """Return whether each rank's samples are one rank's in its order, times a number and plus another."""
    starts = np.cumsum([0, *map(len, theirs)])
    ways = [
        [ours[starts[i] : starts[i + 1]] for i in range(len(theirs))],
        [ours[i :: len(theirs)] for i in range(len(theirs))],
    ]
    return any(all(_on_line(*pair) for pair in zip(way, theirs, strict=True)) for way in ways)


def _on_line(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    if len(ours) != len(theirs) or len(ours) < 4:  # through fewer there is always one, or nearly
        return False
    a, b = np.asarray(ours), np.asarray(theirs)
    a, b = a - a.mean(), b - b.mean()
    rest = b - a * float(a @ b) / max(float(a @ a), 1e-300)
    return bool(np.linalg.norm(rest) <= 10 * _SUM * np.linalg.norm(b))


def _padded(note: StepNote, notes: Sequence[StepNote], evidence: str) -> Reason | None:
    shapes = {str(batch.shape[1:]) for each in (note, *notes) for batch in each.batches}
    if len(shapes) < 2 or not all(len(each.batches) == len(note.batches) for each in notes):
        return None
    return Reason(
        Cause.PADDED,
        f"{evidence}, and a sample is of shape {joined(sorted(shapes), 'or')}",
        "padding to the longest sample of a batch gives other shapes on each rank, which is not a mistake if a mask "
        "leaves padding out: to verify the rest, pad to a fixed length",
        sure=False,
    )


def _drew(one: Observation, many: Observation, step: int) -> str:
    """Return in words which generators were drawn from between the loader and the model, for each rank's part."""
    if any(batch.drew_before for each in many.at(step) for batch in each.batches):
        return "torch's generator"
    moved = [
        name
        for name in ("python", "numpy")
        if _drawn(many, name) and _states(one, name, step) != _states(many, name, step)
    ]
    return joined(_GENERATORS[name] for name in moved) if moved else ""


def _other_count(step: int, ranks: int, count: int, total: int) -> Reason:
    more = total > count
    why = "a sampler repeats samples so that all ranks have as many" if more else "a sampler drops samples"
    return Reason(
        Cause.DATA,
        f"step {step} trains on {total} samples on {ranks} ranks, and on {count} on one: {why}?",
        "let lockstep.shard cut the batch: it repeats and drops no sample, and weights each rank by its samples; or "
        "drop the last batch in both",
    )


#: The advice by which any number of ranks draws the same.
_DRAW_ELSEWHERE = (
    "nothing is wrong with it: the ranks' numbers are as random. For equal bits draw what belongs to a sample in the "
    "dataset, where lockstep.shard seeds it by the sample's position, or cut slices (lockstep.shard(loader, "
    "slices=8)), in which any number of ranks draws the same"
)


def _other_samples(one: Observation, many: Observation, step: int, note: StepNote, notes: Sequence[StepNote]) -> Reason:
    missing, count = _unmatched(note, notes), _count(note)
    evidence = f"in step {step} the model got {missing} samples of {count} that are not those on one rank"
    names = _apart(many, until=step)
    if names:
        which = joined(_GENERATORS[name] for name in names)
        return Reason(
            Cause.APART,
            f"{evidence}, and {which} had other states on each rank",
            "seed it alike on all ranks, draw from it on all of them, and draw what belongs to a sample in the "
            "dataset, where lockstep.shard seeds it by the sample's position",
        )
    drawn_from = _drew(one, many, step)
    if drawn_from:
        return Reason(
            Cause.PER_RANK,
            f"{evidence}, and numbers were drawn from {drawn_from} for each rank's part between the loader and the "
            "model",
            _DRAW_ELSEWHERE,
        )
    return Reason(
        Cause.DATA,
        evidence,
        "have all ranks read the same data in the same order, and let lockstep.shard (or a DistributedSampler) cut it; "
        "and between the loader and the model compute nothing from the rank's part of a batch as a whole",
    )


# Outputs -------------------------------------------------------------------------------------------------------------


def _outputs(difference: Distance, step: int, nudged: Sequence[Nudged]) -> list[Reason]:
    """Look whether the model's outputs for each sample are those on one rank."""
    note, notes = difference.first.at(step)[0], difference.other.at(step)
    size = max((batch.output_size for batch in note.batches if batch.outputs), default=0.0)
    allowed = expected(difference, nudged, step, _most_apart)
    known, differ = _compare_outputs(
        note, notes, _UNKNOWN * size if allowed is None else max(allowed, _LEAST_OUTPUT * size)
    )
    if known and not differ:
        return []
    found = []
    drew = [batch for each in notes for batch in each.batches if batch.drew]
    seen = f"{differ} of {known} samples have another output than on one rank" if known else "the outputs are not known"
    norms, dropouts = notes[0].norms, notes[0].dropouts
    if norms:
        found.append(
            Reason(
                Cause.BATCH_NORM,
                f"{seen}, and each rank takes the statistics of its own part in {listed(norms, most=4)}",
                "lockstep.convert_sync_batchnorm(model) takes those of the global batch, and lockstep.shard(loader, "
                "slices=8) those of the same slices on any number of ranks",
                sure=bool(known),
            )
        )
    if drew:
        where = f", in {listed(dropouts, most=4)}" if dropouts else ""
        found.append(
            Reason(
                Cause.DROPOUT,
                f"{seen}, and numbers are drawn in the forward{where}: each rank draws its own, as it should, and so "
                "others than one rank does",
                "nothing is wrong with it: the ranks' numbers are as random. For equal bits cut slices "
                "(lockstep.shard(loader, slices=8)), in which any number of ranks draws the same",
                sure=bool(known),
            )
        )
    if known and not found:
        found.append(
            Reason(
                Cause.TOGETHER,
                f"{seen}, though nothing is drawn and no batch norm takes statistics",
                "the output of a sample depends on the others of its batch, or on the rank: look for means over the "
                "batch, padding to its longest sample, and buffers that each rank keeps",
                sure=False,
            )
        )
    return found


_WEIGH = (
    "the loss is a mean over something else than samples (tokens, pixels that are not masked, classes with weights): "
    "pass the number or the weights (docs/weights.md)"
)


def _loss(difference: Distance, step: int, nudged: Sequence[Nudged]) -> list[Reason]:
    """Look at the loss; samples and outputs are those of one rank."""
    note, notes = difference.first.at(step)[0], difference.other.at(step)
    combined, weighted = combined_loss(note, notes), weighted_loss(notes)
    if combined is None or weighted is None:
        return []
    one, ranks = combined[0], len(notes)
    allowed = _loss_allowed(difference, step, nudged, one)
    if abs(one - weighted) <= allowed:
        return []
    if any(loss.drew for each in notes for loss in each.losses):
        return [
            Reason(
                Cause.PER_RANK,
                f"in step {step} samples and outputs are those of one rank, the loss is {weighted:.6g} in place of "
                f"{one:.6g}, and numbers were drawn from torch's generator between the model and the backward",
                _DRAW_ELSEWHERE,
            )
        ]
    total, scaled = summed_loss(notes), _scaled(difference, step)
    if abs(one - total) <= allowed:
        return [
            Reason(
                Cause.SUM,
                f"in step {step} the losses of {ranks} ranks add up to {total:.6g}, which is that of one rank; "
                f"their mean is {weighted:.6g}{scaled}: is it a sum over samples, or divided by the number of ranks?",
                'take the mean over samples (reduction="mean"), and leave dividing by the world size out: gradients '
                "are averaged; if it must be a sum, see docs/weights.md",
            )
        ]
    if abs(one * ranks - weighted) <= ranks * allowed:
        return [
            Reason(
                Cause.SCALE,
                f"in step {step} the ranks' losses come to {weighted:.6g}, {ranks} times that of one rank{scaled}: is "
                "the loss multiplied by the number of ranks?",
                "leave the factor out: the gradients are averaged over the ranks, which gives those of one rank",
            )
        ]
    names = _apart(difference.other, until=step)
    if names:
        return [
            Reason(
                Cause.APART,
                f"in step {step} samples and outputs are those of one rank, the loss is {weighted:.6g} in place of "
                f"{one:.6g}, and {joined(_GENERATORS[name] for name in names)} had other states on each rank",
                "seed it alike on all ranks, and draw from it on all of them",
                sure=False,
            )
        ]
    seen = [note for at in range(1, step + 1) for note in difference.other.at(at)]
    sums, counts = dict.fromkeys(line for note in seen for line in note.sums), sorted({_count(note) for note in seen})
    if sums and len(counts) > 1:
        return [
            Reason(
                Cause.GATHERED,
                f"in step {step} samples and outputs are those of one rank, the loss is {weighted:.6g} in place of "
                f"{one:.6g}; up to there the ranks add up at {listed([*sums], most=2)}, and had "
                f"{joined(map(str, counts))} samples",
                "a mean of the ranks' means is not the mean over samples if these are not equally many: take it of the "
                "rows of lockstep.gathered (docs/gathered.md) or by world.mean, or keep batches equal (drop_last=True)",
                sure=False,
            )
        ]
    return [
        Reason(
            Cause.LOSS,
            f"in step {step} the ranks' losses, weighed by their samples, come to {weighted:.7g}, and that of one rank "
            f"is {one:.7g}{scaled}",
            _WEIGH,
        )
    ]


def _loss_allowed(difference: Distance, step: int, nudged: Sequence[Nudged], one: float) -> float:
    """Return by how much the loss may differ by rounding."""

    def gap(run: Distance, at: int) -> float | None:
        return run.steps[at - 1].loss

    allowed = expected(difference, nudged, step, gap)
    if allowed is None:
        return _UNKNOWN * max(abs(one), 1e-12)
    spacing = max((loss.spacing for loss in difference.first.at(step)[0].losses), default=0.0)
    return max(allowed, max(_LEAST, 2 * spacing) * abs(one))


def _gradient(difference: Distance, step: int) -> list[Reason]:
    """Look at the gradients; the loss is that of one rank."""
    notes = difference.other.at(step)
    counts = [_count(each) for each in notes]
    if notes[0].gathers:
        where = f"in step {step} the ranks gather at {listed(notes[0].gathers, most=2)} what the loss is made of"
        if len({*counts}) > 1:
            return [
                Reason(
                    Cause.GATHERED,
                    f"{where}, and they have {joined(map(str, counts))} samples",
                    "each rank's gradients are weighted by its own samples, also those that it sends to the samples of "
                    "other ranks: gather with lockstep.gathered (docs/gathered.md), call world.weigh(1) before the "
                    "backward, or keep batches equal (drop_last=True)",
                )
            ]
        return [
            Reason(
                Cause.GATHERED,
                f"{where}, and the loss is that of one rank{_scaled(difference, step)}",
                "torch.distributed.all_gather passes no gradient on to other ranks, and "
                "torch.distributed.nn.functional.all_gather adds up theirs: lockstep.gathered does what a loss of the "
                "whole batch needs (docs/gathered.md)",
                sure=False,
            )
        ]
    if len({*counts}) > 1 and all(loss.local is None for each in notes for loss in each.losses):
        return [
            Reason(
                Cause.WEIGHTS,
                f"in step {step} the ranks have {joined(map(str, counts))} samples, and torch averages their gradients "
                "as if they had the same number",
                "let lockstep.shard cut the batch, which weights by the shares; or keep batches equal (drop_last=True)",
            )
        ]
    scale = _scale(difference, step)
    if scale is not None:
        ranks = {float(len(notes)): ": are they multiplied by the number of ranks?"}
        ranks[1 / len(notes)] = ": are they divided by the number of ranks?"
        guess = next((words for factor, words in ranks.items() if abs(scale - factor) <= _UNKNOWN * factor), "")
        return [
            Reason(
                Cause.SCALE,
                f"in step {step} samples, outputs and loss are those of one rank{_scaled(difference, step)}{guess}",
                "the gradients are averaged over the ranks already: neither divide nor multiply by the world size",
            )
        ]
    return []


def _all_alike(judgement: Judgement, difference: Distance, nudged: Sequence[Nudged]) -> list[Reason]:
    """Look whether all ranks have the same loss, so that it says nothing of how the mean is weighed."""
    step = judgement.step
    if judgement.stage is not Stage.GRADIENT or step is None:
        return []
    notes = difference.other.at(step)
    values = [loss.value for each in notes for loss in each.losses if loss.value is not None]
    if (
        len(values) > 1
        and not _whole_batch_each(difference.first.at(step)[0], notes)
        and max(values) - min(values) <= _loss_allowed(difference, step, nudged, values[0])
    ):
        return [
            Reason(
                Cause.LOSS,
                f"in step {step} all ranks have the loss {values[0]:.6g}, as if the last layer begins at 0, so the "
                "loss can't show over what the mean is taken; the gradients differ",
                _WEIGH,
                sure=False,
            )
        ]
    return []


def _options(note: StepNote, notes: Sequence[StepNote], *, sure: bool) -> list[Reason]:
    for group, (ours, theirs) in enumerate(zip(note.options, notes[0].options, strict=False)):
        other = [name for name in ours if name in theirs and ours[name] != theirs[name]]
        if other:
            words = [f"{name} is {theirs[name]} on {len(notes)} ranks and {ours[name]} on one" for name in other]
            return [
                Reason(
                    Cause.OPTIMIZER,
                    f"in step {note.step}, group {group}: {listed(words)}",
                    "the global batch is the same on any number of ranks, so the options are as well",
                    sure=sure,
                )
            ]
    return []


def _unknown(judgement: Judgement, difference: Distance) -> Reason:
    one, many = difference.first, difference.other
    if judgement.stage is Stage.COUNT:
        return Reason(
            Cause.DATA,
            _steps_in_words(one, many),
            "look at what ends the loop: the length of a loader, or a condition that depends on the rank",
            sure=False,
        )
    stage = "" if judgement.stage is None else f": {judgement.stage.value}"
    return Reason(
        Cause.UNKNOWN,
        f"samples, outputs, losses and generators are those of one rank; what differs first is{stage}",
        "look at what changes gradients or parameters between backward() and the end of step(): clipping, hooks, "
        "penalties, averages",
        sure=False,
    )


def _steps_in_words(one: Observation, many: Observation) -> str:
    taken = many.steps_of_ranks
    if len({*taken}) == 1:
        return f"{many.world_size} ranks take {many.steps} steps, and one takes {one.steps}"
    each = listed([f"rank {rank} takes {counted(count, 'step')}" for rank, count in enumerate(taken)])
    return f"{each}, and one rank alone takes {one.steps}"


# What the notes say --------------------------------------------------------------------------------------------------

_GENERATORS = {
    "python": "Python's generator",
    "numpy": "NumPy's generator",
    "torch": "torch's generator",
}


def _drawn(run: Observation, generator: str) -> bool:
    """Return whether a generator was seeded or drawn from in the script, on some rank."""
    for rank in run.ranks:
        states = [note.generators.get(generator) for note in rank.steps]
        if {*states} != {rank.about["generators"].get(generator)}:
            return True
    return False


def _apart(many: Observation, *, until: int = 1) -> list[str]:
    """Return the generators that are used, and whose states differ between the ranks in a step up to ``until``."""
    found = []
    for name in _GENERATORS:
        states = [{note.generators.get(name) for note in many.at(step)} for step in range(1, until + 1)]
        if any(len(each) > 1 for each in states) and _drawn(many, name):
            found.append(name)
    return found


def _states(run: Observation, generator: str, step: int) -> str | None:
    return run.at(step)[0].generators.get(generator)


def _count(note: StepNote) -> int:
    """Return how many samples the model got in a step: the first one, where there are several."""
    if not note.batches:
        return 0
    first = note.batches[0].module
    return sum(batch.shape[0] for batch in note.batches if batch.module == first)


def whole_batch_each(one: Observation, many: Observation) -> bool:
    """Return whether every rank has computed the whole global batch in every step, all of them the same."""
    steps = min(one.steps, many.steps)
    return bool(steps and _count(one.at(1)[0])) and all(
        _whole_batch_each(one.at(step)[0], many.at(step)) for step in range(1, steps + 1)
    )


def _whole_batch_each(note: StepNote, notes: Sequence[StepNote]) -> bool:
    return all(_count(each) == _count(note) and _same_samples(note, [each]) for each in notes)


def _is_cut_elsewhere(note: StepNote, notes: Sequence[StepNote]) -> bool:
    """Return whether the ranks have parts of one rank's batch that its first dimension does not tell, as where that is
    time (``nn.LSTM``, ``nn.Transformer``): the loader's shares say so, or another dimension that makes up the whole.

    Signatures are those of rows of the first dimension, and say nothing of samples there.
    """
    return _is_cut_by_shares(note, notes) or _is_cut_across(note, notes)


def _is_cut_by_shares(note: StepNote, notes: Sequence[StepNote]) -> bool:
    losses = [loss for each in (note, *notes) for loss in each.losses]
    if not losses or any(loss.local is None or loss.whole is None for loss in losses):
        return False
    whole = sum(loss.whole or 0.0 for loss in note.losses)
    local = sum(loss.local or 0.0 for each in notes for loss in each.losses)
    count = _count(note)
    same = all(sum(loss.whole or 0.0 for loss in each.losses) == whole for each in notes)
    return same and local == whole and (count != whole or all(_count(each) == count for each in notes))


def _is_cut_across(note: StepNote, notes: Sequence[StepNote]) -> bool:
    found = [[batch.shape for batch in each.batches] for each in (note, *notes)]
    if len({len(each) for each in found}) > 1:
        return False
    return all(_is_cut_in_another(whole, parts) for whole, *parts in zip(*found, strict=True))


def _is_cut_in_another(whole: Sequence[int], parts: Sequence[Sequence[int]]) -> bool:
    if any(len(each) != len(whole) for each in parts) or sum(each[0] for each in parts) == whole[0]:
        return False
    # (The first dimension may differ as well: sequences are padded to the longest of each part.)
    apart = [i for i in range(1, len(whole)) if any(each[i] != whole[i] for each in parts)]
    return len(apart) == 1 and sum(each[apart[0]] for each in parts) == whole[apart[0]]


def _same_samples(note: StepNote, notes: Sequence[StepNote]) -> bool:
    return _unmatched(note, notes) == 0 and _count(note) == sum(map(_count, notes))


def _unmatched(note: StepNote, notes: Sequence[StepNote]) -> int:
    """Count the samples of ``notes``, all ranks', that one rank's ``note`` does not have: of the first module."""
    ours, theirs = sorted(_of_first(note)), sorted(each for rank in notes for each in _of_first(rank))
    size = max((batch.size for each in (note, *notes) for batch in each.batches), default=0.0)
    i = missing = 0
    for value in theirs:
        while i < len(ours) and ours[i] < value - _SAMPLE * size:
            i += 1
        if i < len(ours) and abs(ours[i] - value) <= _SAMPLE * size:
            i += 1
        else:
            missing += 1
    return missing


def _of_first(note: StepNote) -> list[float]:
    if not note.batches:
        return []
    first = note.batches[0].module
    return [value for batch in note.batches if batch.module == first for value in batch.samples]


def _compare_outputs(note: StepNote, notes: Sequence[StepNote], limit: float) -> tuple[int, int]:
    """Return for how many samples the outputs are known, and how many of them differ from one rank's by more than
    ``limit``."""
    gaps = _output_gaps(note, notes)
    return len(gaps), sum(1 for gap in gaps if not gap <= limit)


def _most_apart(difference: Distance, step: int) -> float | None:
    """Return by how much a sample's output differs at most."""
    return max(_output_gaps(difference.first.at(step)[0], difference.other.at(step)), default=None)


def _output_gaps(note: StepNote, notes: Sequence[StepNote]) -> list[float]:
    """Return by how much each sample's output differs from that on one rank; empty if that is not known.

    Samples are told by their signatures; where several have the same, their outputs are compared in order of size.
    """
    ours, theirs = sorted(_pairs([note])), sorted(_pairs(notes))
    if len(ours) != len(theirs):
        return []
    return [0.0 if a == b else abs(a - b) for (_, a), (_, b) in zip(ours, theirs, strict=True)]


def _pairs(notes: Sequence[StepNote]) -> list[tuple[float, float]]:
    found = []
    for note in notes:
        first = note.batches[0].module if note.batches else ""
        for batch in note.batches:
            if batch.module == first and len(batch.outputs) == len(batch.samples):
                found += [(round(sample, 6), out) for sample, out in zip(batch.samples, batch.outputs, strict=True)]
    return found


def _scaled(difference: Distance, step: int) -> str:
    """Return words about the number that all gradients are multiplied by, or none if they are not."""
    scale = _scale(difference, step)
    return "" if scale is None else f"; the gradients are {scale:.4g} times those of one rank"


def _scale(difference: Distance, step: int) -> float | None:
    ours, theirs = difference.first.numbers(step), difference.other.numbers(step)
    names = [name for name in ours if name.startswith("g") and name in theirs]
    if not names:
        return None
    a = np.concatenate([ours[name].ravel().astype(np.float64) for name in names])
    b = np.concatenate([theirs[name].ravel().astype(np.float64) for name in names])
    square = float(a @ a)
    if not square or not math.isfinite(square) or not np.all(np.isfinite(b)):
        return None
    scale = float(a @ b) / square
    rest = float(np.linalg.norm(b - scale * a)) / math.sqrt(square)
    return scale if rest < _UNKNOWN * abs(scale) and abs(scale - 1) > _UNKNOWN else None
