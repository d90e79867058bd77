"""One backward: which gradients have come, what was sent of them, and the averages that are handed out.

Note [Issue order]
~~~~~~~~~~~~~~~~~~
A backend pairs the ranks' collectives by the order in which each rank starts them, and gradients may arrive in another
order on every rank. So buckets are issued strictly by index: a full bucket waits for those before it. The last bucket
is issued at the end of backward; nothing is left to overlap it with. A comm hook may start more collectives from the
backend's threads as earlier ones end (PowerSGD does). Nothing else is started while a hook's bucket is under way, or
the ranks' orders would differ: the next bucket waits for its future, and so do the flags and the sparse gradients.

Note [Labels]
~~~~~~~~~~~~~
If backward fails on one rank, which catches that and continues, its next backward meets the others' present one. So a
bucket's all-reduce is labelled with the number of the backward, for backends that compare labels (modulo a small
number, since labels are kept), and with whether its gradients are weighed by items.

Note [Unused parameters]
~~~~~~~~~~~~~~~~~~~~~~~~
A parameter without an event in this backward, and in the unsynchronised ones before it, is unused on this rank. It
sends its ``grad`` as it stands, or zeros, since what it holds already is the same on all ranks, and says "unused" in
Note [Bucket layout]'s flags. A rank reads the flags after the reduction only if it has an unused parameter itself. If
another rank used the parameter it gets the average, else its ``grad`` stays as it was, bit by bit, None included.

Note [Taken gradients]
~~~~~~~~~~~~~~~~~~~~~~
A user's hook that runs the optimizer inside backward steps with this rank's gradient, before there is an average, and
sets ``grad`` to None. That can be seen, and it is an error: an event, but no gradient, and the parameter was changed in
place since the backward began. (An event without a gradient alone is none: a function may have had none to give.) A
hook that zeroes ``grad`` in place is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep.comm.exchange import all_gather_records
from lockstep.comm.labels import labelled
from lockstep.comm.waiting import wait_for
from lockstep.ddp.batches import BatchFlags
from lockstep.ddp.bucket import PLACES, Bucket
from lockstep.ddp.comm_hooks import CommHook, GradBucket
from lockstep.ddp.counts import MIXED, Weight, are_mixed, unit_of_means, unit_of_sums
from lockstep.ddp.drift import DriftCheck
from lockstep.ddp.finite import FiniteLook
from lockstep.ddp.sparse import SparseSlot, SparseTransfer
from lockstep.errors import CollectiveMismatch, LockstepError, NonFiniteGradient, sentence
from lockstep.share import Place

#: See Note [Labels].
_LABELS = 16
#: Factors kept as tensors; ever new shares must not fill the memory.
_MOST_SCALES = 64
_NOTHING = nullcontext()
_LEFT_OUT, _WEIGHED = "without a backward", "weighed by items"


@dataclass(eq=False)
class Averaging:
    """What all backwards of a replica have in common: whose gradients are averaged, over whom, and how."""

    #: The parameters that are trained; positions count in this order.
    params: Sequence[Parameter]
    #: Theirs.
    names: Sequence[str]
    #: In the order in which they are reduced.
    buckets: list[Bucket]
    #: The parameters with sparse gradients.
    sparse: list[SparseSlot]
    #: The ranks that hold replicas.
    group: dist.ProcessGroup
    #: Let every grad be a view of its bucket.
    as_view: bool
    #: An all-reduce returns when it is complete; see Note [One reduction].
    at_once: bool
    #: Looks at the gradients before they are sent.
    finite: FiniteLook | None
    #: Compares the replicas in some of the steps.
    drift: DriftCheck | None = None
    #: Compares which batches the ranks are in.
    batches: BatchFlags | None = None
    #: Synchronised backwards that have ended.
    step: int = 0
    #: Positions of parameters with gradients that were accumulated without synchronisation.
    pending: set[int] = field(default_factory=set)
    #: Items of all ranks in the last backward that counted them.
    last_items: int | None = None

    def __post_init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        #: What reduces the buckets instead of an all-reduce, and its first argument; see :meth:`use_hook`.
        self.comm_hook: tuple[Any, CommHook] | None = None
        #: Whether anything is sent at all; a world of one has nobody to send to.
        self.sends = self.world_size > 1
        #: Where the parameters whose gradient has come are listed.
        self.arrived = [bucket.arrived for bucket in self.buckets] + [slot.arrived for slot in self.sparse]
        self.call = dist.AllreduceOptions()
        self.call.asyncOp = not self.at_once
        self.labels = [
            [labelled(f"backward {n} of each {_LABELS}, {self.describe(bucket)}") for n in range(_LABELS)]
            for bucket in self.buckets
        ]
        self._scales: dict[tuple[float, torch.dtype], Tensor] = {}

    def use_hook(self, comm_hook: tuple[Any, CommHook] | None) -> None:
        """Let a comm hook, called with its first argument, reduce the buckets."""
        self.comm_hook = comm_hook
        self.sends = self.world_size > 1 or comm_hook is not None

    def scale(self, bucket: Bucket, factor: float) -> Tensor | None:
        """Return ``factor`` as a tensor (0-dim) that gradients in ``bucket`` can be multiplied by; None for 1."""
        if factor == 1:
            return None
        dtype = torch.float64 if bucket.flat.dtype in (torch.float64, torch.complex128) else torch.float32
        scale = self._scales.get((factor, dtype))
        if scale is None:
            if len(self._scales) > _MOST_SCALES:
                self._scales.clear()
            scale = self._scales[factor, dtype] = torch.tensor(factor, dtype=dtype)
        return scale

    def describe(self, bucket: Bucket) -> str:
        """Say which bucket this is."""
        first, last = self.names[bucket.positions[0]], self.names[bucket.positions[-1]]
        return f"bucket {bucket.index} of {len(self.buckets)} (parameters '{first}' to '{last}')"

    def whoami(self) -> str:
        """Say which rank this is, and how far it has come."""
        return f"rank {self.rank} of {self.world_size}, step {self.step}"


class Backward:
    """The backward that is under way.

    Args:
        averaging: what it has in common with all others.
        sync: whether gradients are averaged in it; if not, they accumulate on this rank.
        weight: how much this rank's gradients count.
        kept: copies of gradients, by position, that are put back if no rank used the parameter.
        discards: its own gradients count nothing, so one that is gone at the end is not a mistake.
        number: how many synchronised backwards have begun, this one included if it is one; see Note [Labels].
    """

    def __init__(
        self,
        averaging: Averaging,
        *,
        sync: bool,
        weight: Weight,
        kept: dict[int, Tensor],
        discards: bool,
        number: int,
    ) -> None:
        self._all = averaging
        self.sync, self.number = sync, number
        self._weight, self._kept = weight, kept
        #: Of float16 buckets that no total of items is known for, the gradients of this rank, by index.
        self._unweighed: dict[int, Tensor] = {}
        #: Forwards since the last averaged backward that had none, and how far this rank is, to be compared with the
        #: others; see Note [Left-out backwards].
        self.left_out = 0
        self.place = 0
        #: Which batch this rank is in; see Note [Batches compared].
        self.batch: Place | None = None
        #: Whether this rank's flags say what it holds; see Note [Replicas compared].
        self._compares = False
        #: What to raise at the end, on all ranks, if replicas differ.
        self.drifted: LockstepError | None = None
        #: Index of the bucket to issue next; see Note [Issue order].
        self.next = 0
        #: Whether gradients were bad, so that all ranks leave this step out.
        self.skipped = False
        #: The comm hook's latest future.
        self._in_hook: torch.futures.Future[Any] | None = None
        for bucket in averaging.buckets:
            bucket.begin()
        # Private, and the only count of in-place changes; see Note [Taken gradients].
        looks = not discards and averaging.sends
        self._versions = [param._version for param in averaging.params] if looks else []

    def arrivals(self) -> Iterable[int]:
        """Return the positions of the parameters that got a gradient, as often as they did."""
        return chain.from_iterable(self._all.arrived)

    def scale(self, bucket: Bucket) -> Tensor | None:
        """Return what gradients are multiplied by on their way into ``bucket``; a comm hook divides by itself."""
        factor = self._weight.factor
        if self._weight.items is not None:
            factor = 1.0 if self._keeps(bucket) else factor / self._unit(bucket)
        elif self._all.comm_hook is None:
            factor /= self._weight.divisor
        return self._all.scale(bucket, factor)

    def _unit(self, bucket: Bucket) -> float:
        """Return what items are counted in in ``bucket``; see Note [Counts in the flags]."""
        if self._all.comm_hook is not None:
            return unit_of_means(self._all.last_items, self._all.world_size)
        return unit_of_sums(self._all.last_items) if bucket.flat.dtype is torch.float16 else 1.0

    def _keeps(self, bucket: Bucket) -> bool:
        """Return whether the gradients of ``bucket`` may have to be sent once more."""
        is_first = self._weight.items is not None and self._all.last_items is None
        return is_first and bucket.flat.dtype is torch.float16 and self._all.comm_hook is None

    def leave_to_holders(self) -> None:
        """See Note [Gradients held elsewhere]; without views every gradient is its parameter's own."""
        if self._all.as_view and self._all.sends:
            for bucket in self._all.buckets:
                bucket.leave_to_holders()

    def close(self) -> list[Bucket]:
        """End, however it went; return the buckets of which something is under way still."""
        for arrived in self._all.arrived:
            arrived.clear()
        under_way = []
        for bucket in self._all.buckets:
            if bucket.wait is None:
                bucket.put_back()
            else:
                under_way.append(bucket)
        return under_way

    # Sending --------------------------------------------------------------------------------------------------------

    def hook_is_done(self) -> bool:
        """Return whether no comm hook is at work; see Note [Issue order]."""
        return self._in_hook is None or self._in_hook.done()

    def issue_next(self) -> None:
        """**Collective.** Fill the next bucket and begin to reduce it; under ``no_grad``."""
        bucket = self._all.buckets[self.next]
        bucket.counted, self.next = len(bucket.arrived), self.next + 1
        bucket.missing = bucket.find_missing(self._all.pending)
        if not self._all.sends and self._all.finite is None:
            return
        self._fill(bucket)
        if self._all.finite is not None:
            self._all.finite.inspect(bucket, self._all.names, is_hooked=self._all.comm_hook is not None)
        if self._keeps(bucket):
            self._unweighed[bucket.index] = bucket.values.clone()
            self._multiply(bucket, self._weight.factor)
        if self._all.comm_hook is not None:
            self._issue_hook(*self._all.comm_hook, bucket)
        elif self._all.world_size > 1:
            self._all_reduce(bucket)

    @torch.no_grad()
    def average_rest(self, *, write: bool) -> list[int]:
        """**Collective.** Send what was not sent yet, wait for all of it, and make it the gradients if ``write``.

        Returns:
            The positions of the parameters that no rank used.

        Raises:
            NonFiniteGradient: as :meth:`~lockstep.ddp.finite.FiniteCheck.verdict`, on all ranks.
            CollectiveMismatch: the ranks are in different backwards.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        drift = self._all.drift if write and self._all.sends else None
        self._compares = drift is not None and drift.count()
        while self.next < len(self._all.buckets):
            self.issue_next()
        if not self._all.sends and self._all.finite is None:
            self._divide_alone()
            return self.missing()
        unused = self._collect(write=write and self._all.sends)
        if not self._all.sends:
            self._divide_alone()
            return self.missing()
        self._refuse_other_backward()
        if self._all.batches is not None and self._all.buckets:
            self._all.batches.refuse_others(self._all.buckets[-1].batch, self._all.whoami)
        if drift is not None and self._compares:
            has_bucket = bool(self._all.buckets)
            self.drifted = drift.judge(self._all.buckets[-1].compared) if has_bucket else drift.exchange_alone()
        return unused

    def _fill(self, bucket: Bucket) -> None:
        """Put this rank's gradients into ``bucket``; see Note [Unused parameters]."""
        bucket.reset_flags(self.place)
        if self._compares and self._all.drift is not None and len(bucket.compared):
            self._all.drift.fill(bucket.compared)
        if self._all.batches is not None and len(bucket.batch):
            self._all.batches.fill(bucket.batch, self.batch)
        if self._weight.items is not None:
            bucket.say_count(self._weight.items, is_mixed=self._weight.is_mixed)
        grads = [param.grad for param in bucket.params]
        absent = bucket.missing
        for slot, grad in enumerate(grads):
            if grad is None and slot not in bucket.missing:
                absent = [*absent, slot]  # discarded, or Note [Taken gradients]
        if self._weight.factor == 0:
            self._keep_views(bucket, range(len(bucket)))
            bucket.values.zero_()
            absent = list(range(len(bucket)))
        elif absent or bucket.packed:
            self._keep_views(bucket, absent)
            bucket.pack_some(grads, self.scale(bucket))
        else:
            self._pack(bucket, [grad for grad in grads if grad is not None])
        if absent:
            bucket.used[absent] = 0
        bucket.missing = absent

    def _pack(self, bucket: Bucket, grads: list[Tensor]) -> None:
        try:
            bucket.pack(grads, self.scale(bucket))
        except RuntimeError as error:
            for position, grad in zip(bucket.positions, grads, strict=True):
                if grad.layout != torch.strided:
                    raise LockstepError(
                        f"{self._all.whoami()}: parameter '{self._all.names[position]}' got a sparse gradient, but it "
                        "is not the weight of an nn.Embedding or nn.EmbeddingBag with sparse=True, so it was planned "
                        "as a dense one: use such a module, or make the gradient dense"
                    ) from error
            raise

    def _keep_views(self, bucket: Bucket, slots: Iterable[int]) -> None:
        """Copy the gradients that the reduction is about to overwrite but that may have to stay."""
        for slot in slots:
            grad, position = bucket.params[slot].grad, bucket.positions[slot]
            if grad is bucket.views[slot] and position not in self._kept:
                self._kept[position] = grad.clone()

    def _all_reduce(self, bucket: Bucket) -> None:
        # The group's own method: dist.all_reduce does the same with checks that take longer than a small bucket.
        call: Callable[[], dist.Work] = lambda: self._all.group.allreduce([bucket.message], self._all.call)  # noqa: E731
        with self._label(bucket), self._looking(bucket):
            if self._all.at_once:
                what = lambda: f"{self._all.whoami()}: averaging {self._all.describe(bucket)}"  # noqa: E731
                wait_for(call, what, name=None)  # a backend that reduces at once sleeps, and tells of it, by itself
            else:
                bucket.wait = call().wait

    def _looking(self, bucket: Bucket) -> AbstractContextManager[object]:
        return _NOTHING if self._all.finite is None else self._all.finite.reducing(bucket)

    def _label(self, bucket: Bucket) -> labelled:
        backward = self.number % _LABELS
        tells = self.left_out and bucket is self._all.buckets[-1]
        if tells or self._weight.items is not None:
            said = [f"backward {backward} of each {_LABELS}"]
            said += [_WEIGHED] if self._weight.items is not None else []
            said += [f"after {_count_left_out(self.left_out)}"] if tells else []
            return labelled(", ".join([*said, self._all.describe(bucket)]))
        return self._all.labels[bucket.index][backward]

    def _issue_hook(self, state: Any, hook: CommHook, bucket: Bucket) -> None:
        if self._in_hook is not None:
            before = f"{self._all.whoami()}: averaging the bucket before bucket {bucket.index}"
            wait_for(self._in_hook.wait, lambda: before)
        future = self._in_hook = hook(state, GradBucket(bucket, is_last=bucket.index == len(self._all.buckets) - 1))
        bucket.wait, bucket.result = future.wait, future.value

    def _issue_sparse(self, slot: SparseSlot) -> SparseTransfer:
        used = bool(slot.arrived) or slot.position in self._all.pending
        weight = self._weight
        factor = weight.factor if weight.items is not None else weight.factor / weight.divisor
        return slot.issue(factor, used, self._all.finite, items=weight.items, is_mixed=weight.is_mixed)

    # Handing out ----------------------------------------------------------------------------------------------------

    def _collect(self, *, write: bool) -> list[int]:
        """Wait for all that was sent. Return the positions of the parameters that no rank used, unless the step is
        skipped."""
        buckets, checked = self._all.buckets, self._all.finite is not None
        hooked = self._all.comm_hook is not None and self._all.world_size > 1
        unused: list[int] = []
        if hooked:  # see Note [Issue order]
            for bucket in buckets:
                self._wait(bucket)
            # (What the hook itself sends may come from any thread, so it goes without a label.)
            if buckets:
                with self._label(buckets[-1]):
                    self._exchange_flags()
        sparse = [self._issue_sparse(slot) for slot in self._all.sparse]
        late = checked or hooked or self._weight.items is not None
        for bucket in () if hooked else buckets:
            self._wait(bucket)
            if write and not late:
                unused += self._write(bucket)
        if checked:
            self.skipped = self._judge(sparse, restore=write)
            if self.skipped:
                return []
        total = self._divide(sparse) if write else None
        if write and late:
            for bucket in buckets:
                unused += self._write(bucket)
        for slot, transfer in zip(self._all.sparse, sparse, strict=True):
            if not transfer.complete(write=write, divisor=total or 1) and write:
                unused.append(slot.position)
        return unused

    # Items ----------------------------------------------------------------------------------------------------------

    def _divide(self, sparse: Sequence[SparseTransfer]) -> int | None:
        """Divide what has come back by the items of all ranks, if they are counted. Return their number.

        See Note [Counts in the flags]. Where not all ranks have counted, nothing is divided: all are about to raise.
        """
        if self._weight.items is None:
            return None
        buckets = self._all.buckets
        if buckets:
            sums = (buckets[-1].counts.real if buckets[-1].flat.is_complex() else buckets[-1].counts).tolist()
            flags = buckets[-1].count_flags
            if are_mixed(sums) or flags is None:
                return None
            total = flags.total(sums)
        else:
            total = sum(transfer.items() for transfer in sparse[:1])
        self._refuse_nothing(total)
        for bucket in buckets:
            if bucket.index in self._unweighed and not bool(bucket.values.isfinite().all()):
                self._send_again(bucket, total)
            else:
                averaged_over = 1 if self._all.comm_hook is None else self._all.world_size
                self._multiply(bucket, averaged_over * self._unit(bucket) / total)
        if self._all.world_size == 1:  # with a comm hook; sparse gradients are where they were
            self._multiply_gradients([slot.param for slot in self._all.sparse], self._weight.factor / total)
        self._all.last_items = total
        return total

    def _send_again(self, bucket: Bucket, total: int) -> None:
        """**Collective.** Average ``bucket``, whose weighed sums have overflowed, by weights of at most 1."""
        bucket.values.copy_(self._unweighed[bucket.index])
        self._multiply(bucket, self._weight.factor / total)
        self._all_reduce(bucket)
        self._wait(bucket)

    def _divide_alone(self) -> None:
        """Do the same where nobody else is: in place, if several batches with items of their own were accumulated."""
        if self._weight.items is None or self.skipped:
            return
        self._refuse_nothing(self._weight.items)
        if self._weight.is_mixed:
            raise self._mixed()
        self._multiply_gradients(self._all.params, self._weight.factor / self._weight.items)

    def _multiply_gradients(self, params: Iterable[Parameter], factor: float) -> None:
        for param in params:
            if param.grad is not None and factor != 1:
                param.grad.mul_(factor)

    def _multiply(self, bucket: Bucket, factor: float) -> None:
        scale = self._all.scale(bucket, factor)
        if scale is not None:
            bucket.values.mul_(scale)

    def _refuse_nothing(self, total: int) -> None:
        if total == 0:
            raise LockstepError(
                f"{self._all.whoami()}: every rank has said world.weigh(0), so there is nothing to take a mean of: "
                "leave this step out, on all ranks"
            )

    def _mixed(self) -> CollectiveMismatch:
        return CollectiveMismatch(f"{self._all.whoami()}: {MIXED}")

    def missing(self) -> list[int]:
        """Return the positions of the parameters that got no gradient on this rank."""
        return [bucket.positions[slot] for bucket in self._all.buckets for slot in bucket.missing]

    def _write(self, bucket: Bucket) -> list[int]:
        """Hand out the averages. Return the positions of the parameters that no rank used."""
        if not bucket.missing:
            if self._all.as_view:
                bucket.unpack_as_views()
            else:
                bucket.unpack_by_copy()
            return []
        unused = self._restore_unused(bucket)
        for slot in range(len(bucket)):
            if slot not in unused:
                bucket.unpack_one(slot, as_view=self._all.as_view)
        return [bucket.positions[slot] for slot in unused]

    def _wait(self, bucket: Bucket) -> None:
        wait, bucket.wait = bucket.wait, None  # whether it fails or not, it is over then
        if wait is not None:
            what = lambda: f"{self._all.whoami()}: averaging {self._all.describe(bucket)}"  # noqa: E731
            wait_for(wait, what, name="averaging gradients")
        if bucket.result is not None:
            value = bucket.result()
            tensor = value[0] if isinstance(value, (list, tuple)) else value
            if not isinstance(tensor, Tensor) or tensor.numel() != bucket.values.numel():
                raise LockstepError(
                    f"{self._all.whoami()}: the comm hook's future for {self._all.describe(bucket)} must hold a tensor "
                    f"of {bucket.values.numel()} elements, not {getattr(tensor, 'shape', type(tensor).__name__)}"
                )
            if tensor.data_ptr() != bucket.values.data_ptr():
                bucket.values.copy_(tensor.view(-1))

    def _judge(self, sparse: Sequence[SparseTransfer], *, restore: bool) -> bool:
        """Return whether this step is skipped."""
        assert self._all.finite is not None  # (for the type checker)
        finite, names = self._all.finite, self._all.names
        flags = [transfer.is_bad() for transfer in sparse]
        flags += [finite.is_flagged(bucket, names) for bucket in self._all.buckets]
        try:
            return finite.verdict(flagged=any(flags), whoami=self._all.whoami)
        except NonFiniteGradient:
            for bucket in self._all.buckets if restore else ():
                self._restore_unused(bucket)
            raise

    def _restore_unused(self, bucket: Bucket) -> list[int]:
        """Restore the gradients that no rank used as they were before the reduction. Return their slots."""
        if not bucket.missing:
            return []
        unused = [slot for slot, used in enumerate((bucket.used.abs() > 0).tolist()) if not used]
        for slot in unused:
            kept, grad = self._kept.get(bucket.positions[slot]), bucket.params[slot].grad
            if kept is not None and grad is not None:
                grad.copy_(kept)
        return unused

    def _exchange_flags(self) -> None:
        """Exchange the flags by themselves: a comm hook sees gradients only."""
        buckets = self._all.buckets
        flags = torch.cat([bucket.tail.abs().to(torch.float32) for bucket in buckets])
        work = dist.all_reduce(flags, group=self._all.group, async_op=True)
        wait_for(work.wait, lambda: f"{self._all.whoami()}: exchanging which parameters were used")
        for bucket, part in zip(buckets, flags.split_with_sizes([len(each.tail) for each in buckets]), strict=True):
            bucket.tail.copy_(part)

    # Mistakes -------------------------------------------------------------------------------------------------------

    def find_mistake(self) -> LockstepError | None:
        """Return what to raise, at the very end, for what only this rank can see and what makes the replicas differ."""
        return self._find_late_portion() or (self._find_taken() if self.sync and self._versions else None)

    def _find_late_portion(self) -> LockstepError | None:
        """Find a gradient that changed after it was sent; see Note [More than one event]."""
        late: list[int] = []
        for bucket in self._all.buckets:
            arrived = bucket.arrived
            if bucket.index < self.next:
                late += arrived[bucket.counted :]
            if bucket.packed and len(set(arrived)) < len(arrived):
                packed = {bucket.positions[slot] for slot in bucket.packed}
                late += [position for position in packed if arrived.count(position) > 1]
        if not late:
            return None
        return LockstepError(
            f"{self._all.whoami()}: parameter '{self._all.names[late[0]]}' received more of its gradient after its "
            "bucket was sent or filled, so the average is wrong. The graph changed since the first step (re-entrant "
            "checkpointing of a parameter that is used several times): pass overlap=False to lockstep.replicate or "
            "DistributedDataParallel, or checkpoint with use_reentrant=False"
        )

    def _find_taken(self) -> LockstepError | None:
        """Find a gradient that was gone before it was sent; see Note [Taken gradients]."""
        for position in self.arrivals():
            param = self._all.params[position]
            if param.grad is None and param._version != self._versions[position]:
                return LockstepError(
                    f"{self._all.whoami()}: the gradient of parameter '{self._all.names[position]}' was gone before "
                    "the ranks had averaged it. If a hook on the parameter runs the optimizer inside backward, it "
                    "stepped with this rank's own gradient, and the replicas differ from now on: go back to a "
                    "checkpoint, and let the optimizer step after backward"
                )
        return None

    def _refuse_other_backward(self) -> None:
        """Raise on all ranks if they were in different backwards, where the backend has not compared labels."""
        last = self._all.buckets[-1] if self._all.buckets else None
        if last is None or (not last.marks_place and self._weight.items is None):
            return
        marks = last.marks.tolist()
        places, counts = marks[:-2], marks[-2:]
        if not places or places.count(0) == PLACES - 1:
            if are_mixed(counts):
                raise self._mixed()
            return
        mine = [self.number % _LABELS, self.left_out]
        told = [
            f"rank {rank} in backward {backward} of each {_LABELS}"
            + (f", after {_count_left_out(left_out)}" if left_out else "")
            for rank, (backward, left_out) in enumerate(all_gather_records(mine, self._all.group))
        ]
        raise CollectiveMismatch(
            f"{self._all.whoami()}: the ranks averaged the gradients of different backwards: {'; '.join(told)}"
        )


def _count_left_out(number: int) -> str:
    """Count forwards without a backward, in the words that :func:`explained` looks for."""
    return f"{number} forward{'' if number == 1 else 's'} {_LEFT_OUT}"


def explained(error: CollectiveMismatch) -> CollectiveMismatch:
    """Return ``error`` with a remedy, if some rank said that it left a backward out; else ``error`` itself."""
    text = str(error)
    if text.count("backward ") > text.count(_WEIGHED) > 0:
        return CollectiveMismatch(f"{sentence(str(error))} That is, {MIXED}")
    if _LEFT_OUT not in text:
        return error
    return CollectiveMismatch(
        f"{sentence(str(error))} A rank that runs a forward for training and leaves its backward out (a `continue` "
        "before it) would be averaged with the others' next batch from then on. Decide that on all ranks together, for "
        "instance with world.all_reduce(int(bad), 'max'). If its loss only has no use for an output, let it count "
        "nothing: loss + 0 * out.sum(). A forward that is not for training belongs under torch.no_grad()"
    )
