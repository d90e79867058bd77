"""What Horovod is to a program that is its only process, after its documentation: what the guide's program calls.

It averages nothing, since there is nobody else. What it does all the same is the step with zero gradients by which
``broadcast_optimizer_state`` fills an optimizer's empty state.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch

Sum = "sum"


def init() -> None:
    """Do nothing: the world is this process."""


def rank() -> int:
    """Return the rank of the only process."""
    return 0


def size() -> int:
    """Return the number of processes."""
    return 1


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    backward_passes_per_step: int = 1,
) -> torch.optim.Optimizer:
    """Return the optimizer, with what a program calls between a backward and a step."""
    named = {id(parameter) for _, parameter in named_parameters}
    assert named == {id(each) for group in optimizer.param_groups for each in group["params"]}
    assert backward_passes_per_step > 0
    optimizer.synchronize = lambda: None  # type: ignore[attr-defined]
    optimizer.skip_synchronize = nullcontext  # type: ignore[attr-defined]
    return optimizer


def allreduce(tensor: torch.Tensor, name: str, op: str) -> torch.Tensor:
    """Return the sum over one process."""
    assert name
    assert op == Sum
    return tensor.clone()


def broadcast_object(value: Any, root_rank: int) -> Any:
    """Return the value of the only process."""
    assert root_rank == 0
    return value


def broadcast_parameters(parameters: dict[str, torch.Tensor], root_rank: int) -> None:
    """Leave the parameters as they are."""
    assert root_rank == 0
    assert parameters


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Fill a state that is still empty, and leave it otherwise."""
    assert root_rank == 0
    if not optimizer.state_dict()["state"]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
