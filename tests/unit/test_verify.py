"""Comparing observed runs and finding reasons, on records that no rank has written."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.cli import main
from lockstep.launch.spec import Program
from lockstep.tools.verify import compare, runs
from lockstep.tools.verify.compare import FindingKind, Nudged, Stage, judge, measure
from lockstep.tools.verify.reasons import Cause, explain, whole_batch_each
from lockstep.tools.verify.records import Array, ForwardRecord, Loss, NotesWriter, Observation, OptimizerNote, StepNote
from lockstep.tools.verify.report import describe
from lockstep.tools.verify.runs import Contrast, Result, VerifyOptions
from tests.schemas import holds

_EPS = 2.0**-23
_SHAPES = [[40], [8]]
_STATES = {"python": "a", "numpy": "b", "torch": "c"}

Change = Callable[[int, int, StepNote, dict[str, Array]], StepNote]


def _as_it_is(_step: int, _rank: int, note: StepNote, _numbers: dict[str, Array]) -> StepNote:
    return note


def _observe(
    folder: Path,
    *,
    ranks: int = 1,
    steps: int = 4,
    change: Change = _as_it_is,
    rounding: float = 0.0,
    seed: int = 0,
    apart: bool = False,
) -> Observation:
    """A run of plain gradient descent with gradients that are drawn, whose ranks hold equal parts of 12 samples.

    Args:
        folder: where its ranks write.
        ranks: how many there are.
        steps: how many they take.
        change: changes what a rank writes of a step, for a mistake; it may change the numbers in place.
        rounding: what gradients are off by, relative.
        seed: of how they are off.
        apart: whether NumPy's generator stands elsewhere on each rank from the beginning, as where nobody seeds it.
    """
    folder.mkdir()
    off = np.random.default_rng(seed)
    truth = np.random.default_rng(7)
    writers = [NotesWriter(folder, rank=rank) for rank in range(ranks)]
    states = [_STATES | ({"numpy": f"{rank}"} if apart else {}) for rank in range(ranks)]
    for rank, writer in enumerate(writers):
        writer.add("about", {"generators": states[rank]})
        writer.add("spacing", {"spacing": _EPS})
        writer.add("optimizer", asdict(OptimizerNote("SGD", ["weight", "bias"], _SHAPES, [_EPS, _EPS])))
    values = [truth.standard_normal(shape[0]).astype(np.float32) for shape in _SHAPES]
    for step in range(1, steps + 1):
        numbers: dict[str, Array] = {}
        for i, value in enumerate(values):
            if step == 1:
                numbers[f"b{i}"] = value.copy()
            gradient = truth.standard_normal(len(value)) * (1 + rounding * off.choice([-1, 1], len(value)))
            numbers[f"g{i}"] = gradient.astype(np.float32)
        samples = truth.standard_normal(12)
        for rank, writer in enumerate(writers):
            part = slice(12 * rank // ranks, 12 * (rank + 1) // ranks)
            kept = samples[part].tolist()
            batch = ForwardRecord("net", [len(kept), 3], kept, 1.0, [2 * each for each in kept], 1.0, False, False)
            note = StepNote(
                step, 0, [], [], [], [{"lr": 0.1}], [Loss(1.0 + float(np.mean(kept)))], [batch], states[rank]
            )
            changed = change(
                step, rank, note, numbers if rank == 0 else {name: each.copy() for name, each in numbers.items()}
            )
            if rank == 0:
                values = [
                    value - np.float32(changed.options[0]["lr"]) * numbers[f"g{i}"] for i, value in enumerate(values)
                ]
                numbers |= {f"p{i}": value.copy() for i, value in enumerate(values)}
            changed = replace(
                changed,
                gradients=changed.gradients or [numbers[f"g{i}"].tobytes().hex() for i in range(2)],
                parameters=[value.tobytes().hex() for value in values],
            )
            writer.add_step(changed, numbers if rank == 0 else {})
    for writer in writers:
        writer.close()
    return Observation.read(folder, ranks)


def _judged(tmp_path: Path, change: Change, **others: object) -> tuple[compare.Judgement, compare.Distance]:
    one = _observe(tmp_path / "one")
    many = _observe(tmp_path / "many", ranks=2, change=change, rounding=_EPS, seed=1, **others)  # type: ignore[arg-type]
    nudged = _observe(tmp_path / "nudged", rounding=_EPS, seed=2)
    difference = measure(one, many)
    return judge(difference, [Nudged(measure(one, nudged), _EPS, compare.FACTOR)]), difference


def _cause(tmp_path: Path, change: Change, **others: object) -> Cause:
    judgement, difference = _judged(tmp_path, change, **others)
    assert judgement.kind is FindingKind.DIFFERENT
    return explain(judgement, difference)[0].cause


def test_the_same_numbers_are_equal_bits(tmp_path: Path) -> None:
    difference = measure(_observe(tmp_path / "one"), _observe(tmp_path / "two", ranks=3))
    assert judge(difference, []).kind is FindingKind.BITS
    assert [each.gradient for each in difference.steps] == [0.0] * 4


def test_one_bit_is_not_equal_bits(tmp_path: Path) -> None:
    def flip(step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        if step == 3 and rank == 0:
            numbers["g1"][0] = np.nextafter(numbers["g1"][0], np.float32(9))
        return note

    difference = measure(_observe(tmp_path / "one"), _observe(tmp_path / "two", ranks=2, change=flip))
    assert judge(difference, []).kind is FindingKind.ROUNDING
    assert [each.same_bits for each in difference.steps] == [True, True, False, False]


def test_rounding_that_grows_no_faster_than_that_of_a_nudged_run_is_rounding(tmp_path: Path) -> None:
    judgement, _ = _judged(tmp_path, _as_it_is)
    assert judgement == compare.Judgement(FindingKind.ROUNDING)


@pytest.mark.parametrize("part", [1e-4, 1e-2])
def test_a_tensor_beyond_rounding_is_named_with_its_step_and_size(tmp_path: Path, part: float) -> None:
    def change(step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        if step == 3 and rank == 0:
            numbers["g1"] *= np.float32(1 + part)
        return note

    judgement, _ = _judged(tmp_path, change)
    assert (judgement.kind, judgement.step, judgement.stage) == (FindingKind.DIFFERENT, 3, Stage.GRADIENT)
    assert judgement.tensor == 1
    assert judgement.relative == pytest.approx(part, rel=0.01)
    assert judgement.allowed < 1e-4


def test_a_step_in_the_function_that_a_further_nudge_meets_is_rounding(tmp_path: Path) -> None:
    """As where the input of a ReLU crosses 0: beyond what a small nudge does, but no more than a larger one does."""

    def crossing(_step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        if rank == 0:
            numbers["g0"][3] *= np.float32(1.02)
        return note

    judgement, difference = _judged(tmp_path, crossing)
    assert judgement.kind is FindingKind.DIFFERENT
    assert judgement.relative < compare.CLOSE
    near, far = (
        measure(difference.first, _observe(tmp_path / name, change=change, rounding=_EPS * times, seed=3))
        for name, times, change in (("near", 1.0, _as_it_is), ("far", compare.FAR, crossing))
    )
    both = [Nudged(near, _EPS, compare.FACTOR), Nudged(far, _EPS * compare.FAR, compare.FACTOR_FAR)]
    assert judge(difference, both).kind is FindingKind.ROUNDING


def test_nothing_is_said_of_runs_that_rounding_takes_far_apart(tmp_path: Path) -> None:
    def chaos(seed: int) -> Change:
        drawn = np.random.default_rng(seed)

        def change(step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
            if rank == 0 and step >= 3:
                for name in ("g0", "g1"):
                    numbers[name] += drawn.standard_normal(len(numbers[name])).astype(np.float32)
            return note

        return change

    one = _observe(tmp_path / "one", change=chaos(1))
    away = Nudged(measure(one, _observe(tmp_path / "nudged", change=chaos(2))), _EPS, compare.FACTOR)
    judgement = judge(measure(one, _observe(tmp_path / "many", change=chaos(3))), [away])
    assert (judgement.kind, judgement.conclusive) == (FindingKind.ROUNDING, 2)


def test_what_a_nudged_run_differs_by_wholly_may_differ(tmp_path: Path) -> None:
    """A gradient that is nothing but rounding differs wholly in every run: one more tensor than one that is not."""

    def noise(seed: int) -> Change:
        drawn = np.random.default_rng(seed)

        def change(_step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
            if rank == 0:
                numbers["g1"] = (drawn.standard_normal(8) * 1e-9).astype(np.float32)
            return note

        return change

    one = _observe(tmp_path / "one", change=noise(1))
    difference = measure(one, _observe(tmp_path / "many", change=noise(2)))
    away = measure(one, _observe(tmp_path / "nudged", change=noise(3)))
    assert judge(difference, []).kind is FindingKind.DIFFERENT
    assert judge(difference, [Nudged(away, _EPS, compare.FACTOR)]).kind is FindingKind.ROUNDING


def test_numbers_that_are_not_finite_are_equal_where_both_have_them(tmp_path: Path) -> None:
    def broken(step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        if step == 2 and rank == 0:
            numbers["g0"][:] = np.nan
        return note

    one, two = (_observe(tmp_path / name, change=broken) for name in ("one", "two"))
    assert judge(measure(one, two), []).kind is FindingKind.BITS
    assert [each.gradient for each in measure(one, two).steps] == [0.0] * 4
    whole = _observe(tmp_path / "whole")
    judgement = judge(measure(one, whole), [])
    assert (judgement.kind, judgement.step) == (FindingKind.DIFFERENT, 2)


def _lost_from(first: int) -> Change:
    """Gradients that are NaN from a step on, but for zeros, as behind a ReLU, and the loss with them."""

    def lost(step: int, _rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        if step < first:
            return note
        numbers["g0"][1:], numbers["g1"][:] = np.nan, 0.0
        return replace(note, losses=[replace(note.losses[0], value=math.nan)])

    return lost


def test_runs_that_are_nan_throughout_train_nothing(tmp_path: Path) -> None:
    found = compare.why_not_a_number(_observe(tmp_path / "run", change=_lost_from(1)))
    assert found is not None
    assert "loss and the gradients of step 1 are NaN" in found
    assert compare.why_not_a_number(_observe(tmp_path / "later", change=_lost_from(2))) is None


def test_nothing_is_said_of_steps_that_are_nan(tmp_path: Path) -> None:
    one, two = (
        _observe(tmp_path / name, ranks=ranks, change=_lost_from(3)) for name, ranks in (("one", 1), ("two", 2))
    )
    difference = measure(one, two)
    judgement = judge(difference, [])
    assert judgement == compare.Judgement(FindingKind.BITS, conclusive=2)
    result = Result(VerifyOptions(Program("train.py"), (2,), steps=4), "1", 4, [Contrast(2, difference, judgement)])
    assert "from step 3 on the gradients are NaN" in describe(result)


def test_another_number_of_steps_is_a_difference_after_the_last_common_one(tmp_path: Path) -> None:
    one, two = _observe(tmp_path / "one"), _observe(tmp_path / "two", ranks=2, steps=2)
    judgement = judge(measure(one, two), [])
    assert (judgement.kind, judgement.step, judgement.stage) == (FindingKind.DIFFERENT, 3, Stage.COUNT)
    assert "2 ranks take 2 steps, and one takes 4" in explain(judgement, measure(one, two))[0].evidence


def test_other_first_parameters_come_before_the_first_step(tmp_path: Path) -> None:
    def change(step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        if step == 1 and rank == 0:
            numbers["b0"] += 1
        return note

    judgement, difference = _judged(tmp_path, change)
    assert (judgement.step, judgement.stage, judgement.tensor) == (0, Stage.START, 0)
    assert explain(judgement, difference)[0].cause is Cause.START


# Reasons -------------------------------------------------------------------------------------------------------------


def _scaled(numbers: dict[str, Array], factor: float) -> None:
    for name in ("g0", "g1"):
        numbers[name] *= np.float32(factor)


def test_gradients_that_differ_between_ranks_are_outside_of_the_replica(tmp_path: Path) -> None:
    def change(_step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        if rank == 0:
            numbers["g1"] *= np.float32(1.3)
        return replace(note, gradients=[numbers["g0"].tobytes().hex(), f"{rank}"])

    judgement, difference = _judged(tmp_path, change)
    reason = explain(judgement, difference)[0]
    assert reason.cause is Cause.OUTSIDE
    assert reason.evidence.endswith("on each rank: bias")


def _with_batches(note: StepNote, batch: Callable[[ForwardRecord], ForwardRecord]) -> StepNote:
    return replace(note, batches=[batch(each) for each in note.batches])


def _moved(batch: ForwardRecord) -> ForwardRecord:
    return replace(batch, samples=[math.sin(9 * each) for each in batch.samples])


def test_other_samples_are_data_unless_generators_explain_them(tmp_path: Path) -> None:
    def data(_step: int, _rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        _scaled(numbers, 1.1)
        return _with_batches(note, _moved)

    def apart(step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        return replace(data(step, rank, note, numbers), generators=_STATES | {"numpy": f"{rank} {step}"})

    def unused(step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        return data(step, rank, note, numbers)

    def per_rank(step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        return replace(data(step, rank, note, numbers), generators=_STATES | {"numpy": f"both {step}"})

    def own_stream(step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        return _with_batches(data(step, rank, note, numbers), lambda batch: replace(batch, drew_before=True))

    found = {}
    for change in (data, apart, unused, per_rank, own_stream):
        (tmp_path / change.__name__).mkdir()
        found[change.__name__] = _cause(tmp_path / change.__name__, change, apart=change is unused)
    assert found == {
        "data": Cause.DATA,
        "apart": Cause.APART,
        "unused": Cause.DATA,
        "per_rank": Cause.PER_RANK,
        "own_stream": Cause.PER_RANK,
    }


def _other_outputs(batch: ForwardRecord) -> ForwardRecord:
    return replace(batch, outputs=[each + 0.1 for each in batch.outputs])


@pytest.mark.parametrize(
    ("norms", "drew", "causes"),
    [
        (["norm"], False, [Cause.BATCH_NORM]),
        ([], True, [Cause.DROPOUT]),
        (["norm"], True, [Cause.BATCH_NORM, Cause.DROPOUT]),
        ([], False, [Cause.TOGETHER]),
    ],
)
def test_other_outputs_of_the_same_samples(
    tmp_path: Path, norms: list[str], drew: bool, causes: Sequence[Cause]
) -> None:
    def change(_step: int, _rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        _scaled(numbers, 1.1)
        changed = _with_batches(note, lambda batch: replace(_other_outputs(batch), drew=drew))
        return replace(changed, norms=norms)

    judgement, difference = _judged(tmp_path, change)
    assert [each.cause for each in explain(judgement, difference)] == causes


def test_a_batch_norm_that_changes_no_output_is_not_the_reason(tmp_path: Path) -> None:
    def change(_step: int, _rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        _scaled(numbers, 0.5)
        return replace(note, norms=["norm"])

    assert _cause(tmp_path, change) is Cause.SCALE


def _time_first(note: StepNote, *, batch: int, share: Loss | None = None) -> StepNote:
    """A step whose input is of shape (time, batch, features): its rows are moments, not samples."""
    shape = [5, batch, 3] if share is None else [5, 3]
    rows = [100.0 * batch + each for each in range(5)]
    losses = note.losses if share is None else [replace(share, value=note.losses[0].value)]
    return _with_batches(
        replace(note, losses=losses, dropouts=["dropout (Dropout)"]),
        lambda record: replace(record, shape=shape, samples=rows, outputs=rows, drew=True),
    )


@pytest.mark.parametrize("known_by", ["another dimension", "the shares"])
def test_an_input_whose_first_dimension_is_time_has_no_batch_size_per_rank(tmp_path: Path, known_by: str) -> None:
    def change(ranks: int) -> Change:
        share = None if known_by == "another dimension" else Loss(None, 12 / ranks, 12.0)

        def changed(_step: int, _rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
            if ranks > 1:
                _scaled(numbers, 1.1)
            return _time_first(note, batch=12 // ranks, share=share)

        return changed

    one = _observe(tmp_path / "one", change=change(1))
    many = _observe(tmp_path / "many", ranks=2, change=change(2))
    difference = measure(one, many)
    reasons = explain(judge(difference, []), difference)
    assert [(each.cause, each.sure) for each in reasons] == [(Cause.DROPOUT, False)]


def test_a_batch_size_per_rank_is_one_whatever_the_shares(tmp_path: Path) -> None:
    def change(whole: float) -> Change:
        def changed(_step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
            if whole > 12:
                _scaled(numbers, 1.1)
            return _time_first(note, batch=12 + rank, share=Loss(None, 12.0, whole))

        return changed

    one = _observe(tmp_path / "one", change=change(12.0))
    many = _observe(tmp_path / "many", ranks=2, change=change(24.0))
    difference = measure(one, many)
    assert explain(judge(difference, []), difference)[0].cause is Cause.BATCH_PER_RANK


def test_losses_that_add_up_to_that_of_one_rank_are_sums(tmp_path: Path) -> None:
    def change(_step: int, _rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        _scaled(numbers, 0.5)
        (loss,) = note.losses
        assert loss.value is not None
        return replace(note, losses=[Loss(loss.value / 2)])

    judgement, difference = _judged(tmp_path, change)
    reason = explain(judgement, difference)[0]
    assert reason.cause is Cause.SUM
    assert "0.5 times" in reason.evidence


def test_options_that_differ_are_the_reason_where_gradients_do_not(tmp_path: Path) -> None:
    def change(_step: int, _rank: int, note: StepNote, _numbers: dict[str, Array]) -> StepNote:
        return replace(note, options=[{"lr": 0.2}])

    judgement, difference = _judged(tmp_path, change)
    assert judgement.stage is Stage.UPDATE
    reason = explain(judgement, difference)[0]
    assert (reason.cause, reason.sure) == (Cause.OPTIMIZER, True)
    assert "lr is 0.2 on 2 ranks and 0.1 on one" in reason.evidence


def test_parameters_of_another_number_are_no_steps_to_compare(tmp_path: Path) -> None:
    one, two = _observe(tmp_path / "one"), _observe(tmp_path / "two")
    two.first.optimizers[0].shapes.append([3])
    judgement = judge(measure(one, two), [])
    assert judgement.stage is Stage.LAYOUT
    assert explain(judgement, measure(one, two))[0].cause is Cause.LAYOUT


def test_slices_that_each_have_a_loss_make_that_of_one_rank(tmp_path: Path) -> None:
    one = _observe(tmp_path / "one").at(1)[0]
    whole = replace(one, losses=[Loss(value) for value in (1.0, 2.0, 3.0)])
    ranks = [replace(one, losses=[Loss(1.0), Loss(2.0)]), replace(one, losses=[Loss(3.0)])]
    assert compare.combined_loss(whole, ranks) == (6.0, 6.0)


def test_a_rank_without_samples_does_not_weigh(tmp_path: Path) -> None:
    one = _observe(tmp_path / "one").at(1)[0]
    ranks = [replace(one, losses=[Loss(2.0, 1, 1)]), replace(one, losses=[Loss(float("nan"), 0, 1)])]
    assert compare.weighted_loss(ranks) == 2.0


def test_ranks_that_all_compute_the_whole_batch_are_known(tmp_path: Path) -> None:
    one = _observe(tmp_path / "one")
    assert not whole_batch_each(one, _observe(tmp_path / "cut", ranks=2))
    assert whole_batch_each(one, replace(one, world_size=2, ranks=[one.first, one.first]))


# The report, and what it reads ---------------------------------------------------------------------------------------


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    _observe(tmp_path / "one")
    lines = tmp_path / "one" / "rank0.jsonl"
    lines.write_text(lines.read_text()[:-20])
    assert Observation.read(tmp_path / "one", 1).steps == 3
    assert Observation.read(tmp_path / "one", 2).steps == 0


def test_the_report_says_verdict_parameter_size_and_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(_step: int, _rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        _scaled(numbers, 2.0)
        return note

    judgement, difference = _judged(tmp_path, change)
    contrast = Contrast(2, difference, judgement, explain(judgement, difference), ["a remark"])
    result = Result(VerifyOptions(Program("train.py", ("--fast",)), (2,)), "1", 4, [contrast])
    text = describe(result)
    assert "2 ranks: different from step 1 on" in text
    assert "differs by 100.0% of its size" in text
    assert "2 times those of one rank" in text
    assert "\n  next:   " in text
    assert max(map(len, text.splitlines())) <= 120
    monkeypatch.setattr(runs, "verify", lambda *_: result)
    handlers = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)]
    done = CliRunner().invoke(main, ["verify", "--json", "-", "train.py"])
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)] == handlers
    assert done.exit_code == 1
    found = holds(done.stdout, "lockstep.verify/1")
    assert (found["verdict"], found["code"]) == ("different", "different")
    assert found["contrasts"][0]["stage_code"] == "differs-in-gradient"
    assert found["contrasts"][0]["reasons"][0]["code"] == "gradients-scaled"
    assert found["contrasts"][0]["parameter"] in ("weight", "bias")
    assert found["contrasts"][0]["reasons"][0]["cause"] == Cause.SCALE.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"ranks": (1,)}, "-n"), ({"steps": 0}, "--steps 0"), ({"timeout": 0.0}, "--timeout 0"), ({"keep": 5}, "--keep")],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VerifyOptions(Program("train.py"), **({"ranks": (2,)} | changes))  # type: ignore[arg-type]


# Random numbers that each rank draws ---------------------------------------------------------------------------------


def _settled(tmp_path: Path, beneath: Contrast | None, failure: str = "") -> Contrast:
    """What is said of a dropout in the first step, where ``beneath`` was found without it."""
    judgement, difference = _judged(_made(tmp_path / "found"), _dropped)
    reasons = explain(judgement, difference)
    assert reasons[0].is_random
    return runs.settle(Contrast(2, difference, judgement, reasons), beneath, failure)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _dropped(_step: int, _rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
    _scaled(numbers, 1.1)
    return _with_batches(note, lambda batch: replace(_other_outputs(batch), drew=True))


def test_numbers_of_each_rank_that_hide_nothing_are_no_difference(tmp_path: Path) -> None:
    judgement, difference = _judged(_made(tmp_path / "alike"), _as_it_is)
    settled = _settled(tmp_path, Contrast(2, difference, judgement))
    assert (settled.judgement.kind, settled.beneath) == (FindingKind.RANDOM, judgement.kind)
    assert [each.cause for each in settled.reasons] == [Cause.DROPOUT]
    assert settled.difference is difference


def test_a_mistake_beneath_the_numbers_of_each_rank_is_the_verdict(tmp_path: Path) -> None:
    def summed(step: int, rank: int, note: StepNote, numbers: dict[str, Array]) -> StepNote:
        if step == 3 and rank == 0:
            _scaled(numbers, 2.0)
        return note

    judgement, difference = _judged(_made(tmp_path / "alike"), summed)
    reasons = explain(judgement, difference)
    settled = _settled(tmp_path, Contrast(2, difference, judgement, reasons))
    assert (settled.judgement, settled.reasons) == (judgement, reasons)
    assert "from step 1 on (dropout per rank), which is no mistake" in settled.remarks[0]


def test_numbers_that_were_not_made_alike_stay_the_reason_and_that_is_said(tmp_path: Path) -> None:
    judgement, difference = _judged(_made(tmp_path / "alike"), _dropped)
    settled = _settled(tmp_path, Contrast(2, difference, judgement, explain(judgement, difference)))
    assert (settled.judgement.kind, settled.beneath) == (FindingKind.DIFFERENT, None)
    assert "could not be made alike" in settled.remarks[0]
    settled = _settled(_made(tmp_path / "failed"), None, "the run on one rank failed with exit code 1")
    assert settled.judgement.kind is FindingKind.DIFFERENT
    assert settled.remarks == [
        "what else may differ is not known: with random numbers made alike the run on one rank failed with exit code 1"
    ]
