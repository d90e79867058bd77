"""The CRNN recipe's model and loss: independent of padding and of how a batch was cut."""

from __future__ import annotations

import pytest
import torch
from examples.crnn.lines import HEIGHT, Batch
from examples.crnn.model import CRNN, Bidirectional, ctc
from torch import nn

WIDTHS = [30, 18, 44, 20, 26]
LENGTHS = [3, 1, 5, 2, 2]


def batch(seed: int = 0) -> Batch:
    """Five lines of noise; whatever they are, the model must treat each by itself."""
    made = torch.Generator().manual_seed(seed)
    widths, lengths = torch.tensor(WIDTHS), torch.tensor(LENGTHS)
    images = torch.rand(5, 1, HEIGHT, max(WIDTHS), generator=made)
    images *= torch.arange(max(WIDTHS)) < widths[:, None, None, None]
    digits = torch.randint(10, (5, max(LENGTHS)), generator=made) * (torch.arange(5) < lengths[:, None])
    return Batch(images, widths, digits, lengths)


def part(whole: Batch, start: int, stop: int) -> Batch:
    """Some of the lines, padded to the longest of them and no further."""
    images, widths, digits, lengths = (tensor[start:stop] for tensor in whole)
    return Batch(images[..., : int(widths.max())], widths, digits[:, : int(lengths.max())], lengths)


@pytest.fixture
def model() -> CRNN:
    torch.manual_seed(0)
    model = CRNN(hidden=16)
    with torch.no_grad():
        for convolution in model.convolutions:  # so that padding that is not masked shows
            assert isinstance(convolution, nn.Conv2d)
            assert convolution.bias is not None
            convolution.bias.fill_(0.5)
    return model


def loss_of(model: CRNN, lines: Batch) -> torch.Tensor:
    return ctc(model(lines.images, lines.widths), lines.widths, lines.digits, lines.lengths)


def test_scores_have_time_first_and_the_batch_second(model: CRNN) -> None:
    lines = batch()
    assert model(lines.images, lines.widths).shape == (22, 5, 11)


@pytest.mark.parametrize("row", range(5))
def test_a_line_is_read_the_same_alone_and_in_a_batch(model: CRNN, row: int) -> None:
    lines = batch()
    alone = part(lines, row, row + 1)
    steps = WIDTHS[row] // 2
    together = model(lines.images, lines.widths)[:steps, row]
    assert torch.allclose(model(alone.images, alone.widths)[:, 0], together, atol=1e-5)


def test_the_mean_over_parts_weighted_by_their_lines_is_the_mean_over_the_batch(model: CRNN) -> None:
    lines = batch()
    whole = loss_of(model, lines)
    parts = [part(lines, 0, 2), part(lines, 2, 5)]
    weighted = sum(len(lines_.widths) / 5 * loss_of(model, lines_) for lines_ in parts)
    assert isinstance(weighted, torch.Tensor)
    assert torch.allclose(whole, weighted, rtol=1e-5)
    ours = torch.autograd.grad(weighted, list(model.parameters()))
    theirs = torch.autograd.grad(whole, list(model.parameters()))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_no_lines_are_a_loss_of_zero_that_reaches_every_parameter(model: CRNN) -> None:
    lines = Batch(*(tensor[:0] for tensor in batch()))
    loss = loss_of(model, lines)
    loss.backward()
    assert loss.item() == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_bidirectional_is_torchs_lstm_over_packed_sequences() -> None:
    torch.manual_seed(0)
    ours = Bidirectional(6, 4)
    theirs = nn.LSTM(6, 4, bidirectional=True)
    for suffix, lstm in (("", ours.forwards), ("_reverse", ours.backwards)):
        for name, parameter in lstm.named_parameters():
            theirs.get_parameter(name + suffix).data.copy_(parameter.data)
    sequence, steps = torch.randn(9, 3, 6), torch.tensor([9, 1, 5])
    packed, _ = theirs(nn.utils.rnn.pack_padded_sequence(sequence, steps, enforce_sorted=False))
    expected, _ = nn.utils.rnn.pad_packed_sequence(packed)
    got = ours(sequence, steps)
    for line, end in enumerate(steps.tolist()):
        assert torch.allclose(got[:end, line], expected[:end, line], atol=1e-6)


def test_the_loss_of_a_line_is_that_of_its_alignments() -> None:
    """Two steps, one digit: the paths are digit-digit, blank-digit and digit-blank."""
    scores = torch.randn(2, 1, 11, generator=torch.Generator().manual_seed(1))
    p = scores.softmax(2)[:, 0]
    digit = 7
    likely = p[0, digit + 1] * p[1, digit + 1] + p[0, 0] * p[1, digit + 1] + p[0, digit + 1] * p[1, 0]
    loss = ctc(scores, torch.tensor([4]), torch.tensor([[digit]]), torch.tensor([1]))
    assert torch.allclose(loss, -likely.log(), rtol=1e-5)
    narrow = ctc(scores, torch.tensor([4]), torch.tensor([[3, 8]]), torch.tensor([2]))  # one path, and no mean over it
    assert torch.allclose(narrow, -(p[0, 4] * p[1, 9]).log(), rtol=1e-5)
