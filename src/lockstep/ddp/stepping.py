"""What is done when an optimizer is about to step with the gradients of a replica.

Between the backward that averages and the optimizer's step a script may do anything with its gradients: unscale them
and not step at all (a GradScaler), clip them, put numbers in the place of NaN, look at them and ``continue``. What is
wrong with them matters when an optimizer takes them, so that is where it is looked at: by a hook of torch's that runs
before every step of every optimizer, and does nothing but ask whether there is anything to look at.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from lockstep import _torch


class Attends(Protocol):
    """Has something to look at before an optimizer steps."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at it. To raise here keeps the optimizer from stepping."""
        ...


#: Those who asked to be told of the next steps, in the order in which they did so, which is the same on all ranks.
alerted: dict[int, Attends] = {}
#: By optimizer, parameters and their gradients that it is not to see in the step under way. (An optimizer may step
#: another one inside its own step.)
_hidden: dict[int, list[tuple[Tensor, Tensor]]] = {}
_watches = False


def watch_steps() -> None:
    """From now on attend to the optimizers of this process."""
    global _watches
    if not _watches:
        _watches = True
        optimizers.register_optimizer_step_pre_hook(_before_step)
        optimizers.register_optimizer_step_post_hook(_after_step)


def alert(member: Attends) -> None:
    """Tell ``member`` of every step from now on."""
    alerted.setdefault(id(member), member)


def quiet(member: Attends) -> None:
    """Tell it of no more steps."""
    alerted.pop(id(member), None)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return what ``optimizer`` steps."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def leave_out(optimizer: Optimizer) -> None:
    """Let the step that is about to come change nothing: its parameters have no gradients until it is over."""
    hidden = _hidden.setdefault(id(optimizer), [])
    for param in params_of(optimizer):
        if param.grad is not None:
            hidden.append((param, param.grad))
            param.grad = None


@_torch.mark_untraced
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 or kwargs:  # a closure runs the backward inside the step
        return _with_closure(optimizer, args, kwargs)
    if alerted:
        _attend(optimizer)
    return None


@_torch.mark_untraced
def _after_step(optimizer: Optimizer, *_: object) -> None:
    if _hidden:
        _show(optimizer)


def _show(optimizer: Optimizer) -> None:
    for param, grad in _hidden.pop(id(optimizer), ()):
        if param.grad is None:
            param.grad = grad


def _attend(optimizer: Optimizer) -> None:
    _show(optimizer)  # what a step that failed has left
    for member in list(alerted.values()):
        member.before_step(optimizer)


def _with_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        _attend(optimizer)
        return None

    def attended(*given: Any, **named: Any) -> Any:
        _show(optimizer)
        loss = closure(*given, **named)
        _attend(optimizer)
        return loss

    if len(args) > 1:
        return (args[0], attended, *args[2:]), kwargs
    return args, {**kwargs, "closure": attended}
