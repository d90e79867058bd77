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
        listener: as for :class:`Reducer`.
    """
    sparse_ids = sparse_parameters(module)
    sparse = [i for i, param in enumerate(params) if id(param) in sparse_ids]
    dense = [i for i, param in enumerate(params) if id(param) not in sparse_ids]
    memory = _choose_memory([params[i] for i in dense], group, options)
    overlap = memory is None and options.overlap is not False
    plan = plan_buckets(
        [ParameterSpec.of(params[i]) for i in dense],
        caps=options.bucket_caps if memory is None else [_ALL],
    )
    positions = [[dense[i] for i in bucket] for bucket in plan]
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
