"""A replica's part in steps in slices: its work from a step's beginning to its end, if it can take part."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import nn

from lockstep.ddp.buffers import ReplicaTensors
from lockstep.ddp.checks import GradientChecks
from lockstep.ddp.hooks import Forward
from lockstep.ddp.members import parameters_of
from lockstep.ddp.reducer import Reducer
from lockstep.ddp.sliced import SlicedGradients
from lockstep.ddp.synchroniser import Synchroniser
from lockstep.errors import LockstepError
from lockstep.step import slicing


class Sliceable(Protocol):
    """The interface of a replica that a step in slices needs."""

    reducer: Reducer
    checks: GradientChecks
    tensors: ReplicaTensors

    @property
    def group(self) -> dist.ProcessGroup: ...

    @property
    def synchroniser(self) -> Synchroniser: ...

    @property
    def is_in_backward(self) -> bool: ...

    def whoami(self) -> str: ...

    def lay_out_if_unfrozen(self, module: nn.Module) -> None: ...

    def backward_dies(self) -> None: ...


class SliceMember:
    """Takes part in steps in slices for one replica; see Note [What becomes of a slice] in ``sliced.py``.

    Args:
        replica: the replica whose gradients are added up.
    """

    def __init__(self, replica: Sliceable) -> None:
        self._replica = replica
        self._gradients: SlicedGradients | None = None
        #: The error that says why the replica can't take part in the step in hand, if so.
        self._unfit: LockstepError | None = None
        #: Number of forwards in the slice in hand.
        self._forwards = 0
        #: This member's number among all that take part in steps in slices; the same on all ranks.
        self.number = slicing.join(self)

    def close(self) -> None:
        """Stop taking part."""
        slicing.leave(self.number)

    def turn_to_new_layout(self) -> None:
        """Begin anew with the next step: the replica trains other parameters."""
        self._gradients = None

    @property
    def has_trained(self) -> bool:
        """Return whether a step in slices has begun with these parameters."""
        return self._gradients is not None

    # In a slice -----------------------------------------------------------------------------------------------------

    def forward_begins(self, *, trains: bool) -> Forward:
        """Return the state of a forward in a slice."""
        if trains and self._unfit is not None:
            raise self._unfit
        self._forwards += 1
        return forward_in_slice()

    def backward_begins(self, *, unannounced: bool) -> None:
        """Make way for the gradients of a backward in a slice."""
        if self._unfit is not None:
            raise self._unfit
        if self._gradients is not None:
            self._gradients.backward_begins(unannounced=unannounced)

    # See slicing.Member ---------------------------------------------------------------------------------------------

    def step_begins(self, step: slicing.SlicedStep) -> None:
        """See :class:`~lockstep.step.slicing.Member`."""
        replica, module = self._replica, self._replica.tensors.module()
        replica.lay_out_if_unfrozen(module)
        # A replica that can't take part is no error as long as the step does not train it.
        why = self._why_not(module) if self._gradients is None else ""
        self._unfit = LockstepError(f"{replica.whoami()}: this model can't train in slices: {why}") if why else None
        if self._unfit is not None:
            return
        if self._gradients is None:
            # Names include those of parameters that have been frozen since.
            named = {id(param): name for name, param in parameters_of(module)}
            params = replica.reducer.params
            names = [named.get(id(param), "") for param in params]
            self._gradients = SlicedGradients(params, names, group=replica.group, finite=replica.checks.finite)
        self._gradients.begin(module, step, replica.tensors.buffers())

    def slice_ends(self, step: slicing.SlicedStep, number: int) -> None:
        """See :class:`~lockstep.step.slicing.Member`."""
        if self._unfit is not None:
            return
        assert self._gradients is not None  # the step has begun
        module = self._replica.tensors.module()
        forwards, self._forwards = self._forwards, 0
        buffers = self._replica.tensors.buffers()
        has_gradient = self._gradients.take(step, number, module, buffers, forwards=forwards)
        self._replica.reducer.forget_accumulated()
        if has_gradient or self._gradients.has_cleared or (forwards and module.training) or self.number in step.said:
            step.touch(self.number, self._gradients.say())

    def step_ends(self, step: slicing.SlicedStep) -> None:
        """See :class:`~lockstep.step.slicing.Member`."""
        assert self._gradients is not None  # the step has begun
        self._gradients.end(step, step.says[self.number])
        self._replica.checks.sliced_step_ended(step)

    def forget(self) -> None:
        """See :class:`~lockstep.step.slicing.Member`."""
        if self._replica.is_in_backward:
            self._replica.backward_dies()
        self._forwards = 0
        self._replica.reducer.forget_accumulated()
        if self._gradients is not None:
            self._gradients.forget()

    def _why_not(self, module: nn.Module) -> str:
        """Return the reason against slices; empty: there is none."""
        reducer = self._replica.reducer
        for name, part in module.named_modules():
            if type(part).__name__ == "SyncBatchNorm":
                return (
                    f"'{name}' is a SyncBatchNorm, which waits for all ranks in every forward, and the ranks have "
                    "different numbers of slices: use a plain batch norm, whose statistics are those of a slice on "
                    "any number of ranks"
                )
        if reducer.hook_name():
            return f"a comm hook ({reducer.hook_name()}) averages its gradients, and slices are added up in order"
        if reducer.sparse:
            return "it has sparse gradients, and slices add up dense ones: make its embeddings with sparse=False"
        return self._replica.synchroniser.why_not_in_slices()


def forward_in_slice() -> Forward:
    """Return the state of a forward in a slice: its gradients are averaged at the end of the step."""
    return Forward(sync=False, weight=1.0, sends_buffers=False, slice=slicing.here())


def of_other_slice(whoami: str) -> LockstepError:
    """Return the error for a backward through a forward that is not of the slice in hand."""
    return LockstepError(
        f"{whoami}: this backward comes through a forward of another slice, or of none, or of a step that is over, so "
        "its gradients would not be averaged: call backward inside the slice whose loss it is"
    )
