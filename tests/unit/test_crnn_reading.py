"""The CRNN recipe's decoding, its counts, its options and its picture."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from examples.crnn import picture
from examples.crnn.options import KEPT, parse
from examples.crnn.reading import Score, collapse, decode, edit_distance, score
from examples.kept import Kept
from hypothesis import given
from hypothesis import strategies as st

import lockstep

words = st.lists(st.integers(0, 3), max_size=6)


@pytest.mark.parametrize(
    ("path", "digits"),
    [
        ([], ()),
        ([0, 0, 0], ()),
        ([1], (0,)),
        ([0, 2, 2, 0, 3], (1, 2)),
        ([2, 2, 0, 2], (1, 1)),  # a blank between two of the same
        ([2, 3, 2], (1, 2, 1)),
        ([10, 10, 10], (9,)),
    ],
)
def test_a_path_is_collapsed(path: list[int], digits: tuple[int, ...]) -> None:
    assert collapse(path) == digits


def test_decoding_takes_the_likeliest_class_up_to_the_end_of_each_line() -> None:
    paths = torch.tensor([[1, 1, 0, 5], [0, 4, 9, 9]])
    scores = torch.nn.functional.one_hot(paths.T, 11).float()
    assert decode(scores, torch.tensor([8, 8])) == [(0, 4), (3, 8)]
    assert decode(scores, torch.tensor([6, 4])) == [(0,), (3,)], "padding is not read"
    assert decode(torch.zeros(4, 0, 11), torch.zeros(0, dtype=torch.int64)) == []


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        ("", "", 0),
        ("", "123", 3),
        ("123", "", 3),
        ("1234", "1234", 0),
        ("1234", "124", 1),
        ("124", "1234", 1),
        ("1234", "1934", 1),
        ("12", "21", 2),
        ("1534497", "513457", 4),
    ],
)
def test_edit_distances(one: str, other: str, distance: int) -> None:
    assert edit_distance([int(c) for c in one], [int(c) for c in other]) == distance


@given(words, words, words)
def test_the_edit_distance_is_a_metric(one: list[int], other: list[int], third: list[int]) -> None:
    distance = edit_distance(one, other)
    assert distance == edit_distance(other, one)
    assert (distance == 0) == (one == other)
    assert abs(len(one) - len(other)) <= distance <= max(len(one), len(other))
    assert distance <= edit_distance(one, third) + edit_distance(third, other)


def test_scores_are_counts_that_add_up() -> None:
    truths = [(1, 2, 3), (4,), (5, 6)]
    readings = [(1, 2, 3), (), (5, 6, 6)]
    whole = score(readings, truths)
    assert whole == Score(lines=3, right=1, edits=2, digits=6)
    assert whole.accuracy == 1 / 3
    assert whole.error_rate == 2 / 6
    assert score(readings[:1], truths[:1]) + score([], []) + score(readings[1:], truths[1:]) == whole
    assert Score.of(whole.counts() * 2) == whole + whole


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--epochs", "0"], "--epochs 0: expected a positive number"),
        (["--lines", "-1"], "--lines -1: expected a positive number"),
        (["--lr", "nan"], "--lr nan: expected a positive number"),
        (["--save-every", "-2"], "--save-every -2: expected 0 or more"),
        (["--mode", "dp", "--gpus", "cpu,x"], "'x' is not a device"),
        (["--mode", "both"], "invalid choice: 'both'"),
        (["--mode", "single", "--gpus", "0,1"], "--gpus 0,1: --mode single does not choose devices"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert text in capsys.readouterr().err


def test_the_argument_that_launchers_pass_changes_nothing() -> None:
    assert parse(["--local_rank=1"]) == parse(["--local-rank", "1"]) == parse([])


def test_devices_are_read_as_people_write_them() -> None:
    assert parse(["--mode", "dp", "--gpus", "5,4"]).devices == ("cuda:5", "cuda:4")
    assert parse(["--mode", "dp", "--devices", "cpu, cpu"]).devices == ("cpu", "cpu")
    assert parse(["--mode", "ddp"]).devices == ()


def test_a_run_is_not_resumed_with_other_options() -> None:
    kept = Kept(parse(["--epochs", "4", "--seed", "1"]), KEPT).state_dict()
    Kept(parse(["--epochs", "4", "--seed", "1", "--mode", "single"]), KEPT).load_state_dict(kept)
    with pytest.raises(lockstep.CheckpointMismatch, match="here is --epochs 5 instead of 4, --seed 0 instead of 1"):
        Kept(parse(["--epochs", "5"]), KEPT).load_state_dict(kept)


def test_a_picture_shows_the_lines_and_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "lines.png"
    images = [torch.zeros(1, 12, 20), torch.ones(1, 12, 8)]
    picture.draw(path, images, [(1, 2), (3,)], [(1, 2), (4,)])
    pixels = read_png(path)
    assert pixels.shape == (8 + 2 * (48 + 8), 16 + 80 + 8 + 2 * (4 + 4) * 4, 3)
    assert (pixels[8:56, 8:88] == 255).all(), "a line without ink is white"
    assert (pixels[64:112, 8:40] == 0).all(), "and one that is all ink is black"
    upper, lower = ({tuple(rgb) for row in half[:, 96:] for rgb in row.tolist()} for half in (pixels[:60], pixels[60:]))
    assert upper == {(255, 255, 255), (0, 120, 60)}, "right"
    assert lower == {(255, 255, 255), (200, 30, 30), (130, 130, 130)}, "wrong, and what is written there"


def read_png(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The pixels of an 8-bit RGB file without filters, its checksums verified."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        body = data[place + 4 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length]) == (zlib.crc32(body),)
        chunks[body[:4]] = body[4:]
        place += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, colour) == (8, 2)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)
