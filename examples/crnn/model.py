"""The recogniser: convolutions that turn a line into a sequence, a bidirectional LSTM, and the CTC loss.

Note [Padding]
~~~~~~~~~~~~~~
How far a line is padded depends on the longest line beside it, so on how the global batch was cut into slices. What the
model makes of a line must not: after every convolution the columns that don't belong to the line are zeroed again, as
if it ended at the edge of its image, and the backward LSTM begins at the line's last column. What is normalised is each
step of time by itself, without batch statistics. So a line's scores and loss are the same alone and in any batch, and
any number of replicas trains the same model as one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.crnn.lines import STEP

#: Class 0 is CTC's blank; digit d is class d + 1.
BLANK = 0
CLASSES = 11


class CRNN(nn.Module):
    """images [lines, 1, 12, widest] and widths [lines] -> scores [time, lines, 11] (float32), time = widest / 2.

    The batch is the second dimension of the output, as CTC has it: whoever splits a batch must join these scores along
    dimension 1.

    After Shi, Bai and Yao 2015 (arXiv:1507.05717), on a small scale: the height is halved more often than the width, so
    that narrow characters keep some steps of time each. One bidirectional LSTM instead of two, and layer normalisation
    of what it reads instead of batch normalisation (Note [Padding]); without any, the CTC loss stands still for twice
    as many steps before it begins to fall.
    """

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        #: Each with what shrinks the maps after it: the height from 12 to 6, to 3, to 1; the width by half, once.
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(1, 16, 3, padding=1),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.Conv2d(32, hidden, 3, padding=(0, 1)),
            ]
        )
        self.pools = nn.ModuleList([nn.MaxPool2d(2), nn.MaxPool2d((2, 1)), nn.Identity()])
        self.norm = nn.LayerNorm(hidden)
        self.recurrent = Bidirectional(hidden, hidden)
        self.classifier = nn.Linear(2 * hidden, CLASSES)

    def forward(self, images: Tensor, widths: Tensor) -> Tensor:
        maps = images
        for convolution, pool in zip(self.convolutions, self.pools, strict=True):
            maps = pool(torch.relu(convolution(maps)))
            shrunk = images.shape[-1] // maps.shape[-1]
            columns = torch.arange(maps.shape[-1], device=maps.device)
            maps = maps * (columns < widths[:, None] // shrunk)[:, None, None, :]
        sequence = self.norm(maps.squeeze(2).permute(2, 0, 1))
        scores: Tensor = self.classifier(self.recurrent(sequence, widths // STEP))
        return scores


class Bidirectional(nn.Module):
    """An LSTM over each sequence and one over its reverse: [time, lines, inputs] -> [time, lines, 2 * hidden].

    ``nn.LSTM(bidirectional=True)`` would begin the reverse in the padding. Packed sequences avoid that as well, at
    three times the time on a CPU, and can't be empty, as the slice of a small last batch can.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.forwards = nn.LSTM(inputs, hidden)
        self.backwards = nn.LSTM(inputs, hidden)

    def forward(self, sequence: Tensor, steps: Tensor) -> Tensor:
        time = torch.arange(len(sequence), device=sequence.device)[:, None]
        # Each line's own steps in reverse, its padding where it was: its own inverse.
        order = torch.where(time < steps, steps - 1 - time, time)
        ahead, _ = self.forwards(sequence)
        back, _ = self.backwards(reordered(sequence, order))
        return torch.cat([ahead, reordered(back, order)], dim=2)


def reordered(sequence: Tensor, order: Tensor) -> Tensor:
    """Return steps of time in another order for each line: [time, lines, features], order [time, lines]."""
    return sequence.gather(0, order[:, :, None].expand_as(sequence))


def ctc(scores: Tensor, widths: Tensor, digits: Tensor, lengths: Tensor) -> Tensor:
    """Return the CTC loss in nats, the mean over lines: each line counts the same, whatever its length.

    Args:
        scores: [time, lines, 11], not normalised.
        widths: [lines], in pixels.
        digits: [lines, longest], padded.
        lengths: [lines].

    Of no lines it is 0, with a gradient of nothing: the slice of a rank that a small last batch leaves out.
    """
    if len(widths) == 0:
        return scores.sum()
    losses: Tensor = nn.functional.ctc_loss(
        scores.log_softmax(2), digits + 1, widths // STEP, lengths, blank=BLANK, reduction="none"
    )
    return losses.mean()
