"""Batches that a loop has taken before its model needs them, known again by their tensors.

Note [Batches read ahead]
~~~~~~~~~~~~~~~~~~~~~~~~~
The batch handed out last is the one in hand (Note [Batches in hand] in ``share.py``), unless a loop reads ahead: it
makes a list of all batches first, a generator or a library's prefetcher is one batch ahead of it, a thread fills a
queue, or ``next(iter(loader))`` takes one and drops the pass. Then a forward would take another batch's share, which is
another weight where the last batch of an epoch has fewer samples.

Such a pass shows itself: it hands out a batch when no forward has come since the one before, it ends so, another thread
asks for it than the one that computes, or the batch before the last still lives (``itertools.cycle`` keeps all, and
gives them again when the pass is over). From there on its batches are remembered by their tensors (and other
objects that a weak reference can follow), and a forward whose inputs are among these, or are views of them, takes the
share of their batch, also if its pass is over. A tensor that several batches of a pass have tells nothing. A loop that
only skips batches looks the same, and its batch is the one in hand anyway.

Inputs that were moved or computed are not known. A forward with such inputs takes the share that the one before it took
if both go into one backward, or else that of the batch in hand. It is warned of if the inputs are as long as another
batch that was read ahead, and not as long as the one in hand. A backward through no forward (its loss came by another
method of the model) shows no inputs at all. It takes the share in hand as well, and is warned of if the shares of what
was read ahead weigh differently.

The ranks compare which batch is in hand (Note [Batches compared] in ``ddp/batches.py``), and not which one a forward
knows, since a rank may know it where others don't. Only where no pass is under way (a loop over a list) do they compare
those that forwards know, and a rank whose forward knows none differs from no other.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar
from weakref import ref

from torch import Tensor

from lockstep.trees import leaves

#: What is remembered of a batch, one object for each.
_Batch = TypeVar("_Batch")

#: The most parts of a batch, or of a model's inputs, that are looked at.
_MOST = 256


class ReadAhead(Generic[_Batch]):
    """The batches that were read ahead, while their tensors live; see Note [Batches read ahead]."""

    def __init__(self) -> None:
        #: Identifier of an object -> a weak reference to it, its batch, and the pass of that; no batch: several of the
        #: pass have it.
        self._known: dict[int, tuple[ref[Any], _Batch | None, object]] = {}

    def remember(self, batch: _Batch, content: object, *, of: object) -> None:
        """Remember which objects are the ``content``, a tree, of a batch of the pass ``of``."""
        for leaf in islice(leaves(content), _MOST):
            key = id(leaf)
            if key in self._known:
                reference, before, its_pass = self._known[key]
                self._known[key] = reference, batch if before is batch or its_pass is not of else None, of
                continue
            try:
                self._known[key] = ref(leaf, partial(_forget, self._known, key)), batch, of
            except TypeError:  # a number or a text
                continue

    def find(self, inputs: object) -> list[_Batch]:
        """Return the batches whose objects are among a model's ``inputs``, a tree; each batch once."""
        if not self._known:
            return []
        found = dict.fromkeys(map(self._batch_of, islice(leaves(inputs), _MOST)))
        return [batch for batch in found if batch is not None]

    def living(self) -> dict[object, list[_Batch]]:
        """Return, by pass, all batches of which an object still lives, each once."""
        found: dict[object, dict[_Batch, None]] = {}
        for _, batch, its_pass in list(self._known.values()):
            if batch is not None:
                found.setdefault(its_pass, {})[batch] = None
        return {its_pass: list(batches) for its_pass, batches in found.items()}

    def _batch_of(self, leaf: Any) -> _Batch | None:
        known = self._known.get(id(leaf))
        if known is None and isinstance(leaf, Tensor) and leaf._base is not None:
            known = self._known.get(id(leaf._base))
        return None if known is None else known[1]


def _forget(known: dict[int, Any], key: int, _: object) -> None:
    known.pop(key, None)
