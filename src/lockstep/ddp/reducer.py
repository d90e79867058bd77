"""The reducer: decides when which bucket is reduced.

It is a state machine driven by three events, and it never touches autograd: ``begin`` (a backward starts), the callable
from ``ready_hook(i)`` (parameter i has its gradient), ``finish`` (the backward has ended). ``hooks`` turns autograd's
events into these; tests make them up. What goes into a bucket is ``contribute``'s concern, what comes out of it
``collect``'s.

Note [Launch order]
~~~~~~~~~~~~~~~~~~~
A backend pairs the ranks' collectives by the order in which each rank starts them, and gradients may arrive in another
order on every rank. So buckets are launched strictly by index: a full bucket waits for those before it. The last bucket
is launched at the end of backward; nothing is left to overlap it with. A comm hook may start more collectives from the
backend's threads as earlier ones end (PowerSGD does). Nothing else is started while a hook's bucket is under way, or
the ranks' orders would differ: the next bucket waits for its future, and so do the flags and the sparse gradients.

Note [One reduction]
~~~~~~~~~~~~~~~~~~~~
A backend that reduces in this process's own time (the backend "shm" does: its ranks' cores are busy with backward, and
there is no other engine) has nothing to overlap with. Then every dtype has one bucket, which lies in the backend's
memory and is reduced in place, by one call that returns when it is done, at the end of backward. A parameter's hook
does nothing then but say that it has come, see Note [A hook for every parameter].

Note [Labels]
~~~~~~~~~~~~~
If backward fails on one rank, which catches that and goes on, its next backward meets the others' present one. So a
bucket's all-reduce is labelled with the number of the backward, for backends that compare labels (modulo a small
number, since labels are kept).

Note [More than one event]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Under re-entrant activation checkpointing a parameter can receive its gradient in several portions, with an event for
each, and nothing says which is the last. So the first synchronised backward launches nothing before its end, and every
bucket that saw a parameter twice stays with that for good; so does a bucket that is found to be incomplete although it
counted enough events. From then on large gradients are copied into their bucket as they come: they are in the cache
still, and their memory is free for the next. A portion that arrives for a gradient that was copied or sent already (a
graph that changed later on) is an error: that was not the whole gradient. ``overlap=False`` always does all at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep import _torch
from lockstep.comm.exchange import all_gather_records
from lockstep.comm.labels import labelled
from lockstep.comm.waiting import wait_for
from lockstep.ddp.arrivals import Arrivals
from lockstep.ddp.bucket import PLACES, SMALL, Bucket
from lockstep.ddp.collect import Collector
from lockstep.ddp.compress import CommHook, GradBucket
from lockstep.ddp.contribute import Contributor, find_missing
from lockstep.ddp.cycle import Cycle
from lockstep.ddp.finite import FiniteCheck
from lockstep.ddp.mistakes import TakenGradients, count_left_out, explained, find_late_portion
from lockstep.ddp.sparse import SparseSlot, SparseTransfer
from lockstep.errors import CollectiveMismatch, LockstepError

_NEVER = 1 << 62
#: See Note [Labels].
_LABELS = 16


class Reducer:
    """Averages gradients over a process group, bucket by bucket.

    Args:
        params: the parameters that are trained; positions count in this order.
        names: theirs.
        buckets: in the order in which they are reduced.
        sparse: the parameters with sparse gradients.
        group: the ranks that hold replicas.
        as_view: let every grad be a view of its bucket.
        overlap: launch buckets while backward goes on.
        at_once: an all-reduce returns when it is complete; see Note [One reduction].
        finite: looks at the gradients before they are sent.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        names: Sequence[str],
        *,
        buckets: Sequence[Bucket],
        sparse: Sequence[SparseSlot] = (),
        group: dist.ProcessGroup,
        as_view: bool = True,
        overlap: bool = True,
        at_once: bool = False,
        finite: FiniteCheck | None = None,
    ) -> None:
        #: The parameters that are trained.
        self.params = list(params)
        self._names = list(names)
        self._buckets, self._sparse = list(buckets), list(sparse)
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._as_view, self._overlap, self._finite = as_view, overlap, finite
        self._comm_hook: tuple[Any, CommHook] | None = None
        #: Synchronised backwards that have ended.
        self.step = 0
        #: Whether a backward is under way.
        self.is_open = False
        #: Called when a gradient arrives although no backward was announced; it must call ``begin``.
        self.announce: Callable[[], None] = self._not_announced
        #: Positions of parameters with gradients that were accumulated without synchronisation.
        self.pending: set[int] = set()
        #: Called once, after the first synchronised backward, with the names of the parameters nobody used.
        self.on_never_used: Callable[[list[str]], None] | None = None
        self._arrivals = Arrivals(buckets)
        self._home = {position: bucket for bucket in self._buckets for position in bucket.positions}
        self._contributor = Contributor(names, self._whoami)
        self._collector = Collector(self._buckets, self._sparse, names, group, finite, as_view, self._whoami)
        self._taken = TakenGradients(params, names)
        #: Buckets that are launched at the end, and parameters that are packed then; see Note [More than one event].
        self._late_for_good = set() if overlap else set(range(len(self._buckets)))
        self._in_portions: set[int] = set() if overlap or at_once else set(range(len(self.params)))
        self._learned = False
        self._lock = threading.Lock()
        #: What an earlier backward that failed still waits for, and what is to be done then.
        self._left_over: list[tuple[Callable[[], object], Callable[[], None]]] = []
        self._cycle = Cycle(sync=False, weight=1.0, divisor=self._world_size, kept={}, discards=False)
        self._packs_early = False
        self._call = dist.AllreduceOptions()
        self._call.asyncOp = not at_once
        #: Synchronised backwards that have begun, and forwards that were told to have had none; see Note [Labels].
        self._begun = 0
        self._left_out = 0
        self._labels = [
            [labelled(f"backward {n} of each {_LABELS}, {self._collector.describe(bucket)}") for n in range(_LABELS)]
            for bucket in self._buckets
        ]
        #: Called after a synchronised backward, with the positions of the parameters that got no gradient: what to
        #: raise if some are not the module's any more.
        self.on_missing: Callable[[list[int]], LockstepError | None] = lambda _: None

    # Events ---------------------------------------------------------------------------------------------------------

    def begin(
        self,
        *,
        sync: bool,
        weight: float = 1.0,
        divisor: int | None = None,
        keep: dict[int, Tensor],
        discards: bool = False,
    ) -> None:
        """**Local.** A backward starts.

        Args:
            sync: whether gradients are averaged in this backward; if not, they accumulate locally.
            weight: this rank's gradients count this much; see Note [Exact mean]. 0 discards them.
            divisor: what the sum over ranks is divided by; the world size if None.
            keep: copies of gradients, by position, that are to be put back if nobody used the parameter.
            discards: this backward's own gradients count nothing, so one that is gone at the end is no mistake.

        Raises:
            CollectiveTimeout, PeerLost: an earlier backward ended with an error while buckets were under way, and
                they can't be completed.
        """
        self._drain()
        divisor = self._world_size if divisor is None else divisor
        cycle = Cycle(sync=sync, weight=weight, divisor=divisor, kept=keep, discards=discards or weight == 0)
        self._cycle = cycle
        self._begun += sync
        for bucket in self._buckets:
            bucket.packed.clear()
        self._taken.begin(looks=not cycle.discards and self._sends)
        self._packs_early = sync and self._learned and self._sends and weight != 0
        if sync:
            self._leave_to_holders()
        self.is_open = True

    def require_sync(self) -> None:
        """**Local.** Average in the backward that is under way, although it began as an unsynchronised one."""
        if not self._cycle.sync:
            self._begun += 1
            self._cycle.sync = True
            self._leave_to_holders()

    @property
    def weight(self) -> float:
        """The weight of the backward that is under way."""
        return self._cycle.weight

    def ready_hook(self, position: int) -> Callable[[object], None]:
        """**Local.** A callable to call when parameter ``position`` has got a gradient; its argument is ignored.

        It runs once for each parameter in each step, so it does nothing but count.
        """
        bucket = self._home.get(position)
        arrived = self._arrivals.list_of(position)
        expected = _NEVER if bucket is None else len(bucket)
        append = arrived.append

        @_torch.mark_untraced
        def on_gradient_at_last(_: object = None) -> None:
            if not self.is_open:
                self.announce()
            append(position)

        @_torch.mark_untraced
        def on_gradient(_: object = None) -> None:
            if not self.is_open:
                self.announce()
            append(position)
            if len(arrived) >= expected:
                self._launch_full_buckets()

        if bucket is None or self.params[position].numel() < SMALL:
            return on_gradient if self._overlap else on_gradient_at_last
        large_in, slot, param = bucket, bucket.positions.index(position), self.params[position]

        @_torch.mark_untraced
        def on_large_gradient(_: object = None) -> None:
            if not self.is_open:
                self.announce()
            append(position)
            if (
                self._packs_early
                and position not in self._in_portions
                and not torch.is_grad_enabled()
                and not _has_other_hooks(param)
            ):
                large_in.pack_early(slot, self._scale(large_in), as_view=self._as_view)
            if len(arrived) >= expected:
                self._launch_full_buckets()

        return on_large_gradient

    def finish(self, *, left_out: int = 0, then: Callable[[], None] = lambda: None) -> None:
        """**Collective** if the backward is synchronised. The backward has ended: send the rest, write the averages.

        A mistake that only this rank can see is raised at the very end, so that the others do not wait for it.

        Args:
            left_out: forwards to tell of that had no backward; see Note [Left-out backwards].
            then: what all ranks do together after a synchronised backward; runs before such a mistake is raised.

        Raises:
            LockstepError: a gradient changed after its bucket had been sent, see Note [More than one event]; or it was
                gone, see Note [Taken gradients].
            NonFiniteGradient: as :meth:`~lockstep.ddp.finite.FiniteCheck.verdict`, on all ranks.
            CollectiveMismatch: the ranks are in different backwards.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        mistake: LockstepError | None = None
        try:
            mistake = find_late_portion(self._arrivals, self._cycle, self._buckets, self._names, self._whoami)
            if not self._cycle.sync:
                self.pending.update(self._arrivals.everyone())
                return
            mistake = mistake or self._taken.find(self._arrivals, self._whoami)
            self._left_out += left_out
            self._cycle.left_out = left_out
            unused = self._average_rest(write=True)
            mistake = mistake or self.on_missing(self._missing())
            if self._cycle.skipped:
                self._drop_gradients()
            else:
                self._note_unused(unused)
            if not self._learned:
                self._learn()
            self.pending.clear()
            self.step += 1
        except CollectiveMismatch as error:
            raise explained(error) from error
        finally:
            self._close()
        then()
        if mistake is not None:
            raise mistake

    def abandon(self) -> None:
        """**Local.** The backward under way ended with an error; forget it. ``begin`` waits for what was sent."""
        self._close()

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """**Local.** Let ``hook`` reduce the buckets; see :func:`lockstep.register_comm_hook`."""
        if self._comm_hook is not None:
            raise LockstepError(f"{self._whoami()}: a comm hook is registered already; a replica takes one")
        self._comm_hook = (state, hook)

    def take_over(self, old: Reducer) -> None:
        """**Local.** Go on where a reducer over other parameters of the same module stands."""
        self.step, self._comm_hook, self.on_never_used = old.step, old._comm_hook, old.on_never_used
        self._begun, self._left_out = old._begun, old._left_out
        if old.pending:
            self.pending = {position for position, param in enumerate(self.params) if param.grad is not None}

    def free(self) -> None:
        """**Local.** End: gradients become tensors of their own, and the buckets' memory can go."""
        for bucket in self._buckets:
            bucket.leave()
        self._buckets.clear()
        self._home.clear()

    def bucket_bytes(self) -> list[int]:
        """**Local.** Bytes of gradients in each bucket, in order of reduction."""
        return [bucket.values.numel() * bucket.values.element_size() for bucket in self._buckets]

    def hook_name(self) -> str:
        """**Local.** The name of the comm hook, empty without one."""
        return "" if self._comm_hook is None else getattr(self._comm_hook[1], "__qualname__", "a comm hook")

    def match_without_gradients(self, divisor: int) -> None:
        """**Collective.** Take part in the others' synchronised backward, with nothing to add and nothing to get."""
        self.begin(sync=True, weight=0.0, divisor=divisor, keep={})
        try:
            self._average_rest(write=False)
        finally:
            self._close()

    # The cycle ------------------------------------------------------------------------------------------------------

    @property
    def _sends(self) -> bool:
        """Whether anything is sent at all; a world of one has nobody to send to."""
        return self._world_size > 1 or self._comm_hook is not None

    def _leave_to_holders(self) -> None:
        """See Note [Gradients held elsewhere]; without views every gradient is its parameter's own."""
        if self._as_view and self._sends:
            for bucket in self._buckets:
                bucket.leave_to_holders()

    def _close(self) -> None:
        self.is_open = False
        for bucket in self._buckets:
            wait = self._cycle.take_wait(bucket.index)
            if wait is None:
                bucket.put_back()
            else:  # a backward that failed: what was sent writes to the bucket still
                self._left_over.append((wait, bucket.put_back))
        self._arrivals.clear()

    def _drain(self) -> None:
        while self._left_over:
            wait, put_back = self._left_over.pop(0)
            try:
                wait_for(wait, lambda: f"{self._whoami()}: completing what an earlier, failed backward had sent")
            finally:
                put_back()

    def _launch_full_buckets(self) -> None:
        cycle = self._cycle
        if not cycle.sync or not self._learned:
            return
        with self._lock:  # a module on several devices has a backward thread for each
            while cycle.next < len(self._buckets) - 1 and self._is_full(cycle.next) and self._hook_is_done():
                with torch.no_grad():
                    self._launch(cycle.next)

    @torch.no_grad()
    def _average_rest(self, *, write: bool) -> list[int]:
        """The positions of the parameters that no rank used."""
        self._cycle.place = self._begun + self._left_out
        while self._cycle.next < len(self._buckets):
            self._launch(self._cycle.next)
        return self._collect(write=write)

    def _hook_is_done(self) -> bool:
        return self._cycle.in_hook is None or self._cycle.in_hook.done()

    def _is_full(self, index: int) -> bool:
        arrived, expected = self._arrivals.by_bucket[index], len(self._buckets[index])
        if len(arrived) < expected or index in self._late_for_good:
            return False
        if len(set(arrived)) < expected:
            self._late_for_good.add(index)
            self._in_portions.update(self._buckets[index].positions)
            return False
        # The hook of the parameter that came last runs behind ours: it is not done yet.
        return not any(_has_other_hooks(param) for param in self._buckets[index].params)

    def _launch(self, index: int) -> None:
        bucket, cycle, arrived = self._buckets[index], self._cycle, self._arrivals.by_bucket[index]
        cycle.counted[index], cycle.next = len(arrived), index + 1
        cycle.missing[index] = missing = find_missing(bucket, arrived, self.pending)
        if not self._sends and self._finite is None:
            return
        cycle.missing[index] = self._contributor.fill(bucket, cycle, missing, self._scale(bucket))
        if self._finite is not None:
            self._finite.inspect(bucket, [self._names[position] for position in bucket.positions])
        if self._comm_hook is not None:
            self._launch_hook(*self._comm_hook, bucket)
        elif self._world_size > 1:
            self._all_reduce(bucket)

    def _all_reduce(self, bucket: Bucket) -> None:
        # The group's own method: dist.all_reduce does the same with checks that take longer than a small bucket.
        call: Callable[[], dist.Work] = lambda: self._group.allreduce([bucket.message], self._call)  # noqa: E731
        with self._label(bucket):
            if self._call.asyncOp:
                self._cycle.waits[bucket.index] = call().wait
            else:
                what = lambda: f"{self._whoami()}: averaging {self._collector.describe(bucket)}"  # noqa: E731
                wait_for(call, what, name=None)  # a backend that reduces at once sleeps, and tells of it, by itself

    def _label(self, bucket: Bucket) -> labelled:
        backward, left_out = self._begun % _LABELS, self._cycle.left_out
        if left_out and bucket is self._buckets[-1]:
            what = f"backward {backward} of each {_LABELS}, after {count_left_out(left_out)}"
            return labelled(f"{what}, {self._collector.describe(bucket)}")
        return self._labels[bucket.index][backward]

    def _launch_hook(self, state: Any, hook: CommHook, bucket: Bucket) -> None:
        cycle = self._cycle
        if cycle.in_hook is not None:
            wait_for(cycle.in_hook.wait, lambda: f"{self._whoami()}: averaging the bucket before bucket {bucket.index}")
        future = cycle.in_hook = hook(state, GradBucket(bucket, is_last=bucket.index == len(self._buckets) - 1))
        cycle.waits[bucket.index], cycle.results[bucket.index] = future.wait, future.value

    def _scale(self, bucket: Bucket) -> Tensor | None:
        """What gradients are multiplied by on their way into the bucket; a comm hook divides itself."""
        cycle = self._cycle
        factor = cycle.weight if self._comm_hook is not None else cycle.weight / cycle.divisor
        return self._contributor.scale(bucket, factor)

    def _collect(self, *, write: bool) -> list[int]:
        if self._sends or self._finite is not None:
            hooked, writes = self._comm_hook is not None and self._world_size > 1, write and self._sends
            label = self._label(self._buckets[-1]) if hooked and self._buckets else None
            unused = self._collector.collect(self._cycle, self._launch_sparse, hooked=label, write=writes)
            if self._sends:
                self._refuse_other_backward()
                return unused
        return self._missing()

    def _missing(self) -> list[int]:
        """The positions of the parameters that got no gradient on this rank."""
        return [bucket.positions[slot] for bucket in self._buckets for slot in self._cycle.missing[bucket.index]]

    def _refuse_other_backward(self) -> None:
        """Raise on all ranks if they were in different backwards, where the backend has not compared labels."""
        if self._world_size == 1 or not self._buckets or not self._buckets[-1].marks_place:
            return
        if self._buckets[-1].places.tolist().count(0) == PLACES - 1:
            return
        mine = [self._begun % _LABELS, self._cycle.left_out]
        told = [
            f"rank {rank} in backward {backward} of each {_LABELS}"
            + (f", after {count_left_out(left_out)}" if left_out else "")
            for rank, (backward, left_out) in enumerate(all_gather_records(mine, self._group))
        ]
        raise CollectiveMismatch(
            f"{self._whoami()}: the ranks averaged the gradients of different backwards: {'; '.join(told)}"
        )

    def _drop_gradients(self) -> None:
        """Leave the optimizer nothing to step with: no momentum, no decay, no count of steps changes then."""
        for param in self.params:
            param.grad = None

    def _launch_sparse(self, slot: SparseSlot) -> SparseTransfer:
        used = slot.position in self._arrivals.sparse or slot.position in self.pending
        finite, name = self._finite, self._names[slot.position]
        inspect = None if finite is None else lambda rows: finite.inspect_rows(rows, name)
        return slot.launch(self._cycle.weight / self._cycle.divisor, used, inspect)

    def _note_unused(self, unused: list[int]) -> None:
        report, self.on_never_used = self.on_never_used, None
        if report is not None and unused:
            report([self._names[position] for position in sorted(unused)])

    def _learn(self) -> None:
        """See Note [More than one event]."""
        self._learned = True
        for index, arrived in enumerate(self._arrivals.by_bucket):
            if len(set(arrived)) < len(arrived):
                self._late_for_good.add(index)
                self._in_portions.update(self._buckets[index].positions)

    # Words ----------------------------------------------------------------------------------------------------------

    def _whoami(self) -> str:
        return f"rank {self._rank} of {self._world_size}, step {self.step}"

    def _not_announced(self) -> None:
        raise LockstepError(f"{self._whoami()}: a gradient arrived, but no backward began")


def _has_other_hooks(param: Parameter) -> bool:
    """Whether a hook of the user's comes after ours, which is to see this rank's own gradient and may change it."""
    return _torch.gradient_hooks(param) > 1
