"""The parts of the image recipe that need no ranks: folders, pictures, transforms, models, schedule, tables."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples.imagenet import transforms, vision
from examples.imagenet.cifar import ResNetCifar
from examples.imagenet.evaluate import counted
from examples.imagenet.folders import Folders, find
from examples.imagenet.main import main
from examples.imagenet.models import build
from examples.imagenet.options import Options, parse
from examples.imagenet.pictures import Collate, Pictures, Sample, decode
from examples.imagenet.records import Table, read_table
from examples.imagenet.schedule import factors, scaled_rate
from PIL import Image
from torch import nn

import lockstep
from tests.imagenet_cases import make_pictures

pytest.importorskip("torchvision", reason="not in the environments of other versions of torch")
#: Imported here, since torch sets an environment variable meanwhile.
V2 = vision.require("torchvision.transforms.v2")


def options(*words: str) -> Options:
    return parse(["DATA", *words], launched=False)


# Folders.


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def found(root: Path, *, val_split: float = 0.0, only_val: bool = False) -> Folders:
    return find(root, val_split=val_split, only_val=only_val)


def test_classes_are_the_sorted_folders_and_pictures_lie_below_them(tmp_path: Path) -> None:
    touch(tmp_path, "train/dog/b.JPEG", "train/dog/more/a.png", "train/cat/x.jpg", "train/cat/notes.txt")
    touch(tmp_path, "val/dog/v.JPEG")
    folders = found(tmp_path)
    assert folders.classes == ("cat", "dog")
    assert folders.train is not None
    names = [folders.train.name(index) for index in range(len(folders.train))]
    assert names == ["cat/x.jpg", "dog/b.JPEG", "dog/more/a.png"]
    assert folders.train.labels.tolist() == [0, 1, 1]
    assert folders.val.labels.tolist() == [1], "a class without test pictures keeps its place"
    assert found(tmp_path, only_val=True).train is None


def test_a_split_is_the_same_every_time_and_parts_nothing(tmp_path: Path) -> None:
    touch(tmp_path, *(f"{name}/{number}.jpg" for name in ("a", "b") for number in range(20)))
    first, again = found(tmp_path, val_split=0.25), found(tmp_path, val_split=0.25)
    assert first.train is not None
    assert again.train is not None
    assert len(first.val) == 10
    train, val = set(first.train.names.tolist()), set(first.val.names.tolist())
    assert len(train | val) == 40
    assert not train & val
    assert first.val.names.tolist() == again.val.names.tolist()
    touch(tmp_path, "a/new.jpg")
    larger = set(found(tmp_path, val_split=0.25).val.names.tolist())
    assert len(larger & val) >= 9, "one more picture moves no more than one of the others"


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (("val/a/1.jpg",), {}, "train is not there"),
        (("train/a/1.jpg",), {}, "val is not there: .* --val-split"),
        (("train/1.jpg", "val/a/1.jpg"), {}, "train holds no folders"),
        (("train/a/1.txt", "val/a/1.jpg"), {}, "no pictures in its classes' folders"),
        (("train/a/1.jpg", "val/b/1.jpg"), {}, "val has classes that .*train has not: b"),
        (("train/a/1.jpg",), {"val_split": 0.3}, "of 1 pictures that leaves 0 to test on"),
        (("train/a/1.jpg", "train/b/1.txt", "val/a/1.jpg"), {}, "no pictures of 1 of its 2 classes: b; put some"),
        (("a/1.jpg", "b/1.txt"), {"val_split": 0.3}, "no pictures of 1 of its 2 classes: b; put some"),
    ],
)
def test_folders_that_lack_something_are_named(
    names: tuple[str, ...], arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    touch(tmp_path, *names)
    with pytest.raises(SystemExit, match=message):
        found(tmp_path, **arguments)


def test_hidden_files_and_folders_are_no_pictures(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.jpg", "train/a/._1.jpg", "train/.ipynb_checkpoints/a.jpg", "val/a/2.JPG")
    (tmp_path / "train/a/link.Png").symlink_to(tmp_path / "train/a/1.jpg")
    folders = found(tmp_path)
    assert folders.classes == ("a",)
    assert folders.train is not None
    assert [folders.train.name(index) for index in range(len(folders.train))] == ["a/1.jpg", "a/link.Png"]
    assert [folders.val.name(index) for index in range(len(folders.val))] == ["a/2.JPG"]


def test_folders_with_other_names_have_another_digest(tmp_path: Path) -> None:
    digests = set()
    for number, names in enumerate([("a/1.jpg", "b/1.jpg"), ("a/1.jpg", "c/1.jpg"), ("a/1.jpg", "b/2.jpg")]):
        root = tmp_path / str(number)
        touch(root, *(f"{part}/{name}" for part in ("train", "val") for name in names))
        assert found(root).digest() == found(root).digest()
        digests.add(found(root).digest())
    assert len(digests) == 3
    assert all(0 <= digest < 2**63 for digest in digests)


# Pictures.


def test_a_picture_comes_with_its_label_and_a_broken_one_with_a_reason(tmp_path: Path) -> None:
    listing = found(make_pictures(tmp_path, train=2, val=1)).train
    assert listing is not None
    (tmp_path / "train/green/000.jpg").write_bytes(b"no picture")
    (tmp_path / "train/green/001.jpg").unlink()
    pictures = Pictures(listing, transforms.testing("cifar", 32))
    samples = [pictures[index] for index in range(len(pictures))]
    assert [sample.label for sample in samples] == [0, 0, 1, 1, 2, 2]
    assert [sample.image is None for sample in samples] == [False, False, True, True, False, False]
    assert samples[2] == Sample(None, 1, "green/000.jpg", "UnidentifiedImageError: cannot identify image file")
    assert samples[3].reason == "FileNotFoundError: [Errno 2] No such file or directory"
    batch = Collate(32)(samples)
    assert batch.labels.tolist() == [0, 0, 2, 2]
    assert batch.images.dtype == torch.uint8
    assert samples[4].image is not None
    assert torch.equal(batch.images[2], samples[4].image)
    assert [name for name, _ in batch.unreadable] == ["green/000.jpg", "green/001.jpg"]
    nothing = Collate(32)(samples[2:4])
    assert nothing.images.shape == (0, 3, 32, 32)
    assert nothing.labels.shape == (0,)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_every_kind_of_picture_becomes_rgb(mode: str, tmp_path: Path) -> None:
    file = tmp_path / ("picture.jpg" if mode == "CMYK" else "picture.png")
    Image.new("RGB", (5, 4), (200, 10, 10)).convert(mode).save(file)
    picture, reason = decode(str(file))
    assert reason == ""
    assert picture is not None
    assert (picture.mode, picture.size) == ("RGB", (5, 4))


@pytest.mark.parametrize("kind", ["imagenet", "cifar", "none"])
@pytest.mark.parametrize("size", [32, 48])
def test_every_view_has_the_size_whatever_the_picture_has(kind: str, size: int) -> None:
    picture = Image.fromarray(np.arange(40 * 70 * 3, dtype=np.uint8).reshape(40, 70, 3))
    for transform in (transforms.training(kind, size), transforms.testing(kind, size)):
        view = transform(picture)
        assert (view.shape, view.dtype) == ((3, size, size), torch.uint8)


def test_random_views_come_from_torchs_generator() -> None:
    picture = Image.fromarray(np.arange(40 * 70 * 3, dtype=np.uint8).reshape(40, 70, 3))
    for kind in ("imagenet", "cifar"):
        transform = transforms.training(kind, 32)
        torch.manual_seed(1)
        first, second = transform(picture), transform(picture)
        torch.manual_seed(1)
        assert torch.equal(transform(picture), first)
        assert not torch.equal(first, second)


def test_bytes_are_scaled_as_torchvision_scales_them() -> None:
    images = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 3, 4, 4)
    scaled = transforms.FromBytes(nn.Identity())(images)
    normalise = V2.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    torch.testing.assert_close(scaled, normalise(images / 255))
    assert not transforms.FromBytes(nn.Linear(1, 1)).state_dict().keys() - {"model.weight", "model.bias"}


def test_pictures_reach_the_model_in_half_precision_and_in_the_layout() -> None:
    inside: list[torch.Tensor] = []

    class Spy(nn.Conv2d):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            inside.extend([images, super().forward(images)])
            return inside[-1]

    pictures = torch.arange(2 * 3 * 8 * 8, dtype=torch.int64).remainder(256).to(torch.uint8).view(2, 3, 8, 8)
    for amp, last in ((None, False), (torch.bfloat16, False), (None, True)):
        scores = transforms.FromBytes(Spy(3, 4, 3), amp=amp, channels_last=last)(pictures)
        given, made = inside[-2:]
        assert scores.dtype == torch.float32
        assert made.dtype == (amp or torch.float32)
        assert given.is_contiguous(memory_format=torch.channels_last) == last


# Models.


def test_the_small_resnet_is_the_papers() -> None:
    model = ResNetCifar(3, 10)
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    assert len(layers) == 20
    assert sum(parameter.numel() for parameter in model.parameters()) == 269_722
    assert model.stages(model.stem(torch.zeros(1, 3, 32, 32))).shape == (1, 64, 8, 8)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_norms_are_replaced_in_torchvisions_models_too() -> None:
    kinds = (nn.BatchNorm2d, nn.GroupNorm, lockstep.SyncBatchNorm)
    for norm, kind in zip(("batch", "group", "sync"), kinds, strict=True):
        model = build("resnet18", 7, norm)
        norms = [layer for layer in model.modules() if isinstance(layer, kinds)]
        assert len(norms) == 20
        assert {type(layer) for layer in norms} == {kind}
        assert model.get_parameter("fc.weight").shape == (7, 512)
    odd = build("mobilenet_v3_small", 5, "group").eval()
    assert odd(torch.zeros(1, 3, 64, 64)).shape == (1, 5)


def test_unknown_models_and_norms_without_effect_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"-a resnet55: unknown. There are resnet20-cifar and .* such as .*resnet"):
        build("resnet55", 10, "batch")
    with pytest.raises(SystemExit, match="alexnet has no batch norms"):
        build("alexnet", 10, "sync")


# Accuracy.


def test_hits_among_the_first_and_the_first_five_are_counted() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(40, 12, generator=generator)
    labels = torch.randint(12, (40,), generator=generator)
    places = [int((row > row[label]).sum()) for row, label in zip(scores, labels, strict=True)]
    loss, top1, top5, pictures = counted(scores, labels).tolist()
    assert (top1, top5, pictures) == (places.count(0), sum(place < 5 for place in places), 40)
    assert 0 < top1 < top5 < 40
    assert loss == pytest.approx(nn.functional.cross_entropy(scores, labels).item() * 40)
    assert counted(scores[:, :3], labels % 3)[2] == 40, "of three classes the right one is always among five"


# Schedule.


def test_the_rate_follows_the_batch_and_says_so() -> None:
    rate, words = scaled_rate(options("-b", "1024", "--lr", "0.1"))
    assert rate == pytest.approx(0.4)
    assert "learning rate 0.1 x 1024 / 256 = 0.4" in words
    assert scaled_rate(options("-b", "1024", "--lr", "0.1", "--no-lr-scaling"))[0] == 0.1


def test_warm_up_is_linear_and_the_cosine_ends_at_nothing() -> None:
    factor = factors(options("--epochs", "10", "--warmup-epochs", "2"), 5)
    warm = [factor(step) for step in range(10)]
    assert warm == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert factor(10) == 1.0
    assert factor(30) == pytest.approx(0.5)
    assert factor(50) == pytest.approx(0.0, abs=1e-12)
    assert all(factor(step) >= factor(step + 1) for step in range(10, 50))


def test_steps_drop_every_so_many_epochs() -> None:
    factor = factors(options("--schedule", "step", "--step-size", "3", "--gamma", "0.5", "--warmup-epochs", "0"), 4)
    assert [factor(step) for step in (0, 11, 12, 23, 24)] == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert math.isclose(factors(replace(options(), epochs=1, warmup_epochs=5.0), 4)(3), 4 / 21), "all of it warm-up"


# Records.


def test_a_table_is_cut_back_to_a_step_and_loses_half_a_row(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    table = Table(path, ("step", "loss"), up_to_step=0)
    for step in (1, 2, 3):
        table.add({"step": step, "loss": step / 2})
    with open(path, "a") as file:
        file.write("4")  # killed while it wrote
    Table(path, ("step", "loss"), up_to_step=2).add({"step": 3})
    assert read_table(path) == [
        {"step": "1", "loss": "0.5"},
        {"step": "2", "loss": "1.0"},
        {"step": "3", "loss": ""},
    ]
    assert path.stat().st_mode & 0o777 == 0o600


# What is missing.


def test_missing_packages_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def without(*absent: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name))

    without("torchvision", "PIL")
    with pytest.raises(SystemExit, match=r"needs torchvision and pillow, .*pip install 'torch-lockstep\[vision\]'"):
        vision.require_installed(tensorboard=True)
    without("tensorboard")
    with pytest.raises(SystemExit, match=r"needs tensorboard, .* or pass --no-tensorboard"):
        vision.require_installed(tensorboard=True)
    vision.require_installed(tensorboard=False)
    without("PIL")
    with pytest.raises(SystemExit, match="needs pillow, not installed here"):
        main(["DATA"])


def test_a_torchvision_for_another_torch_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError(f"operator {name}::nms does not exist")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(SystemExit, match="the torchvision installed here does not fit the torch installed here"):
        vision.require("torchvision")
