"""Two streams of random numbers: the one that all ranks share, and each rank's own while it computes.

Note [Random numbers of a rank]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Whatever a script draws between its steps must be the same on every rank: the split into training and validation data,
first weights, a choice of hyperparameters. What a model draws within a step must differ, or all ranks would drop the
same units. So ``init`` seeds torch's CPU generator alike on all ranks, and a rank leaves this common stream only

- from the moment a sharded loader is asked for a batch until it is asked for the next: a new stretch for each batch;
- in a training forward of a replica, where no sharded batch is in hand.

A stretch begins with one number drawn from the common stream, and this number and the rank seed the generator; at its
end the generator is put back to where the common stream stands. Nothing else is kept, so

- the common stream alone decides all that follows: a checkpoint holds one state, also one that is saved in mid-step,
  and a ``torch.manual_seed`` of the script's own, the same on all ranks, still gives each rank masks of its own;
- a forward that is repeated from a saved state, as activation checkpointing does, draws the same masks, be it the
  replica's whole forward or a part of it.

A world of one never leaves the common stream: its numbers are those of a lone process. A stretch is opened on the main
thread only where a loader opens it, since a thread that reads batches ahead for another must not move that one's
generator. Python's and NumPy's generators stay common throughout (samples are seeded by position), and the generators
of GPUs differ from rank to rank throughout.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

import torch

from lockstep import _torch

#: Tells the ranks' seeds apart: the step of a Weyl sequence, odd.
_STRIDE = 0x9E3779B97F4A7C15
_MASK = 2**63 - 1

_generator = torch.default_generator


class Streams:
    """Where this rank's numbers come from. About 5 µs for each stretch."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._alone = world_size == 1
        #: Where the common stream stands while this rank draws from its own; None while it is in force.
        self._common: torch.Tensor | None = None
        #: Loaders and modules between whose beginning and end we are. Weak: one may go without saying so.
        self._holders: WeakSet[Any] = WeakSet()
        with torch.inference_mode(False):
            self._drawn = torch.empty((), dtype=torch.int64, device="cpu")
        self._plain = _torch.runs_plainly()

    def enter(self, holder: object) -> None:
        """Begin a stretch for ``holder``, unless one is under way.

        Inside a transform, a trace or a dispatch mode nothing is drawn, so nothing happens.
        """
        if self._alone or self._common is not None or not self._plain():
            return
        self._holders.add(holder)
        self._begin()

    def renew(self, holder: object) -> None:
        """Begin a new stretch for ``holder``, whatever is under way."""
        if self._alone or threading.current_thread() is not threading.main_thread() or not self._plain():
            return
        self._holders.add(holder)
        if self._common is not None:
            _generator.set_state(self._common)
        self._begin()

    def leave(self, holder: object) -> None:
        """End ``holder``'s stretch, if it has one: the common stream comes back when nobody's is left."""
        if self._common is None:
            return
        self._holders.discard(holder)
        if not self._holders:
            self.leave_all()

    def leave_all(self) -> None:
        """End every stretch."""
        self._holders.clear()
        if self._common is not None:
            _generator.set_state(self._common)
            self._common = None

    @property
    def state(self) -> torch.Tensor:
        """Where the common stream stands: uint8, as ``torch.get_rng_state`` gives it."""
        return _generator.get_state() if self._common is None else self._common.clone()

    @state.setter
    def state(self, state: torch.Tensor) -> None:
        if self._common is None:
            _generator.set_state(state)
        else:
            self._common = state.clone()

    def _begin(self) -> None:
        seed: int = self._drawn.random_(generator=_generator).item()  # type: ignore[assignment]  # of an int64
        self._common = _generator.get_state()
        _generator.manual_seed((seed + self._rank * _STRIDE) & _MASK)


_current = Streams(rank=0, world_size=1)


def current() -> Streams:
    """Return this process's streams: those of a lone process before ``init`` and after ``shutdown``."""
    return _current


def begin(*, rank: int, world_size: int) -> None:
    """Begin the streams of a rank, for ``init``."""
    global _current
    _current.leave_all()
    _current = Streams(rank=rank, world_size=world_size)
