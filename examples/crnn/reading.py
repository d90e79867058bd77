"""From scores to digits, and how many of them are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.crnn.lines import STEP, Batch
from examples.crnn.model import BLANK

Reading = tuple[int, ...]


def decode(scores: Tensor, widths: Tensor) -> list[Reading]:
    """Return the digits of each line by best-path decoding: the likeliest class of each step of time, repetitions
    as one, blanks left out (Graves et al. 2006, section 3.2).

    Args:
        scores: [time, lines, 11].
        widths: [lines], in pixels; what lies beyond is not read.
    """
    best = scores.argmax(dim=2).T.cpu()
    ends = (widths // STEP).tolist()
    return [collapse(row[:end].tolist()) for row, end in zip(best, ends, strict=True)]


def collapse(path: Sequence[int]) -> Reading:
    """Return the digits that a path of classes spells."""
    starts = (cls for cls, before in zip(path, [BLANK, *path], strict=False) if cls != before)
    return tuple(cls - 1 for cls in starts if cls != BLANK)


def edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the fewest insertions, deletions and substitutions that turn one sequence into the other.

    Row by row, after R. Wagner and M. Fischer, "The String-to-String Correction Problem", Journal of the ACM, 1974.
    """
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, start=1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(other, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


@dataclass(frozen=True)
class Score:
    """Counts over any number of lines. They add up, over batches and over ranks, which rates and means do not."""

    lines: int = 0
    #: Lines of which every digit was read right.
    right: int = 0
    #: Digits inserted, deleted or substituted in all lines together.
    edits: int = 0
    #: Digits that are written there.
    digits: int = 0

    def __add__(self, other: Score) -> Score:
        return Score.of(self.counts() + other.counts())

    @classmethod
    def of(cls, counts: Tensor) -> Score:
        """Make one from four counts, int64 of shape (4,)."""
        return cls(*(int(count) for count in counts))

    def counts(self) -> Tensor:
        """Return it as int64 of shape (4,)."""
        return torch.tensor([self.lines, self.right, self.edits, self.digits])

    @property
    def accuracy(self) -> float:
        """Lines read right, of all lines."""
        return self.right / self.lines

    @property
    def error_rate(self) -> float:
        """The character error rate: edits per digit that is written there."""
        return self.edits / self.digits

    def __str__(self) -> str:
        return (
            f"{self.accuracy:.4f} of {self.lines} lines read right, "
            f"character error rate {self.error_rate:.4f} ({self.edits} edits in {self.digits} digits)"
        )


def written(batch: Batch) -> list[Reading]:
    """Return what is written on each line."""
    rows = zip(batch.digits.tolist(), batch.lengths.tolist(), strict=True)
    return [tuple(digits[:length]) for digits, length in rows]


def score(readings: Sequence[Reading], truths: Sequence[Reading]) -> Score:
    """Compare what was read with what is written."""
    pairs = list(zip(readings, truths, strict=True))
    return Score(
        lines=len(pairs),
        right=sum(reading == truth for reading, truth in pairs),
        edits=sum(edit_distance(reading, truth) for reading, truth in pairs),
        digits=sum(len(truth) for truth in truths),
    )
