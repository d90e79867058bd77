"""Weights of accumulated gradients: keeps the mean exact when batches with different shares are added up.

Note [Accumulated weights]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A backward's gradients count ``w`` (Note [Exact mean]), and the reducer multiplies by it once, when it fills a bucket.
Gradients that were accumulated without synchronisation are multiplied together with the new ones, which is right as
long as the weights are equal. If they are not, then at the start of the backward

- what has accumulated is multiplied by the weight it was waiting for, in place;
- what comes in is multiplied by its own weight before it is added, by a hook on the parameter;
- the reducer multiplies by 1.

What was in ``grad`` before the accumulation began is the same on all ranks, and the weights of all ranks sum to the
world size, so multiplying it as well changes nothing in the end. An empty slice (w = 0) holds NaN, which no factor
removes: what comes in is replaced by zeros, and a ``grad`` that was None is None again afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep import _torch


class AccumulatedWeights:
    """What the gradients in ``grad`` still have to be multiplied by."""

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._params = list(params)
        #: The weight that accumulated gradients wait for, or None if nothing has accumulated.
        self._waiting: float | None = None
        self._bucket_weight = 1.0
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._absent: list[Parameter] = []

    def enter(self, weight: float, pending: set[int]) -> tuple[float, dict[int, Tensor]]:
        """**Local.** A backward with ``weight`` begins.

        Args:
            weight: this rank's weight.
            pending: positions of the parameters with accumulated gradients.

        Returns:
            The weight that the reducer is to use, and copies of the gradients that were multiplied although nobody may
            have used their parameter, by position.
        """
        waiting = self._waiting
        kept: dict[int, Tensor] = {}
        if waiting is None or waiting == weight or all(param.grad is None for param in self._params):
            self._bucket_weight = weight
            if weight != 0:
                return weight, kept
        else:
            kept = self._multiply_accumulated(waiting, pending)
            self._bucket_weight = 1.0
        if weight == 0:
            self._absent = [param for param in self._params if param.grad is None]
        self._weigh_incoming(weight)
        return self._bucket_weight, kept

    def leave(self, *, synced: bool) -> None:
        """**Local.** The backward has ended, before the reducer finishes it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for param in self._absent:
            param.grad = None
        self._absent = []
        self._waiting = None if synced else self._bucket_weight

    def take_over(self, old: AccumulatedWeights) -> None:
        """**Local.** Go on where the weights of other parameters of the same module stand."""
        self._waiting = old._waiting

    @torch.no_grad()
    def _multiply_accumulated(self, waiting: float, pending: set[int]) -> dict[int, Tensor]:
        kept: dict[int, Tensor] = {}
        for position, param in enumerate(self._params):
            if param.grad is None:
                continue
            if position not in pending:
                kept[position] = param.grad.clone()
            if waiting == 0:
                param.grad.zero_()
            else:
                param.grad.mul_(waiting)
        return kept

    def _weigh_incoming(self, weight: float) -> None:
        @_torch.mark_untraced
        def weigh(grad: Tensor) -> Tensor:
            return torch.zeros_like(grad) if weight == 0 else grad * weight

        for param in self._params:
            if param.requires_grad:
                self._handles.append(param.register_hook(weigh))
