"""``lockstep evaluate`` beside real trainings: every result at its step, none twice, and training waits for nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep._proc import descendants
from lockstep.checkpoint.evaluations import Evaluations
from lockstep.checkpoint.run_folder import run_folder
from tests.launching import Finished, Running, gone_within, killed_afterwards, run, start, wait_for
from tests.schemas import holds
from tests.stores import S3, s3

#: Five steps an epoch, with a save after each. "paced": an epoch begins when that of the one before has a result.
_TRAIN = """
import sys, time
from pathlib import Path
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

folder, epochs, lr, how, keep = sys.argv[1:]
world = lockstep.init()
torch.manual_seed(1)
model = lockstep.replicate(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=float(lr))
rows = torch.arange(160.0).reshape(40, 4).sin()
loader = lockstep.shard(DataLoader(TensorDataset(rows, rows[:, :2].cos()), batch_size=8, shuffle=True))
best = lockstep.Retention(last=1, best=1, mode="max", by="eval/rank")
saved = lockstep.Checkpointer(
    folder, model=model, optimizer=optimizer, loader=loader, keep=best if keep == "best" else None
)
if "://" in folder:
    saved.restore()
    log = lockstep.Log("logged", every=2, after=saved.step or None, evaluated=saved)
else:
    log = lockstep.Log(saved, every=2)
for epoch in saved.epochs(int(epochs)):
    optimizer.param_groups[0]["lr"] = float(lr)  # not the one that was saved
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss, **({"step": saved.step} if "://" in folder else {}))
    saved.save()
    limit = time.monotonic() + 120
    results = Path(folder, "evaluations")
    while how == "paced" and world.is_main and not [*results.glob(f"step-{saved.step:08d}-*.json")]:
        assert time.monotonic() < limit
        time.sleep(0.01)
"""

#: What it does is in the file "how", so that it can change between two evaluations.
_EVALUATE = """
import os, sys, time
from pathlib import Path
import torch, lockstep
from torch import nn

world = lockstep.init()
evaluation = lockstep.Evaluation()
how = Path("how").read_text()
if world.is_main:
    with open("started", "a") as file:
        file.write(f"{evaluation.step}\\n")

def hold(where):
    if how == where:
        Path("holds").write_text(str(evaluation.step))
        limit = time.monotonic() + 200
        while not Path("go").exists():
            assert time.monotonic() < limit
            time.sleep(0.01)

assert sys.argv[1:] == ["--some", "option"], sys.argv
if how == "late":
    hold(how)
    sys.exit(4)
if how == "fail":
    print("this is what it says")
    sys.exit(3)
hold("before")
if how == "owns":
    lockstep.Checkpointer(evaluation.folder.parent, model=lockstep.replicate(nn.Linear(4, 2))).restore()
if how == "calm":
    hold(how)
    try:
        evaluation.load(nn.Linear(4, 2))
    except lockstep.CheckpointError:
        sys.exit(0)
model = nn.Linear(4, 2)
evaluation.load(model)
hold("after")
score = model(torch.arange(40.0).reshape(10, 4).sin()).square().mean()
ranked = {5: 1.0, 10: 3.0, 15: 2.0}
if how != "silent":
    evaluation.report({"rank": ranked[evaluation.step]}, score=world.mean(score), nothing=float("nan"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(_TRAIN)
    (tmp_path / "eval.py").write_text(_EVALUATE)
    (tmp_path / "how").write_text("")
    return tmp_path


_TIMES = "0.05"


def _training(*, root: str = "runs/x", epochs: int = 3, lr: float = 0.1, **words: str) -> list[str]:
    ranks = words.get("ranks", "1")
    rest = [str(epochs), str(lr), words.get("how", "free"), words.get("keep", "all")]
    return ["lockstep", "run", "-n", ranks, "train.py", root, *rest]


def _train(folder: Path, env: Mapping[str, str] | None = None, **options: Any) -> None:
    done = run(_training(**options), folder, torch=True, **(env or {}))
    assert done.code == 0, done


def _words(*options: str, root: str = "runs/x") -> list[str]:
    return ["lockstep", "evaluate", *options, root, "eval.py", "--some", "option"]


def _evaluate(folder: Path, *options: str, root: str = "runs/x", **env: str) -> Finished:
    return run(_words(*options, root=root), folder, torch=True, LOCKSTEP_TIMES=_TIMES, **env)


def _begin(folder: Path, *options: str, cold: bool = False) -> Running:
    return start(_words(*options), folder, torch=True, cold=cold, LOCKSTEP_TIMES=_TIMES)


def _lines(folder: Path, path: str = "runs/x/metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / path).read_text().splitlines()]


def _evaluated(folder: Path) -> dict[int, float]:
    """The score at each step in metrics.jsonl; each step is there once."""
    lines = [line for line in _lines(folder) if "evaluation" in line]
    assert len({line["step"] for line in lines}) == len(lines), lines
    return {line["step"]: line["eval/score"] for line in lines}


def _scores(folder: Path, *steps: int) -> dict[int, float]:
    """The score that one process computes from each checkpoint."""
    found = {}
    for step in steps:
        model = nn.Linear(4, 2)
        lockstep.load_weights(folder / f"runs/x/step-{step:08d}", model)
        found[step] = model(torch.arange(40.0).reshape(10, 4).sin()).square().mean().item()
    return found


def _started(folder: Path) -> Counter[int]:
    return Counter(map(int, (folder / "started").read_text().split()))


def _held(folder: Path, where: str) -> None:
    (folder / "how").write_text(where)
    for name in ("holds", "go"):
        (folder / name).unlink(missing_ok=True)


def _wait_until_held(folder: Path, step: int) -> None:
    holds = folder / "holds"
    wait_for(lambda: holds.exists() and holds.read_text() == str(step), f"the evaluation of step {step}")


def _let_go(folder: Path) -> None:
    (folder / "how").write_text("")
    (folder / "go").touch()


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_every_checkpoint_of_a_training_has_its_numbers_at_its_step(folder: Path, ranks: str) -> None:
    with _begin(folder, "--follow", "--patience", "600", "--json", "-n", ranks) as evaluator:
        _train(folder, how="paced", ranks="2")
        done = evaluator.finish()
    assert done.code == 0, done
    assert _evaluated(folder) == _scores(folder, 5, 10, 15), "bit for bit"
    told = [holds(line, "lockstep.evaluate/1") for line in done.out.splitlines()]
    assert [(each["step"], each["code"], each["tries"]) for each in told] == [
        (step, "evaluation-done", 1) for step in (5, 10, 15)
    ]
    assert {each["step"]: each["numbers"]["eval/score"] for each in told} == _evaluated(folder)
    lines = _lines(folder)
    places = {line["step"]: place for place, line in enumerate(lines) if "evaluation" in line}
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(steps) == [2, 4, 5, 6, 8, 10, 12, 14, 15]
    assert places[10] < [line["step"] for line in lines].index(15), "the log took it while it trained"
    first = lines[places[5]]
    assert (first["eval/rank"], first["eval/nothing"], first["nonfinite"]) == (1.0, None, {"eval/nothing": 1})
    assert "3 checkpoints evaluated" in done.err
    assert _started(folder) == {5: 1, 10: 1, 15: 1}


def test_the_best_by_what_is_found_stays(folder: Path) -> None:
    with _begin(folder, "--follow") as evaluator:
        _train(folder, how="paced", keep="best")
        done = evaluator.finish()
    assert done.code == 0, done
    assert {path.name for path in (folder / "runs/x").glob("step-*")} == {"step-00000010", "step-00000015"}
    assert "step 10: eval/rank 3, eval/score " in done.out


def test_what_a_resumed_run_takes_again_is_void(folder: Path) -> None:
    _train(folder)
    done = _evaluate(folder)
    assert done.code == 0, done
    first = _evaluated(folder)
    assert first == _scores(folder, 5, 10, 15)
    assert [line["step"] for line in _lines(folder) if "evaluation" in line] == [15, 10, 5]
    done = run(["lockstep", "checkpoint", "rewind", "runs/x", "--to", "5"], folder, torch=True)
    assert done.code == 0, done
    _train(folder, lr=0.4)
    assert _evaluated(folder) == {5: first[5]}, "those after the step are void"
    done = _evaluate(folder)
    assert done.code == 0, done
    assert _evaluated(folder) == _scores(folder, 5, 10, 15) != first
    assert _started(folder) == {5: 1, 10: 2, 15: 2}
    assert len(Evaluations(folder / "runs/x").all()) == 5, "the void ones are kept beside"
    before = [line["step"] for line in _lines(folder) if "evaluation" in line]
    shutil.rmtree(folder / "runs/x/evaluations")
    done = _evaluate(folder)
    assert done.code == 0, done
    assert [line["step"] for line in _lines(folder) if "evaluation" in line] == [*before, 15, 10, 5], "evaluated anew"


def test_a_result_that_comes_after_its_run_was_resumed_is_void(folder: Path) -> None:
    _train(folder)
    old = _scores(folder, 15)
    _held(folder, "after")
    with _begin(folder, "--follow", "--patience", "1") as evaluator:
        _wait_until_held(folder, 15)
        done = run(["lockstep", "checkpoint", "rewind", "runs/x", "--to", "5"], folder, torch=True)
        assert done.code == 0, "nobody holds a checkpoint"
        with start(_training(lr=0.4, how="paced"), folder, torch=True) as training:
            wait_for((folder / "runs/x/step-00000010").is_dir, "the save at step 10")
            _let_go(folder)
            assert training.finish().code == 0
        done = evaluator.finish()
    assert done.code == 0, done
    assert old.items() - _evaluated(folder).items() == old.items()
    assert _evaluated(folder) == _scores(folder, 5, 10, 15)
    assert len([each for each in Evaluations(folder / "runs/x").all() if each.step == 15]) == 2


@pytest.mark.parametrize("where", ["before", "calm"])
def test_a_checkpoint_that_is_removed_meanwhile_is_said_in_a_line(folder: Path, where: str) -> None:
    """Also if the script has caught the error and ended without one."""
    _train(folder)
    _held(folder, where)
    with _begin(folder, "--json") as evaluator:
        _wait_until_held(folder, 15)
        root = run_folder(folder / "runs/x")
        assert root.remove("step-00000015")
        assert root.remove("step-00000010")
        _let_go(folder)
        done = evaluator.finish()
    assert done.code == 0, done
    told = [holds(line, "lockstep.evaluate/1") for line in done.out.splitlines()]
    assert [(each["step"], each["code"]) for each in told] == [
        (15, "evaluation-gone"),
        (10, "evaluation-left-out"),
        (5, "evaluation-done"),
    ]
    assert "step 15: step-00000015 was removed while it was evaluated, so it is left out" in done.err
    assert _evaluated(folder) == _scores(folder, 5)


def test_a_script_that_fails_is_tried_three_times_and_named(folder: Path) -> None:
    _train(folder, epochs=1)
    (folder / "how").write_text("fail")
    done = _evaluate(folder, "--json")
    assert done.code == 1, done
    told = [holds(line, "lockstep.evaluate/1") for line in done.out.splitlines()]
    assert [(each["tries"], each["again"], each["exit_code"], each["code"]) for each in told] == [
        (number, number < 3, 3, "evaluation-failed") for number in (1, 2, 3)
    ]
    assert "this is what it says" in Path(told[2]["log"]).read_text()
    assert "step 5: it ended with exit code 3 (try 3 of 3, the last one); what it printed is in " in done.err
    assert "1 failed (step 5)" in done.err
    done = _evaluate(folder)
    assert done.code == 0, done
    assert "nothing was left to evaluate, 1 failed before (step 5). A checkpoint is tried 3 times; once" in done.err
    assert _started(folder) == {5: 3}, "a marked one is left alone"
    (folder / "how").write_text("silent")
    done = _evaluate(folder, "--retry-failed")
    assert done.code == 1, done
    assert "it ended without a report" in done.err
    (folder / "how").write_text("")
    done = _evaluate(folder, "--retry-failed")
    assert done.code == 0, done
    assert _evaluated(folder) == _scores(folder, 5)


def test_a_failure_is_one_also_where_the_checkpoint_has_gone(folder: Path) -> None:
    _train(folder, epochs=2)
    _held(folder, "late")
    with _begin(folder, "--json") as evaluator:
        _wait_until_held(folder, 10)
        assert run_folder(folder / "runs/x").remove("step-00000010")
        _let_go(folder)
        done = evaluator.finish()
    assert done.code == 1, done
    told = [holds(line, "lockstep.evaluate/1") for line in done.out.splitlines()]
    assert [(each["step"], each["code"], each["again"]) for each in told] == [
        (10, "evaluation-failed", False),
        (5, "evaluation-done", False),
    ]
    assert "1 checkpoint evaluated, 1 failed (step 10)" in done.err


def test_two_evaluators_do_not_do_the_same_work(folder: Path) -> None:
    _train(folder, epochs=2)
    _held(folder, "before")
    with _begin(folder) as evaluator:
        _wait_until_held(folder, 10)
        done = _evaluate(folder)
        assert (done.code, _started(folder)) == (2, {10: 1})
        assert "another lockstep evaluate is at work on" in done.err
        told = holds(_evaluate(folder, "--json").out, "lockstep.error/1")
        assert (told["code"], told["exit_code"]) == ("checkpoint-error", 2)
        _let_go(folder)
        assert evaluator.finish().code == 0
    assert _started(folder) == {10: 1, 5: 1}
    assert _evaluated(folder) == _scores(folder, 5, 10)


def _results(folder: Path) -> list[int]:
    return [each.step for each in Evaluations(folder / "runs/x").all() if each.numbers is not None]


def _held_at(folder: Path, step: int) -> Running:
    """A command with an interpreter of its own that holds the evaluation of a step."""
    _held(folder, "before")
    evaluator = _begin(folder, "--follow", "--patience", "60", cold=True)
    _wait_until_held(folder, step)
    return evaluator


def test_an_evaluator_that_is_killed_begins_where_it_was(folder: Path) -> None:
    _train(folder, epochs=2)
    with _held_at(folder, 10) as evaluator:
        below = descendants(evaluator.pid)
        with killed_afterwards(below):
            os.kill(evaluator.pid, signal.SIGKILL)
            assert gone_within(below, 60) == []
    assert _results(folder) == []
    _let_go(folder)
    done = _evaluate(folder)
    assert done.code == 0, done
    assert _started(folder) == {10: 2, 5: 1}
    assert _evaluated(folder) == _scores(folder, 5, 10)


def test_sigterm_ends_the_evaluator_and_what_it_has_started(folder: Path) -> None:
    _train(folder, epochs=2)
    with _held_at(folder, 10) as evaluator:
        below = descendants(evaluator.pid)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):  # one that has ended meanwhile
                assert os.getpriority(os.PRIO_PROCESS, pid) >= 10, "low priority for all that it starts"
        with killed_afterwards(below):
            os.kill(evaluator.pid, signal.SIGTERM)
            done = evaluator.finish()
            assert gone_within(below, 60) == []
    assert done.code == 128 + signal.SIGTERM, done
    assert _results(folder) == []
    _let_go(folder)
    assert _evaluate(folder).code == 0, "nobody holds the folder"
    assert Evaluations(folder / "runs/x").all()[-1].tries == 1, "what was asked to end has not failed"


def test_a_script_that_hangs_is_stopped_at_the_limit(folder: Path) -> None:
    _train(folder, epochs=1)
    _held(folder, "before")
    with _begin(folder, "--limit", "2s", "--json", cold=True) as evaluator:
        done = evaluator.finish()
    assert done.code == 1, done
    told = [holds(line, "lockstep.evaluate/1") for line in done.out.splitlines()]
    assert [(each["code"], each["exit_code"]) for each in told] == [("evaluation-limit", None)] * 3
    assert "it was stopped after 0:02, the limit of an evaluation (--limit)" in done.err


def test_a_run_that_does_not_come_is_waited_for_and_named(folder: Path) -> None:
    done = _evaluate(folder, "--follow", "--patience", "0.3")
    assert done.code == 2
    assert "is not there yet; it has 0:00 to come (--patience)" in done.err
    assert "no such folder: give the folder that the run gives to its Checkpointer" in done.err
    assert not (folder / "runs").exists()
    _train(folder, epochs=1)
    done = _evaluate(folder, root="runs/x/step-00000005")
    assert (done.code, "is a checkpoint: give the folder of its run" in done.err) == (2, True)
    done = run(["lockstep", "evaluate", "runs/x", "--follow", "eval.py"], folder, torch=True)
    assert (done.code, "--follow stands after FOLDER: expected PROGRAM there" in done.err) == (2, True)
    done = run(["lockstep", "evaluate", "runs/x", "nowhere.py"], folder, torch=True)
    assert (done.code, "nowhere.py" in done.err) == (2, True)
    done = _evaluate(folder, "--cores", "x")
    assert (done.code, "--cores x: expected numbers and ranges of cores" in done.err) == (2, True)


def test_a_folder_without_checkpoints_is_named(folder: Path) -> None:
    _train(folder, epochs=1)
    for options in ((), ("--follow", "--patience", "0.3")):
        done = _evaluate(folder, *options, root="runs")
        assert (done.code, f"{folder}/runs has no checkpoint: give the folder that the run" in done.err) == (2, True)
        if not options:
            assert not (folder / "runs/evaluations").exists(), "nothing is left where no run is"


@pytest.mark.parametrize("how", ["nowhere", "folder"])
def test_a_log_that_can_not_be_written_ends_no_evaluations(folder: Path, how: str) -> None:
    _train(folder, epochs=2)
    if how == "folder":
        (folder / "runs/x/metrics.jsonl").unlink()
        (folder / "runs/x/metrics.jsonl").mkdir()
    done = _evaluate(folder, *(["--metrics", "nowhere/metrics.jsonl"] if how == "nowhere" else []))
    assert (done.code, _results(folder)) == (0, [5, 10])
    assert done.err.count("metrics.jsonl was not written: ") == 1
    assert "the results are in " in done.err


def test_a_script_may_not_own_the_run_that_it_evaluates(folder: Path) -> None:
    """What it saves would be evaluated in its turn, and what training has saved be removed."""
    _train(folder, epochs=2)
    (folder / "link").symlink_to(folder / "runs/x")
    (folder / "how").write_text("owns")
    done = _evaluate(folder, "--json", root="link")
    assert done.code == 1, done
    told = [holds(line, "lockstep.evaluate/1") for line in done.out.splitlines()]
    assert Counter(each["step"] for each in told) == {5: 3, 10: 3}
    assert "is the run of which this script evaluates step-000000" in Path(told[0]["log"]).read_text()
    assert sorted(path.name for path in (folder / "runs/x").glob("step-*")) == ["step-00000005", "step-00000010"]


def test_a_run_that_is_moved_meanwhile_is_named(folder: Path) -> None:
    _train(folder, epochs=1)
    _held(folder, "after")
    with _begin(folder) as evaluator:
        _wait_until_held(folder, 5)
        (folder / "runs/x").rename(folder / "runs/y")
        _let_go(folder)
        done = evaluator.finish()
    assert (done.code, "runs/x was moved or removed meanwhile: give its new path" in done.err) == (2, True)
    done = _evaluate(folder, root="runs/y")
    assert (done.code, "1 checkpoint evaluated" in done.err) == (0, True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3(tmp_path_factory.mktemp("s3")) as running:
        yield running


def test_a_run_in_a_store_is_evaluated_and_keeps_its_best(folder: Path, server: S3) -> None:
    root, env = "s3://bucket/evaluated", server.environment
    _train(folder, env, root=root, epochs=2)
    done = _evaluate(folder, "--json", "--log-dir", "logs", root=root, **env)
    assert done.code == 0, done
    told = [holds(line, "lockstep.evaluate/1") for line in done.out.splitlines()]
    assert [(each["step"], each["numbers"]["eval/rank"]) for each in told] == [(10, 3.0), (5, 1.0)]
    results = [key for key in server.objects() if key.startswith("evaluated/evaluations/step-")]
    assert len(results) == 2
    done = _evaluate(folder, root=root, **env)
    assert (done.code, done.out) == (0, ""), "nothing is left to do"
    _train(folder, env, root=root, keep="best")
    kept = {key.split("/")[1] for key in server.objects() if key.startswith("evaluated/step-")}
    assert kept == {"step-00000010", "step-00000015"}
    lines = _lines(folder, "logged/metrics.jsonl")
    assert {line["step"]: line["eval/rank"] for line in lines if "evaluation" in line} == {5: 1.0, 10: 3.0}
    done = _evaluate(folder, "--metrics", "logged/metrics.jsonl", root=root, **env)
    assert (done.code, _started(folder)) == (0, {10: 1, 5: 1, 15: 1})
    lines = _lines(folder, "logged/metrics.jsonl")
    assert [line["step"] for line in lines if "evaluation" in line] == [5, 10, 15]
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6, 8, 10, 12, 14, 15]
