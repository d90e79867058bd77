"""The CRNN recipe's lines: seeded, composed of one split's digits, and padded to a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from examples.crnn.lines import HEIGHT, STEP, Lines, Split, collate
from examples.digits import load_digits
from torch.utils.data import DataLoader, TensorDataset


@pytest.fixture(scope="module")
def splits() -> tuple[TensorDataset, TensorDataset]:
    return load_digits()


def lines(splits: tuple[TensorDataset, TensorDataset], split: Split = "train", count: int = 50, seed: int = 0) -> Lines:
    return Lines(splits[split == "test"], split=split, count=count, seed=seed)


def test_a_line_depends_on_seed_split_and_index_and_on_nothing_else(
    splits: tuple[TensorDataset, TensorDataset],
) -> None:
    first = [lines(splits)[index] for index in range(50)]
    np.random.seed(7)
    torch.manual_seed(7)
    again = lines(splits, count=1000)
    for index in reversed(range(50)):  # another order, another count, other global generators
        image, digits = again[index]
        assert torch.equal(image, first[index][0])
        assert torch.equal(digits, first[index][1])
    for other in (lines(splits, seed=1), Lines(splits[0], split="test", count=50)):
        assert not any(torch.equal(other[index][0], image) for index, (image, _) in enumerate(first))
    assert not torch.equal(first[0][0], first[1][0])


def test_workers_render_the_same_lines(splits: tuple[TensorDataset, TensorDataset]) -> None:
    here = next(iter(DataLoader(lines(splits), batch_size=50, collate_fn=collate)))
    there = next(iter(DataLoader(lines(splits), batch_size=50, collate_fn=collate, num_workers=1)))
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))


def test_no_digit_is_in_both_splits(splits: tuple[TensorDataset, TensorDataset]) -> None:
    train, test = ({image.numpy().tobytes() for image in split.tensors[0]} for split in splits)
    assert not train & test
    assert len(splits[0]) + len(splits[1]) == 1797


def test_lines_are_what_they_are_said_to_be(splits: tuple[TensorDataset, TensorDataset]) -> None:
    lengths = set()
    widths = set()
    for image, digits in (lines(splits, count=400)[index] for index in range(400)):
        assert image.shape[:2] == (1, HEIGHT)
        assert image.dtype == torch.float32
        assert image.shape[2] % STEP == 0
        assert image.min() >= 0
        assert 0.4 < image.max() <= 1
        # CTC needs a step for each digit, and one for the blank between two that are the same.
        repeated = int((digits[1:] == digits[:-1]).sum())
        assert image.shape[2] // STEP >= len(digits) + repeated
        lengths.add(len(digits))
        widths.add(image.shape[2])
        # Ink stays inside: only a hint of it reaches the first and the last column.
        assert image[:, :, [0, -1]].max() < 0.35
    assert lengths == set(range(1, 8))
    assert len(widths) > 20, "spacing and size vary"


def test_every_digit_of_a_line_is_drawn(splits: tuple[TensorDataset, TensorDataset]) -> None:
    """Ink in every stretch of a line, from left to right, about as much as its pictures have."""
    images, labels = splits[0].tensors
    ink = torch.stack([images[labels == digit].sum(dim=(1, 2, 3)).mean() for digit in range(10)])
    ratios = [
        float(image.sum() / ink[digits].sum()) for image, digits in (lines(splits, count=200)[i] for i in range(200))
    ]
    assert 0.7 < np.median(ratios) < 1.2  # the mean strength of the ink is 0.8, the mean area 1.1


@pytest.mark.parametrize(
    ("options", "text"),
    [({"count": 0}, "count=0"), ({"longest": 0}, "longest=0"), ({"split": "val"}, "split='val'")],
)
def test_what_makes_no_sense_is_refused(
    splits: tuple[TensorDataset, TensorDataset], options: dict[str, object], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Lines(splits[0], **{"split": "train", "count": 5, **options})  # type: ignore[arg-type]


def test_there_is_nothing_beyond_the_last_line(splits: tuple[TensorDataset, TensorDataset]) -> None:
    with pytest.raises(IndexError, match="line 50 of 50"):
        lines(splits)[50]


def test_a_batch_is_padded_behind_each_line() -> None:
    long, short = torch.full((1, HEIGHT, 8), 0.5), torch.ones(1, HEIGHT, 4)
    batch = collate([(long, torch.tensor([3, 1, 4])), (short, torch.tensor([2]))])
    assert batch.images.shape == (2, 1, HEIGHT, 8)
    assert torch.equal(batch.images[0], long)
    assert torch.equal(batch.images[1, :, :, :4], short)
    assert not batch.images[1, :, :, 4:].any()
    assert batch.widths.tolist() == [8, 4]
    assert batch.digits.tolist() == [[3, 1, 4], [2, 0, 0]]
    assert batch.lengths.tolist() == [3, 1]
