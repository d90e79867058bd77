"""The ImageNet recipe on real ranks: the same training in every mode, resumed, evaluated, and with broken pictures."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from examples.imagenet.cifar import ResNetCifar
from examples.imagenet.options import parse
from examples.imagenet.records import read_table
from examples.imagenet.schedule import factors
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep import knobs
from lockstep.launch.ports import free_port
from tests.harness import RanksFailed, collect_outcomes, run_ranks
from tests.imagenet_cases import (
    COMMON,
    ROOT,
    SITE,
    SIZE,
    alone_or_launched,
    last_line,
    losses,
    make_pictures,
    recipe,
    sample,
    unpack,
)
from tests.launching import LIMIT, Running, environment, python_path, start, wait_for

MODULE = "examples.imagenet"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """39 pictures to train on, so that batches of 16 end with one of 7; 15 to test on."""
    return make_pictures(tmp_path_factory.mktemp("pictures"), train=13, val=5)


@pytest.fixture(scope="module")
def alone(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run on one device, and what it printed."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, recipe(None, pictures, *COMMON, "-b", "16", "--epochs", "2", "--folder", folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = max((folder / "run-001").glob("step-*"))
    return load_file(newest / "model.safetensors")


@pytest.mark.parametrize(
    ("ranks", "mode"),
    [
        (2, ()),
        pytest.param(3, ("--backend", "shm"), marks=pytest.mark.campaign),
        (None, ("--mode", "dp")),
        pytest.param(None, ("--mode", "dp", "--gpus", "cpu,cpu,cpu"), marks=pytest.mark.campaign),
    ],
    ids=["ddp on 2", "ddp on 3 over shm", "dp on 2", "dp on 3"],
)
def test_every_mode_has_the_same_loss_curve(
    ranks: int | None, mode: tuple[str, ...], pictures: Path, alone: tuple[Path, str], tmp_path: Path
) -> None:
    text = recipe(ranks, pictures, *COMMON, "-b", "16", "--epochs", "2", "--folder", tmp_path, *mode)
    curve = losses(alone[0])
    assert len(curve) == 6
    assert max(curve) - min(curve) > 0.5, "the model hardly changes, so equal curves say little"
    assert losses(tmp_path) == pytest.approx(curve, rel=1e-4)
    assert re.findall(r"top-1 [\d.]+, top-5 [\d.]+", text)[-1] in alone[1]


@pytest.mark.parametrize(("ranks", "epochs"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.campaign)])
def test_synchronised_statistics_train_as_one_process_does(
    pictures: Path, tmp_path: Path, ranks: int, epochs: int
) -> None:
    shared = (*COMMON[:4], *COMMON[6:], "-b", "16", "--epochs", str(epochs))
    recipe(None, pictures, *shared, "--folder", tmp_path / "one")
    recipe(ranks, pictures, *shared, "--folder", tmp_path / "synced", "--sync-bn")
    recipe(ranks, pictures, *shared, "--folder", tmp_path / "own")
    curve = losses(tmp_path / "one")
    assert losses(tmp_path / "synced") == pytest.approx(curve, rel=1e-3)
    assert losses(tmp_path / "own") != pytest.approx(curve, rel=1e-2), "statistics of each rank's own slice differ"
    one, synced = weights(tmp_path / "one"), weights(tmp_path / "synced")
    assert one.keys() == synced.keys()
    for name, value in one.items():
        torch.testing.assert_close(synced[name], value, rtol=1e-2, atol=1e-3)


def test_a_checkpoint_of_two_ranks_tests_the_same_on_one_device_and_on_three(pictures: Path, tmp_path: Path) -> None:
    options = (*COMMON[:4], "--image-size", str(SIZE), "--no-tensorboard", "-b", "16", "--folder", tmp_path)
    trained = recipe(2, pictures, *options, "--epochs", "1", "--sync-bn", "--ema", "0.5")
    found = last_line(trained)
    assert re.match(r"test: top-1 [\d.]+, top-5 [\d.]+, loss [\d.]+ on 15 pictures", found), trained
    for ranks in (None, 3):
        assert last_line(recipe(ranks, pictures, *options, "--evaluate", "--sync-bn")) == found
    assert last_line(recipe(None, pictures, *options, "--evaluate")) == found, "with torch's own batch norm"
    averaged = re.findall(r"averaged weights: (.*)", trained)[-1]
    assert averaged not in found
    assert last_line(recipe(None, pictures, *options, "--evaluate", "--ema", "0.5")) == f"test: {averaged}"
    newest = max((tmp_path / "run-001").glob("step-*"))
    under_a_wrapper = {f"module.{name}": value for name, value in load_file(newest / "model.safetensors").items()}
    save_file(under_a_wrapper, tmp_path / "wrapped.safetensors")
    assert found == last_line(
        recipe(None, pictures, *options, "--evaluate", "--pretrained", tmp_path / "wrapped.safetensors")
    )


def _resumable(pictures: Path, epochs: int, workers: int) -> list[str]:
    return [
        str(pictures), *COMMON[:4], "--image-size", str(SIZE), "-j", str(workers), "--warmup-epochs", "1",
        "--log-every", "1", "-b", "16", "--epochs", str(epochs), "--ema", "0.9", "--save-every", "2", "--sync-bn",
    ]  # fmt: skip


def _goes_on_with_the_same_bits(options: list[str], whole: Path, killed: Path) -> None:
    """Resume the run in ``killed`` and compare all that it has written with the run that nobody disturbed."""
    resumed = recipe(2, *options, "--folder", killed, "--resume")
    assert last_line(resumed).startswith("test: ")
    for file in ("model.safetensors", "optimizer.safetensors"):
        contents = [(max((folder / "run-001").glob("step-*")) / file).read_bytes() for folder in (whole, killed)]
        assert contents[0] == contents[1], file
    assert (whole / "run-001/ema.safetensors").read_bytes() == (killed / "run-001/ema.safetensors").read_bytes()
    assert (whole / "run-001/steps.csv").read_text() == (killed / "run-001/steps.csv").read_text()
    columns = ("step", "train_loss", "top1", "ema_top1", "pictures")
    tables = [read_table(folder / "run-001/epochs.csv") for folder in (whole, killed)]
    cells = [[[row[column] for column in columns] for row in table] for table in tables]
    assert cells[0] == cells[1]


def _dies_after(step: int, words: list[str]) -> str:
    taken = itertools.count(1)

    def die(*_: object) -> None:
        if next(taken) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(die)
    return alone_or_launched(words, True)


def test_a_run_that_dies_goes_on_with_the_same_bits(pictures: Path, tmp_path: Path) -> None:
    """Within the second of two epochs of three steps, behind the checkpoint of step 4."""
    options, whole, killed = _resumable(pictures, 2, 0), tmp_path / "whole", tmp_path / "killed"
    recipe(2, *options, "--folder", whole)
    outcomes = collect_outcomes(_dies_after, 2, 5, [*options, "--folder", str(killed)])
    assert not any(outcome.ok for outcome in outcomes)
    assert max(path.name for path in (killed / "run-001").glob("step-*")) == "step-00000004"
    with open(killed / "run-001/steps.csv", "a") as table:  # as if it had died while it wrote of a step that it repeats
        table.write("5,2,0.1,123.0,16\r\n6,2,0.1,12")
    _goes_on_with_the_same_bits(options, whole, killed)
    again = recipe(2, *options, "--folder", killed, "--resume")
    assert "all 2 epochs of this run were done already" in again


def _is_asked_to_stop_after(step: int, words: list[str]) -> str:
    taken = itertools.count(1)

    def ask(*_: object) -> None:
        if next(taken) == step:
            os.kill(os.getpid(), signal.SIGTERM)

    register_optimizer_step_post_hook(ask)
    return alone_or_launched(words, True)


def test_a_run_that_is_stopped_before_a_row_is_due_loses_no_loss(pictures: Path, tmp_path: Path) -> None:
    """The one row of an epoch of ten steps is due at its end; the run is stopped in the middle."""
    options, whole, stopped = _resumable(pictures, 1, 0), tmp_path / "whole", tmp_path / "stopped"
    for name, value in (("--log-every", "100"), ("--save-every", "0"), ("-b", "4")):
        options[options.index(name) + 1] = value
    recipe(2, *options, "--folder", whole)
    outcomes = collect_outcomes(_is_asked_to_stop_after, 2, 2, [*options, "--folder", str(stopped)])
    assert {(outcome.error, outcome.message) for outcome in outcomes} == {("SystemExit", "75")}
    assert [path.name for path in (stopped / "run-001").glob("step-*")] < ["step-00000010"]
    _goes_on_with_the_same_bits(options, whole, stopped)
    for table in ("steps", "epochs"):
        assert [row["pictures"] for row in read_table(stopped / f"run-001/{table}.csv")] == ["39"]


@pytest.mark.campaign
@pytest.mark.timeout(4 * LIMIT)
def test_a_run_whose_launcher_is_killed_goes_on_with_the_same_bits(pictures: Path, tmp_path: Path) -> None:
    options, whole, killed = _resumable(pictures, 3, 2), tmp_path / "whole", tmp_path / "killed"
    recipe(2, *options, "--folder", whole)
    argv = ["lockstep", "run", "-n", "2", "-m", MODULE, *options, "--folder", str(killed)]
    with start(argv, tmp_path, torch=True, PYTHONPATH=python_path(SITE, ROOT)) as job:
        run = killed / "run-001"
        # Killed within the second epoch (steps 4 to 6), whose rows and checkpoints are partly written then.
        wait_for(
            lambda: (run / "step-00000004").exists() or job.process.poll() is not None,
            "a checkpoint",
            limit=2 * LIMIT,
        )
        assert job.process.poll() is None, job.finish()
        job.process.kill()
        job.finish()
    left = sorted(path.name for path in run.glob("step-*"))
    assert "step-00000009" not in left, "it was not killed in time to show anything"
    with open(run / "steps.csv", "a") as table:  # as if it had been killed while it wrote of a step that it repeats
        table.write("8,2,0.1,123.0,16\r\n9,2,0.1,12")
    _goes_on_with_the_same_bits(options, whole, killed)


def break_pictures(folder: Path) -> Path:
    """A copy with three broken pictures to train on and one to test on, of each kind of damage."""
    make_pictures(folder, train=13, val=5)
    whole = (folder / "train/red/000.jpg").read_bytes()
    (folder / "train/red/000.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "train/red/001.jpg").write_bytes(b"")
    (folder / "train/blue/012.jpg").write_text("this is no picture")
    (folder / "val/green/002.jpg").write_bytes(whole[:100])
    return folder


def test_broken_pictures_are_named_and_the_mean_is_over_what_remains(tmp_path: Path) -> None:
    broken = break_pictures(tmp_path / "broken")
    options = (*COMMON, "--lr", "0.02", "-b", "5", "--epochs", "1", "--max-bad-images", "4")
    texts = [
        recipe(ranks, broken, *options, *mode, "--folder", tmp_path / name)
        for ranks, mode, name in ((None, (), "one"), (2, (), "two"), (None, ("--mode", "dp"), "dp"))
    ]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert losses(tmp_path / "dp") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    rows = read_table(tmp_path / "two/run-001/steps.csv")
    assert sum(int(row["pictures"]) for row in rows) == 39 - 3
    for text in texts:
        assert "4 pictures could not be read and were left out" in text
        assert "on 14 pictures" in last_line(text)
    newest = max((tmp_path / "two/run-001").glob("step-*"))
    reasons = json.loads((newest / "extra.json").read_text())
    assert {"red/000.jpg", "red/001.jpg", "blue/012.jpg", "green/002.jpg"} <= set(
        re.findall(r"\w+/\d+\.jpg", str(reasons))
    )


def test_a_batch_with_nothing_left_takes_no_step(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path / "pictures", train=2, val=2)
    for name in ("blue/000", "green/000", "green/001"):
        (folder / f"train/{name}.jpg").write_bytes(b"")
    recipe(2, folder, *COMMON, "-b", "2", "--epochs", "4", "--folder", tmp_path / "runs")
    rows = read_table(tmp_path / "runs/run-001/steps.csv")
    assert sum(int(row["pictures"]) for row in rows) == 4 * 3
    assert len(rows) < 4 * 3, "in none of the epochs two broken pictures met"
    assert all(math.isfinite(float(row["loss"])) for row in rows)


def test_too_many_broken_pictures_are_an_error_on_every_rank(tmp_path: Path) -> None:
    broken = break_pictures(tmp_path / "broken")
    words = [str(broken), *COMMON, "-b", "16", "--max-bad-images", "1", "--folder", str(tmp_path / "runs")]
    outcomes = collect_outcomes(alone_or_launched, 2, words, True)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == "SystemExit"
        message = outcome.message or ""
        assert re.match(rf"rank {rank}: [23] pictures could not be read, more than --max-bad-images 1", message), (
            message
        )
    assert (outcomes[0].message or "")[6:] == (outcomes[1].message or "")[6:]


def test_a_resumed_run_keeps_its_options(pictures: Path, alone: tuple[Path, str]) -> None:
    words = (pictures, *COMMON, "--epochs", "2", "--folder", alone[0])
    with pytest.raises(RanksFailed, match="batch-size is 8 and was 16"):
        recipe(2, *words, "-b", "8", "--resume")
    with pytest.raises(RanksFailed, match="begun with, but arch is resnet18 and was resnet20-cifar"):
        recipe(2, *words, "-a", "resnet18", "--image-size", str(SIZE), "--augment", "cifar", "-b", "16", "--resume")
    with pytest.raises(RanksFailed, match="trained with, but image-size is 40 and was 16"):
        recipe(2, *words, "--image-size", "40", "--evaluate")


def test_a_run_that_can_not_begin_leaves_no_folder_to_resume(pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    words = (str(pictures), *COMMON, "-b", "16", "--epochs", "1", "--folder", str(folder))
    for options, message in (
        (("-a", "resnet55"), "-a resnet55: unknown"),
        (("-b", "1"), "--batch-size 1 is smaller than the world of 2 ranks"),
        (("--pretrained", str(tmp_path / "none.pth")), "no such file"),
        (("--resume",), "no run in .* yet: train first"),
        (("--evaluate",), "no run in .* yet: train first"),
    ):
        for outcome in collect_outcomes(alone_or_launched, 2, [*words, *options], True):
            assert re.search(message, outcome.message or ""), outcome
        assert not folder.exists()
    (folder / "run-007").mkdir(parents=True)  # killed before its first checkpoint
    text = recipe(2, *words, "--resume", "--local_rank=0")
    assert re.search(r"run-007 has no checkpoint yet: it begins anew", text)
    assert [path.name for path in folder.iterdir()] == ["run-007"]


def test_machines_must_see_the_same_names(tmp_path: Path) -> None:
    folders = [
        str(make_pictures(tmp_path / third, train=2, val=1, classes=("blue", "green", third)))
        for third in ("red", "pink")
    ]
    for outcome in collect_outcomes(_own_folder, 2, folders, tmp_path / "runs"):
        assert outcome.error == "SystemExit"
        assert "as many classes and pictures, but under different names" in (outcome.message or "")
    one = make_pictures(tmp_path / "one", train=2, val=1, classes=("red",))
    with pytest.raises(RanksFailed, match="there is one class only, red"):
        recipe(1, one, *COMMON, "--folder", tmp_path / "runs")


def _own_folder(folders: list[str], runs: Path) -> str:
    return alone_or_launched([folders[int(os.environ["RANK"])], *COMMON, "--folder", str(runs)], True)


def test_every_steps_rate_is_written_down(alone: tuple[Path, str]) -> None:
    rates = [float(row["lr"]) for row in read_table(alone[0] / "run-001/steps.csv")]
    chosen = parse(["DATA", *COMMON, "-b", "16", "--epochs", "2"], launched=False)
    factor = factors(chosen, 3)
    assert rates == pytest.approx([0.2 * 16 / 256 * factor(step) for step in range(6)])
    assert "learning rate 0.2 x 16 / 256 = 0.0125" in alone[1]


def test_labels_are_smoothed_in_training_and_not_in_the_test(pictures: Path, tmp_path: Path) -> None:
    rows = {}
    for smoothing in ("0", "0.6"):
        options = ("--lr", "1e-9", "-b", "39", "--epochs", "1", "--label-smoothing", smoothing)
        recipe(1, pictures, *COMMON, *options, "--folder", tmp_path / smoothing)
        (rows[smoothing],) = read_table(tmp_path / smoothing / "run-001/epochs.csv")
    # The same weights and pictures: only the targets of the training loss differ.
    assert float(rows["0.6"]["val_loss"]) == pytest.approx(float(rows["0"]["val_loss"]))
    assert float(rows["0.6"]["train_loss"]) != pytest.approx(float(rows["0"]["train_loss"]), rel=1e-2)


def test_pretrained_weights_of_other_classes_lack_the_classifier(pictures: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    save_file(ResNetCifar(3, 10).state_dict(), tmp_path / "ten.safetensors")
    options = (
        *COMMON[:4], "--image-size", str(SIZE), "--no-tensorboard", "-b", "16", "--epochs", "1", "--lr", "1e-9",
    )  # fmt: skip
    text = recipe(2, pictures, *options, "--pretrained", tmp_path / "ten.safetensors", "--folder", tmp_path / "runs")
    assert "but not classifier.2.bias, classifier.2.weight, which are for another number of classes" in text
    stem = "stem.0.weight"
    torch.testing.assert_close(weights(tmp_path / "runs")[stem], load_file(tmp_path / "ten.safetensors")[stem])
    save_file({"stem.0.weight": torch.zeros(16, 3, 3, 3)}, tmp_path / "part.safetensors")
    with pytest.raises(RanksFailed, match="checkpoint of another model"):
        recipe(1, pictures, *options, "--pretrained", tmp_path / "part.safetensors", "--folder", tmp_path / "runs")


@pytest.mark.parametrize(
    "options",
    [
        ("--amp", "bf16", "--channels-last", "--schedule", "step", "--augment", "imagenet"),
        pytest.param(("--amp", "bf16", "--channels-last"), marks=pytest.mark.campaign),
        pytest.param(("--schedule", "step", "--augment", "imagenet"), marks=pytest.mark.campaign),
    ],
    ids=["all at once", "half precision", "steps"],
)
def test_other_ways_to_compute_train_as_well(options: tuple[str, ...], pictures: Path, tmp_path: Path) -> None:
    text = recipe(2, pictures, *COMMON, "-b", "16", "--epochs", "2", "--folder", tmp_path, "--ema", "0.9", *options)
    curve = losses(tmp_path)
    assert curve[-1] < curve[0]
    assert last_line(text).startswith("test: top-1")


@pytest.mark.campaign  # every run of the tests has what is compiled around replicas
def test_a_compiled_model_has_the_same_loss_curve(tmp_path: Path) -> None:
    # One batch of all pictures, as many to test on: each other size is traced anew, for seconds of all cores.
    pictures = make_pictures(tmp_path / "pictures", train=8, val=8)
    options = (*COMMON, "-b", "24", "--epochs", "3")
    recipe(None, pictures, *options, "--folder", tmp_path / "one")
    recipe(2, pictures, *options, "--folder", tmp_path / "compiled", "--compile", "eager")
    curve = losses(tmp_path / "one")
    assert max(curve) - min(curve) > 0.2
    assert losses(tmp_path / "compiled") == pytest.approx(curve, rel=1e-4)


def outside(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that nobody launched: here torchvision loads, and each uses one core.

    Two "machines" are one here, and each would use all its cores: threads that spin while they wait for others, which
    wait for a core, take four times the work, and many times that beside other work.
    """
    env = environment(tmp_path, PYTHONPATH=python_path(SITE, ROOT), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    del env[knobs.PRELOAD]
    return env


@pytest.mark.campaign  # two that nobody launched meet there in every run of the tests
@pytest.mark.timeout(3 * LIMIT)
def test_spawned_ranks_of_two_machines_meet_at_the_address(
    pictures: Path, alone: tuple[Path, str], tmp_path: Path
) -> None:
    argv = [
        sys.executable, "-m", MODULE, str(pictures), *COMMON, "-b", "16", "--epochs", "2", "--folder",
        str(tmp_path / "runs"), "--mode", "spawn", "--nprocs", "1", "--dist-url", f"tcp://127.0.0.1:{free_port()}",
        "--world-size", "2",
    ]  # fmt: skip
    pipe = subprocess.PIPE
    machines = [
        subprocess.Popen([*argv, "--rank", rank], env=outside(tmp_path), stdout=pipe, stderr=pipe, text=True)
        for rank in "10"
    ]
    try:
        texts = ["".join(machine.communicate(timeout=2 * LIMIT)) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    assert [machine.returncode for machine in machines] == [0, 0], texts
    assert "2 replica(s) in processes" in texts[1]
    assert losses(tmp_path / "runs") == pytest.approx(losses(alone[0]), rel=1e-4)


def test_processes_that_nobody_launched_meet_at_the_address(
    pictures: Path, alone: tuple[Path, str], tmp_path: Path
) -> None:
    words = [
        str(pictures), *COMMON, "-b", "16", "--epochs", "2", "--folder", str(tmp_path), "--dist-backend", "gloo",
        "--dist-url", f"tcp://127.0.0.1:{free_port()}", "--world-size", "2", "--rank",
    ]  # fmt: skip
    texts = run_ranks(_told_its_rank, 2, words)
    assert "2 replica(s) in processes" in texts[0]
    assert losses(tmp_path) == pytest.approx(losses(alone[0]), rel=1e-4)


def _told_its_rank(words: list[str]) -> str:
    return alone_or_launched([*words, os.environ["RANK"]], False)


def test_it_starts_its_own_processes(pictures: Path, alone: tuple[Path, str], tmp_path: Path) -> None:
    options = [*COMMON, "-b", "16", "--epochs", "2", "--folder", str(tmp_path / "runs")]
    command = [MODULE, str(pictures), *options, "--mode", "spawn", "--nprocs", "2"]
    with Running(command, cwd=tmp_path, env=outside(tmp_path)) as job:
        done = job.finish()
    assert done.code == 0, done
    assert "over 2 ranks" in done.out
    assert losses(tmp_path / "runs") == pytest.approx(losses(alone[0]), rel=1e-4)
    command[1] = "nowhere"
    with Running(command, cwd=tmp_path, env=outside(tmp_path)) as job:
        done = job.finish()
    assert done.code == 1, done
    assert re.search(r"rank [01] of 2 failed: exit code 1\n +nowhere/train is not there", done.err)
    assert "Traceback" not in done.err


def _tensorboard_has_what_the_tables_have(run: Path) -> None:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    rows = read_table(run / "epochs.csv")
    assert [event.step for event in events.Scalars("epochs/top1")] == [int(row["step"]) for row in rows]
    for name in ("train_loss", "val_loss", "top1", "top5", "lr"):
        assert [event.value for event in events.Scalars(f"epochs/{name}")] == pytest.approx(
            [float(row[name]) for row in rows]
        )
    assert events.Scalars("steps/loss")


def test_tensorboard_has_what_the_tables_have(pictures: Path, tmp_path: Path) -> None:
    options = [option for option in COMMON if option != "--no-tensorboard"]
    recipe(2, pictures, *options, "-b", "16", "--epochs", "2", "--folder", tmp_path)
    assert [row["step"] for row in read_table(tmp_path / "run-001/epochs.csv")] == ["3", "6"]
    _tensorboard_has_what_the_tables_have(tmp_path / "run-001")


@pytest.mark.campaign  # what every run of the tests trains on are pictures that were made
def test_real_small_pictures_are_learnt(tmp_path: Path) -> None:
    data = unpack(sample("cifar10-sample.tar"), tmp_path, per_class=40)
    options = ("-a", "resnet20-cifar", "--sync-bn", "-j", "2", "-b", "32", "--lr", "0.4", "--warmup-epochs", "1")
    text = recipe(2, data, *options, "--epochs", "2", "--folder", tmp_path / "runs")
    found = re.search(r"top-1 ([\d.]+), top-5 ([\d.]+), loss [\d.]+ on (\d+) pictures, over 2", text)
    assert found, text
    assert int(found[3]) == 400
    assert float(found[1]) > 0.15, "no better than guessing one of ten"
    assert [row["step"] for row in read_table(tmp_path / "runs/run-001/epochs.csv")] == ["13", "26"]
    _tensorboard_has_what_the_tables_have(tmp_path / "runs/run-001")


@pytest.mark.campaign
def test_real_large_pictures_go_through_a_model_of_torchvision(tmp_path: Path) -> None:
    data = unpack(sample("imagenet-sample.tar"), tmp_path, per_class=1)
    options = ("-a", "resnet18", "--image-size", "64", "--val-split", "0.25", "-j", "2", "-b", "30", "--epochs", "1")
    text = recipe(2, data, *options, "--folder", tmp_path / "runs", "--no-tensorboard")
    assert "80 classes" in text
    assert "60 pictures to train on, 20 to test on, 2 steps" in text
    assert "on 20 pictures, over 2 ranks" in text


def test_a_model_of_torchvision_is_taken_by_its_name(pictures: Path, tmp_path: Path) -> None:
    options = ("-a", "resnet18", "--image-size", "32", "-j", "0", "-b", "20", "--epochs", "1", "--no-tensorboard")
    text = recipe(2, pictures, *options, "--folder", tmp_path)
    assert "39 pictures to train on, 15 to test on, 2 steps" in text
    assert "on 15 pictures, over 2 ranks" in text
