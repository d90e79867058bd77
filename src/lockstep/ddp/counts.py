"""How many items each rank's gradients are the mean of: counts that ride with the gradients.

Note [Counts in the flags]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Rank r's gradient g_r is a mean over n_r items, and the gradient of the mean over all items is

    sum over r of n_r * g_r   /   sum over r of n_r.

The second sum is not known when a bucket is filled. So gradients are multiplied by n_r on their way in, n_r travels in
the flags of the last bucket (Note [Bucket layout]), and when all have come back every bucket is divided by the total.
The total must be exact, whatever the bucket's dtype: bfloat16 knows the whole numbers up to 256 and no others. So n_r
is written in digits that are small enough for their sum over the ranks to be one of these; where there are so many
ranks that a digit would have less than two bits, they take turns in several rows of digits.

Two flags before the digits say "weighed" and "not weighed". A rank that sees both after the reduction is among ranks of
which some have weighed and others have not: their sums mean nothing, and all raise. Over a backend that compares labels
they are told apart before (Note [Labels]), and else a rank that has not weighed reads these flags with those that say
which backward it is in. (On a GPU it reads neither: there the ranks that have weighed raise alone, which ends the job.)

float16 ends at 65504, and a gradient times its items may be more. There the items are counted in units: of the power of
two next to the last total, so that the weights add up to between 1 and 2, which costs no precision. The first time no
total is known, so a bucket is kept, and sent once more with weights n_r / n if its sums have overflowed: all ranks see
the same sums. A comm hook gets gradients in units of the mean over ranks, the first time in single items, and what it
returns is as exact as it averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lockstep.share import MOST_ITEMS

#: Bits of a count.
_BITS = MOST_ITEMS.bit_length() - 1
#: Flags are summed as float32 where a comm hook reduces the gradients.
_MOST_EXACT = 2**24
#: What has happened, and what to do.
MIXED = (
    "some ranks have weighed this backward's gradients by items (World.weigh), and others have not, or not those of "
    "every batch that they accumulated: call world.weigh before each backward, on all ranks, with 0 where it has none"
)


class Weight(NamedTuple):  # (a frozen dataclass takes three times as long to make)
    """How much this rank's gradients count in one backward."""

    #: What they are multiplied by: a factor for the mean over ranks (Note [Exact mean]), or items. 0 discards them.
    factor: float
    #: What the sum over ranks is divided by, where no items are counted.
    divisor: int
    #: Items that the gradients of this rank are of, the accumulated ones included; None: they are not counted.
    items: int | None = None
    #: Whether some of what was accumulated was weighed by items and some was not.
    is_mixed: bool = False


class CountFlags:
    """Writes a rank's count of items into flags, and reads the total out of their sum; see Note [Counts in the flags].

    Args:
        dtype: of the flags.
        rank: this rank.
        world_size: ranks whose flags are added.
    """

    def __init__(self, dtype: torch.dtype, *, rank: int, world_size: int) -> None:
        exact = min(int(2 / torch.finfo(dtype).eps), _MOST_EXACT)
        per_row = min(world_size, exact // 3)
        self._digit_bits = (exact // per_row + 1).bit_length() - 1
        self._digits = -(-_BITS // self._digit_bits)
        self._row, self._rows = rank // per_row, -(-world_size // per_row)
        #: Flags of a rank that has not weighed.
        self.unweighed = [0, 1] + [0] * (self._rows * self._digits)

    def __len__(self) -> int:
        return len(self.unweighed)

    def flags(self, items: int, *, is_mixed: bool = False) -> list[int]:
        """Return the flags of a rank that has ``items``."""
        flags = [1, int(is_mixed)] + [0] * (self._rows * self._digits)
        first, mask = 2 + self._row * self._digits, (1 << self._digit_bits) - 1
        for digit in range(self._digits):
            flags[first + digit] = items >> (digit * self._digit_bits) & mask
        return flags

    def total(self, sums: Sequence[float]) -> int:
        """Return the items of all ranks, from the sums of their flags."""
        return sum(int(each) << (number % self._digits * self._digit_bits) for number, each in enumerate(sums[2:]))


def are_mixed(sums: Sequence[float]) -> bool:
    """Return whether some ranks have weighed and others have not, from the sums of the flags; two are enough."""
    return sums[0] != 0 and sums[1] != 0


def unit_of_sums(total: int | None) -> float:
    """Return what items are counted in where the weighed gradients of all ranks are added, in a world of ``total``."""
    return float(1 << (total.bit_length() - 1)) if total else 1.0


def unit_of_means(total: int | None, world_size: int) -> float:
    """Return what items are counted in where the weighed gradients of ``world_size`` ranks are averaged."""
    return unit_of_sums(total // world_size if total else None)
