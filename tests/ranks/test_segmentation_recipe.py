"""The segmentation recipe: the same run in every mode, in slices to the bit, after a kill, and on real folders."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.segmentation.data import load
from examples.segmentation.options import parse
from examples.segmentation.train import begin, fit
from PIL import Image
from torch.optim.optimizer import register_optimizer_step_post_hook

import lockstep
from tests.digests import digest_of
from tests.harness import collect_outcomes, run_ranks
from tests.imagenet_cases import ROOT, SITE
from tests.launching import Finished, python_path, run, start
from tests.unit.test_segmentation_parts import write_mask

MODULE = "examples.segmentation"
#: Two epochs of three steps; the test pictures are an odd number.
SMALL = [
    "--epochs", "2", "--pictures", "26", "--test-pictures", "7", "--size", "24", "--batch-size", "8", "--width", "4",
]  # fmt: skip
PATH = python_path(SITE, ROOT)


def _train(folder: str, arguments: list[str], kill_at: int | None = None) -> dict[str, Any]:
    """A run in this process; it dies behind optimizer step ``kill_at``."""
    options = parse([*SMALL, *arguments])
    world = lockstep.init(seed=options.seed, timeout=30)
    run = begin(world, options, load(world, options), Path(folder))
    if kill_at is not None:

        def kill(*_: object) -> None:
            # The hooks of the optimizer itself, which count its steps, come first.
            if run.saved.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        register_optimizer_step_post_hook(kill)
    means: list[float] = []
    finish = run.losses.epoch

    def note() -> tuple[float, int]:
        found = finish()
        means.append(found[0])
        return found

    run.losses.epoch = note  # type: ignore[method-assign]
    fit(run)
    assert run.score is not None
    states = {"model": run.computing.model.state_dict(), "optimizer": run.optimizer.state_dict()["state"]}
    return {"losses": means, "matrix": run.score.matrix.tolist(), "digest": digest_of(states)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the small run gives on one device, without statistics of a batch."""
    (result,) = run_ranks(_train, 1, str(tmp_path_factory.mktemp("alone")), ["--mode", "single", *PLAIN])
    assert result["losses"][1] < result["losses"][0]
    return dict(result)


#: Nothing in it depends on how a batch is cut.
PLAIN = ["--norm", "group"]


def test_a_stream_has_the_same_loss_on_several_ranks(tmp_path: Path, alone: dict[str, Any]) -> None:
    (one,) = run_ranks(_train, 1, str(tmp_path / "one"), ["--stream", *PLAIN])
    assert one["losses"] != pytest.approx(alone["losses"], rel=1e-4), "another order"
    for result in run_ranks(_train, 2, str(tmp_path / "two"), ["--stream", *PLAIN]):
        assert result["losses"] == pytest.approx(one["losses"], rel=1e-4)


@pytest.mark.parametrize(
    ("mode", "ranks"), [("ddp", 2), pytest.param("ddp", 3, marks=pytest.mark.campaign), ("dp --gpus cpu,cpu", 1)]
)
def test_every_mode_has_the_same_loss(tmp_path: Path, alone: dict[str, Any], mode: str, ranks: int) -> None:
    results = run_ranks(_train, ranks, str(tmp_path), ["--mode", *mode.split(), *PLAIN])
    for result in results:
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert result["digest"] == results[0]["digest"], "the ranks hold the same bits"
        assert result["matrix"] == results[0]["matrix"]
    assert np.sum(results[0]["matrix"]) == np.sum(alone["matrix"]), "every pixel was counted once"


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_in_slices_two_ranks_have_the_bits_of_one(tmp_path: Path, ranks: int) -> None:
    """With batch norms, as they are."""
    (one,) = run_ranks(_train, 1, str(tmp_path / "one"), ["--mode", "ddp", "--slices", "4"])
    for result in run_ranks(_train, ranks, str(tmp_path / "more"), ["--mode", "ddp", "--slices", "4"]):
        assert result["digest"] == one["digest"]
        assert result["losses"] == pytest.approx(one["losses"], rel=1e-12), "added up in another order"
        assert result["matrix"] == one["matrix"]


@pytest.mark.parametrize("slices", ["0", pytest.param("4", marks=pytest.mark.campaign)])
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path, slices: str) -> None:
    arguments = ["--mode", "ddp", "--slices", slices, "--save-every", "2"]
    whole = run_ranks(_train, 2, str(tmp_path / "whole"), arguments)
    outcomes = collect_outcomes(_train, 2, str(tmp_path / "killed"), arguments, 5)
    assert not any(outcome.ok for outcome in outcomes)
    assert max(path.name for path in (tmp_path / "killed").glob("step-*")) == "step-00000004"
    resumed = run_ranks(_train, 2, str(tmp_path / "killed"), arguments)
    for one, other in zip(whole, resumed, strict=True):
        assert other["digest"] == one["digest"]
        assert other["matrix"] == one["matrix"]
        assert other["losses"] == one["losses"][1:], "the mean of the whole second epoch, of which it took a part"


@pytest.fixture(scope="module")
def voc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six pictures of several sizes with masks, in folders as those of Pascal VOC."""
    folder = tmp_path_factory.mktemp("voc")
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    draw = np.random.default_rng(0)
    names = [f"2007_00000{number}" for number in range(6)]
    for number, name in enumerate(names):
        height, width = 20 + 3 * number, 30 - number
        Image.fromarray(draw.integers(0, 255, (height, width, 3)).astype(np.uint8)).save(
            folder / f"JPEGImages/{name}.jpg"
        )
        few = number < 2  # pixels that count
        mask = draw.choice([0, 1, 15, 255], (height, width), p=[0.02, 0.02, 0.01, 0.95] if few else None).tolist()
        write_mask(folder / f"SegmentationClass/{name}.png", mask)
    (folder / "ImageSets/Segmentation/train.txt").write_text("\n".join(names[:4]) + "\n")
    (folder / "ImageSets/Segmentation/val.txt").write_text("\n".join(names[3:]) + "\n")
    return folder


@pytest.mark.parametrize(("mode", "ranks"), [("ddp", 2), ("dp --gpus cpu,cpu", 1)])
def test_the_loss_is_the_mean_over_the_pixels_of_all_ranks(tmp_path: Path, voc: Path, mode: str, ranks: int) -> None:
    """Also where one rank has twenty times as many that count as the other."""
    options = [
        *PLAIN, "--data", str(voc), "--batch-size", "4", "--epochs", "5", "--base-size", "24", "--crop-size", "24",
    ]  # fmt: skip
    (one,) = run_ranks(_train, 1, str(tmp_path / "one"), ["--mode", "single", *options])
    for result in run_ranks(_train, ranks, str(tmp_path / "more"), ["--mode", *mode.split(), *options]):
        assert result["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert max(one["losses"]) / min(one["losses"]) > 1.1, "the model hardly changes, so equal losses say little"


def _started(folder: Path, command: list[str]) -> Finished:
    done = run(command, folder, torch=True, PYTHONPATH=PATH)
    assert done.code == 0, done
    return done


def _found(done: Finished) -> str:
    found = re.search(r"^test: (.*), over \d rank", done.out, re.MULTILINE)
    assert found, done.out
    return found[1]


def test_real_folders_are_trained_on_tested_alone_and_drawn(tmp_path: Path, voc: Path) -> None:
    options = [
        "--data", str(voc), "--epochs", "1", "--batch-size", "4", "--width", "4", "--base-size", "24",
        "--crop-size", "24",
    ]  # fmt: skip
    done = _started(tmp_path, ["lockstep", "run", "-n", "2", "-m", MODULE, *options])
    assert "fcn_small" in done.out
    assert "21 classes: 2 replica(s) in processes, on cpu" in done.out
    assert "IoU: background" in done.out
    again = _started(tmp_path, [MODULE, *options, "--evaluate", "--picture", "seen.png"])
    assert _found(again) == _found(done)
    with Image.open(tmp_path / "seen.png") as image:
        assert image.size[0] > 300


@pytest.mark.campaign  # a ResNet-50
@pytest.mark.parametrize("arch", ["fcn_resnet50", "deeplabv3_resnet50"])
def test_torchvisions_networks_train(tmp_path: Path, arch: str) -> None:
    options = [*SMALL, "-a", arch, "--epochs", "1", "--pictures", "8", "--size", "64", "--lr", "0.01"]
    done = _started(tmp_path, ["lockstep", "run", "-n", "2", "-m", MODULE, *options, "--norm", "sync"])
    assert f"{arch}, " in done.out
    assert _found(done).startswith("mean IoU ")


def test_two_machines_find_each_other(tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    command = [
        "lockstep", "run", "-n", "1", "--nnodes", "2", "--rdzv", f"file:{tmp_path / 'meet'}", "-m", MODULE, *SMALL,
        "--epochs", "1", "--folder", str(tmp_path / "runs"),
    ]  # fmt: skip
    with (
        start(command, tmp_path, torch=True, PYTHONPATH=PATH) as first,
        start(command, tmp_path, torch=True, PYTHONPATH=PATH) as second,
    ):
        done = [job.finish() for job in (first, second)]
    assert [each.code for each in done] == [0, 0], done
    (told,) = [each for each in done if each.out]
    assert "2 replica(s) in processes, on cpu" in told.out
    assert "over 2 ranks" in told.out


def test_one_process_is_what_a_mode_for_one_process_needs(tmp_path: Path) -> None:
    done = run(["lockstep", "run", "-n", "2", "-m", MODULE, "--mode", "single"], tmp_path, torch=True, PYTHONPATH=PATH)
    assert done.code != 0
    assert "--mode single is one process, and this is rank" in done.err
