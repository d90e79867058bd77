"""The GPT recipe: the same bits on any number of ranks and after a kill, and a checkpoint that one process reads."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from examples.gpt.model import write
from examples.gpt.options import parse
from examples.gpt.text import load
from examples.gpt.train import begin, fit
from torch.optim.optimizer import register_optimizer_step_post_hook

import lockstep
from tests.digests import digest_of
from tests.harness import collect_outcomes, run_ranks
from tests.launching import python_path, run

GPT = "examples.gpt"
#: Where the program is found.
ROOT = python_path(Path(__file__).parents[2])
#: Two epochs of some steps, the last batch smaller than the others.
SMALL = [
    "--vocabulary", "280", "--context", "16", "--width", "16", "--layers", "1", "--heads", "2", "--epochs", "2",
    "--batch-size", "8", "--slices", "4", "--warmup-steps", "2", "--length", "20",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The option that names a text of some paragraphs."""
    draw = random.Random(0)
    words = ["all", "ranks", "take", "the", "same", "step", "and", "hold", "weights"]
    paragraphs = [f"{number}. " + " ".join(draw.choices(words, k=9)) + "." for number in range(40)]
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(paragraphs))
    return ["--text", str(file)]


def _train(folder: str, arguments: list[str], kill_at: int | None = None) -> dict[str, Any]:
    """A run in this process; it dies behind optimizer step ``kill_at``."""
    options = parse([*SMALL, *arguments])
    world = lockstep.init(seed=options.seed, timeout=30)
    text = load(options.text, options.vocabulary)
    run = begin(world, options, text, Path(folder))
    if kill_at is not None:

        def kill(*_: object) -> None:
            # The hooks of the optimizer itself, which count its steps, come first.
            if run.saved.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        register_optimizer_step_post_hook(kill)
    fit(run)
    states = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()["state"]}
    return {
        "curve": run.curve.epochs,
        "held out": run.held_out_loss,
        "steps": run.saved.step,
        "digest": digest_of(states),
        "written": write(run.model, [1, 2], count=10, temperature=1.0, seed=0),
    }


@pytest.fixture(scope="module")
def alone(text: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the small run gives on one rank."""
    (result,) = run_ranks(_train, 1, str(tmp_path_factory.mktemp("alone")), text)
    assert result["steps"] % 2 == 0
    assert result["steps"] >= 12
    assert result["curve"][1] < result["curve"][0]
    return dict(result)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_any_number_of_ranks_has_the_bits_of_one(
    tmp_path: Path, text: list[str], alone: dict[str, Any], ranks: int
) -> None:
    assert run_ranks(_train, ranks, str(tmp_path), text) == [alone] * ranks


def test_a_stream_is_read_in_the_same_order_on_any_number_of_ranks(
    tmp_path: Path, text: list[str], alone: dict[str, Any]
) -> None:
    (one,) = run_ranks(_train, 1, str(tmp_path / "one"), [*text, "--stream"])
    assert one["steps"] == alone["steps"]
    assert one["digest"] != alone["digest"], "another order"
    arguments = [*text, "--stream", "--save-every", "2"]
    assert not any(outcome.ok for outcome in collect_outcomes(_train, 2, str(tmp_path / "two"), arguments, 5))
    assert run_ranks(_train, 2, str(tmp_path / "two"), arguments) == [one] * 2


@pytest.mark.parametrize("then", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, text: list[str], alone: dict[str, Any], then: int
) -> None:
    """Two ranks die within the first epoch; the run goes on with others, from its checkpoint in mid-epoch."""
    arguments = [*text, "--save-every", "2"]
    outcomes = collect_outcomes(_train, 2, str(tmp_path), arguments, 5)
    assert not any(outcome.ok for outcome in outcomes)
    assert max(path.name for path in tmp_path.glob("step-*")) == "step-00000004"
    assert run_ranks(_train, then, str(tmp_path), arguments) == [alone] * then
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps)), "each step once"
    assert steps[-1] == alone["steps"]


def test_a_run_is_not_resumed_with_other_options(tmp_path: Path, text: list[str]) -> None:
    run_ranks(_train, 1, str(tmp_path), [*text, "--epochs", "1"])
    (refused,) = collect_outcomes(_train, 1, str(tmp_path), text)
    assert refused.error == "CheckpointMismatch"
    assert "--epochs 2 instead of 1" in str(refused.message)


def test_a_run_of_two_ranks_is_tested_and_continued_in_one_process(tmp_path: Path, text: list[str]) -> None:
    done = run(["lockstep", "run", "-n", "2", "-m", GPT, *SMALL, *text], tmp_path, torch=True, PYTHONPATH=ROOT)
    assert done.code == 0, done
    assert "2 replica(s) on cpu" in done.out
    assert re.search(r"epoch  2/2  loss [\d.]+  held out [\d.]+  [\d,]+ tokens/s", done.out)
    found = re.search(r"held-out loss (.* bits a byte\)), over 2 ranks", done.out)
    assert found, done.out
    assert f"loaded runs/gpt/run-001 in one process: held-out loss {found[1]}" in done.out
    written = done.out.partition("it writes:")[2]
    assert written.strip().startswith("The")
    again = run([GPT, *SMALL, *text, "--evaluate"], tmp_path, torch=True, PYTHONPATH=ROOT)
    assert again.code == 0, again
    assert f"loaded runs/gpt/run-001: held-out loss {found[1]}, over 1 rank\n" in again.out
    assert again.out.partition("it writes:")[2] == written
    resumed = run([GPT, *SMALL, *text, "--resume"], tmp_path, torch=True, PYTHONPATH=ROOT)
    assert resumed.code == 0, resumed
    assert "all 2 epochs of this run were done already" in resumed.out
    assert f"held-out loss {found[1]}, over 1 rank\n" in resumed.out
