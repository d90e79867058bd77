"""Look for infinite or NaN gradients on the rank that has them, before the average spreads them to every rank.

Note [Looking at gradients]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
An infinite or NaN value survives a sum, so a finite sum of a bucket proves that it holds none, in a fraction of the
time that looking at each element takes; only if the sum is not finite is each element looked at. (Finite gradients near
the end of their dtype's range may have an infinite sum. Then nothing is found, and nothing happens.)

On an accelerator the host would wait for backward at each bucket. There the greatest magnitude of each gradient, by one
kernel for all of a bucket, becomes its flag without being read: times 0 it is 0, or NaN if it is not finite. All flags
are read at once, at the end of backward, and a rank's own magnitudes only where some rank has set one.
"""

from __future__ import annotations

import math
import weakref
from cmath import isfinite
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lockstep import _torch, callsite
from lockstep.bits import with_any
from lockstep.comm.exchange import all_gather_records
from lockstep.comm.looks import total_of
from lockstep.ddp.bucket import SMALL, Bucket
from lockstep.ddp.members import buffers_of
from lockstep.ddp.options import CheckFinite
from lockstep.ddp.rider import BackwardState
from lockstep.errors import NonFiniteGradient
from lockstep.job import flight, notes
from lockstep.text import listed

_foreach_norm = _torch.foreach_norm()
#: Number of steps skipped in a row at which training stops with an error.
MOST_SKIPPED = 100


def is_finite(values: Tensor) -> bool:
    """Return whether all of ``values`` are finite; see Note [Looking at gradients]. Waits for their device."""
    return isfinite(total_of(values).item()) or bool(values.isfinite().all())


def dense_grads(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the dense values of the parameters' gradients."""
    grads = [param.grad.detach() for param in params if param.grad is not None]
    return [grad if grad.layout == torch.strided else grad._values() for grad in grads]


def are_sound(params: Iterable[Tensor]) -> bool:
    """Return whether the parameters' gradients, on a CPU, are finite for certain. As this runs in each step of a rank
    that is alone, small gradients are joined, which takes less time than adding up each of them."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for grad in [param.grad for param in params]:
        assert grad is not None  # (for the type checker)
        values = grad if grad.layout is torch.strided else grad._values()
        if values.numel() < SMALL:
            small.setdefault(values.dtype, []).append(values.flatten())
        elif not isfinite(total_of(values).item()):
            return False
    return all(isfinite(total_of(torch.cat(those)).item()) for those in small.values())


def magnitude(values: Iterable[Tensor]) -> Tensor:
    """Return the greatest magnitude in ``values``: infinite or NaN if one of them is (0-dim); waits for nothing."""
    parts = [torch.view_as_real(each) if each.is_complex() else each for each in values if each.numel()]
    if len({(part.device, part.dtype) for part in parts}) == 1:  # what get_total_norm does, in half of its time
        of_all: Tensor = torch.linalg.vector_norm(torch.stack(_foreach_norm(parts, math.inf)), math.inf)
        return of_all
    greatest: Tensor = get_total_norm(parts, math.inf)
    return greatest


def _magnitudes_of(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the greatest magnitude in each of ``grads``, of any shapes (0-dim); waits for nothing."""
    parts = [torch.view_as_real(each) if each.is_complex() else each for each in grads]
    filled = iter(_foreach_norm([part for part in parts if part.numel()], math.inf))
    return [next(filled) if part.numel() else part.sum() for part in parts]


def words_for(found: Mapping[int, Sequence[str]]) -> str:
    """Return a description of the parameters whose gradients are not finite, by rank."""
    return "; ".join(
        f"of {listed([f'{name!r}' for name in names], most=5)} on rank {rank}" for rank, names in sorted(found.items())
    )


def note_left_out(found: Mapping[int, Sequence[str]], bad: Sequence[str] = ()) -> None:
    """**Rank 0.** Leave a note for the run's record that the step under way is left out on all ranks.

    Args:
        found: rank -> the parameters whose gradients were not finite there, as far as it is known.
        bad: the parameters whose averages are not.
    """
    of = words_for(found) if found else f"of {listed([*map(repr, bad)], most=5)}"
    notes.tell(notes.LEFT_OUT, step=flight.current.step, of=of)


class NanBuffers:
    """Finds buffers that forwards have made NaN: no later batch mends a running statistic, and in evaluation the model
    computes nothing but NaN with it, though its gradients are finite again.

    Nothing is found before :meth:`turn_to` is called.
    """

    def __init__(self) -> None:
        self._module: weakref.ref[nn.Module] | None = None
        #: Names of the buffers that held NaN before, or were named.
        self._known: frozenset[str] = frozenset()

    def turn_to(self, module: nn.Module) -> None:
        """Look at the buffers of ``module`` from now on; those that hold NaN already are not named."""
        self._module = weakref.ref(module)
        self._known = frozenset(self._now())

    def words(self) -> str:
        """Return the end of a warning that names the buffers that have become NaN since it was asked last, or ""."""
        now = self._now()
        new, self._known = [name for name in now if name not in self._known], self._known.union(now)
        if not new:
            return ""
        return (
            f". The forward has also left NaN in {listed([*map(repr, new)], most=5)}, where it stays: an evaluation "
            "would give NaN, and checkpoints of it are not sound. Resume from one before this step, or reset these "
            "buffers (of a batch norm: reset_running_stats())"
        )

    def _now(self) -> list[str]:
        module = None if self._module is None else self._module()
        named = [] if module is None else [*buffers_of(module)]
        found = with_any(torch.isnan, named)
        return [name for name, _ in named if name in found]


class FiniteCheck:
    """A rider that does what ``check_finite`` says with gradients that are not finite.

    A rank that stopped at its own bad gradient would leave the others waiting, and one that skipped its step alone
    would diverge from them. So it sends the bucket all the same, with the flags of Note [Bucket layout], and all ranks
    decide at the end, from the same flags. (The announcement of a sparse gradient, before its rows are sent, has such a
    flag too.) Only if a flag is set do the ranks exchange the names of the gradients.
    """

    def __init__(self, policy: CheckFinite, group: dist.ProcessGroup, buffers: NanBuffers) -> None:
        self._policy, self._group, self._buffers = policy, group, buffers
        self._mine: list[str] = []
        #: True if any rank has flagged a gradient of the backward under way; the same on all ranks.
        self._is_flagged = False
        #: The flags of all ranks that devices hold, bucket by bucket; this rank's magnitudes, with their names.
        self._unread: list[Tensor] = []
        self._magnitudes: list[tuple[list[str], Tensor]] = []
        self._skipped_in_a_row = 0

    def width(self, parameters: int, *, is_last: bool) -> int:  # noqa: ARG002  (as the protocol has it)
        """See :class:`~lockstep.ddp.rider.Rider`: a flag for each parameter."""
        return parameters

    def write(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> None:
        """See :class:`~lockstep.ddp.rider.Rider`."""
        if not bucket.flat.is_cpu:
            if not bucket.index:
                self._magnitudes.clear()  # of a backward that failed
            names = [sending.name_of(bucket, slot) for slot in range(len(bucket))]
            magnitudes = torch.stack(_magnitudes_of(bucket.views))
            self._magnitudes.append((names, magnitudes))
            flags.copy_(magnitudes * 0)
            return
        if is_finite(bucket.values):
            return
        bad = [slot for slot, view in enumerate(bucket.views) if not is_finite(view)]
        flags[bad] = 1
        self._mine += [sending.name_of(bucket, slot) for slot in bad]

    def read(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> None:
        """See :class:`~lockstep.ddp.rider.Rider`. The last bucket decides what becomes of the step.

        Raises:
            NonFiniteGradient: as :meth:`verdict`.
        """
        if bucket.flat.is_cpu:
            self._is_flagged |= bool(flags.any())
        else:
            self._unread.append(flags)
        if bucket.is_last:
            self.alone(sending)

    def alone(self, sending: BackwardState) -> None:
        """See :class:`~lockstep.ddp.rider.Rider`."""
        unread, self._unread = self._unread, []
        magnitudes, self._magnitudes = self._magnitudes, []
        if unread:
            device = unread[0].device
            self._is_flagged |= bool(torch.cat([(each != 0).to(device) for each in unread]).any())
        if self._is_flagged:
            for names, own in magnitudes:
                self._mine += [name for name, each in zip(names, own.tolist(), strict=True) if not isfinite(each)]
        sending.skipped |= self.verdict(flagged=self._is_flagged, whoami=sending.whoami)

    def inspect_rows(self, rows: Tensor, name: str) -> bool:
        """See :class:`~lockstep.ddp.sparse.RowLook`."""
        if is_finite(rows):
            return False
        self._mine.append(name)
        return True

    def note_flagged_rows(self) -> None:
        """See :class:`~lockstep.ddp.sparse.RowLook`."""
        self._is_flagged = True

    def inspect_sums(self, sums: Sequence[Sequence[Tensor | None]], names: Sequence[str]) -> None:
        """Inspect the sums of a rank's slices: each has a tensor or None for each of ``names``."""
        for each in sums:
            pairs = zip(names, each, strict=False)  # a sum holds buffers as well
            self._mine += [name for name, tensor in pairs if tensor is not None and not is_finite(tensor)]

    def verdict(self, *, flagged: bool, whoami: Callable[[], str]) -> bool:
        """**Collective.** Decide what becomes of this step. Return whether it is skipped.

        Args:
            flagged: whether any rank flagged a gradient; the same on all ranks.

        Raises:
            NonFiniteGradient: with the policy "raise", or after too many skipped steps; the same on all ranks.
        """
        mine, self._mine, self._is_flagged = self._mine, [], False
        if not flagged:
            self._skipped_in_a_row = 0
            return False
        found = {rank: names for rank, names in enumerate(all_gather_records(mine, self._group)) if names}
        what = f"{whoami()}: infinite or NaN gradients before averaging: {words_for(found)}"
        if self._policy == "raise":
            raise NonFiniteGradient(
                f"{what}. Every rank stops here, before the optimizer's step. Look at that rank's batch and loss, or "
                "lower the learning rate"
            )
        rank = dist.get_rank(self._group)
        concerned = rank in (0, *found)  # the others' warnings would be the same
        if self._policy == "warn":
            if concerned:
                callsite.warn(
                    f"{what}. The average is not finite either, on all ranks{self._buffers.words()}", RuntimeWarning
                )
            return False
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == MOST_SKIPPED:
            raise NonFiniteGradient(
                f"{what}. That was the {MOST_SKIPPED}th step in a row that was skipped, so training stops here: the "
                "parameters may hold such values already. Resume from a checkpoint, or lower the learning rate"
            )
        if rank == 0:
            note_left_out(found)
        if concerned:
            callsite.warn(
                f"{what}. No gradient is left on any rank, so the optimizer's step changes nothing"
                f"{self._buffers.words()}",
                RuntimeWarning,
            )
        return True
