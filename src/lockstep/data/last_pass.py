"""The samples that a sharded loader has handed out in its last pass, for outputs that are gathered in order.

They are gathered after the pass, when the loader may stand elsewhere: a state may have been loaded meanwhile. So
nothing here is read from the loader's position.
"""

from __future__ import annotations

from array import array
from itertools import groupby

import numpy as np
import torch

from lockstep.comm.in_order.places import Counts, HandedOut
from lockstep.data.cursor import Cursor
from lockstep.data.order import EpochOrder


class LastPass:
    """The samples that this rank was given of each global batch, and whether the pass was a whole one.

    Args:
        by_index: no rule says which samples of a batch this rank has, so their indices are kept, 8 bytes each.
    """

    def __init__(self, *, by_index: bool) -> None:
        #: The samples of this rank in each batch so far. (A list, since a step appends to it.)
        self.samples: list[int] = []
        #: The indices of the samples; None: they follow from the order.
        self.indices: array[int] | None = array("q") if by_index else None
        #: The order of the epoch's samples; None: its batches have not begun, or have none that is known.
        self.order: EpochOrder | None = None
        self._began: Cursor | None = None
        #: True when the pass has come to its end.
        self.has_ended = False

    def begin(self, cursor: Cursor) -> None:
        """Note that a pass begins at this position."""
        self.samples, self.order, self._began, self.has_ended = [], None, cursor, False
        if self.indices is not None:
            self.indices = array("q")

    def handed_out(self, loader: int, *, total: int | None, in_order: bool, unfinished: str) -> HandedOut:
        """Return the samples that this rank was given.

        Args:
            loader: the loader's number.
            total: the samples of an epoch by the word of its source; None: that is not known.
            in_order: whether the order is that of the data set.
            unfinished: the reason why no pass can be a whole one; empty if it may be.
        """
        began, order = self._began, self.order
        if order is not None:  # a sampler may draw another number than it says
            total = len(order)
        unfinished = unfinished or self._why_unfinished()
        source = f"sharded loader {loader}" if began is None else f"epoch {began.epoch} of sharded loader {loader}"
        counts = Counts((samples, len([*batches])) for samples, batches in groupby(self.samples))
        indices = None if self.indices is None else torch.from_numpy(np.array(self.indices, dtype=np.int64))
        places = None if in_order or order is None else order[:]
        return HandedOut(source, "sample", counts, total, unfinished, self.samples, places, indices)

    def _why_unfinished(self) -> str:
        if self._began is None:
            return "no loop over the sharded loader has begun"
        if self._began.samples:
            return (
                f"the last loop over the sharded loader began at sample {self._began.samples:,} of its epoch (a resume)"
            )
        if not self.has_ended:
            return f"the last loop over the sharded loader was left after {len(self.samples):,} of its batches"
        return ""
