"""The image recipe's command line: defaults that follow from others, and what makes no sense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from examples.imagenet.options import Kept, Options, parse

import lockstep


def options(*words: str, launched: bool = False) -> Options:
    return parse(["DATA", *words], launched=launched)


@pytest.mark.parametrize(
    ("words", "launched", "mode"),
    [
        ((), False, "single"),
        ((), True, "ddp"),
        (("--dist-url", "tcp://10.0.0.1:23456", "--world-size", "2", "--rank", "1"), False, "ddp"),
        (("--mode", "dp"), False, "dp"),
    ],
)
def test_the_mode_follows_from_how_it_was_started(words: tuple[str, ...], launched: bool, mode: str) -> None:
    assert options(*words, launched=launched).mode == mode


def test_the_documents_words_mean_what_they_meant() -> None:
    chosen = options("--mode", "dp", "--gpus", "4,5,6,7", "-b", "1024", "-j", "16", "-a", "resnet101", "--wd", "5e-5")
    assert chosen.devices == ("cuda:4", "cuda:5", "cuda:6", "cuda:7")
    assert (chosen.batch_size, chosen.workers, chosen.arch, chosen.weight_decay) == (1024, 16, "resnet101", 5e-5)
    assert options("--mode", "dp", "--gpus", "cpu,cpu").devices == ("cpu", "cpu")
    assert options("--sync-bn").norm == options("--norm", "sync").norm == "sync"
    assert options().norm == "batch"
    machines = ("--dist-url", "tcp://[::1]:9", "--world-size", "2", "--rank", "0")
    several = options(*machines, "--mode", "spawn", "--nprocs", "8")
    assert (several.address, several.nprocs) == (("::1", 9), 8)


@pytest.mark.parametrize("argument", ["--local_rank=1", "--local-rank=1"])
def test_the_argument_that_launchers_pass_changes_nothing(argument: str) -> None:
    assert parse([argument, "DATA"], launched=True) == parse(["DATA"], launched=True)


def test_what_is_not_there_is_refused() -> None:
    world = lockstep.init()
    try:
        with pytest.raises(SystemExit, match=r"there is no cuda:99 here; torch sees \d+ GPU"):
            options("--mode", "dp", "--gpus", "cpu,99").refuse_in(world)
        options("--mode", "dp", "--gpus", "cpu,cpu").refuse_in(world)
    finally:
        lockstep.shutdown()


def test_sizes_follow_from_the_model() -> None:
    small, large = options("-a", "resnet20-cifar"), options("-a", "resnet50")
    assert (small.image_size, small.augment) == (32, "cifar")
    assert (large.image_size, large.augment) == (224, "imagenet")
    assert options("-a", "resnet50", "--image-size", "160", "--augment", "none").image_size == 160


@pytest.mark.parametrize(
    ("words", "launched", "message"),
    [
        (("--mode", "ddp"), False, "no launcher started this process"),
        (("--mode", "dp"), True, "a launcher started several"),
        (("--mode", "spawn"), True, "a launcher started several"),
        (("--gpus", "0,1"), False, "is for --mode dp"),
        (("--nprocs", "2"), False, "is for --mode spawn"),
        (("--mode", "dp", "--sync-bn"), False, "--norm sync synchronises processes"),
        (("--world-size", "2"), False, "go with --dist-url"),
        (("--dist-url", "file:///tmp/x", "--world-size", "2", "--rank", "0"), False, "expected tcp://HOST:PORT"),
        (("--dist-url", "tcp://a:1", "--world-size", "2", "--rank", "2"), False, "a rank from 0 to one less"),
        (("--dist-url", "tcp://a:1", "--world-size", "2", "--rank", "0"), True, "has said where the ranks meet"),
        (("--dist-url", "tcp://a:1", "--mode", "dp"), False, "--dist-url is for --mode spawn and ddp, not dp"),
        (("--mode", "dp", "--gpus", "0,x"), False, "'x' is not a device"),
        (("--mode", "dp", "--gpus", "0,,1"), False, "'' is not a device"),
        (("--epochs", "0"), False, "--epochs 0: expected a positive number"),
        (("-b", "0"), False, "--batch-size 0: expected a positive number"),
        (("--lr", "nan"), False, "--lr nan: expected a positive number"),
        (("--max-bad-images", "-1"), False, "--max-bad-images -1: expected 0 or more"),
        (("--val-split", "1"), False, "--val-split 1.0: expected 0 or more, and less than 1"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: tuple[str, ...], launched: bool, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options(*words, launched=launched)
    assert message in capsys.readouterr().err


def test_a_run_keeps_what_decides_its_steps_and_nothing_else() -> None:
    begun = options()
    saved = Kept(begun, ["cat", "dog"]).state_dict()
    Kept(replace(begun, workers=9, mode="dp", save_every=7), ["cat", "dog"]).load_state_dict(saved)
    with pytest.raises(lockstep.CheckpointMismatch, match=r"epochs is 3 and was 90; lr is 0.2 and was 0.1"):
        Kept(replace(begun, lr=0.2, epochs=3), ["cat", "dog"]).load_state_dict(saved)
    with pytest.raises(lockstep.CheckpointMismatch, match="there are 3 classes, other ones than the 2 then"):
        Kept(begun, ["cat", "dog", "eel"]).load_state_dict(saved)


def test_a_run_is_tested_as_it_was_trained(tmp_path: Path) -> None:
    begun, classes = options("--image-size", "64"), ["cat", "dog"]
    Kept(begun, classes).refuse_other(tmp_path, testing=True)  # there is no note yet: nothing to compare with
    Kept(begun, classes).write(tmp_path)
    assert (tmp_path / "options.json").stat().st_mode & 0o777 == 0o600
    Kept(replace(begun, lr=7.0, epochs=1, batch_size=1), classes).refuse_other(tmp_path, testing=True)
    for change, text in (({"image_size": 32}, "image-size is 32 and was 64"), ({"val_split": 0.5}, "val-split is 0.5")):
        with pytest.raises(lockstep.CheckpointMismatch, match=text):
            Kept(replace(begun, **change), classes).refuse_other(tmp_path, testing=True)
    with pytest.raises(lockstep.CheckpointMismatch, match="there are 2 classes, other ones than the 2 then"):
        Kept(begun, ["cat", "eel"]).refuse_other(tmp_path, testing=True)
    with pytest.raises(lockstep.CheckpointMismatch, match=r"begun with, but lr is 7.0 and was 0.1"):
        Kept(replace(begun, lr=7.0), classes).refuse_other(tmp_path, testing=False)
