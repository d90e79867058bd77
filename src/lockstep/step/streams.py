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
  and a ``torch.manual_seed`` of the script's own between two steps, the same on all ranks, still gives each rank masks
  of its own;
- a forward that is repeated from a saved state, as activation checkpointing does, draws the same masks, be it the
  replica's whole forward or a part of it.

A world of one never leaves the common stream: its numbers are those of a lone process. A step in slices takes nothing
from the common stream either: what a model draws in a slice is seeded from (seed, epoch, batch, slice), in a world of
any size. A loader opens a stretch on the main thread only, or on the one that called ``init`` (Ray trains in a thread),
and for slices in any: one that reads batches ahead for another must not move that one's generator. Of forwards in
several threads, the one that opens a stretch ends it, and the others take no part. Nor does a forward that runs within
another of the same replica (a model that calls itself): the outermost ends the stretch. Python's and NumPy's generators
stay common throughout (samples are seeded by position), and the generators of GPUs differ from rank to rank throughout.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch

from lockstep import _torch

#: Tells the ranks' seeds apart: the step of a Weyl sequence, odd.
_STRIDE = 0x9E3779B97F4A7C15
_MASK = 2**63 - 1

_generator = torch.default_generator


@dataclass(slots=True)
class _OpenForward:
    """The forward that began a stretch."""

    module: ReferenceType[Any]
    thread: int
    #: The number of nested calls of the module under way.
    depth: int = 1

    def is_of(self, module: object) -> bool:
        """Return whether it is a forward of ``module``, in this thread."""
        return self.module() is module and self.thread == threading.get_ident()


class RandomStreams:
    """Where this rank's numbers come from. A stretch costs some 7 µs alone, and more within a training step."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._alone = world_size == 1
        self._thread = threading.get_ident()
        #: State of the common stream while this rank draws from its own; None while the common one is in force.
        self._common: torch.Tensor | None = None
        #: Loaders whose batch is in hand. Weak, as the module of a forward is: one may go without saying so.
        self._loaders: WeakSet[Any] = WeakSet()
        self._forward: _OpenForward | None = None
        #: The collector may end a loader's pass anywhere, also while this thread has it.
        self._lock = threading.RLock()
        with torch.inference_mode(False):
            self._drawn = torch.empty((), dtype=torch.int64, device="cpu")
        self._plain, self._unseen = _torch.runs_plainly(), _torch.outside_dispatch_modes()

    def enter(self, module: object, *, draws: bool) -> None:
        """Note that a forward of ``module`` begins, and begin a stretch if it ``draws`` and none is under way.

        Inside a transform, a trace or an export nothing is drawn, so nothing happens.
        """
        forward = self._forward
        if forward is not None and forward.is_of(module):
            forward.depth += 1
            return
        if forward is not None and forward.module() is None:
            self._end_forward()
        if draws and self._common is None and not self._alone and self._plain():
            with self._lock:
                if self._common is None:  # else another thread was faster
                    self._forward = _OpenForward(ref(module), threading.get_ident())
                    self._begin()

    @_torch.mark_untraced
    def leave(self, module: object) -> None:
        """Note that a forward of ``module`` is over; the outermost ends the stretch that it began."""
        forward = self._forward
        if forward is None:
            return
        if forward.is_of(module):
            forward.depth -= 1
        if forward.depth == 0 or forward.module() is None:
            self._end_forward()

    def end(self, module: object) -> None:
        """End the stretch that a forward of ``module`` began, if one did.

        A KeyboardInterrupt in a forward leaves without a call of :meth:`leave`: torch runs no hooks for it.
        """
        if self._forward is not None and self._forward.module() is module:
            self._end_forward()

    def renew(self, loader: object) -> None:
        """Begin a new stretch for ``loader``, whatever is under way."""
        if self._alone or (threading.get_ident() != self._thread and not self._trains_here()) or not self._plain():
            return
        with self._lock:
            self._loaders.add(loader)
            self._forward = None  # it was interrupted, or continues in the loader's stretch
            if self._common is not None:
                _generator.set_state(self._common)
            self._begin()

    def set_aside(self, loader: object) -> None:
        """Leave the common stream for slices of ``loader``, whose seeds the caller sets; until :meth:`finish`.

        In a world of one too, where no other stretch begins: a slice's numbers are the same there. And in any thread,
        since its slices are seeded there as well.
        """
        with self._lock:
            self._loaders.add(loader)
            self._forward = None
            if self._common is None:
                self._common = _generator.get_state()

    def finish(self, loader: object) -> None:
        """End the stretch of ``loader``, if it has one. The common stream comes back when nobody's is left."""
        if self._common is None:
            return
        with self._lock:
            self._loaders.discard(loader)
            if self._forward is None or self._forward.module() is None:
                self._end_forward()

    def _trains_here(self) -> bool:
        return threading.get_ident() == self._thread or threading.current_thread() is threading.main_thread()

    def _end_forward(self) -> None:
        with self._lock:
            self._forward = None
            if not self._loaders:
                self.leave_all()

    def leave_all(self) -> None:
        """End every stretch."""
        with self._lock:
            self._loaders.clear()
            self._forward = None
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
        with self._unseen():
            seed: int = self._drawn.random_(generator=_generator).item()  # type: ignore[assignment]  # of an int64
        self._common = _generator.get_state()
        _generator.manual_seed((seed + self._rank * _STRIDE) & _MASK)


#: This process's streams: those of a lone process before ``init`` and after ``shutdown``.
current = RandomStreams(rank=0, world_size=1)


def begin(*, rank: int, world_size: int) -> None:
    """Begin the streams of a rank, for ``init``."""
    global current
    current.leave_all()
    current = RandomStreams(rank=rank, world_size=world_size)
