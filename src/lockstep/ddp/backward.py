"""One backward: the gradients that have come, those that were sent, and the averages that are handed out.

Note [Issue order]
~~~~~~~~~~~~~~~~~~
A backend pairs the ranks' collectives by the order in which each rank starts them, and gradients may arrive in another
order on every rank. So buckets are issued strictly by index: a full bucket waits for those before it. The last bucket
is issued at the end of backward; nothing is left to overlap it with. A comm hook may start more collectives from the
backend's threads as earlier ones end (PowerSGD does). Nothing else is started while a hook's bucket is under way, or
the ranks' orders would differ: the next bucket waits for its future, and so do the flags and the sparse gradients.

Note [Labels]
~~~~~~~~~~~~~
If backward fails on one rank, which catches the error and continues, its next backward meets the others' present one.
So a bucket's all-reduce is labelled with the number of the backward, for backends that compare labels (modulo a small
number, since labels are kept).

Note [Unused parameters]
~~~~~~~~~~~~~~~~~~~~~~~~
A parameter without an event in this backward, and in the unsynchronised ones before it, is unused on this rank. It
sends its ``grad`` as it stands, or zeros, since what it holds already is the same on all ranks, and says "unused" in
Note [Bucket layout]'s flags. A rank reads the flags after the reduction only if it has an unused parameter itself. If
another rank used the parameter, it gets the average; otherwise its ``grad`` stays as it was, bit by bit, None included.

Note [Taken gradients]
~~~~~~~~~~~~~~~~~~~~~~
A user's hook that runs the optimizer inside backward steps with this rank's gradient, before there is an average, and
sets ``grad`` to None. That is detected, and it is an error: there was an event, but there is no gradient, and the
parameter was changed in place since the backward began. (An event without a gradient is not enough: a function may have
had none to give.) A hook that zeroes ``grad`` in place is not found.

Note [Gradients with a graph]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``loss.backward(create_graph=True)`` leaves gradients in ``grad`` that can be differentiated once more: ``penalty =
sum(p.grad.square().sum() for p in model.parameters())``. A view of a bucket would hold the average without any graph,
so that the penalty adds nothing. After such a backward the averages are copied into the gradients, which keep this
rank's graph. That is exact: with g the average, the penalty f(g) has the gradient f'(g) times the derivative of g,
which is the mean over the ranks of w_r times the derivative of g_r, and the backward of the penalty averages just
these, if its batch is in the same shares w_r (Note [Exact mean]).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, is_not
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep import _torch
from lockstep.comm.labels import labelled
from lockstep.comm.waiting import wait_for
from lockstep.ddp.bucket import Bucket
from lockstep.ddp.comm_hooks import CommHook, GradBucket
from lockstep.ddp.left_out import LABELS, count_left_out
from lockstep.ddp.rider import Rider
from lockstep.ddp.sparse import SparseSlot, SparseTransfer
from lockstep.errors import LockstepError
from lockstep.job import flight
from lockstep.step.share import BatchId

_grad, _version, _packed = attrgetter("grad"), attrgetter("_version"), attrgetter("turn.packed")
_tail, _fresh_flags = attrgetter("tail"), attrgetter("fresh_flags")
_foreach_copy = _torch.foreach_copy()

#: Most factors kept as tensors, so that ever new shares do not fill the memory.
_MOST_SCALES = 64


@dataclass(eq=False)
class Averaging:
    """The configuration that all backwards of a replica share: its parameters, their buckets and the process group."""

    #: The parameters that are trained; a parameter's position is its index here.
    params: Sequence[Parameter]
    #: The parameters' names, in the same order.
    names: Sequence[str]
    #: The buckets, in the order in which they are reduced.
    buckets: list[Bucket]
    #: The parameters with sparse gradients.
    sparse: list[SparseSlot]
    #: The ranks that hold replicas.
    group: dist.ProcessGroup
    #: True if every grad becomes a view of its bucket.
    as_view: bool
    #: Riders: what travels with the gradients, in the order of its flags in the buckets.
    riders: Sequence[Rider] = ()
    #: Number of synchronised backwards that have ended.
    step: int = 0
    #: Positions of parameters with gradients that were accumulated without synchronisation.
    pending: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        #: (state, hook) of the comm hook that reduces the buckets instead of an all-reduce; see :meth:`use_hook`.
        self.comm_hook: tuple[Any, CommHook] | None = None
        #: True if gradients are sent: there is more than one rank, or a comm hook.
        self.sends = self.world_size > 1
        #: For each bucket, the riders that have flags in it, each with its index in ``bucket.flags``.
        self.riding = [
            [(rider, slot) for slot, rider in enumerate(self.riders) if len(bucket.flags[slot])]
            for bucket in self.buckets
        ]
        #: The lists, one per bucket and per sparse parameter, of positions whose gradient has come.
        self.arrived = [bucket.turn.arrived for bucket in self.buckets] + [slot.arrived for slot in self.sparse]
        self.call = dist.AllreduceOptions()
        self.call.asyncOp = True
        self.labels = [
            [f"backward {n} of each {LABELS}, {self.describe(bucket)}" for n in range(LABELS)]
            for bucket in self.buckets
        ]
        #: (factor, dtype) -> the factor as a 0-dim tensor.
        self.scales: dict[tuple[float, torch.dtype], Tensor] = {}

    def use_hook(self, comm_hook: tuple[Any, CommHook] | None) -> None:
        """Let a comm hook, called with its first argument, reduce the buckets."""
        self.comm_hook = comm_hook
        self.sends = self.world_size > 1 or comm_hook is not None

    def leave(self, rider: Rider) -> None:
        """Let ``rider`` travel no more."""
        # (New lists: those that there are may be gone through at present.)
        self.riding = [[(each, slot) for each, slot in riding if each is not rider] for riding in self.riding]

    def make_scale(self, factor: float, dtype: torch.dtype) -> Tensor:
        """Make ``factor`` a tensor (0-dim), and keep it in :attr:`scales`."""
        if len(self.scales) > _MOST_SCALES:
            self.scales.clear()
        scale = self.scales[factor, dtype] = torch.tensor(factor, dtype=dtype, device="cpu")
        return scale

    def describe(self, bucket: Bucket) -> str:
        """Return a description of the bucket."""
        first, last = self.names[bucket.positions[0]], self.names[bucket.positions[-1]]
        return f"bucket {bucket.index} of {len(self.buckets)} (parameters '{first}' to '{last}')"

    def describe_parameter(self, param: Parameter) -> str:
        """Name a parameter, on this rank and in this step."""
        name = next(name for name, each in zip(self.names, self.params, strict=True) if each is param)
        return f"{self.whoami()}: parameter '{name}'"

    def whoami(self) -> str:
        """Say which rank this is, and in which step; the first one is step 1, as in all messages, records and logs.

        Where nobody counts the steps of the whole run, it is the number of this process's averaged backward.
        """
        return f"rank {self.rank} of {self.world_size}, step {flight.current.run_step or self.step + 1}"


class Backward:
    """The backward under way. Riders see it as a :class:`~lockstep.ddp.rider.BackwardState`.

    Args:
        averaging: the configuration that it shares with all other backwards.
        sync: whether gradients are averaged in it; if not, they accumulate on this rank.
        factor: what this rank's gradients are multiplied by, for the mean over ranks (Note [Exact mean]). 0 discards
            them.
        divisor: what the sum over ranks is divided by.
        kept: copies of gradients, by position, that are put back if no rank used the parameter.
        discards: True if this rank's gradients count for nothing, so that one that is gone at the end is no mistake.
        number: the number of synchronised backwards that have begun, this one included if it is one; see Note [Labels].
    """

    def __init__(
        self,
        averaging: Averaging,
        *,
        sync: bool,
        factor: float,
        divisor: int,
        kept: dict[int, Tensor],
        discards: bool,
        number: int,
    ) -> None:
        self._all = averaging
        self.sync, self.number = sync, number
        self.is_hooked = averaging.comm_hook is not None
        self.factor, self._divisor, self._kept = factor, divisor, kept
        # Autograd records within a backward only if it has ``create_graph``; see Note [Gradients with a graph].
        self._as_view = averaging.as_view and not torch.is_grad_enabled()
        #: Positions, within the buckets issued so far, of the parameters that got no gradient on this rank.
        self.missing: list[int] = []
        self.left_out = self.progress = 0
        self.batch: BatchId | None = None
        self.skipped = False
        #: The error that riders ask to raise at the end, on all ranks.
        self.found: LockstepError | None = None
        #: Index of the bucket to issue next; see Note [Issue order].
        self.next = 0
        #: The comm hook's latest future.
        self._in_hook: torch.futures.Future[Any] | None = None
        for bucket in averaging.buckets:
            bucket.turn.begin()
        # ``_version`` is private, and the only count of in-place changes; see Note [Taken gradients].
        looks = not discards and averaging.sends
        self._versions = [*map(_version, averaging.params)] if looks else []

    def name_of(self, bucket: Bucket, slot: int) -> str:
        """Return the name of a parameter."""
        return self._all.names[bucket.positions[slot]]

    def whoami(self) -> str:
        """Say which rank this is, and how far it has come."""
        return self._all.whoami()

    def leave(self, rider: Rider) -> None:
        """See :class:`~lockstep.ddp.rider.BackwardState`."""
        self._all.leave(rider)

    def arrivals(self) -> Iterable[int]:
        """Return the positions of the parameters that got a gradient, as often as they did."""
        return chain.from_iterable(self._all.arrived)

    def scale(self, bucket: Bucket) -> Tensor | None:
        """Return the factor (0-dim) of gradients packed into ``bucket``, None for 1; a comm hook divides itself."""
        factor = self.factor if self.is_hooked else self.factor / self._divisor
        if factor == 1:
            return None
        dtype = torch.float64 if bucket.flat.dtype in (torch.float64, torch.complex128) else torch.float32
        scale = self._all.scales.get((factor, dtype))
        return self._all.make_scale(factor, dtype) if scale is None else scale

    def prepare(self) -> None:
        """Prepare the buckets for gradients that are averaged: leave views to their holders, and reset all flags.

        (See Note [Gradients held elsewhere]; copied gradients need nothing.)
        """
        buckets = self._all.buckets
        if self._all.as_view and self._all.sends:
            for bucket in buckets:
                bucket.leave_to_holders()
        if buckets and (self._all.sends or self._all.riders):
            _foreach_copy([*map(_tail, buckets)], [*map(_fresh_flags, buckets)])

    def close(self) -> list[Bucket]:
        """End the backward, failed or not; return the buckets whose reduction is still under way."""
        for arrived in self._all.arrived:
            arrived.clear()
        under_way = []
        for bucket in self._all.buckets:
            if bucket.turn.wait is None:
                bucket.held.put_back()
            else:
                under_way.append(bucket)
        return under_way

    # Sending --------------------------------------------------------------------------------------------------------

    def hook_is_done(self) -> bool:
        """Return whether no comm hook is at work; see Note [Issue order]."""
        return self._in_hook is None or self._in_hook.done()

    def issue_next(self) -> None:
        """**Collective.** Fill the next bucket and begin to reduce it; under ``no_grad``."""
        bucket, riding = self._all.buckets[self.next], self._all.riding[self.next]
        self.next += 1
        missing = bucket.turn.issue(self._all.pending)
        if self._all.sends or riding:
            missing = self._fill(bucket, missing)
        if missing:
            self.missing += map(bucket.positions.__getitem__, missing)
        for rider, slot in riding:
            rider.write(bucket, bucket.flags[slot], self)
        if not self._all.sends:
            return
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
            NonFiniteGradient, CollectiveMismatch: from riders, on all ranks.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        buckets = self._all.buckets
        while self.next < len(buckets):
            self.issue_next()
        if not (self._all.sends or self._all.riders):
            return self._weigh_alone()
        sparse = self._wait_for_all()
        try:
            self._read(sparse)
        except LockstepError:
            if write and self.missing:
                self._restore_unused()
            raise
        if self.skipped:
            return []
        if not self._all.sends:
            return self._weigh_alone()
        restored = self._restore_unused() if write and self.missing else {}
        for bucket in buckets if write else ():
            self._write(bucket, restored.get(bucket.index, ()))
        unused = [buckets[index].positions[slot] for index, slots in restored.items() for slot in slots]
        for slot, transfer in zip(self._all.sparse, sparse, strict=True):
            if not transfer.complete(write=write) and write:
                unused.append(slot.position)
        return unused

    def _weigh_alone(self) -> list[int]:
        """Scale the gradients in place, as nothing is sent. Return the positions of parameters without a gradient."""
        if self.factor != 1:  # several batches were accumulated
            for param in self._all.params:
                if param.grad is not None:
                    param.grad.mul_(self.factor)
        return self.missing

    def _wait_for_all(self) -> list[SparseTransfer]:
        """**Collective.** Wait for all buckets. Return the transfers of sparse gradients, which have begun."""
        buckets = self._all.buckets
        if not (self.is_hooked and self._all.world_size > 1):
            sparse = [*map(self._issue_sparse, self._all.sparse)]
            for bucket in buckets:
                if bucket.turn.wait is not None or bucket.turn.result is not None:
                    self._wait(bucket)
            return sparse
        for bucket in buckets:  # see Note [Issue order]
            self._wait(bucket)
        # The hook may send from any thread, so its own collectives go without a label.
        if buckets:
            with labelled(self._label(buckets[-1])):
                self._exchange_flags()
        return [*map(self._issue_sparse, self._all.sparse)]

    def _read(self, sparse: Sequence[SparseTransfer]) -> None:
        """**Collective** if a rider is. Let the riders read the flags of all ranks."""
        for transfer in sparse:
            transfer.hear()
        for bucket, riding in zip(self._all.buckets, self._all.riding, strict=True):
            for rider, slot in riding:
                self.found = rider.read(bucket, bucket.flags[slot], self) or self.found
        if not self._all.buckets:
            for rider in self._all.riders:
                self.found = rider.alone(self) or self.found

    def _fill(self, bucket: Bucket, missing: list[int]) -> list[int]:
        """Put this rank's gradients into ``bucket``; see Note [Unused parameters].

        Args:
            bucket: the bucket.
            missing: the slots for which no gradient has come.

        Returns:
            The slots without a gradient, those included whose gradient is gone.
        """
        grads = [*map(_grad, bucket.params)]
        absent = missing
        if not all(map(is_not, grads, repeat(None))):
            for slot, grad in enumerate(grads):
                if grad is None and slot not in missing:
                    absent = [*absent, slot]  # discarded, or Note [Taken gradients]
        if self.factor == 0:
            self._keep_views(bucket, range(len(bucket)))
            bucket.values.zero_()
            absent = list(range(len(bucket)))
        elif absent or bucket.turn.packed:
            self._keep_views(bucket, absent)
            bucket.pack_some(grads, self.scale(bucket))
        else:
            try:
                bucket.pack(cast("list[Tensor]", grads), self.scale(bucket))
            except RuntimeError as error:
                self._explain_sparse(bucket, error)
                raise
        if absent:
            bucket.mark_unused(absent)
        bucket.turn.missing = absent
        return absent

    def _explain_sparse(self, bucket: Bucket, error: RuntimeError) -> None:
        for position, param in zip(bucket.positions, bucket.params, strict=True):
            if param.grad is not None and param.grad.layout != torch.strided:
                raise LockstepError(
                    f"{self._all.whoami()}: parameter '{self._all.names[position]}' got a sparse gradient, but it "
                    "is not the weight of an nn.Embedding or nn.EmbeddingBag with sparse=True, so it was planned "
                    "as a dense one: use such a module, or make the gradient dense"
                ) from error

    def _keep_views(self, bucket: Bucket, slots: Iterable[int]) -> None:
        """Copy the gradients that the reduction is about to overwrite but that may have to stay."""
        for slot in slots:
            grad, position = bucket.params[slot].grad, bucket.positions[slot]
            if grad is bucket.views[slot] and position not in self._kept:
                self._kept[position] = grad.clone()

    def _all_reduce(self, bucket: Bucket) -> None:
        label = self._label(bucket) if self.left_out else self._all.labels[bucket.index][self.number % LABELS]
        if bucket.sum_up is not None:
            what = lambda: f"{self._all.whoami()}: averaging {self._all.describe(bucket)}"  # noqa: E731
            wait_for(partial(bucket.sum_up, label), what, name=None)  # it sleeps, and reports that, by itself
        else:
            with labelled(label):
                # The group's own method: dist.all_reduce has checks that take longer than a small bucket.
                bucket.turn.wait = self._all.group.allreduce([bucket.message], self._all.call).wait

    def _label(self, bucket: Bucket) -> str:
        backward = self.number % LABELS
        if self.left_out and bucket.is_last:
            said = f"backward {backward} of each {LABELS}, after {count_left_out(self.left_out)}"
            return f"{said}, {self._all.describe(bucket)}"
        return self._all.labels[bucket.index][backward]

    def _issue_hook(self, state: Any, hook: CommHook, bucket: Bucket) -> None:
        if self._in_hook is not None:
            before = f"{self._all.whoami()}: averaging the bucket before bucket {bucket.index}"
            wait_for(self._in_hook.wait, lambda: before)
        future = self._in_hook = hook(state, GradBucket(bucket))
        bucket.turn.wait, bucket.turn.result = future.wait, future.value

    def _issue_sparse(self, slot: SparseSlot) -> SparseTransfer:
        used = bool(slot.arrived) or slot.position in self._all.pending
        return slot.issue(self.factor / self._divisor, used)

    # Handing out ----------------------------------------------------------------------------------------------------

    def _write(self, bucket: Bucket, unused: Sequence[int]) -> None:
        """Hand out the averages, but for the slots that no rank used."""
        if not bucket.turn.missing:
            if self._as_view:
                bucket.unpack_as_views()
            else:
                bucket.unpack_by_copy()
            return
        for slot in range(len(bucket)):
            if slot not in unused:
                bucket.unpack_one(slot, as_view=self._as_view)

    def _wait(self, bucket: Bucket) -> None:
        turn = bucket.turn
        wait, turn.wait = turn.wait, None  # the reduction is over then, even if it fails
        if wait is not None:
            what = lambda: f"{self._all.whoami()}: averaging {self._all.describe(bucket)}"  # noqa: E731
            wait_for(wait, what, name="averaging gradients")
        if turn.result is not None:
            value = turn.result()
            tensor = value[0] if isinstance(value, (list, tuple)) else value
            if not isinstance(tensor, Tensor) or tensor.numel() != bucket.values.numel():
                raise LockstepError(
                    f"{self._all.whoami()}: the comm hook's future for {self._all.describe(bucket)} must hold a tensor "
                    f"of {bucket.values.numel()} elements, not {getattr(tensor, 'shape', type(tensor).__name__)}"
                )
            if tensor.data_ptr() != bucket.values.data_ptr():
                bucket.values.copy_(tensor.view(-1))
            if bucket.has_gaps:
                bucket.clear_gaps()

    def _restore_unused(self) -> dict[int, list[int]]:
        """Restore the gradients of parameters that no rank used, from before the reduction. Waits for the device, once.

        Returns:
            Index of a bucket -> the slots of these parameters.
        """
        incomplete = [bucket for bucket in self._all.buckets if bucket.turn.missing]
        # All flags at once, since each read would wait anew.
        device = incomplete[0].used.device
        flags = iter(torch.cat([(bucket.used.abs() > 0).to(device) for bucket in incomplete]).tolist())
        found = {bucket.index: [slot for slot in range(len(bucket)) if not next(flags)] for bucket in incomplete}
        for index, slots in found.items():
            bucket = self._all.buckets[index]
            for slot in slots:
                kept, grad = self._kept.get(bucket.positions[slot]), bucket.params[slot].grad
                if kept is not None and grad is not None:
                    grad.copy_(kept)
        return found

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
        """Return the error to raise at the very end if this rank alone can see a mistake that makes replicas differ."""
        if (self.next or any(map(_packed, self._all.buckets))) and (late := self._find_late_portion()) is not None:
            return late
        if self.sync and self._versions and not all(map(is_not, map(_grad, self._all.params), repeat(None))):
            return self._find_taken()
        return None

    def _find_late_portion(self) -> LockstepError | None:
        """Find a gradient that changed after it was sent; see Note [More than one event]."""
        late: list[int] = []
        for bucket in self._all.buckets:
            late += bucket.turn.find_late(is_issued=bucket.index < self.next)
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
                    f"{self._all.whoami()}: the gradient of parameter '{self._all.names[position]}' was removed before "
                    "the ranks had averaged it. If a hook on the parameter runs the optimizer inside backward, it "
                    "stepped with this rank's own gradient, and the replicas differ from now on: resume from a "
                    "checkpoint, and let the optimizer step after backward"
                )
        return None
