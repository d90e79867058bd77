"""Forwards in low precision: autocast around each forward of a replica, and its outputs in float32.

Note [Autocast around forward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
With ``precision="bf16"`` or ``"fp16"`` each forward of the model runs inside :class:`torch.autocast`, and tensors of
float16 and bfloat16 in what it returns become float32, in tuples, lists, dicts and dataclasses. Parameters, gradients
and the optimizer's state stay in the parameters' dtype, so nothing that the ranks send changes.

Autocast is for the forward alone; torch says to leave backward out of it, and the loss belongs to the script. A loss
that is computed outside of it, from what the last layer returns, would be rounded to 8 or 11 bits at each operation.
Hence the float32 outputs.
Accelerate and Fabric convert outputs for the same reason (``convert_outputs_to_fp32``; ``Precision.convert_output``).

Hooks of the module enter autocast and leave it. A copy or a pickle of the module gets hooks that do nothing, and
wrappers need know nothing of it. torch runs no hooks after a KeyboardInterrupt in a forward, which would leave autocast
on. So with each entry goes the frame in which the forward runs, and an entry whose frame is gone is left at the next
forward.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from itertools import chain
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep import _torch
from lockstep.ddp.loss_scaling import UnscaledGradients
from lockstep.ddp.options import Precision
from lockstep.step import loss_scale
from lockstep.trees import leaves, map_leaves

_LOW = (torch.float16, torch.bfloat16)
_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def why_unfit(module: nn.Module, precision: Precision) -> str | None:
    """Return why ``module`` can't compute in ``precision``, and what to do instead; None if it can."""
    kind, dtype = _kind_of(module), _DTYPES[precision]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where it turns autocast off
            with torch.autocast(kind, dtype):
                is_on = torch.is_autocast_enabled(kind)
    except (RuntimeError, UserWarning) as error:
        return f"torch can't compute in {precision} on its device, {kind}: {error}"
    if not is_on:
        return f"torch can't compute in {precision} on its device, {kind}: leave precision= out"
    if precision == "fp16":
        for name, param in module.named_parameters():
            if param.dtype is torch.float16:
                return (
                    f"parameter '{name}' is float16, and precision='fp16' is for parameters in float32, whose "
                    "gradients keep what float16 loses: call model.float() first"
                )
    return None


class ForwardPrecision:
    """Runs the forwards of one module in low precision; see Note [Autocast around forward].

    Args:
        module: the module.
        precision: the dtype of autocast.
        group: the ranks that hold replicas of it.
    """

    def __init__(self, module: nn.Module, precision: Precision, group: dist.ProcessGroup) -> None:
        self._kind, self._dtype = _kind_of(module), _DTYPES[precision]
        self._entered = _Entered()
        self._gradients = UnscaledGradients(module, group) if precision == "fp16" else None
        # Before the hooks that watch what a forward returns: they see what the script gets.
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(_Enter(self)),
            module.register_forward_hook(_Leave(self)),
            module.register_forward_hook(_LeaveFailed(self), always_call=True),
        ]

    def remove(self) -> None:
        """Leave the forwards alone from now on."""
        if self._gradients is not None:
            self._gradients.remove()
        for handle in self._handles:
            handle.remove()

    @_torch.mark_untraced
    def enter(self) -> None:
        """Begin a forward."""
        self._entered.leave_stale()
        self._entered.enter(torch.autocast(self._kind, self._dtype), sys._getframe(2))

    @_torch.mark_untraced
    def leave(self, output: Any) -> Any:
        """End a forward; return what it returned, in float32."""
        self._entered.leave()
        return map_leaves(output, _in_float32) if any(map(_is_low, leaves(output))) else output

    @_torch.mark_untraced
    def leave_failed(self) -> None:
        """End a forward if it has failed."""
        self._entered.leave_stale()


class _Entered(threading.local):
    """The forwards of a thread that are under way, from the outermost: a model may call itself."""

    def __init__(self) -> None:
        self._all: list[tuple[torch.autocast, FrameType]] = []

    def enter(self, context: torch.autocast, frame: FrameType) -> None:
        context.__enter__()
        self._all.append((context, frame))

    def leave(self) -> None:
        if self._all:
            self._all.pop()[0].__exit__(None, None, None)

    def leave_stale(self) -> None:
        """Leave autocast for the forwards whose frames are gone."""
        while self._all and not _is_running(self._all[-1][1]):
            self.leave()


def _is_running(frame: FrameType) -> bool:
    """Return whether ``frame`` is on this thread's stack."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def _is_low(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in _LOW


def _in_float32(value: Any) -> Any:
    return value.float() if _is_low(value) else value


def _kind_of(module: nn.Module) -> str:
    first = next(chain(module.parameters(), module.buffers()), None)
    return "cpu" if first is None else first.device.type


class _Enter:
    """The forward pre-hook. A copy or a pickle of the module gets a hook that does nothing."""

    def __init__(self, precision: ForwardPrecision) -> None:
        self._precision = precision

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_exporting():  # an exported program stands for the module alone
            self._precision.enter()

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inert, ()


class _Leave(_Enter):
    """The forward hook."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        del module, inputs
        return output if torch.compiler.is_exporting() else self._precision.leave(output)


class _LeaveFailed(_Enter):
    """The forward hook that runs after a forward that failed, too."""

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_exporting():
            self._precision.leave_failed()


def _inert() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """Do nothing: what is left of the hooks in a copy of the module."""


#: Modules that compute in low precision -> what takes it back; it refers to no module, and is called when one is gone.
_attached: weakref.WeakKeyDictionary[nn.Module, weakref.finalize[Any, nn.Module]] = weakref.WeakKeyDictionary()


def attach(module: nn.Module, precision: Precision, group: dist.ProcessGroup) -> None:
    """Run the forwards of ``module`` in ``precision`` from now on."""
    if precision == "fp16":
        loss_scale.enter(module)
    closing = weakref.finalize(module, ForwardPrecision(module, precision, group).remove)
    closing.atexit = False
    _attached[module] = closing


def detach(module: nn.Module) -> None:
    """Leave the module as it was before :func:`attach`; without it do nothing."""
    closing = _attached.pop(module, None)
    if closing is not None:
        closing()
        loss_scale.leave(module)
