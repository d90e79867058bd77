"""The errors for what a replica refuses, with remedies; the conditions are checked where they are raised."""

from __future__ import annotations

from torch import nn

from lockstep.ddp.hooks import Forward
from lockstep.errors import LockstepError


def was_released(whoami: str, module: nn.Module) -> LockstepError:
    """Return the error for a module that is used through the wrapper that it was released from."""
    return LockstepError(
        f"{whoami}: this {type(module).__name__} was released: lockstep.release "
        "has undone its wrapper. Train the module itself, or wrap it again"
    )


def is_wrapped(whoami: str, module: nn.Module, ddp: nn.Module | None) -> LockstepError | None:
    """Return the error for a replica inside one of torch's wrappers; None if it is not inside.

    Args:
        whoami: a description of this rank.
        module: the replica's module.
        ddp: the DistributedDataParallel whose forward is under way, maybe another module's; None: it is a DataParallel.
    """
    if ddp is not None and not any(part is module for part in ddp.modules()):
        return None
    wrapper = "DataParallel" if ddp is None else "DistributedDataParallel"
    return LockstepError(
        f"{whoami}: this {type(module).__name__} is a replica of lockstep's inside torch's {wrapper}, "
        "and both would average its gradients, which is not exact and twice the work: leave one of them out. "
        "lockstep.release(model) makes a plain module again, and lockstep.DistributedDataParallel has the "
        "interface of torch's"
    )


def in_compiled_autograd(whoami: str) -> LockstepError:
    """Return the error for a backward that compiled autograd runs."""
    return LockstepError(
        f"{whoami}: compiled autograd runs this backward, and it does not tell "
        "when a backward has ended, so the gradients would not be averaged: switch it off "
        "(torch._dynamo.config.compiled_autograd, torch._dynamo.compiled_autograd). torch.compile compiles "
        "the backward of what it compiles without it"
    )


def weighed_apart(whoami: str) -> LockstepError:
    """Return the error for a backward through forwards that were weighed by different items."""
    return LockstepError(
        f"{whoami}: one backward goes through forwards that were weighed apart (World.weigh), so no "
        "one number of items makes their mean exact: call backward once for each (inside lockstep.no_sync for "
        "all but the last)"
    )


def with_other_shares(whoami: str, one: Forward, other: Forward) -> LockstepError:
    """Return the error for a backward through forwards of unequal weights."""
    return LockstepError(
        f"{whoami}: one backward goes through forwards of batches with "
        f"different shares (weights {one.weight:g} and {other.weight:g}), so no mean of them is exact: "
        "call backward once for each batch (inside lockstep.no_sync for all but the last)"
    )


def traces_backward() -> LockstepError:
    """Return the error for a torch setting that leaves out the backward of a replica."""
    return LockstepError(
        "torch._dynamo.config.trace_autograd_ops is on: torch then silently leaves out the backward of a compiled "
        "step whose forward it could not trace as one graph, and it can't trace a replica's: switch it off. The "
        "step's parts are compiled all the same"
    )


def not_in_slices(whoami: str, reason: str) -> LockstepError:
    """Return the error for a step in slices through a replica that can't take part."""
    return LockstepError(f"{whoami}: a step in slices has been through a replica that can't take part: {reason}")


def unfrozen_in_step(whoami: str) -> LockstepError:
    """Return the error for parameters that are unfrozen inside a step in slices."""
    return LockstepError(
        f"{whoami}: parameters that were frozen when the step began are trained in one of its slices, which all ranks "
        "have to agree on: unfreeze parameters between steps"
    )


def thawed_too_late(whoami: str, name: str) -> LockstepError:
    """Return the error for a parameter that is trained by a backward that has begun while it was frozen."""
    return LockstepError(
        f"{whoami}: parameter '{name}' was frozen in the forward of this backward, and has got a gradient in it, which "
        "can't be averaged any more: unfreeze parameters between steps, before the first forward of a step"
    )
