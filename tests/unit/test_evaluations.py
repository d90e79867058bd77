"""Evaluation beside training: what is evaluated next, the results, which of them count, and their lines."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep import knobs
from lockstep.checkpoint import folders
from lockstep.checkpoint.evaluation import EvaluationOrder, read_report
from lockstep.checkpoint.evaluations import TRIES, Evaluated, Evaluations
from lockstep.checkpoint.lease import Sign
from lockstep.checkpoint.lineage import FILE, Lineage, LineageRecord, results_of_a_run_at_rest
from lockstep.checkpoint.locks import CheckpointGone, Owner
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.object_store import ObjectStore
from lockstep.checkpoint.read import read_manifest, read_model_unheld
from lockstep.checkpoint.retention import Retention, prune
from lockstep.checkpoint.run_folder import run_folder
from lockstep.checkpoint.state import Moment
from lockstep.checkpoint.storage import Storage
from lockstep.checkpoint.store_folder import StoreFolder
from lockstep.errors import CheckpointCorrupt, LockstepError
from lockstep.launch.spec import Program
from lockstep.metrics.file import LogFile, add_lines, evaluation_line
from lockstep.metrics.sinks import Sink
from lockstep.times import Times
from lockstep.tools.evaluate.attempt import EvaluationAttempt, EvaluationEnd
from lockstep.tools.evaluate.choice import Candidate, left_out, next_one
from lockstep.tools.evaluate.follow import EvaluateOptions, EvaluationOutcome, Telling, evaluate
from tests.checkpoints import State, save
from tests.launching import LIMIT
from tests.stores import Clock, in_memory


def _save(root: PurePath, step: int, value: float = 0.0) -> tuple[PurePath, Manifest]:
    (made,) = save(root, [State({"weight": torch.full((5,), step + value)})], place=Moment(step, 0, False))
    assert isinstance(made, PurePath), made
    return made, read_manifest(made)


def _evaluated(folder: PurePath, manifest: Manifest, **numbers: float) -> Evaluated:
    told = {f"eval/{name}": value for name, value in numbers.items()}
    return Evaluated(folder.name, manifest.identity, told, 1, "", 2.5, 1000.25)


def _made(root: Path) -> Path:
    """The folder of results, as an evaluator makes it."""
    folder = root / "evaluations"
    folder.mkdir(0o700)
    return folder


# What comes next.


def _candidate(step: int, digest: str = "a", revision: int = 1) -> Candidate:
    return Candidate(f"step-{step:08d}" + (f"-r{revision}" if revision > 1 else ""), digest * 32)


def _results(**tries: int) -> dict[tuple[str, str], Evaluated]:
    """Results by step: with so many tries, of which 0 means that it succeeded."""
    found = {}
    for name, count in tries.items():
        each = _candidate(int(name[1:]))
        numbers = {"eval/loss": 1.0} if not count else None
        found[each.name, each.digest] = Evaluated(each.name, each.digest, numbers, count, "" if numbers else "no", 1, 1)
    return found


def test_the_newest_without_a_result_comes_next() -> None:
    there = {_candidate(step) for step in (5, 20, 9)} | {_candidate(9, revision=2)}
    assert next_one(there, {}) == _candidate(20)
    assert next_one(there, _results(s20=0)) == _candidate(9, revision=2)
    other = {(each.name, each.digest): _results(s20=0)["step-00000020", "a" * 32] for each in [_candidate(20, "b")]}
    assert next_one(there, other) == _candidate(20), "another checkpoint had its name"
    assert next_one([], {}) is None


def test_what_has_failed_is_tried_again_once_all_others_are_done() -> None:
    there = {_candidate(step) for step in (5, 9, 20)}
    assert next_one(there, _results(s20=1)) == _candidate(9)
    assert next_one(there, _results(s20=1, s9=0, s5=2)) == _candidate(20)
    assert next_one(there, _results(s20=TRIES, s9=0, s5=2)) == _candidate(5)
    assert next_one(there, _results(s20=TRIES, s9=0, s5=TRIES)) is None


def test_those_that_were_removed_before_are_left_out_in_order() -> None:
    known = [_candidate(step) for step in (30, 10, 20, 5)]
    assert left_out(known, {_candidate(30)}, _results(s20=0), after=(5, 1)) == [_candidate(10)]
    assert left_out(known, set(), _results(s20=TRIES, s30=1), after=(5, 1)) == [_candidate(10), _candidate(30)]


# Results.


def test_a_result_comes_back_as_it_was_written() -> None:
    folder = PurePath("step-00000042-r2")
    result = Evaluated(folder.name, "0" * 31 + "f", {"eval/a": 0.1 + 0.2, "eval/b": math.nan}, 2, "", 1.5, 3.25)
    read = Evaluated.from_json(result.to_json(), name=f"{result.name}.json")
    assert read is not None
    assert read.numbers is not None
    assert (read.numbers["eval/a"], math.isnan(read.numbers["eval/b"])) == (0.1 + 0.2, True)
    assert replace(read, numbers=None) == replace(result, numbers=None)
    assert (read.step, read.is_final) == (42, True)
    failed = replace(result, numbers=None, failure="it ended with exit code 3")
    assert Evaluated.from_json(failed.to_json(), name=f"{result.name}.json") == failed
    assert not failed.is_final
    assert replace(failed, tries=TRIES).is_final


def test_what_is_no_result_is_left_alone(tmp_path: Path) -> None:
    made = _made(tmp_path)
    evaluations = Evaluations(tmp_path)
    result = Evaluated("step-00000001", "a" * 32, {"eval/a": 1.0}, 1, "", 1.0, 1.0)
    name = f"step-00000001-{'b' * 32}.json"
    for content in (result.to_json(), b"", b"[]", b'{"format": 1}', b"\xff", result.to_json().replace(b"1.0", b'"x"')):
        (made / name).write_bytes(content)
        assert evaluations.all() == []
    (made / name).unlink()
    (made / name).symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="link") as failed:
        evaluations.all()
    assert failed.value.filename == str(made / name)


@pytest.mark.parametrize("where", ["disk", "store"])
def test_results_are_put_beside_the_checkpoints(tmp_path: Path, where: str) -> None:
    with in_memory() as address:
        root = tmp_path if where == "disk" else address
        evaluations = Evaluations(root)
        assert not evaluations.exists()
        assert evaluations.all() == []
        if where == "disk":
            _made(tmp_path)
        first = Evaluated("step-00000010", "a" * 32, {"eval/a": 1.0}, 1, "", 1.0, 1.0)
        second = replace(first, checkpoint="step-00000009", numbers=None, failure="no")
        for each in (first, second):
            evaluations.put(each)
        assert evaluations.exists()
        assert evaluations.all() == [second, first]
        assert Evaluations(root).of({"step-00000010"}) == [first]
        evaluations.put(replace(second, tries=2))
        assert [each.tries for each in evaluations.all()] == [2, 1]
        evaluations.forget(second)
        assert Evaluations(root).all() == evaluations.all() == [first]
        if where == "disk":
            (file,) = (tmp_path / "evaluations").iterdir()
            assert file.name == f"{first.name}.json"
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("where", ["disk", "store"])
def test_a_result_that_was_removed_is_read_anew(tmp_path: Path, where: str) -> None:
    with in_memory() as address:
        root = tmp_path if where == "disk" else address
        if where == "disk":
            _made(tmp_path)
        before = Evaluated("step-00000001", "a" * 32, {"eval/a": 1.0}, 1, "", 1.0, 1.0)
        of_training, of_evaluator = Evaluations(root), Evaluations(root)
        of_evaluator.put(before)
        assert of_training.all() == [before]
        of_evaluator.forget(before)
        assert of_training.all() == []
        of_evaluator.put(replace(before, numbers={"eval/a": 2.0}))
        assert of_training.all() == [replace(before, numbers={"eval/a": 2.0})]


class _Full(Storage):
    """A disk that is full."""

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:  # noqa: ARG002
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_result_that_can_not_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    made = _made(tmp_path)
    result = Evaluated("step-00000001", "a" * 32, {"eval/a": 1.0}, 1, "", 1.0, 1.0)
    with pytest.raises(OSError, match="No space left") as failed:
        Evaluations(tmp_path, _Full()).put(result)
    assert failed.value.filename == str(made / f"{result.name}.json")
    assert os.listdir(made) == []


@pytest.mark.parametrize("where", ["disk", "store"])
def test_a_checkpoint_has_one_identity(tmp_path: Path, where: str) -> None:
    with in_memory() as address:
        root: PurePath = tmp_path if where == "disk" else address
        folder, manifest = _save(root, 3)
        assert read_manifest(folder).identity == manifest.identity
        assert Manifest.from_json(manifest.to_json(), where="").identity == manifest.identity
        assert _save(root, 3, 0.5)[1].identity != manifest.identity


# Which results count.


def _counted(lineage: Lineage) -> list[str]:
    return [each.checkpoint for each in lineage.results()]


def test_results_of_steps_that_are_taken_again_are_void(tmp_path: Path) -> None:
    _made(tmp_path)
    lineage, evaluations = Lineage(tmp_path), Evaluations(tmp_path)
    lineage.begin()
    saved = {step: _save(tmp_path, step) for step in (10, 20, 30)}
    for folder, manifest in saved.values():
        lineage.add(folder, manifest)
        evaluations.put(_evaluated(folder, manifest, loss=1.0))
    lineage.end()
    assert _counted(lineage) == ["step-00000010", "step-00000020", "step-00000030"]
    assert LineageRecord.from_json(evaluations.read(FILE)).ended
    lineage.add(*saved[30])  # a save after the last epoch
    assert LineageRecord.from_json(evaluations.read(FILE)).ended
    for step in (10, 30):  # pruned, and set aside
        run_folder(tmp_path).remove(saved[step][0].name)
    resumed = Lineage(tmp_path)
    resumed.resume_from(*saved[20])
    told = LineageRecord.from_json(evaluations.read(FILE))
    assert ([name for name, _ in told.checkpoints], told.ended) == (["step-00000010", "step-00000020"], False)
    assert _counted(resumed) == ["step-00000010", "step-00000020"], "10 has gone, and is where this run has come from"
    again = _save(tmp_path, 30, 0.5)
    resumed.add(*again)
    assert _counted(resumed) == ["step-00000010", "step-00000020"], "the result at step 30 is of another checkpoint"
    evaluations.put(_evaluated(*again, loss=2.0))
    late = replace(_evaluated(*saved[30], loss=9.0), checkpoint="step-00000030", digest="f" * 32)
    evaluations.put(late)  # an evaluation that was under way when the run resumed
    assert [each.digest for each in resumed.results()][-1] == again[1].identity
    assert [each.digest for each in results_of_a_run_at_rest(tmp_path)][-1] == again[1].identity
    once_more = Lineage(tmp_path)
    once_more.resume_from(*again)
    assert _counted(once_more) == ["step-00000010", "step-00000020", "step-00000030"]


def test_where_nobody_evaluates_nothing_is_written(tmp_path: Path) -> None:
    lineage = Lineage(tmp_path)
    lineage.begin()
    saved = {step: _save(tmp_path, step) for step in (10, 20)}
    for each in saved.values():
        lineage.add(*each)
    lineage.end()
    assert {each.name for each in tmp_path.iterdir()} == {"step-00000010", "step-00000020"}
    evaluations = Evaluations(tmp_path)
    _made(tmp_path)
    resumed = Lineage(tmp_path)
    resumed.resume_from(*saved[10])
    for each in saved.values():
        evaluations.put(_evaluated(*each, loss=1.0))
    assert _counted(resumed) == ["step-00000010"], "it is there, and not newer"
    assert [each.step for each in results_of_a_run_at_rest(tmp_path)] == [10, 20]


def test_a_run_that_begins_takes_no_results_of_others(tmp_path: Path) -> None:
    _made(tmp_path)
    folder, manifest = _save(tmp_path, 10)
    Evaluations(tmp_path).put(_evaluated(folder, manifest, loss=1.0))
    lineage = Lineage(tmp_path)
    lineage.add(folder, manifest)
    run_folder(tmp_path).remove(folder.name)
    anew = Lineage(tmp_path)
    anew.begin()
    assert _counted(anew) == []
    assert LineageRecord.from_json(Evaluations(tmp_path).read(FILE)) == LineageRecord()


def test_a_lineage_that_can_not_be_written_is_a_warning(tmp_path: Path) -> None:
    made = _made(tmp_path)
    lineage = Lineage(tmp_path)
    saved = _save(tmp_path, 10)
    made.rename(tmp_path / "moved")
    made.symlink_to(tmp_path / "moved")
    with pytest.warns(RuntimeWarning, match="training goes on"):
        lineage.add(*saved)
    made.unlink()
    (tmp_path / "moved").rename(made)
    lineage.add(*_save(tmp_path, 20))
    assert [name for name, _ in LineageRecord.from_json(Evaluations(tmp_path).read(FILE)).checkpoints] == [
        "step-00000010",
        "step-00000020",
    ]
    for content in (
        b"",
        b"{}",
        b"[]",
        b'{"format": 1, "ended": 1, "checkpoints": []}',
        b'{"format": 1, "ended": true}',
    ):
        assert LineageRecord.from_json(content) == LineageRecord()


def test_the_list_of_a_long_run_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.checkpoint.lineage._MOST", 3)
    _made(tmp_path)
    lineage = Lineage(tmp_path)
    _, manifest = _save(tmp_path, 1)
    for step in range(1, 6):
        lineage.add(tmp_path / f"step-{step:08d}", manifest)
    names = [name for name, _ in LineageRecord.from_json(Evaluations(tmp_path).read(FILE)).checkpoints]
    assert names == ["step-00000003", "step-00000004", "step-00000005"]


def test_a_store_is_asked_for_results_once_in_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_memory() as address:
        root = address / "run"
        saved = _save(root, 5)
        lineage = Lineage(root)
        lineage.add(*saved)
        assert lineage.results() == []
        Evaluations(root).put(_evaluated(*saved, loss=1.0))
        assert lineage.results() == [], "it was asked a moment ago"
        monkeypatch.setattr(lineage, "_next_look", 0.0)
        assert _counted(lineage) == ["step-00000005"]
        assert _counted(lineage) == ["step-00000005"], "a second log of the run is told the same"
        lineage.begin()
        assert lineage.results() == [], "what it has found was of another run"


@pytest.mark.parametrize("stands_still", [0.0, 50.0])
def test_an_owner_in_a_store_that_gives_no_sign_of_life_counts_as_none(
    monkeypatch: pytest.MonkeyPatch, stands_still: float
) -> None:
    """The owner is on another machine, so that nobody here can know that it was killed. Seconds in which the evaluator
    itself stood still are none in which the owner was silent."""
    clock, looks, look = Clock(), itertools.count(1), StoreFolder.beat_now
    monkeypatch.setattr("lockstep.tools.evaluate.follow.time", clock)
    with in_memory() as address:
        root = address / "run"
        _save(root, 5)
        store = ObjectStore.opened("memory")
        sign = Sign(replace(Owner.this_process(), host="elsewhere"), "nonce")
        store.put(f"{root.key}/owner-00000001.json", sign.to_json())
        Evaluations(root).put(
            Evaluated("step-00000005", read_manifest(root / "step-00000005").identity, {}, 1, "", 1, 1)
        )

        def beat_now(self: StoreFolder) -> tuple[str, int] | None:
            if (number := next(looks)) <= 3:
                store.put(f"{root.key}/owner-00000001.json", replace(sign, beat=number).to_json())
            if number == 3:
                clock.sleep(stands_still)
            return look(self)

        monkeypatch.setattr(StoreFolder, "beat_now", beat_now)
        heard: list[tuple[float, str]] = []
        tell = Telling(lambda _: None, lambda words: heard.append((clock.now, words)), lambda _step, _seconds: None)
        evaluate(EvaluateOptions(Program(__file__), root, follows=True, patience=120.0), tell)
        # Looks at 0, 10 and 20 seconds hear of a sign.
        last = 20.0 + stands_still
        assert [at for at, words in heard if "no job trains in" in words] == [last + Times().lease]
        assert clock.now == last + Times().lease + 120.0


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_had_ended_may_be_trained_on_and_the_words_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr("lockstep.tools.evaluate.follow.time", clock)
    folder, manifest = _save(tmp_path, 5)
    _made(tmp_path)
    Evaluations(tmp_path).put(_evaluated(folder, manifest, loss=1.0))
    lineage = Lineage(tmp_path)
    lineage.add(folder, manifest)
    if ended:
        lineage.end()
    heard: list[str] = []
    tell = Telling(lambda _: None, heard.append, lambda _step, _seconds: None)
    evaluate(EvaluateOptions(Program(__file__), tmp_path, follows=True, patience=120.0), tell)
    words = "had done all its epochs before; a job that continues it has 2:00 to begin (--patience)"
    assert [words in said for said in heard] == [ended]
    assert 120 <= clock.now < 140
    heard.clear()
    evaluate(EvaluateOptions(Program(__file__), tmp_path), tell)
    assert heard == []


def test_another_checkpoint_of_the_same_name_in_a_store_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_memory() as address:
        root = address / "run"
        folder, manifest = _save(root, 5)
        evaluations, lineage = Evaluations(root), Lineage(root)
        evaluations.put(_evaluated(folder, manifest, loss=1.0))
        lineage.add(folder, manifest)
        seen: list[str] = []

        def between_looks(_root: PurePath) -> float:
            if not seen:
                run_folder(root).remove(folder.name)
                lineage.begin()
                lineage.add(*_save(root, 5, 0.5))
            return 0.01

        def attempted(_program: Program, _checkpoint: PurePath, digest: str, **_: Any) -> EvaluationAttempt:
            seen.append(digest)
            return EvaluationAttempt(EvaluationEnd.DONE, {"eval/loss": 2.0}, "", 1.0, 0)

        monkeypatch.setattr("lockstep.tools.evaluate.follow._pause", between_looks)
        monkeypatch.setattr("lockstep.tools.evaluate.follow.attempt", attempted)
        tell = Telling(lambda _: None, lambda _: None, lambda _step, _seconds: None)
        evaluate(EvaluateOptions(Program(__file__), root, follows=True, patience=0.5), tell)
        assert seen == [read_manifest(folder).identity] != [manifest.identity]


def test_a_failure_stays_one_where_the_checkpoint_goes_before_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path
    folder, manifest = _save(root, 5)
    Lineage(root).add(folder, manifest)
    outcomes: list[EvaluationOutcome] = []

    def failed(*_: Any, **__: Any) -> EvaluationAttempt:
        return EvaluationAttempt(EvaluationEnd.FAILED, None, "it ended with exit code 1", 1.0, 1)

    def heard(outcome: EvaluationOutcome) -> None:
        outcomes.append(outcome)
        if outcome.again:
            assert run_folder(root).remove(folder.name)

    monkeypatch.setattr("lockstep.tools.evaluate.follow.attempt", failed)
    said: list[str] = []
    tally = evaluate(
        EvaluateOptions(Program(__file__), root), Telling(heard, said.append, lambda _step, _seconds: None)
    )
    assert [each.end for each in outcomes] == [EvaluationEnd.FAILED]
    assert (tally.failed, tally.missed) == ([5], [])
    assert "removed before it could be tried again" in said[-1]


# What is kept.


def _steps(root: Path) -> list[int]:
    return sorted(folders.step_of(folder) for folder in folders.checkpoints(root))


def test_the_best_by_evaluated_numbers_stays(tmp_path: Path) -> None:
    _made(tmp_path)
    evaluations = Evaluations(tmp_path)
    rule = Retention(last=1, best=1, mode="max", by="eval/acc")
    for step, acc in {1: 0.5, 2: 0.9, 3: math.nan, 4: 0.8, 5: None}.items():
        folder, manifest = _save(tmp_path, step)
        if acc is not None:
            evaluations.put(_evaluated(folder, manifest, acc=acc, loss=-acc))
        prune(tmp_path, folder, rule)
    assert _steps(tmp_path) == [2, 5], "the best by known numbers, and the last"
    folder, manifest = _save(tmp_path, 6)
    evaluations.put(replace(_evaluated(folder, manifest, acc=2.0), digest="0" * 32))
    prune(tmp_path, folder, rule)
    assert _steps(tmp_path) == [2, 6], "a number of another checkpoint of that name counts for nothing"


def test_a_number_that_nobody_reports_is_named(tmp_path: Path) -> None:
    _made(tmp_path)
    folder, manifest = _save(tmp_path, 1)
    Evaluations(tmp_path).put(_evaluated(folder, manifest, acc=0.5, loss=1.0))
    with pytest.warns(
        RuntimeWarning, match="by='eval/accuracy', but lockstep evaluate has found only eval/acc and eval"
    ):
        prune(tmp_path, folder, Retention(last=1, best=1, by="eval/accuracy"))
    for options, words in {
        (("best", 1), ("by", "accuracy")): "expected the name of a number as metrics.jsonl has it",
        (("by", "eval/acc"),): "say how many of the best",
    }.items():
        with pytest.raises(ValueError, match=words):
            Retention(**dict(options))  # type: ignore[arg-type]


# What a script reports.


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file for the report of a checkpoint at step 7, whose evaluation this process is."""
    (tmp_path / "run").mkdir()
    folder, manifest = _save(tmp_path / "run", 7)
    EvaluationOrder(str(folder), manifest.identity, str(tmp_path / "report")).write(tmp_path / "order")
    monkeypatch.setenv(knobs.EVALUATION, str(tmp_path / "order"))
    return tmp_path / "report"


class _Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))


def test_a_script_loads_the_checkpoint_and_reports(order: Path) -> None:
    evaluation = lockstep.Evaluation("/nowhere")
    model = _Weight()
    assert evaluation.load(model).source == evaluation.folder
    assert (evaluation.step, model.weight.tolist()) == (7, [7.0] * 5)
    assert read_report(order) is None
    third = 1 / 3
    evaluation.report({"top/5": np.float32(0.5), "eval/same": 3}, acc=torch.tensor(third, dtype=torch.float64))
    evaluation.report(acc=0.25, odd=math.nan, one=torch.tensor([2]))
    told = read_report(order)
    assert told is not None
    assert math.isnan(told.pop("eval/odd"))
    assert told == {"eval/top/5": 0.5, "eval/same": 3.0, "eval/acc": 0.25, "eval/one": 2.0}
    assert stat.S_IMODE(order.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("numbers", "kind", "words"),
    [
        ({"acc": math.inf}, ValueError, "acc is inf, or beyond what a float holds: expected a finite number"),
        ({"acc": 10**400}, ValueError, "beyond what a float holds"),
        ({"acc": "0.5"}, TypeError, "acc is of the type str: expected a number"),
        ({"acc": None}, TypeError, "acc is of the type NoneType"),
        ({"acc": True}, TypeError, "acc is of the type bool"),
        ({"acc": torch.zeros(2)}, ValueError, r"acc is a tensor of shape \[2\], torch.float32: expected one real"),
        ({"acc": torch.tensor(1j)}, ValueError, "expected one real number"),
        ({"": 1.0}, TypeError, "'' is the name of a number"),
        ({3: 1.0}, TypeError, "3 is the name of a number"),
        ({str(number): 1.0 for number in range(1000)}, ValueError, "1001 numbers of step 7, at most 1000"),
        ({"n" * 201: 1.0}, ValueError, "nnn is the name of a number: expected at most 200 printable characters"),
        ({"two\nlines": 1.0}, ValueError, r"'two\\nlines' is the name of a number: expected at most 200 printable"),
        ({"\ud800": 1.0}, ValueError, r"'\\ud800' is the name of a number: expected at most 200 printable"),
    ],
)
def test_what_is_no_number_is_refused_by_name(order: Path, numbers: Any, kind: type[Exception], words: str) -> None:
    evaluation = lockstep.Evaluation()
    with pytest.raises(kind, match=words):
        evaluation.report({"fine": 1.0, **numbers})
    assert read_report(order) is None


def test_what_several_evaluations_of_a_script_report_is_one_report(order: Path) -> None:
    lockstep.Evaluation().report(acc=0.5, loss=2.0)
    lockstep.Evaluation().report(acc=0.75)
    assert read_report(order) == {"eval/acc": 0.75, "eval/loss": 2.0}
    with pytest.raises(ValueError, match="1002 numbers of step 7, at most 1000"):
        lockstep.Evaluation().report({str(number): 1.0 for number in range(1000)})
    assert read_report(order) == {"eval/acc": 0.75, "eval/loss": 2.0}


def test_all_that_may_be_reported_can_be_read_back(order: Path, tmp_path: Path) -> None:
    """A result that can't be read would be evaluated again for ever."""
    _made(tmp_path)
    names = ["\U0001f600" * 197 + f"{number:03}" for number in range(1000)]
    lockstep.Evaluation().report(dict.fromkeys(names, math.pi * 1e-300))
    told = read_report(order)
    assert told is not None
    result = Evaluated("step-00000007", "a" * 32, told, 1, "", 1.0, 1.0)
    Evaluations(tmp_path).put(result)
    assert len(told) == 1000
    assert Evaluations(tmp_path).all() == [result]


def test_a_checkpoint_that_goes_is_an_error_that_says_so(order: Path) -> None:
    evaluation = lockstep.Evaluation()
    run_folder(evaluation.folder.parent).remove(evaluation.folder.name)
    with pytest.raises(CheckpointGone, match="was removed"):
        evaluation.load(_Weight())
    _save(evaluation.folder.parent, 7, 0.5)
    with pytest.raises(CheckpointGone, match="another checkpoint has taken the place"):
        evaluation.load(_Weight())
    assert read_report(order) is None


def test_a_checkpoint_is_not_held_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = _save(tmp_path, 7)
    read = type(run_folder(folder.parent)).open

    def removed(self: Any, name: str) -> Any:
        opened = read(self, name)
        assert run_folder(folder.parent).remove(name), "nobody holds it"
        return opened

    monkeypatch.setattr(type(run_folder(folder.parent)), "open", removed)
    with pytest.raises(CheckpointGone, match="was removed while it was read"):
        read_model_unheld(folder)


def test_damage_is_not_taken_for_a_checkpoint_that_went(tmp_path: Path) -> None:
    folder, _ = _save(tmp_path, 7)
    Path(folder, "model.safetensors").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors"):
        read_model_unheld(folder)


def test_by_hand_the_numbers_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (7, 9):
        folder, _ = _save(tmp_path, step)
    for path in (str(tmp_path), folder):
        evaluation = lockstep.Evaluation(path)
        model = _Weight()
        evaluation.load(model)
        evaluation.report(acc=0.5)
        assert (evaluation.step, model.weight[0].item()) == (9, 9.0)
        assert capsys.readouterr().out == "lockstep: step 9: eval/acc 0.5\n"
    with pytest.raises(LockstepError, match="no checkpoint: lockstep evaluate, which names it, has not started"):
        lockstep.Evaluation()
    with pytest.raises(LockstepError, match="neither a checkpoint nor the folder of a run"):
        lockstep.Evaluation(tmp_path / "nowhere")


def test_a_variable_that_leads_nowhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in ("", "[]", '{"checkpoint": "x"}', '{"checkpoint": "x", "digest": "x", "report": "y"}'):
        (tmp_path / "order").write_text(content)
        monkeypatch.setenv(knobs.EVALUATION, str(tmp_path / "order"))
        with pytest.raises(LockstepError, match=r"LOCKSTEP_EVALUATION=.*not what lockstep evaluate writes"):
            lockstep.Evaluation()


# Lines of metrics.jsonl.


def _line(step: int, loss: float = 1.0, time: float = 5.0) -> dict[str, Any]:
    return evaluation_line(f"result-{step}", step=step, time=time, numbers={"eval/loss": loss})


def _told(path: Path) -> list[tuple[int, str | None]]:
    return [(each["step"], each.get("evaluation")) for each in map(json.loads, path.read_text().splitlines())]


def test_the_line_of_a_result() -> None:
    line = evaluation_line("name", step=3, time=5.00049, numbers={"eval/a": 0.1, "eval/b": math.nan})
    assert line == {
        "step": 3, "time": 5.0, "eval/a": 0.1, "eval/b": None, "evaluation": "name", "nonfinite": {"eval/b": 1},
    }  # fmt: skip


def test_lines_of_results_are_added_once_where_no_log_is_open(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert add_lines(path, []) == 0
    assert not path.exists()
    assert add_lines(path, [_line(2)]) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    log = LogFile(path, after=9)
    log.append({"step": 4})
    assert log.evaluations == {("result-2", 5.0)}
    log.close()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')
    assert add_lines(path, [_line(2), _line(3)]) == 1
    assert add_lines(path, [_line(2), _line(3)]) == 0
    assert _told(path) == [(2, "result-2"), (4, None), (3, "result-3")]
    path.write_text("hello\n")
    with pytest.raises(LockstepError, match="has not written line 1"):
        add_lines(path, [_line(2)])
    assert path.read_text() == "hello\n"


def test_a_resumed_log_knows_which_lines_of_results_it_has(tmp_path: Path) -> None:
    """The line of step 2 came after that of step 6, from which on the file is cut off."""
    path = tmp_path / "metrics.jsonl"
    log = LogFile(path, after=None)
    for line in ({"step": 1}, _line(1), {"step": 4}, {"step": 6}, _line(2)):
        log.append(line)
    log.close()
    log = LogFile(path, after=5)
    assert log.evaluations == {("result-1", 5.0)}
    log.append(_line(2))
    assert log.evaluations == {("result-1", 5.0), ("result-2", 5.0)}
    log.close()
    assert _told(path) == [(1, None), (1, "result-1"), (4, None), (2, "result-2")]


@pytest.mark.parametrize("logs", [True, False])
def test_a_checkpoint_that_is_evaluated_anew_has_a_line_of_its_own(tmp_path: Path, logs: bool) -> None:
    """Its result has the name of the one before. Where a log has written the file, the line before stays."""
    path = tmp_path / "metrics.jsonl"
    if logs:
        log = LogFile(path, after=None)
        log.append({"step": 2})
        log.close()
    for line in (_line(2), _line(2), _line(2, loss=3.0, time=7.0), _line(2, loss=3.0, time=7.0)):
        add_lines(path, [line])
    losses = [line["eval/loss"] for line in map(json.loads, path.read_text().splitlines()) if "evaluation" in line]
    assert losses == ([1.0, 3.0] if logs else [3.0])


def test_lines_that_are_void_go_where_there_is_nothing_but_results(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    add_lines(path, [_line(2), _line(4)])
    assert add_lines(path, [_line(2), _line(3)]) == 2
    assert _told(path) == [(2, "result-2"), (3, "result-3")]
    with path.open("a") as file:
        file.write('{"step": 3, "loss": 1}\n')
    assert add_lines(path, [_line(2)]) == 0
    assert _told(path) == [(2, "result-2"), (3, "result-3"), (3, None)], "the script has a log: it cuts its file itself"


#: Holds the lock of a file until its standard input ends.
_HOLDS = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.lockf(fd, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_where_a_log_is_open_it_takes_the_results_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.TIMES, "log_lock=300")
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-IS", "-c", _HOLDS, str(path)], stdin=pipe, stdout=pipe) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        assert add_lines(path, [_line(2)]) is None
        assert _told(path) == [(1, None)]
        begins = threading.Thread(target=lambda: LogFile(path, after=1).close())
        begins.start()
        begins.join(0.2)
        assert begins.is_alive(), "a log that begins waits for the evaluator"
        other.stdin.close()
        begins.join(LIMIT)
        assert not begins.is_alive()
    assert add_lines(path, [_line(2)]) == 1


class _ByLog:
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.lines.append((step, values))


class _ByMetrics(_ByLog):
    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        self.lines.append((step, values))


def test_sinks_get_results_at_their_step_or_with_it() -> None:
    ordered, free = _ByLog(), _ByMetrics()
    for each in (ordered, free):
        Sink(each).write_late({"eval/loss": 1.0}, 20, now=50)
    assert ordered.lines == [(50, {"eval/loss": 1.0, "eval/step": 20})], "Weights & Biases takes no step that lies back"
    assert free.lines == [(20, {"eval/loss": 1.0})]


# The process.


def test_priority_and_cores() -> None:
    told = """
import json, os
from lockstep.tools.evaluate import priority
first = min(os.sched_getaffinity(0))
priority.keep_to(frozenset({first}))
refused = priority.lower()
try:
    priority.keep_to(frozenset({first, 4095}))
except ValueError as error:
    words = str(error)
print(json.dumps([refused, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0) == os.SCHED_BATCH,
                  [*os.sched_getaffinity(0)] == [first], words]))
"""
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=120, check=True)
    refused, nice, is_batch, is_bound, words = json.loads(done.stdout)
    assert len(refused) <= 1, "a container may refuse some of it"
    assert (nice, is_batch, is_bound) == (max(10, os.getpriority(os.PRIO_PROCESS, 0)), True, True)
    assert words.startswith("--cores: expected some of the cores that this process may use, ")
