"""``replicate`` and its companions: what a training script calls.

Note [Buffers]
~~~~~~~~~~~~~~
With ``broadcast_buffers`` rank 0's buffers (batch statistics, counters) replace those of the other ranks before every
forward in training mode whose backward will be averaged, as torch's DDP does, and again when that backward has ended.
So after every step all ranks hold the same buffers, and a forward in evaluation mode sends nothing: it may run on one
rank alone. Inside ``no_sync`` and under ``torch.no_grad`` nothing is sent either. (A module without buffers that makes
some in a forward has them sent before the next forward.)
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from lockstep import _torch, tracebacks
from lockstep.comm.calls import of_all_ranks
from lockstep.ddp import forward_precision
from lockstep.ddp import tracing as _tracing  # noqa: F401  (a trace sees gradients by it)
from lockstep.ddp.comm_hooks import CommHook
from lockstep.ddp.compare import why_unfit
from lockstep.ddp.in_rounds import InRounds, why_unfit_for_local_steps
from lockstep.ddp.local_steps import LocalSteps
from lockstep.ddp.members import parameters_of
from lockstep.ddp.options import CheckFinite, CompareEvery, Precision, ReplicaOptions
from lockstep.ddp.replica import Replica
from lockstep.errors import LockstepError
from lockstep.step import streams

Model = TypeVar("Model", bound=nn.Module)

#: Modules and their replicas. The replica refers to its module weakly, so both go when the module goes.
_replicas: weakref.WeakKeyDictionary[nn.Module, Replica] = weakref.WeakKeyDictionary()


@of_all_ranks("lockstep.replicate()")
def replicate(
    model: Model,
    *,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float | None = None,
    first_bucket_mb: float = 1.0,
    broadcast_buffers: bool = True,
    find_unused_parameters: bool = False,
    check_finite: CheckFinite = "step",
    gradient_as_bucket_view: bool = True,
    overlap: bool | None = None,
    init_sync: bool = True,
    sync: LocalSteps | None = None,
    compare_every: CompareEvery = "auto",
    same_batches: bool = False,
    precision: Precision | None = None,
    **unknown: NoReturn,
) -> Model:
    """**Collective.** Make ``model`` a replica: the same parameters on every rank, and the same gradients.

    The model is changed in place and returned; it is not wrapped, and the names in its ``state_dict`` stay as they are.
    From here on every backward averages the gradients over the ranks, exactly by sample if the batches come from
    :func:`lockstep.shard`. A copy or a pickle of the model is a plain model. A model without trainable parameters is
    returned as it is, compared and made equal.

    Parameters that are frozen now and unfrozen later join in at the next forward, or in the next backward where a loss
    comes by another method (all ranks must unfreeze the same).
    Parameters must not be added, replaced or converted afterwards: the next step raises an error.
    ``torch.autograd.grad``, transforms of torch.func and inner backwards send nothing. Compiled autograd is refused. A
    rank must not leave out a backward that the others run, nor run it with another batch; see Notes [Left-out
    backwards] and [Batches compared]. :func:`release` undoes it all.

    Names in ``model._ddp_params_and_buffers_to_ignore``, which torch's DDP reads, are left alone. Models whose
    parameters the ranks hold in parts (FSDP, tensor parallelism) are refused, as are those on the meta device and
    TorchScript.

    Args:
        model: any module; its parameters may span several devices and have several dtypes.
        process_group: the ranks that hold replicas; the default group if None. In a group that is not the whole world
            gradients are averaged over ranks, without the sharded loader's weights.
        bucket_cap_mb: MiB of gradients that are averaged at once; 25 if None.
        first_bucket_mb: MiB of the first bucket, small so that communication starts early.
        broadcast_buffers: send rank 0's buffers to all ranks at construction and around every training step.
        find_unused_parameters: parameters that get no gradient always work; True silences the warning that names those
            that no rank used.
        check_finite: what happens if gradients are infinite or NaN. "step": ``grad`` holds what torch's DDP would leave
            there, and if an optimizer steps with it, all ranks skip that step: parameters and the optimizer's state
            stay as they are, and a warning names rank and parameter. 100 such steps in a row are an error. On a GPU the
            step is taken, and all ranks raise NonFiniteGradient in the next backward. See Note [Averages that are not
            finite] in guard.py. "off": nothing is checked. The other values check before averaging, for which they read
            the gradients once more, also on a GPU: "warn" continues; "skip" makes every ``grad`` None on all ranks (a
            GradScaler, which skips such steps itself, refuses to step without gradients); "raise" raises
            NonFiniteGradient on all ranks.
        gradient_as_bucket_view: let every ``grad`` be a view of its bucket, which saves a copy of the gradients. The
            same memory is used again in the next step, unless you still hold the gradient (or a slice or a NumPy array
            of it): then it stays as it is, as in one process.
        overlap: average a bucket as soon as it is full, during backward. False: average all at the end, as needed for a
            graph that changes from step to step under re-entrant checkpointing. None: True, except that over a backend
            that reduces in its own memory ("shm") all gradients of a dtype are one bucket, whatever its size, that is
            averaged in place at the end; see Note [One reduction] in reducer.py.
        init_sync: send rank 0's parameters and buffers to all ranks now. If False they must be equal already.
        sync: None: average the gradients of every backward. A :class:`lockstep.LocalSteps`: let the ranks train apart
            for some steps, and average the changes of their parameters; for slow links. The statements here about
            gradients do not hold then, and the options about buckets have no effect: see docs/local_steps.md.
        compare_every: compare parameters and the state of optimizers with those of the other ranks while training,
            everything within this many averaged backwards; "auto": as often as is possible in less than 0.5 % of the
            time, and everything within 1024; None or 0: never. See Note [Replicas compared] in drift.py. A difference
            is a ReplicaMismatch on every rank, from the backward in which it is found. With None replicas may differ,
            so that a step with gradients that were never averaged is not an error either: Note [Steps without an
            average] in unaveraged.py.
        same_batches: True: all ranks train on the same batches on purpose. Otherwise a warning says so if the inputs of
            the first three steps are the same on all ranks and no sharded loader has handed them out, as with a plain
            DataLoader. There is no warning if the batch is the same in each step. See Note [A loader that nobody
            sharded] in same_batches.py.
        precision: "bf16" or "fp16": compute each forward of the model inside :class:`torch.autocast`, on the kind of
            device that its first parameter is on, and return float32 where it would return either of these.
            Parameters, gradients and the optimizer's state keep their dtype. With "fp16" call
            ``lockstep.scale_loss(loss).backward()``: small gradients would be lost in float16, and a backward from a
            loss that was not scaled is an error. A step whose gradients are infinite or NaN is left out on all ranks.
            See Notes [Autocast around forward] in forward_precision.py and [Scaled losses] in loss_scaling.py.
        unknown: no other argument is accepted; for those of torch's DDP the error says what to do instead.

    Raises:
        TypeError: an argument is unknown.
        ReplicaMismatch: on all ranks, before anything is sent, if a parameter's name, shape or dtype differs; and in a
            later backward, if the replicas' values differ.
        ValueError: an option is out of range; or, on all ranks, the model of some rank can't be a replica (lazy, sparse
            or sharded parameters, torch's SyncBatchNorm on the CPU, ...) or is one already.
        LockstepError: no process group is open.
        CollectiveTimeout, PeerLost: another rank is late or gone, here or in any later backward.
    """
    _refuse_unknown(unknown)
    options = ReplicaOptions(
        bucket_cap_mb=ReplicaOptions.bucket_cap_mb if bucket_cap_mb is None else bucket_cap_mb,
        first_bucket_mb=first_bucket_mb,
        broadcast_buffers=broadcast_buffers,
        find_unused_parameters=find_unused_parameters,
        check_finite=check_finite,
        gradient_as_bucket_view=gradient_as_bucket_view,
        overlap=overlap,
        init_sync=init_sync,
        sync=sync,
        compare_every=compare_every,
        same_batches=same_batches,
        precision=precision,
    )
    replica = attach(model, process_group, options)
    replica.announcing += (
        model.register_forward_pre_hook(_BeforeForward(replica), prepend=True, with_kwargs=True),
        model.register_forward_hook(_AfterForward(replica)),
        model.register_forward_hook(_leave_stream, always_call=True),
    )
    return model


_ONE_DEVICE = "one process drives one device: move the model to world.device first, and leave it out"
_NOTHING_TO_SAY = "what torch's class needs it for works without it: leave it out"
#: Name of an argument of torch's DistributedDataParallel that :func:`replicate` does not take -> why not.
_TORCHS = {
    "device_ids": _ONE_DEVICE,
    "output_device": _ONE_DEVICE,
    "dim": _ONE_DEVICE,
    "static_graph": _NOTHING_TO_SAY,
    "check_reduction": _NOTHING_TO_SAY,
    "delay_all_reduce_named_params": _NOTHING_TO_SAY,
    "param_to_hook_all_reduce": _NOTHING_TO_SAY,
    "skip_all_reduce_unused_params": _NOTHING_TO_SAY,
    "batched_grad_copy": _NOTHING_TO_SAY,
    "lazy_bucket_allocation": _NOTHING_TO_SAY,
    "forward_sync_buffers": "its name here is broadcast_buffers",
    "bucket_cap_mb_list": "give first_bucket_mb for the first bucket and bucket_cap_mb for the others",
    "device_mesh": "give process_group=mesh.get_group()",
    "mixed_precision": "compute in low precision with precision='bf16' or 'fp16', and average in it with "
    "lockstep.register_comm_hook(model, None, lockstep.bf16_compress_hook)",
}
#: Attribute of torch's wrapper that a replica lacks -> what to use instead.
_WRAPPERS = {
    "module": "lockstep.replicate returns the model itself, so it is its own .module: leave that out",
    "no_sync": "accumulate within lockstep.no_sync(model)",
    "join": "it is lockstep.join(model)",
    "register_comm_hook": "it is lockstep.register_comm_hook(model, state, hook)",
    "require_backward_grad_sync": "accumulate within lockstep.no_sync(model)",
    "_set_static_graph": _NOTHING_TO_SAY,
}


def _refuse_unknown(unknown: Mapping[str, object]) -> None:
    for name in unknown:
        why = _TORCHS.get(name)
        hint = "" if why is None else f", which torch's DistributedDataParallel takes: {why}"
        raise TypeError(f"lockstep.replicate has no argument {name!r}{hint}")


def _explain_wrappers(error: BaseException) -> str | None:
    """Say what to use instead of an attribute that torch's wrapper has and a replica lacks."""
    if isinstance(error, AttributeError) and isinstance(error.obj, nn.Module) and error.obj in _replicas:
        return _WRAPPERS.get(str(error.name))
    return None


tracebacks.explainers.append(_explain_wrappers)


def release(model: nn.Module) -> nn.Module:
    """Make a replica a plain module again: the inverse of :func:`replicate`.

    Its backwards then send nothing, its gradients are tensors of their own, and the memory of the buckets is freed.
    Gradients accumulated inside ``no_sync`` stay this rank's own. Call it on every rank: a rank that does not waits in
    its next backward for those that did. The module may be replicated or wrapped again afterwards.

    Args:
        model: one that :func:`replicate` returned, or a ``DistributedDataParallel``, whose forward then raises.

    Returns:
        The module itself, without the wrapper.

    Raises:
        ValueError: ``model`` is not a replica.
        LockstepError: called inside a backward.
    """
    replica = replica_of(model)
    module = replica.module
    assert module is not None  # replica_of found it by its module
    replica.release()
    forward_precision.detach(module)
    del _replicas[module]
    return module


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which gradients accumulate on each rank and nothing is sent.

    Both forward and backward belong inside. The first backward outside it averages what has accumulated together with
    its own gradients; an optimizer that steps before that is an error, on all ranks. ``model`` is one that
    :func:`replicate` returned, or a ``DistributedDataParallel``.

    Raises:
        ValueError: ``model`` is not a replica.
    """
    return replica_of(model).no_sync()


@of_all_ranks("lockstep.join()")
def join(
    *models: nn.Module | Joinable,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> AbstractContextManager[None]:
    """**Collective.** Return a context for training loops with unequal numbers of batches on the ranks.

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


@of_all_ranks("lockstep.finish_round()")
def finish_round(model: nn.Module) -> None:
    """**Collective.** End the round of local steps here, so that all ranks hold the same parameters and buffers.

    For a model that was replicated with ``sync=LocalSteps(...)``: call it before an evaluation, after the last step,
    and before you save without a Checkpointer (which calls it by itself). It returns when all ranks have called it: a
    rank that has run out of batches takes part in the rounds of the others until then. If no rank has trained since the
    last round, no parameter changes.

    Raises:
        ValueError: ``model`` is not such a replica.
        CollectiveTimeout, PeerLost: another rank is late or gone.
    """
    rounds = replica_of(model).synchroniser
    if not isinstance(rounds, InRounds):
        raise ValueError(
            f"this {type(model).__name__} averages every gradient, so it has no rounds: finish_round is for models "
            "replicated with sync=lockstep.LocalSteps()"
        )
    rounds.finish_round()


def register_comm_hook(model: nn.Module, state: Any, hook: CommHook) -> None:
    """Let ``hook(state, bucket) -> Future[Tensor]`` average the buckets; the same on every rank.

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
    replica_of(model).synchroniser.register_comm_hook(state, hook)


def attach(
    model: nn.Module,
    process_group: dist.ProcessGroup | None,
    options: ReplicaOptions,
    *,
    wrapper: nn.Module | None = None,
) -> Replica:
    """**Collective.** Make ``model`` a replica whose forward is announced by the caller.

    Args:
        wrapper: the module that announces the forward; the replica is released when it is gone. If None, hooks of the
            model announce it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, not {type(model).__name__}")
    group = _open_group(process_group)
    unfit = _why_taken(model)
    if unfit is not None:
        gc.collect()  # a wrapper that is no longer used may lie in a cycle
        unfit = _why_taken(model)
    unfit = unfit or why_unfit(
        model, group, sends_buffers=options.sends_buffers, runs_hooks=wrapper is None, stays_equal=options.compares
    )
    if options.sync is not None:
        unfit = unfit or why_unfit_for_local_steps(model)
    if options.precision is not None:
        unfit = unfit or forward_precision.why_unfit(model, options.precision)
    replica = Replica(model, group, options, unfit=unfit)
    _replicas[model] = replica
    if options.precision is not None:
        forward_precision.attach(model, options.precision, group)
    if wrapper is not None:
        weakref.finalize(wrapper, _release_unwrapped, weakref.ref(model), weakref.ref(replica)).atexit = False
    return replica


def _why_taken(model: nn.Module) -> str | None:
    if model in _replicas:
        return "this model belongs to a replica already: lockstep.release(model) makes it a plain module again"
    for module in list(_replicas):
        taken = {id(param) for _, param in parameters_of(module)}
        for name, param in parameters_of(model):
            if id(param) in taken:
                return (
                    f"'{name}' belongs to a replica already: replicate a model once, as a whole, and none of its "
                    "parts. lockstep.release makes a replica a plain module again"
                )
    return None


def _release_unwrapped(model: weakref.ref[nn.Module], replica: weakref.ref[Replica]) -> None:
    """Release a replica whose wrapper is gone. (Inside a backward it stays a replica, until the module goes.)"""
    module, attached = model(), replica()
    if module is None or attached is None or _replicas.get(module) is not attached or attached.is_in_backward:
        return
    attached.release()
    forward_precision.detach(module)
    del _replicas[module]


def replicas() -> list[Replica]:
    """Return all replicas of this process."""
    return list(_replicas.values())


def replica_of(model: nn.Module) -> Replica:
    """Return the replica that :func:`attach` made of ``model``, or of the module that it wraps.

    Raises:
        ValueError: ``model`` is not a replica.
    """
    for candidate in (model, _torch.original_of(model), getattr(model, "module", None)):
        if isinstance(candidate, nn.Module) and candidate in _replicas:
            return _replicas[candidate]
    raise ValueError(f"this {type(model).__name__} is not a replica: call lockstep.replicate(model) first")


def _open_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        raise LockstepError(
            "no process group is open, so there are no other replicas: call lockstep.init() first "
            "(or torch.distributed.init_process_group)"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the process group it passed to replicate")
    return group


def _leave_stream(module: nn.Module, *_: Any) -> None:
    """Return to the common random numbers, also after a forward that failed. In a copy it does nothing."""
    if not torch.compiler.is_exporting():
        streams.current.leave(module)


class _BeforeForward:
    """The forward pre-hook of a replica. A copy or a pickle of the module gets a hook that does nothing."""

    #: True if the hook must run once in each forward of this rank: DataParallel refuses a module that has such a hook.
    once_per_rank = True

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_exporting():  # an exported program stands for the module alone
            self._replica.before_forward(module, (args, kwargs))

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
    """Do nothing: what is left of a replica's hooks in a copy of its module."""
