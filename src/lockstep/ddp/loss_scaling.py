"""Losses that are scaled before backward, and gradients that are not: what ``precision="fp16"`` does besides autocast.

Note [Scaled losses]
~~~~~~~~~~~~~~~~~~~~
``lockstep.scale_loss(loss).backward()`` multiplies the loss by the scale of Note [Loss scale] (``step/loss_scale.py``).
Each parameter divides the gradient that reaches it by the same factor, in a hook that runs before the gradient is added
to ``grad``. So no gradient that anybody can see is scaled: not what accumulates inside ``no_sync`` or in a slice, not
what is averaged, clipped, compared or logged. Factors are powers of two, so this changes no digit, and it does not
matter whether the ranks have the same one.

The script scales its loss in so many words. A factor that was put in at the outputs of the model's forward would need
no word, and be wrong in silence: for a term of the loss that does not come through the outputs (a penalty on the
parameters), whose gradient would be divided and never was multiplied, and for what lies before the model (another
model, an input whose gradient is asked for), whose gradients would be multiplied and never divided. A backward that was
not scaled is an error at the first gradient.

Whether a step is left out is decided in front of the optimizer's step. Averaged gradients are the same on all ranks, so
all decide alike, and nothing is sent. Only for parameters that the replica does not average
(``_ddp_params_and_buffers_to_ignore``) do the ranks tell each other what they have found. Ranks of which each steps
with gradients of its own, as ``compare_every=None`` lets them, decide each for itself.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lockstep import _torch
from lockstep.comm.exchange import all_gather_records
from lockstep.ddp.finite import are_sound, dense_grads, is_finite, magnitude
from lockstep.ddp.members import parameters_of
from lockstep.ddp.parameters import may_be_trained, thawed
from lockstep.errors import LockstepError, NonFiniteGradient
from lockstep.job import flight, notes
from lockstep.step import loss_scale as scales
from lockstep.step.loss_scale import DynamicScale
from lockstep.step.stepping import alert, leave_out, params_of, quiet, watch_steps
from lockstep.text import counted, listed

_queue_callback = _torch.queue_callback()


@_torch.mark_untraced
def scale_loss(loss: Tensor) -> Tensor:
    """Return ``loss`` times the loss scale, to call ``backward`` on.

    For models that were replicated with ``precision="fp16"``. If there is none, the loss itself is returned, so that
    the same script trains in any precision. Gradients are divided by the scale before they are added to ``grad``, so
    they have their true size when they are averaged, clipped and logged. Nothing is sent. A step whose gradients are
    infinite or NaN is left out on all ranks, and the scale changes by the rule of ``torch.amp.GradScaler``.

    Args:
        loss: floating point, of any shape; log this loss, not the scaled one.

    Returns:
        The scaled loss, in float32 or, if the loss has it, float64.

    Raises:
        TypeError: ``loss`` is not a tensor of floating-point numbers.
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        kind = str(loss.dtype) if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"scale_loss takes a tensor of floating-point numbers, not {kind}")
    scale = scales.in_force()
    if scale is None:
        return loss
    factor = scale.for_loss()
    scaled = loss.to(torch.promote_types(loss.dtype, torch.float32)) * factor
    if scaled.requires_grad:
        scaled.register_hook(partial(_begin, factor))
    return scaled


@dataclass(frozen=True)
class LossScale:
    """The loss scale of a process, from :func:`lockstep.loss_scale`."""

    #: What the next loss is multiplied by; a power of two.
    scale: float
    #: Number of optimizer steps so far that were left out because their gradients were infinite or NaN.
    skipped: int


def loss_scale() -> LossScale | None:
    """Return the loss scale of this process, for a log.

    Returns:
        The scale, and how many steps were left out; None if no model was replicated with ``precision="fp16"``.
    """
    scale = scales.in_force()
    return None if scale is None else LossScale(scale.scale, scale.skipped)


class _ScaledBackward:
    """The backward under way, if it comes from a scaled loss.

    autograd calls the callback when the backward has ended, and drops it uncalled if it ends with an error: so the
    backward is under way for as long as the callback, which nothing else holds, is there.
    """

    def __init__(self) -> None:
        self._factor = 1.0
        self._callback: weakref.ref[partial[None]] | None = None

    def begin(self, factor: float) -> None:
        """Note that the backward under way comes from a loss that was multiplied by ``factor``."""
        if self.factor is None:
            callback = partial(self._ended)
            self._factor, self._callback = factor, weakref.ref(callback)
            _queue_callback(callback)
        elif self._factor != factor:
            least, greatest = sorted((self._factor, factor))
            raise LockstepError(
                f"{_place()}: this backward comes from losses that were scaled by {least:g} and by {greatest:g}, as "
                "an optimizer has stepped in between: call lockstep.scale_loss right before backward"
            )

    @property
    def factor(self) -> float | None:
        """What the gradients of the backward under way were multiplied by; None: it comes from no scaled loss."""
        return None if self._callback is None or self._callback() is None else self._factor

    @_torch.mark_untraced
    def _ended(self) -> None:
        self._callback = None


_backward = _ScaledBackward()


@_torch.mark_untraced
def _begin(factor: float, gradient: object) -> None:
    """Note that a backward has reached a scaled loss: called by autograd."""
    del gradient
    _backward.begin(factor)


@_torch.mark_untraced
def _unscale(gradient: Tensor) -> Tensor:
    """Return a parameter's gradient in its true size: called by autograd."""
    factor = _backward.factor
    if factor is None:
        raise LockstepError(
            f"{_place()}: a backward through a model with precision='fp16' comes from a loss that was not scaled, so "
            "that small gradients would be lost in float16: call lockstep.scale_loss(loss).backward(), without a "
            "GradScaler, on all ranks"
        )
    return gradient * (1 / factor)


def _place() -> str:
    """Say which rank this is, and at which step."""
    rank = f"rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "this process"
    return f"{rank}, step {flight.current.run_step}"


#: The models whose gradients are unscaled.
_unscaled: WeakSet[UnscaledGradients] = WeakSet()


class UnscaledGradients:
    """Unscales the gradients of one model, and leaves out the steps in which they are infinite or NaN.

    Args:
        module: the model.
        group: the ranks that hold replicas of it.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        watch_steps()
        self._group, self._rank, self._world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self._names = {id(param): name for name, param in module.named_parameters()}
        #: Keeps the ids of the names' parameters from being given to others.
        self._params = list(module.parameters())
        averaged = {id(param) for _, param in parameters_of(module)}
        #: Ids of the parameters whose gradients are each rank's own.
        self._own = set() if self._world_size == 1 else self._names.keys() - averaged
        trainable = [param for param in self._params if may_be_trained(param)]
        with thawed(trainable):  # those that are frozen may be trained later
            self._handles: list[RemovableHandle] = [param.register_hook(_unscale) for param in trainable]
        _unscaled.add(self)
        alert(self)

    def remove(self) -> None:
        """Leave gradients alone from now on."""
        quiet(self)
        _unscaled.discard(self)
        for handle in self._handles:
            handle.remove()

    def before_step(self, optimizer: Optimizer) -> None:
        """**Collective** if the optimizer holds parameters that the replica does not average. Leave the step out if
        gradients are infinite or NaN.

        Raises:
            LockstepError: the optimizer holds gradients that nothing has unscaled.
            NonFiniteGradient: too many steps in a row were left out; on all ranks.
        """
        scale = scales.in_force()
        params = params_of(optimizer)
        mine = [param for param in params if id(param) in self._names]
        if not mine or scale is None:
            return
        stepped = [param for param in mine if param.grad is not None]
        self._refuse_scaled(params, optimizer)
        bad = _not_finite(stepped)
        found = [[bool(stepped), bool(bad)]]
        if not self._own.isdisjoint(map(id, mine)):
            found = all_gather_records(found[0], self._group)
        if any(is_bad for _, is_bad in found):
            self._leave_out(optimizer, scale, [self._names[id(param)] for param in bad])
        elif any(has_gradients for has_gradients, _ in found):
            scale.stepped(skipped=False)

    def _refuse_scaled(self, params: Sequence[Tensor], optimizer: Optimizer) -> None:
        others = [each for each in params if each.grad is not None and id(each) not in self._names]
        others = [each for each in others if not any(id(each) in member._names for member in _unscaled)]
        if others:
            raise LockstepError(
                f"{_place()}: {type(optimizer).__name__} is about to step {counted(len(others), 'parameter')} beside "
                "those of a model with precision='fp16' that belong to no such model, so their gradients are "
                "multiplied by the loss scale: replicate one module that has them all, or each of them with "
                "precision='fp16'"
            )

    def _leave_out(self, optimizer: Optimizer, scale: DynamicScale, bad: Sequence[str]) -> None:
        """Leave the step out; that is how the scale is found, so nothing is warned of."""
        factor = scale.scale
        scale.stepped(skipped=True)
        leave_out(optimizer)
        if self._rank == 0:
            notes.tell(notes.LEFT_OUT, step=flight.current.step, of=f"with the loss scale {factor:,g}")
        if scale.is_exhausted:
            where = f" in {listed([*map(repr, bad)], most=5)}" if bad else " on another rank"
            raise NonFiniteGradient(
                f"{_place()}: the gradients are infinite or NaN{where} with the loss scale {factor:g} as well, after "
                f"{counted(scale.skipped, 'step')} that were left out for it, so training stops here: it is not the "
                "range of float16 that makes them so. Look at the batches and the loss, resume from a checkpoint, or "
                "lower the learning rate"
            )


def _not_finite(params: Sequence[Tensor]) -> list[Tensor]:
    """Return those of ``params`` whose gradients are infinite or NaN. Waits for their devices."""
    if not params:
        return []
    if all(param.is_cpu for param in params):
        if are_sound(params):
            return []
    elif math.isfinite(magnitude(dense_grads(params)).item()):
        return []
    return [param for param in params if not all(map(is_finite, dense_grads([param])))]
