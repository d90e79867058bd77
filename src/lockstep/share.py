"""A rank's share of a global batch: what makes a mean over unequal slices exact.

Note [Exact mean]
~~~~~~~~~~~~~~~~~
A global batch of n samples is cut into W slices; rank r has n_r of them and takes the mean of its own losses. The
gradient of the global mean is then

    sum over r of (n_r / n) * g_r   =   mean over r of  w_r * g_r,      w_r = n_r * W / n.

So a plain average over ranks is exact when every rank first scales its gradient by its weight ``w_r``. Equal slices
have w_r = 1 and cost nothing. The weights of all ranks sum to W, so a term that every rank adds in full (a penalty on
the parameters, say) comes out unchanged. A rank with an empty slice has weight 0, and what it holds is discarded
rather than multiplied: the mean over no samples is NaN, and 0 * NaN is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchShare:
    """How many samples of the current global batch this rank has."""

    #: Samples in this rank's slice.
    local_samples: int
    #: Samples in the global batch.
    global_samples: int

    def weight(self, world_size: int) -> float:
        """**Local.** The factor that makes a plain average over ranks exact; see Note [Exact mean]."""
        return self.local_samples * world_size / self.global_samples
