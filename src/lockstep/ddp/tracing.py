"""The gradients in a trace, recorded while its window is open; outside of it nothing is installed.

Note [Traced gradients]
~~~~~~~~~~~~~~~~~~~~~~~
A trace has phases and collectives; the rest that ``lockstep runs plan`` needs (``tools/plan/timetable.py``) is recorded
here: a mark where a backward begins, with a description of its replica, a mark where each bucket was ready to be sent,
and a slice for the averaging at the backward's end. Where buckets are sent during backward, one is ready when it is
issued. Where all are sent at the end, the buckets are those that would have been sent, and one is ready when the last
of its gradients has come. Hooks on autograd's accumulating nodes report that, and not hooks on the parameters, which
the reducer would take for a user's and wait for. The hooks only take the time, which is recorded when the backward has
ended: if gradients come in portions, or some are not used, it is unknown before then which is the last.
"""

from __future__ import annotations

import itertools
from time import monotonic_ns
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lockstep import _torch, machine
from lockstep.comm.init import current_world
from lockstep.comm.tracing import Replacing
from lockstep.ddp.backward import Backward
from lockstep.ddp.bucket import ParameterSpec, plan_buckets
from lockstep.ddp.hooks import Forward
from lockstep.ddp.in_rounds import InRounds
from lockstep.ddp.reducer import Reducer
from lockstep.ddp.replica import Replica
from lockstep.job import tracing
from lockstep.job.trace import EventKind, EventWriter
from lockstep.step.share import Items

_MARK = int(EventKind.MARK)
_CATEGORY = "gradients"


class _Gradients:
    """Records backwards and their averages, in place of the methods that begin and end them."""

    on_demand = False

    def __init__(self) -> None:
        self._methods = Replacing()
        self._seen: WeakKeyDictionary[Reducer, _Seen] = WeakKeyDictionary()
        self._numbers = itertools.count(1)

    def open(self, recorder: EventWriter) -> None:
        """See :class:`~lockstep.job.tracing.Eye`."""
        during: WeakSet[Backward] = WeakSet()  # backwards that send buckets while they go on
        ready = recorder.name("bucket ready", _CATEGORY)
        begins, finish, issue_next = Replica.backward_begins, Reducer.finish, Backward.issue_next

        def begins_recorded(self_: Replica, forward: Forward) -> None:
            begins(self_, forward)
            reducer = self_.reducer
            seen = self._seen.get(reducer)
            if seen is None:
                seen = self._seen[reducer] = _Seen(self_, recorder, number=next(self._numbers))
            seen.begins(forward)
            if reducer.overlaps and reducer.backward is not None:
                during.add(reducer.backward)

        def finish_recorded(self_: Reducer, **how: Any) -> Any:
            seen = self._seen.get(self_)
            if seen is None or self_.backward is None or not self_.backward.sync:
                return finish(self_, **how)
            for bucket, at in sorted(seen.full.items()):
                recorder.add(_MARK, ready, bucket + 1, at=at)
            recorder.begin(recorder.name("averaging gradients", _CATEGORY, **_samples()), self_.step + 1)
            try:
                return finish(self_, **how)
            finally:
                recorder.end()

        def issue_recorded(self_: Backward) -> None:
            if self_ in during:
                recorder.add(_MARK, ready, self_.next + 1)
            issue_next(self_)

        self._methods.replace(Replica, "backward_begins", begins_recorded)
        self._methods.replace(Reducer, "finish", finish_recorded)
        self._methods.replace(Backward, "issue_next", issue_recorded)

    def close(self) -> None:
        """See :class:`~lockstep.job.tracing.Eye`."""
        self._methods.undo()
        for seen in self._seen.values():
            seen.close()
        self._seen.clear()


class _Seen:
    """A replica's reducer, as a trace sees it.

    Args:
        replica: the replica.
        recorder: the trace's writer.
        number: the replica's number in the trace.
    """

    def __init__(self, replica: Replica, recorder: EventWriter, *, number: int) -> None:
        self._recorder = recorder
        #: Bucket that would be sent during backward, if none is -> time of its last gradient, in monotonic ns.
        self.full: dict[int, int] = {}
        self._handles: list[RemovableHandle] = []
        self._about = {**_describe(replica), "replica": number}
        self._names: dict[tuple[bool, bool], int] = {}
        reducer = replica.reducer
        if self._about["why_not"] or reducer.overlaps:
            return
        parts = plan_buckets([*map(ParameterSpec.of, reducer.params)], caps=replica.bucket_caps)
        self._about["buckets"] = [sum(reducer.params[i].nbytes for i in part) for part in parts]
        for bucket, part in enumerate(parts):
            # (One that is frozen by now has no gradient to wait for.)
            trained = [reducer.params[i] for i in part if reducer.params[i].requires_grad]
            self._handles += [self._listen(param, bucket) for param in trained]

    def begins(self, forward: Forward) -> None:
        """Record that a backward of the replica has begun."""
        self.full.clear()
        kind = forward.sync, forward.slice is not None
        name = self._names.get(kind)
        if name is None:
            about = {**self._about, "averages": forward.sync}
            if forward.slice is not None:
                about["why_not"] = "it trained in slices, whose gradients are averaged after the last of them"
            name = self._names[kind] = self._recorder.name("backward begins", _CATEGORY, **about)
        self._recorder.add(_MARK, name)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _listen(self, param: Tensor, bucket: int) -> RemovableHandle:
        full = self.full

        @_torch.mark_untraced
        def came(_: object) -> None:
            full[bucket] = monotonic_ns()

        return get_gradient_edge(param).node.register_prehook(came)


def _describe(replica: Replica) -> dict[str, Any]:
    """Return the description of a replica that a plan needs, in JSON's types."""
    reducer = replica.reducer
    why_not = _why_not(replica)
    return {
        "why_not": why_not,
        "backend": dist.get_backend(replica.group),
        "ranks": dist.get_world_size(replica.group),
        "device": "cpu" if why_not or not reducer.params else reducer.params[0].device.type,
        "threads": torch.get_num_threads(),
        "cores": machine.cores_of_all_ranks(),
        "overlaps": reducer.overlaps,
        "buckets": [bucket.flat.nbytes for bucket in reducer.buckets],
    }


def _why_not(replica: Replica) -> str:
    """Return why this replica's steps can't be planned with; empty: they can."""
    reducer = replica.reducer
    ranks, whole = dist.get_world_size(replica.group), dist.get_world_size()
    if isinstance(replica.synchroniser, InRounds):
        return "it trained with LocalSteps, which average parameters after many steps and no gradients"
    if ranks != whole:
        return f"the replicas are on {ranks} of the {whole} ranks, and a plan is of all"
    if not reducer.params:
        return "it has no parameters that are trained, so nothing is averaged"
    if reducer.hook_name():
        return f"a comm hook ({reducer.hook_name()}) averages the buckets, and a plan can't know what it sends"
    if reducer.sparse:
        return "sparse gradients are sent as what they hold, which differs from step to step"
    devices = {param.device for param in reducer.params}
    if len(devices) > 1:
        return f"its parameters are on {len(devices)} devices, each with a clock of its own"
    if devices.pop().type != "cpu" and not reducer.overlaps:
        return "the gradients are on a GPU and are sent at the end of backward, where nothing tells when each was ready"
    return ""


def _samples() -> dict[str, float]:
    """Return the numbers of samples of this rank and of all ranks in the step, if they are counted."""
    world = current_world()
    share = None if world is None else world._in_hand.share
    if share is None or isinstance(share, Items):
        return {}
    return {"local_samples": float(share.local_samples), "global_samples": float(share.global_samples)}


tracing.look_with(_Gradients())
