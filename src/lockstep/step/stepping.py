"""The hook that runs when an optimizer is about to step with the gradients of a replica.

Between the backward that averages and the optimizer's step a script may do anything with its gradients: unscale them
and not step at all (a GradScaler), clip them, put numbers in the place of NaN, look at them and ``continue``. Wrong
gradients matter only when an optimizer takes them, so they are looked at then: by a hook of torch's that runs before
every step of every optimizer, and only asks whether there is anything to look at.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from lockstep import _torch


class Attends(Protocol):
    """An object with something to look at before an optimizer steps."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at it. Raising here keeps the optimizer from stepping."""
        ...


#: Id -> object that asked to be told of the next steps, in the order of asking, which is the same on all ranks.
alerted: dict[int, Attends] = {}
#: Id of an optimizer -> parameters and gradients hidden from it in the step under way. (An optimizer may step another
#: one inside its own step.)
_hidden: dict[int, list[tuple[Tensor, Tensor]]] = {}
_watches = False
_nesting = _torch.nesting


def watch_steps() -> None:
    """Attend to the optimizers of this process from now on."""
    global _watches
    if not _watches:
        _watches = True
        optimizers.register_optimizer_step_pre_hook(_before_step)
        optimizers.register_optimizer_step_post_hook(_after_step)


def alert(member: Attends) -> None:
    """Tell ``member`` of every step from now on."""
    alerted.setdefault(id(member), member)


def quiet(member: Attends) -> None:
    """Tell ``member`` of no more steps."""
    alerted.pop(id(member), None)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that ``optimizer`` steps."""
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
    if _nesting[type(optimizer)] and _torch.is_inner_step(optimizer):
        return None
    if len(args) > 1 or kwargs:  # a closure runs the backward inside the step
        return _with_closure(optimizer, args, kwargs)
    if alerted:
        _attend(optimizer)
    return None


@_torch.mark_untraced
def _after_step(optimizer: Optimizer, *_: object) -> None:
    if _hidden and not (_nesting[type(optimizer)] and _torch.is_inner_step(optimizer)):
        _show(optimizer)


def _show(optimizer: Optimizer) -> None:
    for param, grad in _hidden.pop(id(optimizer), ()):
        if param.grad is None:
            param.grad = grad


def _attend(optimizer: Optimizer) -> None:
    _show(optimizer)  # left hidden by a step that failed
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
