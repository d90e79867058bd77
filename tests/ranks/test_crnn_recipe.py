"""The CRNN recipe: the same run in every mode, after a kill, and from its checkpoint on one device."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from examples.crnn.modes import prepare
from examples.crnn.options import parse
from examples.crnn.train import begin, evaluate, fit, lines_of
from torch.optim.optimizer import register_optimizer_step_post_hook

import lockstep
from tests.digests import digest_of
from tests.harness import collect_outcomes, run_ranks
from tests.launching import Finished, python_path, run, start

CRNN = "examples.crnn"
#: Where the program is found.
ROOT = python_path(Path(__file__).parents[2])
#: Two epochs of three steps, the last of a single line: on several ranks all but one have none of it.
SMALL = ["--epochs", "2", "--lines", "17", "--batch-size", "8", "--test-lines", "7", "--longest", "3"]
#: What a model that has begun to read is tested on: an odd number of lines.
TASK = ["--longest", "4", "--test-lines", "201"]


def _train(folder: str, arguments: list[str], kill_at: int | None = None) -> dict[str, Any]:
    """A run in this process; it dies behind optimizer step ``kill_at``."""
    options = parse([*SMALL, *arguments])
    world = lockstep.init(seed=options.seed, timeout=30)
    run = begin(world, options, Path(folder))
    if kill_at is not None:

        def kill(*_: object) -> None:
            # The hooks of the optimizer itself, which count its steps, come first.
            if run.saved.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        register_optimizer_step_post_hook(kill)
    fit(run)
    states = {"model": run.computing.model.state_dict(), "optimizer": run.optimizer.state_dict()["state"]}
    return {"losses": run.losses, "score": run.score, "steps": run.saved.step, "digest": digest_of(states)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the small run gives on one device."""
    (result,) = run_ranks(_train, 1, str(tmp_path_factory.mktemp("alone")), ["--mode", "single"])
    assert len(result["losses"]) == 6
    assert result["losses"][-2] < result["losses"][0]
    return dict(result)


def test_a_stream_gives_the_same_loss_curve_on_several_ranks(tmp_path: Path, alone: dict[str, Any]) -> None:
    (one,) = run_ranks(_train, 1, str(tmp_path / "one"), ["--stream"])
    assert one["steps"] == alone["steps"]
    assert one["losses"] != pytest.approx(alone["losses"], rel=1e-4), "another order"
    for result in run_ranks(_train, 2, str(tmp_path / "two"), ["--stream"]):
        assert result["losses"] == pytest.approx(one["losses"], rel=1e-4)
        assert result["score"] == one["score"]


@pytest.mark.parametrize(
    ("mode", "ranks"), [("ddp", 2), pytest.param("ddp", 3, marks=pytest.mark.campaign), ("dp --gpus cpu,cpu", 1)]
)
def test_every_mode_gives_the_same_loss_curve(tmp_path: Path, alone: dict[str, Any], mode: str, ranks: int) -> None:
    results = run_ranks(_train, ranks, str(tmp_path), ["--mode", *mode.split()])
    assert results[0]["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    for result in results:
        assert result["losses"] == results[0]["losses"]
        assert result["digest"] == results[0]["digest"], "the ranks hold the same bits"
        assert result["score"] == alone["score"]
        assert result["score"].lines == 7


@pytest.mark.parametrize(
    ("mode", "ranks", "kills"),
    [
        ("ddp", 2, (5,)),
        pytest.param("ddp", 2, (3, 5), marks=pytest.mark.campaign),
        pytest.param("dp --gpus cpu,cpu", 1, (5,), marks=pytest.mark.campaign),
    ],
)
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path, mode: str, ranks: int, kills: tuple[int, ...]) -> None:
    arguments = ["--mode", *mode.split(), "--save-every", "2"]
    whole = run_ranks(_train, ranks, str(tmp_path / "whole"), arguments)
    folder = str(tmp_path / "killed")
    for kill_at in kills:  # behind a save within the first epoch, and behind one within the second
        outcomes = collect_outcomes(_train, ranks, folder, arguments, kill_at)
        assert -signal.SIGKILL in [outcome.exit_code for outcome in outcomes]
        assert not any(outcome.ok for outcome in outcomes)
    resumed = run_ranks(_train, ranks, folder, arguments)
    assert [result["digest"] for result in resumed] == [result["digest"] for result in whole]
    assert [result["score"] for result in resumed] == [result["score"] for result in whole]
    assert resumed[0]["losses"] == whole[0]["losses"][4:], "it took up the run behind its fourth step"


def test_a_run_is_resumed_in_another_mode_but_not_with_other_options(tmp_path: Path) -> None:
    first = run_ranks(_train, 2, str(tmp_path), ["--mode", "ddp"])
    (done,) = run_ranks(_train, 1, str(tmp_path), ["--mode", "single"])
    assert done["losses"] == []
    assert done["digest"] == first[0]["digest"]
    (refused,) = collect_outcomes(_train, 1, str(tmp_path), ["--mode", "single", "--seed", "1", "--epochs", "3"])
    assert refused.error == "CheckpointMismatch"
    assert "--epochs 3 instead of 2, --seed 1 instead of 0" in str(refused.message)


def _train_there(folder: Path, *options: str) -> tuple[Path, Finished]:
    command = ["lockstep", "run", "-n", "2", "-m", CRNN, "--mode", "ddp", *TASK, "--epochs", "1", *options]
    done = run(command, folder, torch=True, PYTHONPATH=ROOT)
    assert done.code == 0, done
    return folder, done


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """A folder with a run on two ranks that has left the weights as they were, and what it printed.

    Such a model reads digits everywhere, where one that has begun to learn reads none: its edits tell models apart.
    """
    options = ("--lines", "8", "--batch-size", "8", "--lr", "1e-9", "--seed", "1")
    folder, done = _train_there(tmp_path_factory.mktemp("crnn"), *options)
    found = re.search(r"character error rate ([\d.]+) ", last_line(done.out))
    assert found
    assert float(found[1]) > 1.5, "it reads next to nothing, which others may do as well"
    return folder, done


def last_line(text: str) -> str:
    """What a run says in the end about its test lines."""
    found = re.search(r"^test: (.*), over \d rank", text, re.MULTILINE)
    assert found, text
    return found[1]


@pytest.mark.campaign
def test_it_learns_to_read(tmp_path: Path) -> None:
    _, done = _train_there(tmp_path, "--lines", "11200", "--batch-size", "32")
    found = re.match(r"([\d.]+) of 201 lines read right, character error rate ([\d.]+) ", last_line(done.out))
    assert found
    assert float(found[1]) > 0.3
    assert float(found[2]) < 0.4
    assert re.search(r"epoch  1/1  loss +[\d.]+  step [\d.]+ ms  ", done.out)
    assert "2 replica(s) in processes, on cpu, global batch 32, 91,403 parameters -> runs/crnn/run-001" in done.out


@pytest.mark.timed
@pytest.mark.campaign
def test_nine_lines_of_ten_are_read_within_five_minutes(tmp_path: Path) -> None:
    with start(
        ["lockstep", "run", "-n", "2", "-m", CRNN, "--mode", "ddp"], tmp_path, torch=True, PYTHONPATH=ROOT
    ) as job:
        done = job.finish(limit=300)
    assert done.code == 0, done
    found = re.match(r"([\d.]+) of 1000 lines read right", last_line(done.out))
    assert found, done.out
    assert float(found[1]) > 0.9


def test_a_run_that_has_no_checkpoint_yet_begins_anew_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "runs/crnn/run-001").mkdir(parents=True)
    command = ["lockstep.launch", "--nproc_per_node=2", "-m", CRNN, *SMALL, "--resume"]  # passes --local_rank
    done = run(command, tmp_path, torch=True, PYTHONPATH=ROOT)
    assert done.code == 0, done
    assert "run-001 has no checkpoint yet: it begins anew" in done.out
    assert "of 7 lines read right" in done.out


def test_a_run_says_what_it_does_and_how_it_goes(untrained: tuple[Path, Finished]) -> None:
    _, done = untrained
    assert re.search(r"epoch  1/1  loss +[\d.]+  step [\d.]+ ms  ", done.out)
    assert "2 replica(s) in processes, on cpu, global batch 8, 91,403 parameters -> runs/crnn/run-001" in done.out


def test_a_checkpoint_of_two_ranks_is_tested_the_same_on_one_device(untrained: tuple[Path, Finished]) -> None:
    folder, done = untrained
    command = [CRNN, "--mode", "single", *TASK, "--evaluate", "--picture", "lines.png"]
    again = run(command, folder, torch=True, PYTHONPATH=ROOT)
    assert again.code == 0, again
    assert last_line(again.out) == last_line(done.out)
    assert (folder / "lines.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("mode", "ranks"), [("dp --gpus cpu,cpu,cpu", 1), ("ddp", 3)])
def test_a_checkpoint_of_two_ranks_is_tested_the_same_on_three(
    untrained: tuple[Path, Finished], mode: str, ranks: int
) -> None:
    folder, done = untrained
    scores = run_ranks(_evaluate, ranks, str(folder / "runs/crnn/run-001"), ["--mode", *mode.split()])
    assert scores == [last_line(done.out)] * ranks


def _evaluate(folder: str, arguments: list[str]) -> str:
    options = parse([*TASK, *arguments])
    world = lockstep.init()
    computing = prepare(world, options)
    lockstep.load_weights(folder, computing.model)
    return str(evaluate(world, computing, lines_of(options)[1]))


def test_one_process_is_what_a_mode_for_one_process_needs(tmp_path: Path) -> None:
    done = run(["lockstep", "run", "-n", "2", "-m", CRNN, "--mode", "single"], tmp_path, torch=True, PYTHONPATH=ROOT)
    assert done.code != 0
    assert "--mode single is one process, and this is rank" in done.err
