"""Which batches went to which steps, by what a loader notes of its passes; and the samples of these batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lockstep import knobs
from lockstep.cli import main
from lockstep.data import pass_notes
from lockstep.data.cursor import Cursor
from lockstep.data.pass_notes import PassNotes
from lockstep.job import flight
from lockstep.job.notes import LOADER, Notes
from lockstep.job.page import PAGE
from lockstep.runs import history, loaders
from lockstep.tools.again import samples
from lockstep.tools.again.samples import UnknownBatch
from tests.recorded import write_record
from tests.schemas import holds

_SETTINGS: dict[str, Any] = {
    "order": "shuffled",
    "length": 40,
    "batch_size": 4,
    "drop_last": False,
    "seed": 3,
    "shares": None,
    "costs": None,
    "slices": None,
    "runs": None,
    "dataset": "Numbers",
    "drawn_by": None,
}


class _Script:
    """A training script on one rank: goes through passes and takes steps, and keeps what truly went to each step."""

    def __init__(self, folder: Path) -> None:
        self._notes = Notes(folder)
        self.truth: dict[int, list[tuple[int, int, int]]] = {}
        self.known: list[dict[str, Any]] = []
        self._loaders: dict[int, PassNotes] = {}

    def run_pass(
        self,
        epoch: int,
        *,
        loader: int = 0,
        begin: int = 0,
        end: int = 10,
        batches_to_step: int = 1,
        steps_to_batch: int = 1,
        skips: tuple[int, ...] = (),
        fails: bool = False,
        **settings: Any,
    ) -> None:
        """Go through the batches ``begin`` to ``end`` of an epoch; steps at the batches in ``skips`` are left out."""
        notes = self._loaders.setdefault(loader, PassNotes(loader, tells=True))
        notes.begin(Cursor(epoch, 4 * begin, begin, in_epoch=True), {**_SETTINGS, **settings})
        for batch in notes.watched(iter(range(begin, end))):
            self.truth.setdefault(flight.current.step, []).append((loader, epoch, batch))
            is_due = (batch + 1 - begin) % batches_to_step == 0 or batch + 1 == end
            if batches_to_step and is_due and batch not in skips:
                for _ in range(steps_to_batch):
                    flight.current.took_step()
        if not fails:
            notes.end(Cursor(epoch, 4 * end, end, in_epoch=True))

    def evaluate(self, *, loader: int = 1, batches: int = 3) -> None:
        """Go through a pass without a step."""
        notes = self._loaders.setdefault(loader, PassNotes(loader, tells=True))
        notes.begin(Cursor(0, 0, 0, in_epoch=True), {**_SETTINGS, "order": "sequential"})
        assert [*notes.watched(iter(range(batches)))] == [*range(batches)]
        notes.end(Cursor(0, 4 * batches, batches, in_epoch=True))

    def record(self) -> list[dict[str, Any]]:
        for note in self._notes.take():
            (loaders.add_loader if note["is"] == LOADER else loaders.add_pass)(self.known, note)
        return self.known

    def told(self, step: int) -> list[tuple[int, int, int]]:
        return [
            (each.loader["loader"], each.epoch, batch)
            for each in loaders.taken(self.record(), step)
            for batch in each.batches
        ]

    def is_certain(self, step: int) -> bool:
        return all(each.is_certain for each in loaders.taken(self.record(), step))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Script]:
    monkeypatch.setenv(knobs.JOB_DIR, str(tmp_path))
    before = flight.current
    flight.use(flight.Flight(memoryview(bytearray(PAGE)))).count()
    yield _Script(tmp_path)
    flight.use(before)


def _holds(script: _Script, *, certain: bool = True) -> None:
    for step, truth in script.truth.items():
        assert script.told(step) == truth, step
        assert script.is_certain(step) or not certain, step


def test_equal_passes_are_noted_once_and_all_known(script: _Script) -> None:
    for epoch in range(8):
        script.run_pass(epoch)
    _holds(script, certain=False)
    (loader,) = script.record()
    (noted,) = loader["passes"]
    assert noted["again"] in range(4, 8), "of seven that followed, noted at powers of two or after a second"
    assert script.is_certain(50)


def test_passes_after_the_last_note_are_inferred_until_another_is_noted(
    script: _Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_notes, "_SECONDS", 1000.0)
    for epoch in range(4):
        script.run_pass(epoch)
    assert script.told(35) == [(0, 3, 4)]
    assert not script.is_certain(35), "two that followed were noted"
    script.run_pass(4, end=7)
    assert script.is_certain(35)
    _holds(script)


def test_evaluations_are_not_taken_for_training(script: _Script) -> None:
    for epoch in range(3):
        script.run_pass(epoch, end=5, fails=False)
        script.evaluate()
        script.evaluate()
        script.run_pass(epoch + 10, loader=2, end=2)
    steps = {step: [each for each in truth if each[0] != 1] for step, truth in script.truth.items()}
    for step, truth in steps.items():
        assert script.told(step) == truth, step
    assert sum(len(each["passes"]) for each in script.record() if each["loader"] == 1) == 1


def test_a_pass_that_never_ended_is_known_in_its_beginning_and_inferred_beyond(script: _Script) -> None:
    script.run_pass(0, end=40, fails=True)
    _holds(script, certain=False)
    assert script.is_certain(15)
    assert not script.is_certain(30)


def test_gradients_that_accumulate_over_batches_take_several(script: _Script) -> None:
    for epoch in range(3):
        script.run_pass(epoch, end=30, batches_to_step=4)
    script.run_pass(3, end=12, batches_to_step=4, fails=True)
    _holds(script, certain=False)
    assert script.told(2) == [(0, 0, batch) for batch in (4, 5, 6, 7)]


def test_two_optimizers_take_two_steps_with_a_batch(script: _Script) -> None:
    for epoch in range(3):
        script.run_pass(epoch, steps_to_batch=2)
    for step, truth in script.truth.items():
        assert script.told(step) == script.told(step + 1) == truth


def test_a_pass_that_was_resumed_and_those_after_it(script: _Script) -> None:
    script.run_pass(4, begin=6, end=10)
    script.run_pass(5)
    script.run_pass(6, end=3, fails=True)
    _holds(script, certain=False)
    found = loaders.taken(script.record(), 1)[0]
    assert (found.position, found.is_certain) == (24, True)


def test_steps_that_a_scaler_left_out_are_a_choice_of_batches_and_never_a_guess(script: _Script) -> None:
    script.run_pass(0, end=40, skips=(20, 25))
    for step, truth in script.truth.items():
        (found,) = loaders.taken(script.record(), step)
        told = [(0, 0, batch) for batch in found.batches]
        assert set(truth) <= set(told), step
        assert found.is_one_of or told == truth, step
    assert not loaders.taken(script.record(), 10)[0].is_one_of, "its batch was noted"
    assert loaders.taken(script.record(), 30)[0].is_one_of


def test_two_loaders_in_one_step_are_both_told(script: _Script) -> None:
    one, two = PassNotes(0, tells=True), PassNotes(1, tells=True)
    for epoch in range(4):
        for notes in (one, two):
            notes.begin(Cursor(epoch, in_epoch=True), _SETTINGS)
        for first, second in zip(one.watched(iter(range(10))), two.watched(iter(range(10))), strict=True):
            script.truth[flight.current.step] = [(0, epoch, first), (1, epoch, second)]
            flight.current.took_step()
        for notes in (one, two):
            notes.end(Cursor(epoch, 40, 10, in_epoch=True))
    _holds(script, certain=False)


def test_other_settings_begin_a_loader_anew(script: _Script) -> None:
    script.run_pass(0)
    script.run_pass(1, seed=9)
    assert [each["seed"] for each in script.record()] == [3, 9]
    assert [loaders.taken(script.record(), step)[0].loader["seed"] for step in (10, 11)] == [3, 9]


def test_nothing_is_told_on_other_ranks_or_without_a_launcher(script: _Script, monkeypatch: pytest.MonkeyPatch) -> None:
    PassNotes(0, tells=False).begin(Cursor(), _SETTINGS)
    monkeypatch.delenv(knobs.JOB_DIR)
    PassNotes(0, tells=True).begin(Cursor(), _SETTINGS)
    assert script.record() == []


def test_a_record_stays_short(script: _Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "MOST", 5)
    for epoch in range(8):
        script.run_pass(epoch, end=3 + epoch)
    (loader,) = script.record()
    assert (len(loader["passes"]), loader["until"]) == (5, 26)
    assert script.told(25) == script.truth[25]
    assert script.told(26) == []


# The command ---------------------------------------------------------------------------------------------------------

_PASS = {"step": 1, "epoch": 0, "batch": 0, "samples": 0, "steps": 10, "batches": 10, "again": 3}


def _recorded(folder: Path, *, passes: list[dict[str, Any]] | None = None, **settings: Any) -> Path:
    loader = {"loader": 0, **_SETTINGS, "passes": passes or [_PASS], **settings}
    start = {"loaders": [loader], "steps": 40, "before": None, "world_size": 3}
    return write_record(folder, starts=[start])


def _batch(folder: Path, *words: object) -> Any:
    return CliRunner().invoke(main, ["runs", "batch", str(folder), *map(str, words)])


def test_the_samples_of_a_step_by_rank(tmp_path: Path) -> None:
    folder = _recorded(tmp_path / "run")
    told = holds(_batch(folder, "--step", 25, "--json").stdout, "lockstep.runs.batch/1")
    (batch,) = told["batches"]
    assert (batch["epoch"], batch["batch"], batch["position"], batch["samples"]) == (2, 4, 16, 4)
    assert [(part["rank"], part["positions"]) for part in batch["parts"]] == [(0, [16, 17]), (1, [18]), (2, [19])]
    words = _batch(folder, "--step", 25).stdout
    assert f"rank 1: {batch['parts'][1]['indices'][0]}\n" in words
    assert "positions 16 to 19" in words
    named = holds(_batch(folder, "--epoch", 2, "--batch", 4, "--json").stdout, "lockstep.runs.batch/1")
    assert (named["batches"], named["step"]) == ([batch], None)
    (part,) = json.loads(_batch(folder, "--step", 25, "--rank", 2, "--json").stdout)["batches"][0]["parts"]
    assert part == batch["parts"][2]


def test_an_epoch_has_each_sample_once(tmp_path: Path) -> None:
    run = history.read(_recorded(tmp_path / "run"))
    asked = [samples.ask_step(run, step) for step in range(11, 21)]
    parts = [
        part for each in asked for wanted in each.wanted for batch in samples.compute(wanted) for part in batch.parts
    ]
    assert sorted(index for part in parts for index in part.indices) == [*range(40)]


def test_slices_that_move_by_pace_are_told_without_their_ranks(tmp_path: Path) -> None:
    folder = _recorded(tmp_path / "run", slices=2)
    parts = json.loads(_batch(folder, "--step", 1, "--json").stdout)["batches"][0]["parts"]
    assert [(part["slice"], part["rank"], len(part["indices"])) for part in parts] == [(0, None, 2), (1, None, 2)]


@pytest.mark.parametrize(
    ("words", "settings", "why"),
    [
        (("--step", 42), {}, "has no step 42: the last one it has taken is 40"),
        (("--step", 0), {}, "the first step is 1"),
        (("--step", 1, "--rank", 3), {}, "had the ranks 0 to 2"),
        (("--step", 1), {"order": "stream"}, "is a stream: its samples have no indices"),
        (("--step", 1), {"order": "sampler", "drawn_by": "Weighted"}, "the sampler Weighted drew the order"),
        (("--step", 1), {"order": "batches", "drawn_by": "Buckets", "batch_size": None}, "with --show the program"),
        (("--step", 1), {"costs": "a function"}, "cut by costs (a function)"),
        (("--epoch", 0, "--batch", 10), {}, "epoch 0 has no batch 10: it has 40 samples"),
        (("--epoch", 0), {}, "name a step"),
        ((), {}, "name a step"),
        (("--step", 1, "--loader", 0), {}, "--loader goes with"),
        (("--epoch", 0, "--batch", 1, "--loader", 4), {}, "has no loader 4: it has 0"),
        (("--step", 3), {"passes": [{**_PASS, "step": 5}]}, "begins at step 5"),
        (
            ("--step", 6),
            {"passes": [{**_PASS, "steps": 8, "again": 0}]},
            "step 6 took one of the batches 5 to 7 of epoch 0, but which one is not known",
        ),
    ],
)
def test_what_the_record_does_not_tell_is_refused_in_words(
    tmp_path: Path, words: tuple[object, ...], settings: dict[str, Any], why: str
) -> None:
    done = _batch(_recorded(tmp_path / "run", **settings), *words)
    assert done.exit_code == 2
    assert why in done.stderr


def test_a_record_of_an_earlier_version_tells_of_no_loader(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run")
    assert "has no loader: batches" in _batch(folder, "--step", 1).stderr
    with pytest.raises(UnknownBatch, match="has no loader: batches"):
        samples.ask_batch(history.read(folder), 0, 0)
