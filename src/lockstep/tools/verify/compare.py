"""Measure how far two observed runs are apart, step by step, and judge whether rounding explains it. Pure.

Note [Nudged runs]
~~~~~~~~~~~~~~~~~~
Two runs that do the same arithmetic in another order differ by rounding, and training makes the difference grow: by how
much depends on the model, its data and its optimizer, not on a constant. So it is measured. A further run on one rank
is nudged: before each step every parameter is multiplied by 1 + s or 1 - s, at random, where s is the distance between
neighbouring numbers of the coarsest type that the model computes in (for float32 1.2e-7). A sum in another order
changes a gradient by that much, so the nudged run's gradients and parameters differ from those of the first run about
as much as by rounding alone, tensor by tensor: also a tensor whose gradient is nothing but rounding (a bias in front of
a batch norm) differs wholly there, and may differ wholly here.

A step of a run on N ranks is within rounding if, for each tensor,

    difference of its gradient  <=  FACTOR * A * (what the nudged run has differed by in any step so far),

and likewise for what the step added to the parameters. A = max(1, d / e), where d is how far the parameters of the N
ranks were from those of one when the step began, and e the same of the nudged run: where they have grown apart further,
so may gradients. So each step is judged by the difference that it adds, and earlier differences count once, in the step
where they arose. (A script that does not repeat itself on one rank is judged without nudged runs, which would learn the
wrong thing.) FACTOR allows for chance: two runs that differ by rounding differ from each other in size as well, by a
factor of three or so; a mistake changes a gradient by a hundredth of itself or more, five orders above a nudge.

Where the difference is beyond that, but small (less than ``CLOSE`` of the gradient), it may be a step in the function
itself: a ReLU's input that rounding takes across 0, or Adam with a gradient near 0, whose sign decides. So a second run
is nudged, by 256 times as much, which meets hundreds of times as many such steps, and the difference may be
``FACTOR_FAR`` times its. Where runs have grown so far apart that gradients differ by more than ``CLOSE``, and rounding
would explain half of a gradient, nothing can be said any more, and the verdict says from which step on. (Half of what
that gradient is where it is largest: one that is 0 but for rounding in a step says nothing of the next.)

Note [What the loss is]
~~~~~~~~~~~~~~~~~~~~~~~
The ranks' losses make that of one rank in more than one way: as a mean weighted by samples, as a plain mean where a
script has weighted them itself, or as all the slices' losses one after the other. The gradient trains, not the loss. So
a loss counts as equal if any of these fits, it decides nothing by itself, and if none fits a remark says so beside the
verdict. Where gradients differ, the loss says whether the difference came in before it or after: for that it is
compared as sharply as the nudged run allows. A model that has learned nothing yet has nearly the same loss for all
samples, so that a mean over something else than samples moves the loss by a thousandth, and the gradient by a third.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lockstep.codes import CodedEnum
from lockstep.text import counted, joined, listed
from lockstep.tools.verify.records import Array, Loss, Observation, StepNote

#: See Note [Nudged runs].
FACTOR, FACTOR_FAR = 64.0, 4.0
#: The second nudge, as a multiple of the first, and the relative difference below which it is worth a run.
FAR, CLOSE = 256.0, 0.05
#: How many times as much as in a nudged run a loss or an output may differ, and the steps that are looked at for it.
#: They only say where a difference comes in, once there is one.
FACTOR_SEEN, _SAMPLE_STEPS = 8.0, 5
#: The fraction of a gradient that rounding may explain; where it would explain more, nothing can be said.
_HALF = 0.5


class FindingKind(CodedEnum):
    """The result of a verification."""

    BITS = "equal bits", "equal-bits"
    ROUNDING = "equal within rounding", "equal-within-rounding"
    RANDOM = "equal but for random numbers of each rank", "equal-but-for-random-numbers"
    DIFFERENT = "different", "different"


class Stage(CodedEnum):
    """Where in a step runs begin to differ."""

    START = "the parameters before the first step", "differs-at-start"
    APART = "the parameters of the ranks among themselves", "differs-between-ranks"
    GRADIENT = "a gradient", "differs-in-gradient"
    UPDATE = "what the optimizer made of equal gradients", "differs-in-update"
    COUNT = "the number of steps", "differs-in-step-count"
    LAYOUT = "the parameters that the optimizer holds", "differs-in-layout"


@dataclass(frozen=True)
class StepDifference:
    """The difference between a step of one run and that of another; tensors in the optimizer's order, root mean
    squares."""

    step: int
    optimizer: int
    #: True if all ranks have the first run's bits, of gradients and parameters.
    same_bits: bool
    #: True if the other run's ranks have equal parameters when the step begins; the same after it.
    ranks_begin_equal: bool
    ranks_agree: bool
    gradients: Array
    gradient_sizes: Array
    #: The largest difference of an element.
    gradient_most: Array
    #: For each tensor, the median of the elements' differences in the step's update.
    updates: Array
    update_sizes: Array
    #: The same as ``gradients``, for the parameters after the step.
    parameters: Array
    parameter_sizes: Array
    parameter_most: Array
    #: The relative difference of all parameters before the step, as one vector.
    entering: float
    #: The difference of the loss, and the size of the loss; None: there is no loss.
    loss: float | None
    loss_size: float | None

    @property
    def gradient(self) -> float:
        """Relative difference of all gradients, as one vector."""
        return _relative(self.gradients, self.gradient_sizes)

    @property
    def parameter(self) -> float:
        """Relative difference of all parameters after the step, as one vector."""
        return _relative(self.parameters, self.parameter_sizes)


@dataclass(frozen=True)
class Distance:
    """The difference between two runs."""

    first: Observation
    other: Observation
    steps: list[StepDifference]
    #: Optimizer -> the relative difference of each parameter before its first step.
    start: dict[int, Array] = field(default_factory=dict)
    #: True if the runs' optimizers hold parameters of the same shapes and step in the same order.
    same_layout: bool = True

    @cached_property
    def same_bits(self) -> bool:
        """Whether both took the same steps with the same bits."""
        return self.same_layout and self.same_counts and all(each.same_bits for each in self.steps)

    @cached_property
    def not_numbers_from(self) -> int | None:
        """The first step since which one of the runs is NaN; None: neither ends so."""
        found = [each for run in (self.first, self.other) if (each := not_numbers_from(run)) is not None]
        return min(found, default=None)

    @property
    def same_counts(self) -> bool:
        """Whether all ranks of the other run took as many steps as the first run."""
        return {*self.other.steps_of_ranks} == {self.first.steps}


@dataclass(frozen=True)
class Judgement:
    """The verdict on a run on several ranks."""

    kind: FindingKind
    #: The first step that differs beyond rounding, from 1; 0: they differ before it.
    step: int | None = None
    stage: Stage | None = None
    #: Index of the tensor that differs most, in its optimizer.
    tensor: int | None = None
    #: The difference relative to the tensor's size, and the largest of an element.
    relative: float = 0.0
    most: float = 0.0
    #: The relative difference that rounding explains there.
    allowed: float = 0.0
    #: The last step of which something can be said; None: all.
    conclusive: int | None = None


def measure(first: Observation, other: Observation) -> Distance:
    """Compare two runs step by step, as far as both go.

    Args:
        first: on one rank.
        other: on any number of them.
    """
    count = min(first.steps, other.steps)
    orders = [[note.optimizer for note in each.first.steps[:count]] for each in (first, other)]
    used = sorted({*orders[0]})
    counts = [
        {tuple(len(note.parameters) for note in rank.steps[:count]) for rank in each.ranks} for each in (first, other)
    ]
    if (
        orders[0] != orders[1]
        or counts[0] != counts[1]
        or len(counts[1]) > 1
        or any(first.first.optimizers[i].shapes != other.first.optimizers[i].shapes for i in used)
    ):
        return Distance(first, other, [], same_layout=False)
    steps: list[StepDifference] = []
    start: dict[int, Array] = {}
    before: dict[int, tuple[list[Array], list[Array]]] = {}
    for step in range(1, count + 1):
        optimizer, tensors = orders[0][step - 1], range(len(first.optimizer(step).shapes))
        ours, theirs = first.numbers(step), other.numbers(step)
        if "b0" in ours or optimizer not in before:  # the first step, or the first with parameters that were added
            before[optimizer] = _of(ours, "b", tensors), _of(theirs, "b", tensors)
        if optimizer not in start:
            pairs = list(zip(*before[optimizer], strict=True))
            start[optimizer] = np.array([_rms(_gap(a, b)) / max(_size(a), 1e-300) for a, b in pairs])
        after = _of(ours, "p", tensors), _of(theirs, "p", tensors)
        gradients = [(_or_zero(ours, theirs, i), _or_zero(theirs, ours, i)) for i in tensors]
        steps.append(_measure_step(first, other, step, before=before[optimizer], after=after, gradients=gradients))
        before[optimizer] = after
    return Distance(first, other, steps, start)


def _of(numbers: dict[str, Array], kind: str, tensors: Iterable[int]) -> list[Array]:
    """Return the numbers of one kind; those of parameters that are not there yet are none."""
    return [numbers.get(f"{kind}{i}", np.zeros(0, np.float32)) for i in tensors]


def _measure_step(
    first: Observation,
    other: Observation,
    step: int,
    *,
    before: tuple[list[Array], list[Array]],
    after: tuple[list[Array], list[Array]],
    gradients: list[tuple[Array, Array]],
) -> StepDifference:
    note, notes = first.at(step)[0], other.at(step)
    added = [
        [_wide(late) - _wide(early) for early, late in zip(*pair, strict=True)]
        for pair in zip(before, after, strict=True)
    ]
    gaps = [_gap(a, b) for a, b in gradients]
    shifts = [_gap(a, b) for a, b in zip(*after, strict=True)]
    entering = [_gap(a, b) for a, b in zip(*before, strict=True)]
    loss = combined_loss(note, notes)
    return StepDifference(
        step,
        note.optimizer,
        same_bits=all(each.gradients == note.gradients and each.parameters == note.parameters for each in notes),
        ranks_begin_equal=all(each.before == notes[0].before for each in notes),
        ranks_agree=all(each.parameters == notes[0].parameters for each in notes),
        gradients=_each(_rms, gaps),
        gradient_sizes=_each(_size, (a for a, _ in gradients)),
        gradient_most=_each(_most, gaps),
        updates=np.array([_median(_gap(a, b)) for a, b in zip(*added, strict=True)]),
        update_sizes=_each(_size, added[0]),
        parameters=_each(_rms, shifts),
        parameter_sizes=_each(_size, after[0]),
        parameter_most=_each(_most, shifts),
        entering=_relative(_each(_rms, entering), _each(_size, before[0])),
        loss=None if loss is None else abs(loss[0] - loss[1]),
        loss_size=None if loss is None else abs(loss[0]),
    )


# Losses --------------------------------------------------------------------------------------------------------------


def combined_loss(note: StepNote, notes: Sequence[StepNote]) -> tuple[float, float] | None:
    """Return one rank's loss of a step, and the loss that those of several ranks come to: of the ways in Note [What the
    loss is], the closest. None: some rank has no loss."""
    if not note.losses or not all(each.losses for each in notes) or any(each.value is None for each in note.losses):
        return None
    one = math.fsum(each.value for each in note.losses if each.value is not None)
    found = [value for value in (weighted_loss(notes), _mean(notes)) if value is not None]
    if sum(len(each.losses) for each in notes) == len(note.losses):
        found.append(summed_loss(notes))
    return (one, min(found, key=lambda value: abs(value - one))) if found else None


def weighted_loss(notes: Sequence[StepNote]) -> float | None:
    """Return the mean of the ranks' losses by samples: of their shares, or of what their models got; None: unknown."""
    counts = {len(each.losses) for each in notes}
    if len(counts) != 1:
        return None
    total = 0.0
    for i in range(counts.pop()):
        losses = [each.losses[i] for each in notes]
        weights = [_weight(loss, each, i) for loss, each in zip(losses, notes, strict=True)]
        if None in weights or not sum(weight or 0.0 for weight in weights):
            return None
        pairs = [(loss.value or 0.0, weight) for loss, weight in zip(losses, weights, strict=True) if weight]
        total += math.fsum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    return total


def _weight(loss: Loss, note: StepNote, i: int) -> float | None:
    if loss.local is not None:
        return loss.local
    sizes = [len(batch.samples) or batch.shape[0] for batch in note.batches]
    return float(sizes[i]) if len(sizes) == len(note.losses) else None


def _mean(notes: Sequence[StepNote]) -> float | None:
    sums = [math.fsum(each.value or 0.0 for each in note.losses) for note in notes]
    return math.fsum(sums) / len(sums)


def summed_loss(notes: Sequence[StepNote]) -> float:
    """Return the sum of all losses of all ranks."""
    return math.fsum(each.value or 0.0 for note in notes for each in note.losses)


# Training ------------------------------------------------------------------------------------------------------------


def why_untrained(run: Observation) -> str | None:
    """Return why a run trains nothing, if it does not: no gradient ever came, or no parameter ever moved."""
    notes, optimizers = run.first.steps, run.first.optimizers
    names = joined(dict.fromkeys(each.name for each in optimizers))
    held = [called for each in optimizers for called in each.called]
    foreign = (
        " None of them is of a model that the script has called: was the optimizer made of a copy, or before the model "
        "was replaced or converted?"
        if held and not any(held)
        else ""
    )
    steps = f"in {counted(len(notes), 'step')}"
    if all(gradient is None for note in notes for gradient in note.gradients):
        hint = foreign or (
            " Is there a backward() before each step, no zero_grad() between the two, and does the loss depend on "
            "these parameters?"
        )
        return f"no parameter that {names} holds had a gradient {steps}.{hint}"
    before: dict[int, list[str]] = {}
    for note in notes:
        if before.setdefault(note.optimizer, note.before) != note.parameters:
            return None
    zero = _is_zero(run)
    hint = foreign or (
        " Is a zero_grad() between backward() and the step, or a factor of the loss 0?"
        if zero
        else " Is the learning rate 0, or does something put the parameters back?"
    )
    return f"no parameter that {names} holds has moved {steps}{', and all gradients are 0' if zero else ''}.{hint}"


def _is_zero(run: Observation) -> bool:
    return not any(
        np.any(values)
        for step in range(1, run.steps + 1)
        for name, values in run.numbers(step).items()
        if name[0] == "g"
    )


def not_numbers_from(run: Observation) -> int | None:
    """Return the first step since which all of a run's steps are NaN; None: its last one is not.

    A step is if each of its gradients holds a NaN, or one does and the loss is NaN: embeddings and layers behind a ReLU
    have zeros as well. Two runs are equal in all of that, whatever else they do.
    """
    first = None
    for step in range(run.steps, 0, -1):
        if not _is_not_a_number(run, step):
            break
        first = step
    return first


def _is_not_a_number(run: Observation, step: int) -> bool:
    found = [bool(np.isnan(values).any()) for name, values in run.numbers(step).items() if name[0] == "g"]
    losses = [loss.value for loss in run.first.steps[step - 1].losses]
    lost = bool(losses) and all(value is not None and math.isnan(value) for value in losses)
    return bool(found) and (all(found) or (lost and any(found)))


def why_not_a_number(run: Observation) -> str | None:
    """Return why there is nothing to compare in a run, if it is NaN from its first step on."""
    if not_numbers_from(run) != 1:
        return None
    losses = [loss.value for loss in run.first.steps[0].losses]
    begun = any(value is not None and math.isnan(value) for value in losses)
    what = "the loss and the gradients of step 1 are NaN" if begun else "the gradients of step 1 are NaN"
    hint = (
        "look at the samples and at what the loss divides by"
        if begun
        else "torch.autograd.set_detect_anomaly(True) names the operation"
    )
    return f"{what}, and so is every later one; any two such runs are equal. Run it on one rank first: {hint}"


def untrained_parameters(run: Observation) -> list[str]:
    """Return a sentence for each optimizer that holds parameters of no model that was called, without any gradient."""
    texts = []
    for index, optimizer in enumerate(run.first.optimizers):
        notes = [note for note in run.first.steps if note.optimizer == index]
        names = [
            name
            for i, (name, called) in enumerate(zip(optimizer.names, optimizer.called, strict=False))
            if not called and all(i >= len(note.gradients) or note.gradients[i] is None for note in notes)
        ]
        if names:
            texts.append(
                f"{optimizer.name} holds parameters that never had a gradient, and that are of no model that the "
                f"script has called: {listed(names, most=4)}"
            )
    return texts


# Judging -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nudged:
    """A run that was nudged, and by how much; see Note [Nudged runs]."""

    difference: Distance
    #: The relative change of the parameters.
    nudge: float
    #: How many times its differences may be exceeded.
    factor: float


def expected(
    difference: Distance, nudged: Sequence[Nudged], step: int, found: Callable[[Distance, int], float | None]
) -> float | None:
    """Return by how much a number of a step may differ by rounding; None: no nudged run tells.

    Args:
        difference: of the run on several ranks.
        nudged: the nearest first.
        step: the number of the step; the nudged run's earlier steps count as well, since by chance one number may
            hardly differ.
        found: returns how far two runs are apart in that number in a step, or None.
    """
    if not nudged:
        return None
    run = nudged[0]
    steps = range(1, min(max(step, _SAMPLE_STEPS), len(run.difference.steps)) + 1)
    seen = [value for each in steps if (value := found(run.difference, each)) is not None and math.isfinite(value)]
    if not seen or step > min(len(difference.steps), len(run.difference.steps)):
        return None
    entering = difference.steps[step - 1].entering, run.difference.steps[step - 1].entering
    return FACTOR_SEEN * max(1.0, entering[0] / max(entering[1], run.nudge)) * max(seen)


def repeats_itself(repeat: Distance) -> bool:
    """Return whether a second run like the first differs from it by no more than rounding where they begin to differ.

    If not, a nudged run differs for the same reason and not because of its nudges, so that it tells nothing.
    """
    spacing = max(repeat.first.first.spacing, repeat.other.first.spacing)
    if not repeat.same_layout or any(found.size and found.max() > FACTOR * spacing for found in repeat.start.values()):
        return False
    for each in repeat.steps:
        if not each.same_bits:
            return bool(np.all(each.gradients <= FACTOR * spacing * each.gradient_sizes))
    return repeat.same_counts


def judge(difference: Distance, nudged: Sequence[Nudged]) -> Judgement:
    """Say whether two runs are equal, and where not, from which step on.

    Args:
        difference: of a run on several ranks from that on one.
        nudged: the differences that rounding makes between runs. Empty: nothing counts as rounding.
    """
    # NaN is equal to NaN, and says nothing
    known = None if difference.not_numbers_from is None else difference.not_numbers_from - 1
    if difference.same_bits:
        return Judgement(FindingKind.BITS, conclusive=known)
    if not difference.same_layout:
        return Judgement(FindingKind.DIFFERENT, 0, Stage.LAYOUT)
    spacing = max(difference.first.first.spacing, difference.other.first.spacing)
    for optimizer, found in difference.start.items():
        worst = int(np.argmax(found)) if found.size else 0
        if found.size and found[worst] > FACTOR * spacing:
            step = next(each.step for each in difference.steps if each.optimizer == optimizer)
            return Judgement(FindingKind.DIFFERENT, step - 1, Stage.START, worst, float(found[worst]))
    noise, largest = _Noise(nudged, spacing), _largest(difference.steps)
    for each in difference.steps:
        found_here = _judge_step(each, noise, difference)
        if found_here is not None:
            return found_here
        if noise.is_blind(each, largest[each.optimizer]):
            return Judgement(FindingKind.ROUNDING, conclusive=each.step - 1)
    if not difference.same_counts:
        return Judgement(FindingKind.DIFFERENT, len(difference.steps) + 1, Stage.COUNT)
    return Judgement(FindingKind.ROUNDING, conclusive=known)


def _judge_step(each: StepDifference, noise: _Noise, difference: Distance) -> Judgement | None:
    noise.learn(each)
    if not each.ranks_begin_equal:
        return _apart(each, [note.before for note in difference.other.at(each.step)])
    allowed = noise.gradients(each)
    if np.any(each.gradients > allowed):
        tensor = _worst(each.gradients, allowed, each.gradient_sizes)
        return Judgement(
            FindingKind.DIFFERENT,
            each.step,
            Stage.GRADIENT,
            tensor,
            _ratio(each.gradients[tensor], each.gradient_sizes[tensor]),
            float(each.gradient_most[tensor]),
            _ratio(allowed[tensor], each.gradient_sizes[tensor]),
        )
    allowed = noise.updates(each, difference)
    if np.any(each.updates > allowed):
        tensor = _worst(each.updates, allowed, each.update_sizes)
        return Judgement(
            FindingKind.DIFFERENT,
            each.step,
            Stage.UPDATE,
            tensor,
            _ratio(each.updates[tensor], each.update_sizes[tensor]),
            float(each.parameter_most[tensor]),
            _ratio(allowed[tensor], each.update_sizes[tensor]),
        )
    if not each.ranks_agree:
        return _apart(each, [note.parameters for note in difference.other.at(each.step)])
    return None


def _apart(each: StepDifference, digests: Sequence[Sequence[str]]) -> Judgement:
    """Name the first parameter of which the ranks, of ``digests``, hold different versions."""
    tensor = next(i for i, versions in enumerate(zip(*digests, strict=True)) if len({*versions}) > 1)
    return Judgement(FindingKind.DIFFERENT, each.step, Stage.APART, tensor)


def _largest(steps: Sequence[StepDifference]) -> dict[int, Array]:
    """Return, for each optimizer, the sizes of its gradients in the step where they are largest."""
    found: dict[int, Array] = {}
    for each in steps:
        found[each.optimizer] = np.maximum(found.get(each.optimizer, 0.0), each.gradient_sizes)
    return found


class _Noise:
    """The differences by rounding so far, by the nudged runs: see Note [Nudged runs]."""

    def __init__(self, nudged: Sequence[Nudged], spacing: float) -> None:
        self._nudged = nudged
        self._spacing = spacing
        self._gradients: dict[tuple[int, int], Array] = {}
        self._updates: dict[tuple[int, int], Array] = {}

    def learn(self, each: StepDifference) -> None:
        """Add what the nudged runs differed by in the step of ``each``."""
        for i, run in enumerate(self._nudged):
            if each.step <= len(run.difference.steps):
                found, key = run.difference.steps[each.step - 1], (i, each.optimizer)
                self._gradients[key] = np.maximum(self._gradients.get(key, 0.0), found.gradients)
                self._updates[key] = np.maximum(self._updates.get(key, 0.0), found.updates)

    def gradients(self, each: StepDifference) -> Array:
        """Return, by tensor, the difference of gradients that rounding explains."""
        return self._allowed(each, self._gradients, self._spacing * each.gradient_sizes)

    def updates(self, each: StepDifference, difference: Distance) -> Array:
        """Return, by tensor, the difference of what a step adds that rounding explains."""
        spacings = np.array(difference.first.optimizer(each.step).spacings)
        return self._allowed(each, self._updates, spacings * each.parameter_sizes)

    def is_blind(self, each: StepDifference, sizes: Array) -> bool:
        """Return whether most gradients differ much, and rounding would explain half of a gradient and more.

        Args:
            each: the step.
            sizes: of the gradients in the step where they are largest.
        """
        some = sizes > 0
        explained = self.gradients(each)[some] / sizes[some]
        found = each.gradients[some] / sizes[some]
        return bool(some.any() and np.median(explained) > _HALF and np.median(found) > CLOSE)

    def _allowed(self, each: StepDifference, noise: dict[tuple[int, int], Array], least: Array) -> Array:
        allowed = FACTOR * least
        for i, run in enumerate(self._nudged):
            if (i, each.optimizer) not in noise:
                continue
            theirs = run.difference.steps[min(each.step, len(run.difference.steps)) - 1].entering
            apart = max(1.0, each.entering / max(theirs, run.nudge))
            allowed = np.maximum(allowed, run.factor * apart * noise[i, each.optimizer])
        return allowed


# Arithmetic ----------------------------------------------------------------------------------------------------------


def _worst(found: Array, allowed: Array, sizes: Array) -> int:
    """Return the tensor that differs most for its size, among those whose difference is not allowed."""
    ratios = np.where(found > allowed, found / np.maximum(sizes, 1e-300), -1.0)
    return int(np.argmax(ratios))


def _or_zero(ours: dict[str, Array], theirs: dict[str, Array], i: int) -> Array:
    """Return the gradient of tensor ``i``, or zeros if there is none."""
    if f"g{i}" in ours:
        return ours[f"g{i}"]
    return np.zeros_like(theirs[f"g{i}"]) if f"g{i}" in theirs else np.zeros(0, np.float32)


def _wide(values: Array) -> Array:
    return np.asarray(values, dtype=np.float64)


def _gap(a: Array, b: Array) -> Array:
    """Return by how much elements differ: 0 for equal ones, also infinite or NaN; infinite if only one of them is."""
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        gap = np.where(same, 0.0, np.abs(_wide(a) - _wide(b)))
    return np.where(np.isnan(gap), np.inf, gap)


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(_wide(values))))) if values.size else 0.0


def _size(values: Array) -> float:
    """Return the root mean square of the finite values."""
    return _rms(values[np.isfinite(values)])


def _most(values: Array) -> float:
    return float(np.max(values)) if values.size else 0.0


def _median(values: Array) -> float:
    return float(np.median(values)) if values.size else 0.0


def _each(function: Callable[[Array], float], arrays: Iterable[Array]) -> Array:
    return np.array([function(each) for each in arrays], dtype=np.float64)


def _ratio(a: float, b: float) -> float:
    return float(a / b) if b else (math.inf if a else 0.0)


def _relative(differences: Array, sizes: Array) -> float:
    """Return how far two lists of tensors differ, each list taken as one vector."""
    return _ratio(math.sqrt(float(np.sum(differences**2))), math.sqrt(float(np.sum(sizes**2))))
