"""``replicate`` and its companions: what a training script calls.

Note [Buffers]
~~~~~~~~~~~~~~
With ``broadcast_buffers`` rank 0's buffers (batch statistics, counters) replace those of the other ranks before every
forward in training mode whose backward will be averaged, as torch's DDP does, and again when that backward has ended.
So after every step all ranks hold the same buffers, and a forward in evaluation mode sends nothing: it may run on one
rank alone. Inside ``no_sync`` and under ``torch.no_grad`` nothing is sent either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from lockstep.ddp.compress import CommHook
from lockstep.ddp.options import CheckFinite, ReplicaOptions
from lockstep.ddp.replica import Replica
from lockstep.errors import LockstepError

Model = TypeVar("Model", bound=nn.Module)

#: Modules and their replicas. The replica refers to its module weakly, so both go when the module goes.
_replicas: weakref.WeakKeyDictionary[nn.Module, Replica] = weakref.WeakKeyDictionary()


def replicate(
    model: Model,
    *,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float | None = None,
    first_bucket_mb: float = 1.0,
    broadcast_buffers: bool = True,
    find_unused_parameters: bool = False,
    check_finite: CheckFinite = "off",
    gradient_as_bucket_view: bool = True,
    overlap: bool | None = None,
    init_sync: bool = True,
) -> Model:
    """**Collective.** Make ``model`` a replica: the same parameters on every rank, and the same gradients.

    The model is changed in place and returned; it is not wrapped, and the names in its ``state_dict`` stay as they are.
    From here on every backward averages the gradients over the ranks, exactly by sample if the batches come from
    :func:`lockstep.shard`. A copy or a pickle of the model is a plain model. A model without trainable parameters is
    returned as it is, compared and made equal.

    Parameters that are frozen now and unfrozen later join in at the next forward (all ranks must unfreeze the same).
    Parameters must not be added, replaced or converted afterwards: the next step says so. ``torch.autograd.grad``,
    transforms of torch.func and inner backwards send nothing. Compiled autograd is refused.

    Args:
        model: any module; its parameters may span several devices and have several dtypes.
        process_group: the ranks that hold replicas; the default group if None. In a group that is not the whole world
            gradients are averaged over ranks, without the sharded loader's weights.
        bucket_cap_mb: MiB of gradients that are averaged at once; 25 if None.
        first_bucket_mb: MiB of the first bucket, small so that communication starts early.
        broadcast_buffers: send rank 0's buffers to all ranks at construction and around every training step.
        find_unused_parameters: parameters that get no gradient always work; True says that they are expected and
            ends the warning that names those that no rank used.
        check_finite: what happens if a rank holds an infinite or NaN gradient before it is averaged: nothing ("off",
            free), a warning that names rank and parameter ("warn"), the same and every ``grad`` is None on all ranks,
            so that the optimizer's step changes nothing ("skip"; 100 such steps in a row are an error), or
            NonFiniteGradient on all ranks ("raise"). The last three read the gradients once more, and wait for the
            device. A GradScaler skips such steps itself, and refuses to step without gradients: "skip" is not for it.
        gradient_as_bucket_view: let every ``grad`` be a view of its bucket, which saves a copy of the gradients. The
            same memory is used again in the next step.
        overlap: average a bucket as soon as it is full, while backward goes on. False: all at the end, which a graph
            that changes from step to step under re-entrant checkpointing needs. None: True, but over a backend that
            reduces in its own memory ("shm") everything is one bucket for each dtype, whatever its size, that is
            averaged in place at the end; see Note [One reduction] in reducer.py.
        init_sync: send rank 0's parameters and buffers to all ranks now. If False they must be equal already.

    Raises:
        ReplicaMismatch: on all ranks, before anything is sent, if a parameter's name, shape or dtype differs.
        ValueError: an option is out of range, the model has lazy or sparse parameters or torch's SyncBatchNorm on the
            CPU, or is a replica already.
        LockstepError: no process group is open.
        CollectiveTimeout, PeerLost: another rank is late or gone, here or in any later backward.
    """
    options = ReplicaOptions(
        bucket_cap_mb=25.0 if bucket_cap_mb is None else bucket_cap_mb,
        first_bucket_mb=first_bucket_mb,
        broadcast_buffers=broadcast_buffers,
        find_unused_parameters=find_unused_parameters,
        check_finite=check_finite,
        gradient_as_bucket_view=gradient_as_bucket_view,
        overlap=overlap,
        init_sync=init_sync,
    )
    replica = attach(model, process_group, options)
    model.register_forward_pre_hook(_BeforeForward(replica), prepend=True)
    model.register_forward_hook(_AfterForward(replica))
    return model


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """**Local.** A context in which gradients accumulate on each rank and nothing is sent.

    Both forward and backward belong inside. The first backward outside it averages what has accumulated together with
    its own gradients. ``model`` is one that :func:`replicate` returned, or a ``DistributedDataParallel``.

    Raises:
        ValueError: ``model`` is not a replica.
    """
    return replica_of(model).no_sync()


def join(
    *models: nn.Module | Joinable,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> AbstractContextManager[None]:
    """**Collective.** A context for training loops with unequal numbers of batches on the ranks.

    A rank that has left the loop answers the collectives of the others until all have left it; then all take the
    parameters of a rank that trained to the end. (Batches from :func:`lockstep.shard` are never uneven in number.)

    Args:
        models: replicas, and other :class:`torch.distributed.algorithms.Joinable` such as ZeroRedundancyOptimizer.
        divide_by_initial_world_size: divide the sum of gradients by the world size, so that a missing rank counts as
            zeros; False divides by the number of ranks that still have data.
        enable: False makes the context do nothing.
        throw_on_early_termination: raise RuntimeError on all ranks as soon as one has run out of data.

    Raises:
        ValueError: a model is not a replica.
    """
    joinables = [model if isinstance(model, Joinable) else replica_of(model) for model in models]
    return Join(
        joinables,
        enable=enable,
        throw_on_early_termination=throw_on_early_termination,
        divide_by_initial_world_size=divide_by_initial_world_size,
    )


def register_comm_hook(model: nn.Module, state: Any, hook: CommHook) -> None:
    """**Local.** Let ``hook(state, bucket) -> Future[Tensor]`` average the buckets; the same on every rank.

    Hooks written for torch's DDP work. The hook gets gradients that are not yet divided by the world size (they are
    multiplied by the batch's weight, see Note [Exact mean]). Register it before the first backward.

    Args:
        model: a replica.
        state: handed to the hook; for lockstep's and torch's own hooks a process group, or None for the default one.
        hook: for instance ``lockstep.bf16_compress_hook``.

    Raises:
        TypeError: ``hook`` is not callable.
        LockstepError: a hook is registered already.
    """
    replica_of(model).register_comm_hook(state, hook)


def attach(model: nn.Module, process_group: dist.ProcessGroup | None, options: ReplicaOptions) -> Replica:
    """**Collective.** Make ``model`` a replica whose forward is announced by the caller."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, not {type(model).__name__}")
    group = _open_group(process_group)
    for other in list(_replicas.values()):
        for name, param in model.named_parameters():
            if other.manages(param):
                raise ValueError(
                    f"'{name}' belongs to a replica already: replicate a model once, as a whole, and none of its parts"
                )
    if model in _replicas:
        raise ValueError("this model is a replica already")
    _refuse_gpu_only_layers(model)
    replica = Replica(model, group, options)
    _replicas[model] = replica
    return replica


def replica_of(model: nn.Module) -> Replica:
    """**Local.** The replica that :func:`attach` made of ``model``, or of the module that it wraps.

    Raises:
        ValueError: ``model`` is not a replica.
    """
    for candidate in (model, getattr(model, "_orig_mod", None), getattr(model, "module", None)):
        # "_orig_mod" is what torch.compile calls the module that it wraps.
        if isinstance(candidate, nn.Module) and candidate in _replicas:
            return _replicas[candidate]
    raise ValueError(f"this {type(model).__name__} is not a replica: call lockstep.replicate(model) first")


def _refuse_gpu_only_layers(model: nn.Module) -> None:
    """torch's SyncBatchNorm would fail in the first training forward, in words that name neither layer nor remedy."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.training:
            tensors = [tensor for tensor in (layer.weight, layer.running_mean) if tensor is not None]
            if any(tensor.device.type == "cpu" for tensor in tensors):
                raise ValueError(
                    f"'{name}' is a torch.nn.SyncBatchNorm on the CPU, and torch's works on GPUs only: call "
                    "lockstep.convert_sync_batchnorm(model) before, whose layers work on both"
                )


def _open_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        raise LockstepError(
            "no process group is open, so there is nobody to be a replica of: call lockstep.init() first "
            "(or torch.distributed.init_process_group)"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the process group it passed to replicate")
    return group


class _BeforeForward:
    """The forward pre-hook of a replica. A copy or a pickle of the module gets a hook that does nothing."""

    #: It stands for a forward of this rank, so it must run once in each: DataParallel refuses a module that has it.
    once_per_rank = True

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def __call__(self, module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_exporting():  # an exported program stands for the module alone
            self._replica.before_forward(module)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inert_hook, ()


class _AfterForward:
    """The forward hook of a replica. A copy or a pickle of the module gets a hook that does nothing."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def __call__(self, module: nn.Module, _: Any, output: Any) -> None:
        del module
        if not torch.compiler.is_exporting():
            self._replica.after_forward(output)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inert_hook, ()


def _inert_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """What is left of a replica's hooks in a copy of its module."""
