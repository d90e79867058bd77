"""The rows of all ranks as one tensor that a backward goes through: for losses of the whole batch.

Note [Losses of the whole batch]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A contrastive loss is no mean over samples: it is one function L of the outputs of all samples, z_1 to z_W by rank.
Every rank gathers them, computes L, and knows the derivative of L by its own rows alone, and the parameters' gradient
is

    sum over r of  J_r^T dL/dz_r,      J_r the derivative of z_r by the parameters.

A replica takes the mean over ranks of w_r g_r, with the weights of Note [Exact mean], where a rank with more
samples weighs more: right for means over samples, wrong for L. So what a backward hands to a rank's own rows is

    (1 / w_r) sum over q of  dL_q/dz_r,

L_q being what rank q computes. The replica's mean is then the gradient of the mean of the L_q over ranks, which is that
of L where all compute the same, whatever the shares. Other terms of the same loss keep their meaning: a mean over the
rank's samples, and parameters that L uses after the rows were gathered (a temperature), of which every rank has the
whole gradient and whose weights add up to W. Where items are counted (``World.weigh``), w_r is the rank's part of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep import _torch
from lockstep.comm.exchange import all_gather_records, all_gather_tensors, carrier
from lockstep.comm.init import current_world
from lockstep.comm.waiting import wait_for
from lockstep.comm.world import World
from lockstep.errors import LockstepError
from lockstep.step import slicing, threaded
from lockstep.step.share import Items


def gathered(rows: Tensor) -> Tensor:
    """**Collective.** Return the rows of all ranks, in order of rank, for a loss that is a function of all of them.

    The backward through the result is exact, also if the ranks have different numbers of rows: the gradients that
    :func:`lockstep.replicate` averages are those of one process that computes the loss of the whole batch. Every rank
    computes the loss from the result; docs/gathered.md shows how. **Collective** in backward, too.

    Args:
        rows: this rank's rows: [samples, ...], of any floating dtype; all but the first dimension are the same on every
            rank. A rank without samples has no rows.

    Returns:
        [samples of all ranks, ...]

    Raises:
        LockstepError: ``lockstep.init()`` has not been called, or a slice is in hand, which lacks samples, or it is
            called in a forward of :class:`lockstep.DataParallel` over several devices, on several ranks.
        ValueError: the ranks' rows differ in shape, dtype or kind of device; on every rank.
        CollectiveTimeout, PeerLost: another rank is late or gone.
    """
    world = current_world()
    if world is None:
        raise LockstepError("lockstep.gathered: no world yet; call lockstep.init() first")
    if slicing.in_slice():
        raise LockstepError(
            f"rank {world.rank} of {world.world_size}: lockstep.gathered() was called inside a slice, and a loss of "
            "the whole batch can't be cut into slices: train it in a plain loop over the sharded loader, without "
            "slices="
        )
    return _Gathered.apply(rows, _kinds(rows, world), world)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class _Kinds:
    """The place and weight of this rank's rows among those of all ranks."""

    #: This rank's rows are those from ``start`` to ``stop`` (exclusive).
    start: int
    stop: int
    #: Factor of the gradient of this rank's own rows; see Note [Losses of the whole batch].
    factor: float
    #: The items counted for the batch, if any were.
    items: Items | None


@_torch.mark_untraced
def _kinds(rows: Tensor, world: World) -> _Kinds:
    """**Collective.** Compare the rows of all ranks."""
    threaded.refuse_in_replicas("lockstep.gathered()", world.group)
    share = world._in_hand.share_of_forward
    items = share if isinstance(share, Items) else None
    counts_nothing = rows.dim() == 0 or not rows.is_floating_point()
    kind = [list(rows.shape[1:]), str(rows.dtype).removeprefix("torch."), counts_nothing, rows.device.type]
    part = 1.0 if share is None else share.local_samples
    told = all_gather_records([kind, rows.shape[0] if rows.dim() else 0, part, items is not None], world.group)
    whoami = f"rank {world.rank} of {world.world_size}: lockstep.gathered()"
    if any(each[0] != told[0][0] or each[0][2] for each in told):
        shown = ", ".join(
            f"rank {rank}: [{each[1]}, *{each[0][0]}] of {each[0][1]} on {each[0][3]}" for rank, each in enumerate(told)
        )
        raise ValueError(
            f"{whoami} takes rows of floating-point numbers of the same shape, dtype and kind of device on every rank; "
            f"only their number may differ ({shown})"
        )
    if any(each[3] != told[0][3] for each in told):
        raise LockstepError(f"{whoami}: world.weigh() was called on some ranks and not on others")
    total = sum(each[2] for each in told)
    for rank, each in enumerate(told):
        if each[1] and not each[2]:
            raise LockstepError(
                f"{whoami}: rank {rank} has {each[1]} rows, but weight 0 (its share of the batch, or world.weigh(0)), "
                "so its part of the gradient would be lost: give it a weight, or no rows"
            )
    start = sum(each[1] for each in told[: world.rank])
    factor = total / (part * world.world_size) if part else 1.0
    return _Kinds(start, start + told[world.rank][1], factor, items)


class _Gathered(torch.autograd.Function):
    """The function from this rank's rows to the rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kinds: _Kinds, world: World) -> Tensor:
        ctx.kinds, ctx.world = kinds, world
        device = carrier(rows.device.type, world.group)
        parts = [part for part in all_gather_tensors(rows, world.group, device=device) if part is not None]
        return torch.cat([part.to(rows.device) for part in parts])

    @staticmethod
    @once_differentiable
    @_torch.mark_untraced
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kinds, world = ctx.kinds, ctx.world
        whoami = f"rank {world.rank} of {world.world_size}: lockstep.gathered()"
        now = world.share
        if isinstance(now, Items) and now is not kinds.items and not now.is_taken:
            raise LockstepError(
                f"{whoami}: world.weigh() was called after the rows were gathered, and they were weighted by the share "
                "known then: call it before lockstep.gathered()"
            )
        total = gradients[0].to(carrier(gradients[0].device.type, world.group), copy=True).contiguous()
        wait_for(
            lambda: dist.all_reduce(total, group=world.group), lambda: f"{whoami}, adding up gradients in backward"
        )
        own = total[kinds.start : kinds.stop].to(gradients[0].device)
        return own * kinds.factor, None, None
