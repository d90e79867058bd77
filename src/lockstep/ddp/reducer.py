"""The reducer: decides when which bucket is reduced, and what every gradient is afterwards.

It is a state machine driven by three events, and it never touches autograd: ``begin`` (a backward starts), the callable
from ``ready_hook(i)`` (parameter i has its gradient), ``finish`` (the backward has ended). ``hooks`` turns autograd's
events into these; tests make them up.

Note [Launch order]
~~~~~~~~~~~~~~~~~~~
A backend pairs the ranks' collectives by the order in which each rank starts them, and gradients may arrive in another
order on every rank. So buckets are launched strictly by index: a full bucket waits for those before it. The last bucket
is launched at the end of backward; nothing is left to overlap it with. A comm hook may start more collectives from the
backend's threads as earlier ones end (PowerSGD does). Nothing else is started while a hook's bucket is under way, or
the ranks' orders would differ: the next bucket waits for its future, and so do the flags and the sparse gradients.

Note [More than one event]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Under re-entrant activation checkpointing a parameter can receive its gradient in several portions, with an event for
each, and nothing says which is the last. So the first synchronised backward launches nothing before its end, and every
bucket that saw a parameter twice stays with that for good; so does a bucket that is found to be incomplete although it
counted enough events. From then on large gradients are copied into their bucket as they come: they are in the cache
still, and their memory is free for the next. A portion that arrives for a gradient that was copied or sent already (a
graph that changed later on) is an error: that was not the whole gradient. ``overlap=False`` always does all at the end.

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

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep.comm.waiting import wait_for
from lockstep.ddp.bucket import SMALL, Bucket
from lockstep.ddp.compress import CommHook, GradBucket
from lockstep.ddp.finite import FiniteCheck
from lockstep.ddp.sparse import SparseSlot, SparseTransfer
from lockstep.errors import LockstepError, NonFiniteGradient

_NEVER = 1 << 62


class Reducer:
    """Averages gradients over a process group, bucket by bucket."""

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
        finite: FiniteCheck | None = None,
    ) -> None:
        self._params, self._names = list(params), list(names)
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
        self._home = {position: bucket for bucket in self._buckets for position in bucket.positions}
        self._arrived: list[list[int]] = [[] for _ in self._buckets]
        self._sparse_arrived: list[int] = []
        self._late_for_good = set(range(len(self._buckets))) if not overlap else set()
        self._learned = False
        self._lock = threading.Lock()
        self._scales: dict[tuple[float, torch.dtype], Tensor] = {}
        self._left_over: list[Callable[[], object]] = []
        self._kept: dict[int, Tensor] = {}
        self._versions: list[int] = []
        self._reset()

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
        self._reset()
        self._sync, self._weight, self._kept = sync, weight, keep
        self._discards = discards or weight == 0
        if not self._discards and self._sends:
            # Private, and the only count of in-place changes; see Note [Taken gradients].
            self._versions = [param._version for param in self._params]
        self._divisor = self._world_size if divisor is None else divisor
        self._packs_early = sync and self._learned and self._sends and weight != 0
        self.is_open = True

    def require_sync(self) -> None:
        """**Local.** Average in the backward that is under way, although it began as an unsynchronised one."""
        self._sync = True

    @property
    def weight(self) -> float:
        """The weight of the backward that is under way."""
        return self._weight

    def ready_hook(self, position: int) -> Callable[[object], None]:
        """**Local.** A callable to call when parameter ``position`` has got a gradient; its argument is ignored.

        It runs once for each parameter in each step, so it does nothing but count.
        """
        bucket = self._home.get(position)
        if bucket is None:
            arrived, expected = self._sparse_arrived, _NEVER
        else:
            arrived, expected = self._arrived[bucket.index], len(bucket)
        append = arrived.append

        def on_gradient(_: object = None) -> None:
            if not self.is_open:
                self.announce()
            append(position)
            if len(arrived) >= expected:
                self._launch_full_buckets()

        if bucket is None or self._params[position].numel() < SMALL:
            return on_gradient
        large_in, slot = bucket, bucket.positions.index(position)

        def on_large_gradient(_: object = None) -> None:
            if not self.is_open:
                self.announce()
            append(position)
            if self._packs_early and large_in.index not in self._late_for_good and not torch.is_grad_enabled():
                large_in.pack_early(slot, self._scale(large_in), as_view=self._as_view)
            if len(arrived) >= expected:
                self._launch_full_buckets()

        return on_large_gradient

    def finish(self, then: Callable[[], None] = lambda: None) -> None:
        """**Collective** if the backward is synchronised. The backward has ended: send the rest, write the averages.

        A mistake that only this rank can see is raised at the very end, so that the others do not wait for it.

        Args:
            then: what all ranks do together after a synchronised backward; runs before such a mistake is raised.

        Raises:
            LockstepError: a gradient changed after its bucket had been sent, see Note [More than one event]; or it was
                gone, see Note [Taken gradients].
            NonFiniteGradient: with ``check_finite="raise"``, on all ranks.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        mistake: LockstepError | None = None
        try:
            if not self._sync:
                for arrived in (*self._arrived, self._sparse_arrived):
                    self.pending.update(arrived)
                return
            mistake = self._find_late_portion() or self._find_taken()
            while self._next < len(self._buckets):
                self._launch(self._next)
            if self._sends or self._finite is not None:
                self._collect()
            else:
                self._note_unused([])
            if not self._learned:
                self._learn()
            self.pending.clear()
            self.step += 1
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
        if old.pending:
            self.pending = {position for position, param in enumerate(self._params) if param.grad is not None}

    def match_without_gradients(self, divisor: int) -> None:
        """**Collective.** Take part in the others' synchronised backward, with nothing to add and nothing to get."""
        self.begin(sync=True, weight=0.0, divisor=divisor, keep={})
        try:
            while self._next < len(self._buckets):
                self._launch(self._next)
            self._collect(write=False)
        finally:
            self._close()

    # The cycle ------------------------------------------------------------------------------------------------------

    @property
    def _sends(self) -> bool:
        """Whether anything is sent at all; a world of one has nobody to send to."""
        return self._world_size > 1 or self._comm_hook is not None

    def _reset(self) -> None:
        self._sync, self._weight, self._divisor = False, 1.0, self._world_size
        self._discards = False
        self._versions = []
        self._kept = {}
        self._next = 0
        self._packs_early = False
        #: The comm hook's latest future.
        self._in_hook: torch.futures.Future[Any] | None = None
        for bucket in self._buckets:
            bucket.packed.clear()
        self._counted = [0] * len(self._buckets)
        self._missing: list[list[int]] = [[] for _ in self._buckets]
        self._waits: list[Callable[[], object] | None] = [None] * len(self._buckets)
        self._results: list[Callable[[], object] | None] = [None] * len(self._buckets)

    def _close(self) -> None:
        self.is_open = False
        self._left_over.extend(wait for wait in self._waits if wait is not None)
        self._waits = []
        for arrived in (*self._arrived, self._sparse_arrived):
            arrived.clear()

    def _drain(self) -> None:
        while self._left_over:
            wait_for(
                self._left_over.pop(0),
                lambda: f"{self._whoami()}: completing what an earlier, failed backward had sent",
            )

    def _launch_full_buckets(self) -> None:
        if not self._sync or not self._learned:
            return
        with self._lock:  # a module on several devices has a backward thread for each
            while self._next < len(self._buckets) - 1 and self._is_full(self._next) and self._hook_is_done():
                self._launch(self._next)

    def _hook_is_done(self) -> bool:
        return self._in_hook is None or self._in_hook.done()

    def _is_full(self, index: int) -> bool:
        arrived, expected = self._arrived[index], len(self._buckets[index])
        if len(arrived) < expected or index in self._late_for_good:
            return False
        if len(set(arrived)) < expected:
            self._late_for_good.add(index)
            return False
        return True

    @torch.no_grad()
    def _launch(self, index: int) -> None:
        bucket = self._buckets[index]
        self._counted[index] = len(self._arrived[index])
        self._next = index + 1
        if not self._sends and self._finite is None:
            self._missing[index] = self._find_missing(index)
            return
        self._fill(bucket)
        if self._finite is not None:
            self._finite.inspect(bucket, [self._names[position] for position in bucket.positions], self._whoami)
        if self._comm_hook is not None:
            state, hook = self._comm_hook
            if self._in_hook is not None:
                wait_for(self._in_hook.wait, lambda: f"{self._whoami()}: averaging the bucket before bucket {index}")
            future = self._in_hook = hook(state, GradBucket(bucket, is_last=index == len(self._buckets) - 1))
            self._waits[index], self._results[index] = future.wait, future.value
        elif self._world_size > 1:
            # The group's own method: dist.all_reduce does the same with checks that take longer than a small bucket.
            self._waits[index] = self._group.allreduce([bucket.message]).wait

    def _find_missing(self, index: int) -> list[int]:
        bucket, arrived = self._buckets[index], set(self._arrived[index])
        if len(arrived) == len(bucket):
            return []
        return [
            slot
            for slot, position in enumerate(bucket.positions)
            if position not in arrived and (position not in self.pending or bucket.params[slot].grad is None)
        ]

    def _fill(self, bucket: Bucket) -> None:
        """Put this rank's contribution into the bucket."""
        bucket.tail.fill_(1)
        if len(bucket.bad):
            bucket.bad.zero_()
        scale = self._scale(bucket)
        grads = [param.grad for param in bucket.params]
        missing = self._find_missing(bucket.index)
        for slot, grad in enumerate(grads):
            if grad is None and slot not in missing:
                missing.append(slot)  # discarded, or Note [Taken gradients]
        if self._weight == 0:
            self._keep_views(bucket, range(len(bucket)))
            bucket.values.zero_()
            missing = list(range(len(bucket)))
        elif missing or bucket.packed:
            self._keep_views(bucket, missing)
            bucket.pack_some(grads, scale)
        else:
            self._pack(bucket, [grad for grad in grads if grad is not None], scale)
        if missing:
            bucket.used[missing] = 0
        self._missing[bucket.index] = missing

    def _keep_views(self, bucket: Bucket, slots: Sequence[int]) -> None:
        """Copy the gradients that the reduction is about to overwrite but that may have to stay."""
        for slot in slots:
            grad, position = bucket.params[slot].grad, bucket.positions[slot]
            if grad is bucket.views[slot] and position not in self._kept:
                self._kept[position] = grad.clone()

    def _pack(self, bucket: Bucket, grads: list[Tensor], scale: Tensor | None) -> None:
        try:
            bucket.pack(grads, scale)
        except RuntimeError as error:
            for position, grad in zip(bucket.positions, grads, strict=True):
                if grad.layout != torch.strided:
                    raise LockstepError(
                        f"{self._whoami()}: parameter '{self._names[position]}' got a sparse gradient, but it is not "
                        "the weight of an nn.Embedding or nn.EmbeddingBag with sparse=True, so it was planned as a "
                        "dense one: use such a module, or make the gradient dense"
                    ) from error
            raise

    def _scale(self, bucket: Bucket) -> Tensor | None:
        """What gradients are multiplied by on their way into the bucket, or None for 1; a comm hook divides itself."""
        factor = self._weight if self._comm_hook is not None else self._weight / self._divisor
        if factor == 1:
            return None
        dtype = torch.float64 if bucket.flat.dtype in (torch.float64, torch.complex128) else torch.float32
        scale = self._scales.get((factor, dtype))
        if scale is None:
            if len(self._scales) > 64:
                self._scales.clear()  # ever new shares must not fill the memory
            scale = self._scales[factor, dtype] = torch.tensor(factor, dtype=dtype)
        return scale

    # The end of the cycle -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _collect(self, *, write: bool = True) -> None:
        hooked = self._comm_hook is not None and self._world_size > 1
        checked = self._finite is not None and self._finite.stops
        unused: list[int] = []
        for index, bucket in enumerate(self._buckets if hooked else ()):
            self._wait(index, bucket)
        if hooked:
            self._exchange_flags()
        sparse = [self._launch_sparse(slot) for slot in self._sparse]
        for index, bucket in enumerate(() if hooked else self._buckets):
            self._wait(index, bucket)
            if write and not checked:
                unused += self._write(bucket)
        if checked and self._finite is not None:
            bad = [transfer.name for transfer in sparse if transfer.is_bad()]
            try:
                self._finite.verdict(self._buckets, self._names, bad, self._whoami)
            except NonFiniteGradient:
                for bucket in self._buckets if write else ():
                    self._restore_unused(bucket)
                raise
        if write and (checked or hooked):
            for bucket in self._buckets:
                unused += self._write(bucket)
        for slot, transfer in zip(self._sparse, sparse, strict=True):
            if not transfer.complete(write=write) and write:
                unused.append(slot.position)
        if write:
            self._note_unused(unused)

    def _wait(self, index: int, bucket: Bucket) -> None:
        wait, result = self._waits[index], self._results[index]
        self._waits[index] = None  # also if it fails: then it is over as well
        if wait is not None:
            wait_for(wait, lambda: f"{self._whoami()}: averaging {self._describe(bucket)}")
        if result is not None:
            value = result()
            tensor = value[0] if isinstance(value, (list, tuple)) else value
            if not isinstance(tensor, Tensor) or tensor.numel() != bucket.values.numel():
                raise LockstepError(
                    f"{self._whoami()}: the comm hook's future for {self._describe(bucket)} must hold a tensor of "
                    f"{bucket.values.numel()} elements, not {getattr(tensor, 'shape', type(tensor).__name__)}"
                )
            if tensor.data_ptr() != bucket.values.data_ptr():
                bucket.values.copy_(tensor.view(-1))

    def _write(self, bucket: Bucket) -> list[int]:
        """Hand out the averages; the positions of the parameters that nobody used."""
        missing = self._missing[bucket.index]
        if not self._sends:
            return [bucket.positions[slot] for slot in missing]
        if not missing:
            if self._as_view:
                bucket.unpack_as_views()
            else:
                bucket.unpack_by_copy()
            return []
        unused = self._restore_unused(bucket)
        for slot in range(len(bucket)):
            if slot not in unused:
                bucket.unpack_one(slot, as_view=self._as_view)
        return [bucket.positions[slot] for slot in unused]

    def _restore_unused(self, bucket: Bucket) -> list[int]:
        """Leave the gradients that nobody used as they were before the reduction; their slots."""
        if not self._missing[bucket.index]:
            return []
        unused = [slot for slot, used in enumerate((bucket.used.abs() > 0).tolist()) if not used]
        for slot in unused:
            kept, grad = self._kept.get(bucket.positions[slot]), bucket.params[slot].grad
            if kept is not None and grad is not None:
                grad.copy_(kept)
        return unused

    def _note_unused(self, unused: list[int]) -> None:
        report, self.on_never_used = self.on_never_used, None
        if report is None:
            return
        if not self._sends and self._finite is None:
            for bucket in self._buckets:
                unused += [bucket.positions[slot] for slot in self._missing[bucket.index]]
        if unused:
            report([self._names[position] for position in sorted(unused)])

    def _exchange_flags(self) -> None:
        """A comm hook sees gradients only, so the flags travel by themselves."""
        flags = torch.cat([bucket.tail.abs().to(torch.float32) for bucket in self._buckets])
        work = dist.all_reduce(flags, group=self._group, async_op=True)
        wait_for(work.wait, lambda: f"{self._whoami()}: exchanging which parameters were used")
        for bucket, part in zip(
            self._buckets, flags.split_with_sizes([len(bucket.tail) for bucket in self._buckets]), strict=True
        ):
            bucket.tail.copy_(part)

    def _launch_sparse(self, slot: SparseSlot) -> SparseTransfer:
        used = slot.position in self._sparse_arrived or slot.position in self.pending
        finite, name = self._finite, self._names[slot.position]
        inspect = None if finite is None else lambda rows: finite.inspect_rows(rows, name, self._whoami)
        return slot.launch(self._weight / self._divisor, used, inspect)

    def _find_taken(self) -> LockstepError | None:
        """See Note [Taken gradients]."""
        if self._discards or not self._sends:
            return None
        for arrived in (*self._arrived, self._sparse_arrived):
            for position in arrived:
                param = self._params[position]
                if param.grad is None and self._versions and param._version != self._versions[position]:
                    return LockstepError(
                        f"{self._whoami()}: the gradient of parameter '{self._names[position]}' was gone before the "
                        "ranks had averaged it. If a hook on the parameter runs the optimizer inside backward, it "
                        "stepped with this rank's own gradient, and the replicas differ from now on: go back to a "
                        "checkpoint, and let the optimizer step after backward"
                    )
        return None

    def _find_late_portion(self) -> LockstepError | None:
        """See Note [More than one event]."""
        late: list[int] = []
        for index, arrived in enumerate(self._arrived):
            bucket = self._buckets[index]
            if index < self._next:
                late += arrived[self._counted[index] :]
            if bucket.packed and len(set(arrived)) < len(arrived):
                packed = {bucket.positions[slot] for slot in bucket.packed}
                late += [position for position in packed if arrived.count(position) > 1]
        if not late:
            return None
        return LockstepError(
            f"{self._whoami()}: parameter '{self._names[late[0]]}' received more of its gradient after its "
            f"bucket was sent or filled, so the average is wrong. The graph changed since the first step "
            "(re-entrant checkpointing of a parameter that is used several times): pass overlap=False to "
            "lockstep.replicate or DistributedDataParallel, or checkpoint with use_reentrant=False"
        )

    def _learn(self) -> None:
        """See Note [More than one event]."""
        self._learned = True
        for index, arrived in enumerate(self._arrived):
            if len(set(arrived)) < len(arrived):
                self._late_for_good.add(index)

    # Words ----------------------------------------------------------------------------------------------------------

    def _whoami(self) -> str:
        return f"rank {self._rank} of {self._world_size}, step {self.step}"

    def _describe(self, bucket: Bucket) -> str:
        first, last = self._names[bucket.positions[0]], self._names[bucket.positions[-1]]
        return f"bucket {bucket.index} of {len(self._buckets)} (parameters '{first}' to '{last}')"

    def _not_announced(self) -> None:
        raise LockstepError(f"{self._whoami()}: a gradient arrived, but no backward began")
