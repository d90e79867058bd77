"""Take the clocks of some steps of a replica, for its timetable.

Note [Timed steps]
~~~~~~~~~~~~~~~~~~
A rank writes events down and reads no clock (``job/flight.py``), and the launcher's looks are too few to tell when a
bucket was ready. So the rank takes clocks itself in :data:`COUNT` steps once :data:`FIRST` have warmed it up, and
leaves what they said in the job's folder. Until then the reducer makes its backwards of another class, which count
themselves. In the steps that are timed there are hooks on the optimizers and, where all is sent at the end, on the
nodes of autograd that accumulate (not on the parameters: a hook there may be the user's, for which the reducer waits).
In all later steps there is none of it.

A step goes from one moment at which all ranks have met, the end of an averaged backward, to the next. What a rank
waits in between is for others, so it is taken off; what it does in between is its own.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from lockstep import _torch, callsite, knobs, machine
from lockstep._files import describe
from lockstep.comm.init import current_world
from lockstep.ddp.backward import Averaging, Backward
from lockstep.ddp.bucket import Bucket, ParameterSpec, plan_buckets
from lockstep.ddp.reducer import Reducer
from lockstep.job import flight
from lockstep.job.flight import Stopwatch
from lockstep.job.timetable import Timetable
from lockstep.share import Items

#: Averaged backwards before the first that is timed, and how many are.
FIRST, COUNT = 10, 20

#: The replica of this process that was timed first, which may be gone; and whether there was another one.
_timed: weakref.ref[Timing] | None = None
_several = False


class Timing:
    """Counts the averaged backwards of one replica, and has some of them timed; see Note [Timed steps].

    Args:
        reducer: the replica's.
        group: the ranks that average.
        caps: bytes of the buckets that there would be if they were sent during backward; see ``plan_buckets``.
        folder: the job's.
    """

    def __init__(self, reducer: Reducer, *, group: dist.ProcessGroup, caps: Sequence[int], folder: Path) -> None:
        self._group, self._caps, self._folder = group, caps, folder
        self._seen, self._is_over = 0, False
        self.clocks: _Clocks | None = None
        self._reducer = reducer
        self.turn_to(reducer)

    def turn_to(self, reducer: Reducer) -> None:
        """Begin anew, with a reducer that has other buckets; where all is over, do nothing."""
        if self._is_over:
            return
        self._drop()
        self._seen, self._reducer = 0, reducer
        reducer.make_backward = partial(_CountedBackward, self)

    def averaged(self) -> None:
        """A backward's gradients are averaged."""
        if self.clocks is None:
            self._seen += 1
            if self._seen == FIRST:
                self._begin()
            return
        self.clocks.averaged()
        if len(self.clocks.steps) == COUNT:
            _leave(self.clocks.timetable(), self._folder)
            self.stop()

    def failed(self) -> None:
        """A backward has failed: what was timed is dropped, and later ones are timed instead."""
        self.turn_to(self._reducer)

    def stop(self) -> None:
        """Count no more, and take no more clocks."""
        self._is_over = True
        self._drop()
        self._reducer.make_backward = Backward

    def _drop(self) -> None:
        if self.clocks is not None:
            self.clocks.close()
        self.clocks = None

    def _begin(self) -> None:
        global _timed, _several
        why = _why_not(self._reducer, self._group)
        first = self if _timed is None else _timed()
        if first is not self:
            _several = True
            if first is not None:
                first.stop()
        if _several:
            why = "several replicas averaged their gradients in turn, and a plan is of one"
        if why:
            self.stop()
            _leave(Timetable(dist.get_rank(), why_not=why), self._folder)
            return
        _timed = weakref.ref(self)
        table = Timetable(
            dist.get_rank(),
            backend=dist.get_backend(self._group),
            world_size=dist.get_world_size(self._group),
            threads=torch.get_num_threads(),
            cores=machine.cores(),
            overlaps=self._reducer.overlaps,
        )
        self.clocks = _Clocks(self._reducer, table, caps=self._caps)


def time_steps(reducer: Reducer, *, group: dist.ProcessGroup, caps: Sequence[int]) -> Timing | None:
    """Have some steps timed of a replica that is made; None: no launcher of ours would read what the clocks say.

    The arguments are those of :class:`Timing`.
    """
    folder = _folder()
    return None if folder is None else Timing(reducer, group=group, caps=caps, folder=folder)


def refuse_to_time(why: str) -> None:
    """Leave word for ``lockstep plan`` why there is nothing to plan with."""
    folder = _folder()
    if folder is not None:
        _leave(Timetable(dist.get_rank(), why_not=why), folder)


def _leave(table: Timetable, folder: Path) -> None:
    try:
        table.write(folder)
    except OSError as error:
        callsite.warn(f"what was timed for lockstep plan is lost: {describe(error)}")


def _folder() -> Path | None:
    folder = knobs.job_dir()
    return None if folder is None or flight.current.pages is None else Path(folder)


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
        self._backward = (0.0, 0.0)
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

    def issued(self, index: int) -> None:
        """A bucket is issued."""
        if self._reducer.overlaps:
            self.came[index] = time.perf_counter()

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

    def timetable(self) -> Timetable:
        """Return what was timed."""
        world = current_world()
        share = None if world is None else world.in_hand.share
        columns: dict[str, Any] = {name: tuple(step[name] for step in self.steps) for name in self.steps[0]}
        values = {**self._table.__dict__, **columns}
        if share is not None and not isinstance(share, Items):
            values |= {"local_samples": float(share.local_samples), "global_samples": float(share.global_samples)}
        ready = tuple(statistics.median(step[k] for step in self._ready) for k in range(len(self._parts)))
        return Timetable(**{**values, "buckets": tuple(self._sizes), "ready": ready})

    def close(self) -> None:
        """Take no more clocks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for page in (self._flight, flight.current):  # that of a GPU takes the other's place, and all it has
            page.stopwatch = None

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


class _CountedBackward(Backward):
    """A backward that is counted, and timed if it is time."""

    def __init__(self, timing: Timing, averaging: Averaging, **how: Any) -> None:
        self._timing, self._clocks, self._is_averaged = timing, timing.clocks, False
        super().__init__(averaging, **how)
        if self._clocks is not None:
            self._clocks.began()

    def average_rest(self, *, write: bool) -> list[int]:
        """**Collective.** As ever."""
        if self._clocks is not None:
            self._clocks.ended()
        unused = super().average_rest(write=write)
        self._is_averaged = write  # else it is of a rank that has run out of data
        return unused

    def close(self) -> list[Bucket]:
        """End, however it went."""
        left = super().close()
        if self._is_averaged:
            self._timing.averaged()
        elif self.sync:
            self._timing.failed()
        return left

    def issue_next(self) -> None:
        """**Collective.** As ever."""
        if self._clocks is not None:
            self._clocks.issued(self.next)
        super().issue_next()

    def _all_reduce(self, bucket: Bucket) -> None:
        self._take_time(super()._all_reduce, bucket)

    def _wait(self, bucket: Bucket) -> None:
        self._take_time(super()._wait, bucket)

    def _take_time(self, part: Callable[[Bucket], None], bucket: Bucket) -> None:
        """Do a part of the averaging, and count it as such where this step is timed."""
        if self._clocks is None:
            part(bucket)
        else:
            self._clocks.reduces(lambda: part(bucket))


def _why_not(reducer: Reducer, group: dist.ProcessGroup) -> str:
    """Return why this replica's steps can't be planned with; empty: they can."""
    ranks, whole = dist.get_world_size(group), dist.get_world_size()
    if ranks != whole:
        return f"the replicas are on {ranks} of the {whole} ranks, and a plan is of all"
    if not reducer.params:
        return "it has no parameters that are trained, so nothing is averaged"
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
