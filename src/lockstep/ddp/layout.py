"""The layout of one replica's gradients for averaging: buckets for the dense ones, a slot for each sparse one."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from lockstep.comm.memory import InPlaceMemory, in_place_memory
from lockstep.ddp.absent import AbsentGradients
from lockstep.ddp.bucket import Bucket, ParameterSpec, plan_buckets
from lockstep.ddp.checks import GradientChecks
from lockstep.ddp.hooks import BackwardListener
from lockstep.ddp.options import ReplicaOptions
from lockstep.ddp.reducer import Reducer
from lockstep.ddp.sparse import SparseSlot

#: A bucket's cap that no model reaches.
_ALL = 1 << 62


def lay_out(
    module: nn.Module,
    params: list[Parameter],
    names: list[str],
    *,
    group: dist.ProcessGroup,
    options: ReplicaOptions,
    checks: GradientChecks,
    batches: bool,
    order: Sequence[int] | None = None,
    listener: BackwardListener,
) -> Reducer:
    """Return the reducer that averages the gradients of ``params``.

    Args:
        module: the module that owns the parameters.
        params: the parameters that are trained.
        names: the parameters' names.
        group: the ranks that hold replicas.
        options: the replica's options.
        checks: the checks that look at the gradients on the way.
        batches: whether the ranks have batches that they can compare.
        order: the positions of the parameters in the order in which their gradients come; None: it is not known.
        listener: as for :class:`Reducer`.
    """
    sparse_ids = sparse_parameters(module)
    sparse = [i for i, param in enumerate(params) if id(param) in sparse_ids]
    dense = [i for i, param in enumerate(params) if id(param) not in sparse_ids]
    memory = _choose_memory([params[i] for i in dense], group, options)
    overlap = memory is None and options.overlap is not False
    positions = cut(params, dense, caps=options.bucket_caps if memory is None else [_ALL], order=order)
    riders = checks.riders(params[positions[-1][0]] if positions else None, batches=batches)
    return Reducer(
        params,
        names,
        buckets=[
            Bucket(
                index,
                chosen,
                [params[i] for i in chosen],
                widths=[rider.width(len(chosen), is_last=chosen is positions[-1]) for rider in riders],
                is_last=chosen is positions[-1],
                memory=memory,
                looks=checks.looks_at_sums,
            )
            for index, chosen in enumerate(positions)
        ],
        sparse=[SparseSlot(i, params[i], names[i], group, checks.in_sums) for i in sparse],
        group=group,
        as_view=options.gradient_as_bucket_view,
        overlap=overlap,
        riders=riders,
        absent=AbsentGradients(params) if overlap and len(positions) > 1 else None,
        listener=listener,
    )


def cut(
    params: Sequence[Parameter], chosen: Sequence[int], *, caps: Sequence[int], order: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the positions of the parameters of each bucket; see :func:`~lockstep.ddp.bucket.plan_buckets`.

    Args:
        params: the parameters.
        chosen: the positions of those that are to be in buckets.
        caps: as for ``plan_buckets``.
        order: all positions in the order in which their gradients come; None: from the last.
    """
    index = {position: i for i, position in enumerate(chosen)}
    by_index = None if order is None else [index[position] for position in order if position in index]
    plan = plan_buckets([ParameterSpec.of(params[i]) for i in chosen], caps=caps, order=by_index)
    return [[chosen[i] for i in bucket] for bucket in plan]


def sparse_parameters(module: nn.Module) -> set[int]:
    """Return the ids of the parameters whose gradients will be sparse."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    return {id(part.weight) for part in module.modules() if isinstance(part, embeddings) and part.sparse}


def _choose_memory(
    params: Sequence[Parameter], group: dist.ProcessGroup, options: ReplicaOptions
) -> InPlaceMemory | None:
    """Return the group's own memory if all gradients are reduced at once at the end; see Note [One reduction]."""
    if options.overlap is True or any(param.device != params[0].device for param in params):
        return None
    return in_place_memory(group, params[0].device) if params else None
