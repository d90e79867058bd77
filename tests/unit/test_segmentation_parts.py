"""The segmentation recipe's shapes, masks, IoU, losses, networks, picture and options."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from examples.segmentation import picture
from examples.segmentation.folders import Folder, read_mask, read_picture
from examples.segmentation.modes import losses_of
from examples.segmentation.options import parse
from examples.segmentation.overlap import Score, confusion
from examples.segmentation.shapes import IGNORED, Shapes, depth
from PIL import Image


def write_mask(path: Path, numbers: list[list[int]]) -> Path:
    """A PNG with Pascal VOC's palette."""
    image = Image.fromarray(np.array(numbers, np.uint8), mode="P")
    image.putpalette(picture.palette().tobytes())
    image.save(path)
    return path


def test_a_shape_is_the_same_whenever_it_is_drawn() -> None:
    shapes = Shapes(5, size=32, split="train", seed=3)
    pixels, mask = shapes[4]
    assert pixels.shape == (3, 32, 32)
    assert mask.shape == (32, 32)
    assert pixels.dtype == mask.dtype == torch.uint8
    again = Shapes(9, size=32, split="train", seed=3)[4]
    assert torch.equal(pixels, again[0])
    assert torch.equal(mask, again[1])
    for other in (Shapes(5, size=32, split="test", seed=3)[4], Shapes(5, size=32, split="train", seed=4)[4], shapes[3]):
        assert not torch.equal(pixels, other[0])
    with pytest.raises(IndexError):
        shapes[5]


def test_masks_hold_all_classes_and_a_band_without_one() -> None:
    shapes = Shapes(20, size=32, split="train", seed=0)
    assert set(torch.stack([shapes[index][1] for index in range(20)]).unique().tolist()) == {0, 1, 2, 3, IGNORED}


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_shapes_have_the_area_of_the_circle_and_their_own_outline(kind: int) -> None:
    y, x = np.mgrid[-40:40, -40:40] + 0.5
    inside = depth(kind, x, y, 12.0, turn=0.3) > 0
    assert inside.sum() == pytest.approx(math.pi * 12**2, rel=0.03)
    farthest = np.hypot(x, y)[inside].max()
    # Of shapes of one area, the corners of a triangle reach farther than those of a square.
    assert farthest == pytest.approx({1: 12.0, 2: 12 * math.sqrt(math.pi / 2), 3: 18.7}[kind], abs=1.3)


def test_a_mask_is_read_as_numbers_whatever_its_colours(tmp_path: Path) -> None:
    path = write_mask(tmp_path / "mask.png", [[0, 1, 20], [IGNORED, 15, 0]])
    assert read_mask(path, 21).tolist() == [[0, 1, 20], [IGNORED, 15, 0]]
    with Image.open(path) as image:
        assert image.convert("RGB").getpixel((1, 0)) == (128, 0, 0), "VOC's colour of aeroplanes"
    with pytest.raises(ValueError, match=r"mask.png has 15 in it; expected 0 to 14, or 255"):
        read_mask(path, 15)


def test_a_mask_with_colours_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (2, 2)).save(tmp_path / "mask.png")
    with pytest.raises(ValueError, match=r"mask.png has colours \(RGB\)"):
        read_mask(tmp_path / "mask.png", 21)


def test_a_picture_is_read_with_its_channels_first(tmp_path: Path) -> None:
    Image.new("RGB", (3, 2), (10, 20, 30)).save(tmp_path / "picture.png")
    pixels = read_picture(tmp_path / "picture.png")
    assert pixels.shape == (3, 2, 3)
    assert pixels[:, 0, 0].tolist() == [10, 20, 30]


def test_a_list_with_files_that_are_absent_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="No such file or directory; expected the names of pictures"):
        Folder(tmp_path, "train", classes=21, transform=None)
    (tmp_path / "ImageSets" / "Segmentation").mkdir(parents=True)
    listing = tmp_path / "ImageSets" / "Segmentation" / "train.txt"
    listing.write_text("\n")
    with pytest.raises(SystemExit, match="names no pictures"):
        Folder(tmp_path, "train", classes=21, transform=None)
    listing.write_text("2007_000001\n2007_000002\n")
    with pytest.raises(SystemExit, match=r"4 files are not there, such as .*2007_000001.jpg"):
        Folder(tmp_path, "train", classes=21, transform=None)


def test_iou_by_hand() -> None:
    truths = torch.tensor([[0, 0, 0, 1], [1, 1, IGNORED, 2]])
    guesses = torch.tensor([[0, 0, 1, 1], [1, 0, 2, 1]])
    matrix = confusion(guesses, truths, 4)
    assert matrix.tolist() == [[2, 1, 0, 0], [1, 2, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    score = Score(matrix)
    assert score.ious[:3] == [2 / 4, 2 / 5, 0.0]
    assert math.isnan(score.ious[3]), "neither there nor seen"
    assert score.mean_iou == pytest.approx((2 / 4 + 2 / 5 + 0) / 3)
    assert score.accuracy == pytest.approx(4 / 7)
    assert str(score) == "mean IoU 0.3000, 0.5714 of 7 pixels right"


def test_matrices_of_parts_add_up() -> None:
    torch.manual_seed(0)
    guesses, truths = torch.randint(3, (4, 9)), torch.randint(3, (4, 9))
    parts = [confusion(guesses[rows], truths[rows], 3) for rows in (slice(0, 1), slice(1, 4), slice(4, 4))]
    assert torch.equal(sum(parts[1:], parts[0]), confusion(guesses, truths, 3))


def test_the_loss_is_the_sum_over_pixels_that_count() -> None:
    torch.manual_seed(0)
    scores = {"out": torch.randn(2, 3, 4, 4), "aux": torch.randn(2, 3, 4, 4)}
    masks = torch.randint(3, (2, 4, 4))
    masks[0, :2] = IGNORED
    losses = losses_of(scores, masks)
    pixels = int((masks != IGNORED).sum())
    assert losses.shape == (2,)
    expected = sum(
        factor * torch.nn.functional.cross_entropy(scores[name], masks, ignore_index=IGNORED)
        for name, factor in (("out", 1.0), ("aux", 0.5))
    )
    torch.testing.assert_close(losses.sum() / pixels, expected)
    torch.testing.assert_close(
        losses_of({"out": scores["out"]}, masks).sum() / pixels,
        torch.nn.functional.cross_entropy(scores["out"], masks, ignore_index=IGNORED),
    )


def test_a_picture_shows_input_truth_and_guess(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "seen.png"
    pixels = torch.full((3, 64, 32), 7, dtype=torch.uint8)
    mask, guess = torch.zeros(64, 32, dtype=torch.uint8), torch.full((64, 32), 2)
    mask[0] = IGNORED
    picture.draw(path, [(pixels, mask, guess), (pixels, mask, guess)])
    with Image.open(path) as image:
        page = np.array(image)
    assert page.shape == (6 + 128 + 6 + 128 + 6, 6 + 64 + 6 + 64 + 6 + 64 + 6, 3)
    for top in (6, 140):
        assert (page[top : top + 128, 6:70] == 7).all()
        assert (page[top : top + 2, 76:140] == (224, 224, 192)).all()
        assert (page[top + 2 : top + 128, 76:140] == 0).all()
        assert (page[top : top + 128, 146:210] == (0, 128, 0)).all()
    assert (page[:6] == 255).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "0"], "--size 0: expected a positive number"),
        (["--slices", "-1"], "--slices -1: expected 0 or more"),
        (["--gpus", "cpu"], "--gpus cpu is for --mode dp"),
        (["--mode", "dp", "--norm", "sync"], "leave it out, or use --norm group"),
        (["--slices", "4", "--norm", "sync"], "leave it out, or use --norm group"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert words in capsys.readouterr().err
