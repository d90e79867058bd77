"""The end of the cycle: wait for the sums, and hand out the averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.labels import labelled
from lockstep.comm.waiting import wait_for
from lockstep.ddp.bucket import Bucket
from lockstep.ddp.cycle import Cycle
from lockstep.ddp.finite import FiniteCheck
from lockstep.ddp.sparse import SparseSlot, SparseTransfer
from lockstep.errors import LockstepError, NonFiniteGradient


@dataclass(frozen=True)
class Collector:
    """Turns the buckets of one reducer into gradients."""

    buckets: Sequence[Bucket]
    sparse: Sequence[SparseSlot]
    names: Sequence[str]
    group: dist.ProcessGroup
    finite: FiniteCheck | None
    #: Let every grad be a view of its bucket.
    as_view: bool
    whoami: Callable[[], str]

    def collect(
        self,
        cycle: Cycle,
        launch_sparse: Callable[[SparseSlot], SparseTransfer],
        *,
        hooked: labelled | None,
        write: bool,
    ) -> list[int]:
        """**Collective.** Wait for all that was sent, and make it the gradients if ``write``; under ``no_grad``.

        Args:
            launch_sparse: starts to gather one sparse gradient.
            hooked: what to call the exchange of flags, if the buckets went through a comm hook. (What the hook itself
                sends may come from any thread, so it goes without a label.)

        Returns:
            The positions of the parameters that no rank used, if ``write`` and the step is not skipped.

        Raises:
            NonFiniteGradient: as :meth:`~lockstep.ddp.finite.FiniteCheck.verdict`, on all ranks.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        checked = self.finite is not None
        unused: list[int] = []
        if hooked:  # see Note [Launch order]
            for bucket in self.buckets:
                self._wait(cycle, bucket)
            with hooked:
                self._exchange_flags()
        sparse = [launch_sparse(slot) for slot in self.sparse]
        for bucket in () if hooked else self.buckets:
            self._wait(cycle, bucket)
            if write and not checked:
                unused += self.write(cycle, bucket)
        if checked:
            cycle.skipped = self._judge(cycle, sparse, restore=write)
            if cycle.skipped:
                return []
        if write and (checked or hooked):
            for bucket in self.buckets:
                unused += self.write(cycle, bucket)
        for slot, transfer in zip(self.sparse, sparse, strict=True):
            if not transfer.complete(write=write) and write:
                unused.append(slot.position)
        return unused

    def write(self, cycle: Cycle, bucket: Bucket) -> list[int]:
        """**Local.** Hand out the averages; the positions of the parameters that nobody used."""
        if not cycle.missing[bucket.index]:
            if self.as_view:
                bucket.unpack_as_views()
            else:
                bucket.unpack_by_copy()
            return []
        unused = self._restore_unused(cycle, bucket)
        for slot in range(len(bucket)):
            if slot not in unused:
                bucket.unpack_one(slot, as_view=self.as_view)
        return [bucket.positions[slot] for slot in unused]

    def describe(self, bucket: Bucket) -> str:
        """**Local.** A bucket in words."""
        first, last = self.names[bucket.positions[0]], self.names[bucket.positions[-1]]
        return f"bucket {bucket.index} of {len(self.buckets)} (parameters '{first}' to '{last}')"

    def _wait(self, cycle: Cycle, bucket: Bucket) -> None:
        wait, result = cycle.take_wait(bucket.index), cycle.results.get(bucket.index)
        if wait is not None:
            wait_for(wait, lambda: f"{self.whoami()}: averaging {self.describe(bucket)}", name="averaging gradients")
        if result is not None:
            value = result()
            tensor = value[0] if isinstance(value, (list, tuple)) else value
            if not isinstance(tensor, Tensor) or tensor.numel() != bucket.values.numel():
                raise LockstepError(
                    f"{self.whoami()}: the comm hook's future for {self.describe(bucket)} must hold a tensor of "
                    f"{bucket.values.numel()} elements, not {getattr(tensor, 'shape', type(tensor).__name__)}"
                )
            if tensor.data_ptr() != bucket.values.data_ptr():
                bucket.values.copy_(tensor.view(-1))

    def _judge(self, cycle: Cycle, sparse: Sequence[SparseTransfer], *, restore: bool) -> bool:
        """Whether this step is skipped."""
        assert self.finite is not None  # (for the type checker)
        flags = [transfer.is_bad() for transfer in sparse] + [bool(bucket.bad.any()) for bucket in self.buckets]
        try:
            return self.finite.verdict(flagged=any(flags), whoami=self.whoami)
        except NonFiniteGradient:
            for bucket in self.buckets if restore else ():
                self._restore_unused(cycle, bucket)
            raise

    def _restore_unused(self, cycle: Cycle, bucket: Bucket) -> list[int]:
        """Leave the gradients that nobody used as they were before the reduction; their slots."""
        if not cycle.missing[bucket.index]:
            return []
        unused = [slot for slot, used in enumerate((bucket.used.abs() > 0).tolist()) if not used]
        for slot in unused:
            kept, grad = cycle.kept.get(bucket.positions[slot]), bucket.params[slot].grad
            if kept is not None and grad is not None:
                grad.copy_(kept)
        return unused

    def _exchange_flags(self) -> None:
        """A comm hook sees gradients only, so the flags travel by themselves."""
        flags = torch.cat([bucket.tail.abs().to(torch.float32) for bucket in self.buckets])
        work = dist.all_reduce(flags, group=self.group, async_op=True)
        wait_for(work.wait, lambda: f"{self.whoami()}: exchanging which parameters were used")
        lengths = [len(bucket.tail) for bucket in self.buckets]
        for bucket, part in zip(self.buckets, flags.split_with_sizes(lengths), strict=True):
            bucket.tail.copy_(part)
