"""The GPT recipe's vocabulary, text, model, what it writes, schedule and options."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from examples.gpt.model import GPT, write
from examples.gpt.options import KEPT, parse
from examples.gpt.pairs import learn
from examples.gpt.text import IGNORED, Windows, load, read, without_repetitions
from examples.gpt.train import Curve, factors, grouped
from examples.kept import Kept
from hypothesis import given
from hypothesis import strategies as st

import lockstep

TEXT = b"the cat sat on the mat, the rat sat on the cat\n\n" * 3


def test_the_most_frequent_pair_becomes_a_token_and_the_lower_one_of_equals() -> None:
    vocabulary = learn(b"aaab aaab", 258)  # "aa" stands there four times; then "ab" and "aa" + "a" twice each
    assert [vocabulary.decode([token]) for token in (256, 257)] == ["aa", "ab"]
    assert vocabulary.encode(b"aaab") == [256, 257]
    assert vocabulary.encode(b"aaaaa") == [256, 256, ord("a")], "joined from the left"


def test_no_token_spans_two_words() -> None:
    vocabulary = learn(TEXT, 400)
    tokens = [vocabulary.decode([token]) for token in range(256, len(vocabulary))]
    assert " the" in tokens
    assert not any(" " in token.strip() for token in tokens)


def test_learning_ends_when_no_pair_stands_there_twice() -> None:
    assert len(learn(b"abc", 300)) == 256
    assert len(learn(b"", 300)) == 256


@given(st.binary(max_size=60))
def test_any_text_comes_back_from_its_tokens(text: bytes) -> None:
    vocabulary = learn(TEXT, 300)
    assert vocabulary.decode(vocabulary.encode(text)) == text.decode(errors="replace")


def test_what_is_held_out_is_not_in_the_training_part(tmp_path: Path) -> None:
    file = tmp_path / "text"
    paragraphs = [f"This is paragraph {number % 40}." for number in range(100)]
    file.write_text("\n\n".join(paragraphs))
    text = load(file, 300)
    trained, held_out = (text.vocabulary.decode(part.tolist()) for part in (text.train, text.held_out))
    assert trained + held_out == "\n\n".join(paragraphs[:40]), "each paragraph once"
    assert not set(trained.split("\n\n")) & set(filter(None, held_out.split("\n\n")))
    assert 0.05 < len(held_out) / len(trained + held_out) < 0.15
    assert text.bytes_per_token == len(held_out) / len(text.held_out)


def test_pythons_help_is_long_enough_to_learn_from() -> None:
    assert len(without_repetitions(read(None))) > 200_000


def test_a_text_that_is_absent_or_has_no_paragraphs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="No such file or directory"):
        load(tmp_path / "absent", 300)
    (tmp_path / "short").write_text("one paragraph")
    with pytest.raises(SystemExit, match="expected several paragraphs"):
        load(tmp_path / "short", 300)


def test_windows_cover_a_text_once() -> None:
    tokens = torch.arange(100, 123)  # 22 tokens to foretell: four windows of five, and one of two
    windows = Windows(tokens, 5, shifted=False)
    inputs, targets = (torch.cat(parts) for parts in zip(*(windows[index] for index in range(5)), strict=True))
    assert len(windows) == 5
    assert inputs[targets != IGNORED].tolist() == list(range(100, 122))
    assert targets[targets != IGNORED].tolist() == list(range(101, 123))


def test_shifted_windows_are_full_and_follow_the_random_numbers() -> None:
    windows = Windows(torch.arange(100, 123), 5, shifted=True)
    torch.manual_seed(0)
    first = [windows[index] for index in range(len(windows))]
    assert all(torch.equal(inputs + 1, targets) for inputs, targets in first)
    assert [int(inputs[0]) for inputs, _ in first] != [100, 105, 110, 115, 117]
    torch.manual_seed(0)
    assert all(torch.equal(windows[index][0], inputs) for index, (inputs, _) in enumerate(first))


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(30, context=8, width=16, layers=2, heads=4)


def test_scores_depend_on_what_came_before_and_on_no_other_text(model: GPT) -> None:
    tokens = torch.randint(30, (3, 8))
    scores = model(tokens)
    assert scores.shape == (3, 8, 30)
    later = tokens.clone()
    later[:, 5:] = (later[:, 5:] + 1) % 30
    torch.testing.assert_close(model(later)[:, :5], scores[:, :5])
    assert not torch.allclose(model(later)[:, 5:], scores[:, 5:])
    torch.testing.assert_close(model(tokens[1:2])[0], scores[1])


def test_what_it_writes_is_the_same_for_a_seed(model: GPT) -> None:
    written = [write(model, [1, 2, 3], count=12, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert written[0] == written[1] != written[2]
    assert written[0][:3] == [1, 2, 3]
    assert len(written[0]) == 15, "more than it looks back at"


def test_a_low_temperature_takes_the_likeliest(model: GPT) -> None:
    token = write(model, [1, 2, 3], count=1, temperature=1e-4, seed=0)[-1]
    assert token == int(model(torch.tensor([[1, 2, 3]]))[0, -1].argmax())


def test_the_learning_rate_grows_and_falls() -> None:
    factor = factors(parse(["--warmup-steps", "4"]), 24)
    assert [factor(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factor(14) == pytest.approx((1 + 0.1) / 2), "half way along the cosine"
    assert factor(24) == pytest.approx(0.1)


def test_matrices_decay_and_every_parameter_is_in_one_group(model: GPT) -> None:
    decaying, others = (group["params"] for group in grouped(model))
    assert {param.dim() for param in decaying} == {2}
    assert {param.dim() for param in others} == {1}
    assert len(decaying) + len(others) == len(list(model.parameters()))


def test_a_curve_goes_on_within_an_epoch() -> None:
    whole, begun, resumed = Curve(), Curve(), Curve()
    for curve in (whole, begun):
        curve.add(3.0, 4)
        curve.end_epoch()
        curve.add(2.0, 4)
    resumed.load_state_dict(begun.state_dict())
    for curve in (whole, resumed):
        curve.add(1.0, 1)
    assert math.isclose(whole.end_epoch(), (2.0 * 4 + 1.0) / 5)
    resumed.end_epoch()
    assert resumed.epochs == whole.epochs


def test_a_run_keeps_its_options_and_its_text() -> None:
    kept = Kept(parse(["--lr", "0.1"]), KEPT, text="0123").state_dict()
    Kept(parse(["--lr", "0.1", "--prompt", "If"]), KEPT, text="0123").load_state_dict(kept)
    with pytest.raises(
        lockstep.CheckpointMismatch, match=r"here is --lr 0.2 instead of 0.1, text 4567 instead of 0123"
    ):
        Kept(parse(["--lr", "0.2"]), KEPT, text="4567").load_state_dict(kept)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slices", "0"], "--slices 0: expected a positive number"),
        (["--batch-size", "-1"], "--batch-size -1: expected a positive number"),
        (["--warmup-steps", "-1"], "--warmup-steps -1: expected 0 or more"),
        (["--vocabulary", "255"], "expected 256 or more, since every byte is a token"),
        (["--heads", "3"], "--width 128 --heads 3: each head gets the same part of the width"),
        (["--dropout", "1"], "expected 0 or more, and less than 1"),
        (["--prompt", ""], "expected at least one character"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert words in capsys.readouterr().err
