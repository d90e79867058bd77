"""Take the clocks of some steps of a replica, for its timetable.

Note [Timed steps]
~~~~~~~~~~~~~~~~~~
A rank writes events down and reads no clock (``job/flight.py``), and the launcher's looks are too few to tell when a
bucket was ready. So the rank takes clocks itself in :data:`COUNT` steps once :data:`FIRST` have warmed it up, and
leaves what they said in the job's folder. In those steps the reducer makes its backwards of another class, and hooks sit
on the optimizers and, where all is sent at the end, on the nodes of autograd that accumulate (not on the parameters: a
hook there may be the user's, for which the reducer waits). In all other steps there is none of it, and a replica asks
two or three times whether there is.

A step goes from one moment at which all ranks have met, the end of an averaged backward, to the next. What a rank
waits in between is for others, so it is taken off; what it does in between is its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from lockstep import _torch, callsite, knobs, machine
from lockstep._files import describe
from lockstep.ddp.backward import Averaging, Backward
from lockstep.ddp.bucket import Bucket, ParameterSpec, plan_buckets
from lockstep.ddp.reducer import Reducer
from lockstep.job import flight
from lockstep.job.flight import Stopwatch
from lockstep.job.timetable import Timetable
from lockstep.share import BatchShare

#: Averaged backwards before the first that is timed, and how many are.
FIRST, COUNT = 10, 20

#: The replica of this process that was timed first, and whether there was another one.
_timed: Timing | None = None
_several = False


class Timing:
    """The clocks of one replica; see Note [Timed steps].

    Args:
        rank: this process's.
        world_size: ranks of its group.
        backend: what they average over.
        caps: bytes of the buckets that there would be if they were sent during backward; see ``plan_buckets``.
        folder: the job's.
    """

    def __init__(self, *, rank: int, world_size: int, backend: str, caps: Sequence[int], folder: Path) -> None:
        self._rank, self._world_size, self._backend = rank, world_size, backend
        self._caps, self._folder = caps, folder
        self._seen = 0
        self._reducer: Reducer | None = None
        self._clocks: _Clocks | None = None

    def began(self) -> None:
        """A backward has begun."""
        if self._clocks is not None:
            self._clocks.began()

    def ended(self) -> None:
        """It has ended, and its gradients are averaged next."""
        if self._clocks is not None:
            self._clocks.ended()

    def died(self) -> None:
        """It has failed: all that was timed is dropped, and later steps are timed instead."""
        self.stop()
        self._seen = 0

    def stop(self) -> None:
        """Take no more clocks."""
        if self._clocks is not None:
            self._clocks.close()
        self._clocks = self._reducer = None

    def averaged(self, reducer: Reducer, share: BatchShare | None) -> Timing | None:
        """Its gradients are averaged. Return what is told of the next one; None: enough was timed."""
        if self._clocks is None or reducer is not self._reducer:
            return self._wait_for_first(reducer)
        self._clocks.averaged()
        if len(self._clocks.steps) < COUNT:
            return self
        self._leave(self._clocks.timetable(share))
        self.stop()
        return None

    def refuse(self, why: str) -> None:
        """Leave a word that nothing is timed here, and why."""
        self._leave(Timetable(self._rank, why_not=why))

    def _wait_for_first(self, reducer: Reducer) -> Timing | None:
        global _timed, _several
        self.stop()
        self._seen += 1
        if self._seen < FIRST:
            return self
        why = _why_not(reducer)
        if _timed is not None and _timed is not self:
            _timed.stop()
            _several = True
        if _several:
            why = "several replicas averaged their gradients in turn, and a plan is of one"
        if why:
            self.refuse(why)
            return None
        _timed, self._reducer = self, reducer
        table = Timetable(
            self._rank,
            backend=self._backend,
            world_size=self._world_size,
            threads=torch.get_num_threads(),
            cores=machine.cores(),
            overlaps=reducer.overlaps,
        )
        self._clocks = _Clocks(reducer, table, caps=self._caps)
        return self

    def _leave(self, table: Timetable) -> None:
        try:
            table.write(self._folder)
        except OSError as error:
            callsite.warn(f"what was timed for lockstep plan is lost: {describe(error)}")


def timing_of(*, rank: int, world_size: int, whole: int, backend: str, caps: Sequence[int]) -> Timing | None:
    """Return the clocks of a replica that is made; None: no launcher of ours would read what they say.

    Args:
        rank: this process's, in the world.
        world_size: ranks of the replica's group.
        whole: ranks of the world.
        backend: what the group averages over.
        caps: as :class:`Timing`.
    """
    folder = knobs.job_dir()
    if folder is None or flight.current.pages is None:
        return None
    timing = Timing(rank=rank, world_size=world_size, backend=backend, caps=caps, folder=Path(folder))
    if world_size != whole:
        timing.refuse(f"the replicas are on {world_size} of the {whole} ranks, and a plan is of all")
        return None
    return timing


class _Clocks:
    """What is timed while it is timed, from the end of an averaged backward on."""

    def __init__(self, reducer: Reducer, table: Timetable, *, caps: Sequence[int]) -> None:
        self._reducer, self._table = reducer, table
        self._watch = flight.current.stopwatch = Stopwatch()
        self._flight = flight.current
        #: By step: :class:`Timetable`'s columns, and when each bucket was ready.
        self.steps: list[dict[str, float]] = []
        self._ready: list[list[float]] = []
        #: When each bucket was issued; where all are at the end, when each parameter's gradient came.
        self.came: dict[int, float] = {}
        self._stepped_at, self._stepping = 0.0, 0.0
        self._handles = [
            optimizers.register_optimizer_step_pre_hook(self._before_step),
            optimizers.register_optimizer_step_post_hook(self._after_step),
        ]
        if reducer.overlaps:
            self._parts = [[bucket.index] for bucket in reducer.buckets]
            self._sizes = [_bytes(bucket.flat) for bucket in reducer.buckets]
        else:
            self._parts = [list(part) for part in _cut(reducer, caps)]
            self._sizes = [sum(_bytes(reducer.params[i]) for i in part) for part in self._parts]
            self._handles += [self._on_arrival(i) for part in self._parts for i in part]
        reducer.make_backward = partial(_TimedBackward, self)
        self._begin_step()

    def _begin_step(self) -> None:
        self.came.clear()
        self._stepping = 0.0
        #: In the averaging: seconds, and of these what the stopwatch has, too.
        self._averaging = self._slept = 0.0
        self._begun = self._over = self._now()

    def _now(self) -> tuple[float, float]:
        """Return the time, and what was waited so far."""
        return time.perf_counter(), self._watch.waited

    def began(self) -> None:
        """A backward has begun; of several it is the last that counts."""
        self.came.clear()
        self._backward = self._now()

    def ended(self) -> None:
        """The backward has ended."""
        self._over = self._now()
        self._averaging = self._slept = 0.0

    def averaged(self) -> None:
        """The averages are there."""
        now = self._now()
        length = _spent(self._backward, self._over)
        waited = now[1] - self._over[1]
        self.steps.append(
            {
                "optimizer": self._stepping,
                "before": _spent(self._begun, self._backward) - self._stepping,
                "backward": length,
                "handling": now[0] - self._over[0] - self._averaging - (waited - self._slept),
                "averaging": self._averaging,
                "waiting": now[1] - self._begun[1] - self._slept,
            }
        )
        begun = self._backward[0]
        ends = [max((self.came.get(i, begun) for i in part), default=begun) for part in self._parts]
        self._ready.append([min(1.0, (end - begun) / length) if length else 1.0 for end in ends])
        self._begin_step()

    def timetable(self, share: BatchShare | None) -> Timetable:
        """Return what was timed."""
        columns: dict[str, Any] = {name: tuple(step[name] for step in self.steps) for name in self.steps[0]}
        values = {**self._table.__dict__, **columns}
        if share is not None:
            values |= {"local_samples": float(share.local_samples), "global_samples": float(share.global_samples)}
        ready = tuple(statistics.median(step[k] for step in self._ready) for k in range(len(self._parts)))
        return Timetable(**{**values, "buckets": tuple(self._sizes), "ready": ready})

    def close(self) -> None:
        """Take no more clocks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._reducer.make_backward = Backward
        self._flight.stopwatch = None

    def reduces(self, reduce: Callable[[], None]) -> None:
        """Call what averages, and take its time."""
        begun = self._now()
        reduce()
        now = self._now()
        self._averaging += now[0] - begun[0]
        self._slept += now[1] - begun[1]

    def _on_arrival(self, position: int) -> RemovableHandle:
        @_torch.mark_untraced
        def came(_: object) -> None:
            self.came[position] = time.perf_counter()

        return get_gradient_edge(self._reducer.params[position]).node.register_prehook(came)

    @_torch.mark_untraced
    def _before_step(self, *_: object) -> None:
        self._stepped_at = time.perf_counter()

    @_torch.mark_untraced
    def _after_step(self, *_: object) -> None:
        self._stepping += time.perf_counter() - self._stepped_at


class _TimedBackward(Backward):
    """A backward that says when a bucket was issued, and how long the averaging took."""

    def __init__(self, clocks: _Clocks, averaging: Averaging, **how: Any) -> None:
        super().__init__(averaging, **how)
        self._clocks = clocks
        self._overlaps = clocks._reducer.overlaps

    def issue_next(self) -> None:
        """**Collective.** As ever."""
        if self._overlaps:
            self._clocks.came[self.next] = time.perf_counter()
        super().issue_next()

    def _all_reduce(self, bucket: Bucket) -> None:
        reduce = super()._all_reduce
        self._clocks.reduces(lambda: reduce(bucket))

    def _wait(self, bucket: Bucket) -> None:
        wait = super()._wait
        self._clocks.reduces(lambda: wait(bucket))


def _why_not(reducer: Reducer) -> str:
    """Return why this replica's steps can't be planned with; empty: they can."""
    if reducer.hook_name():
        return f"a comm hook ({reducer.hook_name()}) averages the buckets, and what it sends is its own affair"
    if reducer.sparse:
        return "sparse gradients are sent as what they hold, which differs from step to step"
    if any(param.device.type != "cpu" for param in reducer.params):
        return "the gradients are on a GPU, and the clocks that were taken are the processor's"
    return ""


def _cut(reducer: Reducer, caps: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the positions of the parameters of each bucket that would be sent during backward."""
    params = reducer.params
    specs = [ParameterSpec(param.numel(), param.element_size(), (param.dtype, param.device)) for param in params]
    return plan_buckets(specs, caps=caps)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _spent(begun: tuple[float, float], over: tuple[float, float]) -> float:
    """Return the seconds between two moments, without what was waited."""
    return over[0] - begun[0] - (over[1] - begun[1])
