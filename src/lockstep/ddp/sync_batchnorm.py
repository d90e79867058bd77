"""Batch normalisation over the batch of all ranks, on CPUs and GPUs alike.

Note [Synchronised statistics]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank knows, for each channel, how many values it has (n_r), their mean m_r and the sum of their squared deviations
M_r. Over all ranks, with n the sum of the n_r,

    m = sum of n_r m_r / n        M = sum of M_r + sum of n_r (m_r - m)^2

(T. F. Chan, G. H. Golub and R. J. LeVeque, "Algorithms for computing the sample variance", The American Statistician
37, 1983). No squares of large numbers are subtracted from each other, as they are in E[x^2] - E[x]^2. Every rank
gathers the same triples and adds them up in the order of the ranks, in double precision, so all ranks hold the same
bits. A rank without samples adds n_r = 0.

Backward: with the gradient G of the *global* loss for each output, x^ the normalised input and s the scale, the input's
gradient is

    s (G - mean(G) - x^ mean(G x^)),        means over the n values of all ranks.

A rank has the gradient g of its own loss, and G = w_r g / W with the weight w_r of Note [Exact mean], by which the
replica multiplies later whatever comes out of this rank's backward. So the sums are taken of w_r g over all
ranks, and this rank's part is divided by w_r again. With equal shares w_r = 1. The replica takes the gradients of scale
and offset as it takes every other parameter's: they stay this rank's own sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep import _torch
from lockstep.comm.exchange import issue_gather
from lockstep.comm.init import current_world
from lockstep.comm.waiting import wait_for
from lockstep.step import threaded
from lockstep.step.share import BatchesInHand, Items

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm
else:
    _BatchNorm = _torch.batch_norm()

Module = TypeVar("Module", bound=nn.Module)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose training statistics are those of the global batch.

    **Collective** in training: one exchange of 2 C + 1 float64 numbers in forward and one of 2 C in backward, for C
    channels. Sends nothing in evaluation, and where no process group is open. Takes inputs [batch, C, ...] of any
    floating dtype, statistics in float32 or better. N ranks train the same model as one process with
    ``torch.nn.BatchNorm2d`` and the global batch, also when the ranks' shares are unequal or empty (Note [Synchronised
    statistics]), and the running statistics come out the same on every rank.

    In a :class:`lockstep.DataParallel` over several devices the replicas are threads. On one rank each of them uses its
    own statistics there; on several ranks that is an error.

    The names in its ``state_dict`` are those of torch's batch norms. Second derivatives are refused.

    Args:
        num_features: channels of the input, C.
        eps, momentum, affine, track_running_stats, device, dtype: as in ``torch.nn.BatchNorm2d``.
        process_group: the ranks that share statistics; the default group if None.

    Raises:
        ValueError: the input is not [batch, C, ...], or all ranks together have no more than one value per channel.
        LockstepError: there are several ranks, and it trains in a DataParallel over several devices.
        CollectiveTimeout, PeerLost: another rank is late or gone, in forward or in backward.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:  # torch's name for it
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm: expected [batch, {self.num_features}, ...], got {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Return [batch, C, ...] normalised, of the same shape and dtype."""
        group = self._group()
        if not self.training or group is None:
            return super().forward(input)
        self._check_input_dim(input)
        return self._synchronised(input, group)

    def _group(self) -> dist.ProcessGroup | None:
        return self.process_group or (dist.group.WORLD if dist.is_initialized() else None)

    @_torch.mark_untraced
    def _synchronised(self, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        threaded.refuse_in_replicas("a SyncBatchNorm in training", group)
        whoami = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}: SyncBatchNorm"
        statistics = _gather_statistics(input.detach(), group, whoami)
        # More than one value here is more than one in all; only otherwise is it worth waiting for the device.
        if input.numel() <= input.shape[1] and statistics.count <= 1:
            raise ValueError(
                f"{whoami}: expected more than 1 value per channel when training, got {int(statistics.count)} on all "
                f"ranks together (input of this rank: {list(input.shape)})"
            )
        self._track(statistics)
        normalised: Tensor = _SynchronisedNorm.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, statistics, self.eps, _exchange(group, whoami)
        )
        return normalised

    @torch.no_grad()
    def _track(self, statistics: _Statistics) -> None:
        if self.num_batches_tracked is None or self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)
        step = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        count = statistics.count
        unbiased = statistics.variance * (count / (count - 1))
        for running, new in ((self.running_mean, statistics.mean), (self.running_var, unbiased)):
            running.copy_(torch.lerp(running.double(), new, step))


def convert_sync_batchnorm(module: Module, process_group: dist.ProcessGroup | None = None) -> Module | SyncBatchNorm:
    """Replace every batch norm in ``module`` (torch's SyncBatchNorm included) by a :class:`SyncBatchNorm`.

    Parameters, buffers and switches (training, ``requires_grad``) are taken over as they are, so an optimizer that
    holds the parameters still does. Convert before :func:`lockstep.replicate`.

    Args:
        module: any module; changed in place, unless it is a batch norm itself.
        process_group: the ranks that share statistics; the default group if None.

    Returns:
        ``module``, or its replacement if it is a batch norm itself.

    Raises:
        ValueError: a batch norm in it is lazy and does not know its channels yet.
    """
    replaced: Module | SyncBatchNorm = _replace(module, process_group, {})
    return replaced


def _replace(module: Any, group: dist.ProcessGroup | None, done: dict[nn.Module, nn.Module]) -> Any:
    """Replace one module; ``done`` holds the new module of each old one, which may occur several times."""
    if module in done:
        return done[module]
    batch_norm = isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)
    done[module] = _converted(module, group) if batch_norm else module
    if not batch_norm:
        for name, child in list(module._modules.items()):  # named_children() leaves out repetitions
            if child is not None:
                module._modules[name] = _replace(child, group, done)
    return done[module]


def _converted(norm: _BatchNorm, process_group: dist.ProcessGroup | None) -> SyncBatchNorm:
    if any(nn.parameter.is_lazy(each) for each in (norm.weight, norm.running_mean) if each is not None):
        raise ValueError(
            f"a {type(norm).__name__} does not know its channels yet: pass a batch through the model first, then "
            "call convert_sync_batchnorm"
        )
    synced = SyncBatchNorm(
        norm.num_features,
        norm.eps,
        norm.momentum,
        norm.affine,
        norm.track_running_stats,
        process_group,
        device="meta",  # everything is replaced below
    )
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(synced, name, getattr(norm, name))
    return synced.train(norm.training)


@dataclass(frozen=True)
class _Statistics:
    """The statistics of the values of all ranks."""

    #: Number of values per channel: float64 [1], on the input's device.
    count: Tensor
    #: Mean of each channel: float64 [C], on the input's device.
    mean: Tensor
    #: Variance of each channel: float64 [C], divided by ``count`` (biased).
    variance: Tensor


@dataclass(frozen=True)
class _Exchange:
    """The group and weights with which backward exchanges sums."""

    group: dist.ProcessGroup
    #: This rank's weight; see Note [Exact mean].
    weight: float
    #: The items counted before the forward, and the source of later ones; see Note [Counted items].
    items: Items | None
    in_hand: BatchesInHand | None
    whoami: str

    def weight_now(self) -> float:
        """Return the weight, or the number of items counted in this backward; only their proportion matters."""
        items = None if self.in_hand is None else self.in_hand.items_for(self.items)
        return self.weight if items is None else float(items.count)


def _exchange(group: dist.ProcessGroup, whoami: str) -> _Exchange:
    world = current_world()
    in_hand = None if world is None else world._in_hand
    items = None if in_hand is None else in_hand.items
    weight = 1.0
    if in_hand is not None and world is not None and world.world_size == dist.get_world_size(group):
        weight = in_hand.weight_of_forward
    return _Exchange(group, weight, items, in_hand, whoami)


def _gather_statistics(values: Tensor, group: dist.ProcessGroup, whoami: str) -> _Statistics:
    """**Collective.** Return the statistics of all ranks; see Note [Synchronised statistics]."""
    channels = values.shape[1]
    own = _own_moments(values)
    table = own.new_empty(dist.get_world_size(group), len(own))
    wait_for(lambda: issue_gather(table, own, group).wait(), lambda: f"{whoami}, gathering statistics")
    counts, means, squares = table[:, :1], table[:, 1 : channels + 1], table[:, channels + 1 :]
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    variance = (squares + counts * (means - mean).square()).sum(0) / count
    return _Statistics(count, mean, variance)


def _own_moments(values: Tensor) -> Tensor:
    """Return this rank's count, means and sums of squared deviations, in one tensor: float64 [1 + 2 C]."""
    channels = values.shape[1]
    count = values.numel() // channels if channels else 0
    result = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=values.device)
    if count == 0:
        return result
    values = values.to(_precision(values.dtype))
    dims = _dims(values)
    rough = values.mean(dims)
    centred = values - _as_channels(rough, values)
    # The rounding error of the mean is removed: the corrected two-pass algorithm of the same authors.
    rest = centred.sum(dims).double()
    result[0] = count
    result[1 : channels + 1] = rough.double() + rest / count
    result[channels + 1 :] = centred.square().sum(dims).double() - rest.square() / count
    return result


class _SynchronisedNorm(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, where mean and variance depend on every rank's x."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: _Statistics,
        eps: float,
        exchange: _Exchange,
    ) -> Tensor:
        precision = _precision(values.dtype)
        mean, variance = statistics.mean.to(precision), statistics.variance.to(precision)
        scale = (statistics.variance + eps).rsqrt().to(precision)
        ctx.save_for_backward(values, weight, mean, scale, statistics.count)
        ctx.exchange = exchange
        if not values.numel():
            return values.clone()
        in_precision = [None if each is None else each.to(precision) for each in (weight, bias)]
        return torch.batch_norm(
            values.to(precision), in_precision[0], in_precision[1], mean, variance, False, 0.0, eps, False
        ).to(values.dtype)

    @staticmethod
    @once_differentiable
    @_torch.mark_untraced
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, mean, scale, count = ctx.saved_tensors
        gradient = gradients[0].to(scale.dtype)
        dims = _dims(values)
        normalised = (values.to(scale.dtype) - _as_channels(mean, values)) * _as_channels(scale, values)
        sums = torch.stack([gradient.sum(dims), (gradient * normalised).sum(dims)])
        # This runs on every rank, also if the input needs no gradient here: the others wait for this rank's sums.
        offset, slope = _means_over_ranks(sums, count, ctx.exchange)
        scale = scale if weight is None else scale * weight.to(scale.dtype)
        through = gradient - _as_channels(offset, values) - normalised * _as_channels(slope, values)
        to_values = (through * _as_channels(scale, values)).to(values.dtype)
        to_weight, to_bias = (None, None) if weight is None else (sums[1].to(weight.dtype), sums[0].to(weight.dtype))
        return to_values, to_weight, to_bias, None, None, None


def _means_over_ranks(sums: Tensor, count: Tensor, exchange: _Exchange) -> Tensor:
    """**Collective.** Return [2, C]: this rank's sums, averaged over the values of all ranks."""
    # A rank without samples counts for nothing, and 0 * NaN would be NaN.
    weight = exchange.weight_now()
    total = sums.double() * weight if weight else torch.zeros_like(sums, dtype=torch.float64)
    wait_for(
        lambda: dist.all_reduce(total, group=exchange.group),
        lambda: f"{exchange.whoami}, adding up gradients in backward",
    )
    return (total / (count * weight if weight else count)).to(sums.dtype)


def _precision(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _dims(values: Tensor) -> list[int]:
    return [0, *range(2, values.dim())]


def _as_channels(row: Tensor, like: Tensor) -> Tensor:
    """View [C] as [1, C, 1, ...]."""
    return row.view(1, -1, *[1] * (like.dim() - 2))
