"""How gradients find their way from the replicas' copies to the original parameters.

Note [Lent parameters]
~~~~~~~~~~~~~~~~~~~~~~
A forward that records a graph lends the copies to the replicas through one autograd function: its inputs are the
original parameters, its outputs the copies, and its backward adds the replicas' gradients up, in the order of the
replicas. So ``backward``, ``torch.autograd.grad``, hooks on parameters and gradients of gradients mean what they mean
without replicas. The first replica is the original module; its gradients take the ordinary way, and autograd adds the
two, in either order the same. Autograd has a thread for each accelerator, so replicas on accelerators go backward side
by side; on the CPU it uses the caller's thread, and they go one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep import _torch


def lend(origins: Sequence[tuple[int, int]], sources: Sequence[Tensor], copies: Sequence[Tensor]) -> list[Tensor]:
    """Return ``copies`` of ``sources`` as autograd knows them.

    Args:
        origins: for each copy, the position of its original among ``sources``, and the replica it is lent to.
        sources: the original parameters.
        copies: tensors like them, on the replicas' devices.
    """
    return list(_Lend.apply(origins, copies, *sources))  # type: ignore[no-untyped-call]


class _Lend(torch.autograd.Function):
    @staticmethod
    @_torch.mark_untraced
    def forward(
        ctx: Any, origins: Sequence[tuple[int, int]], copies: Sequence[Tensor], *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.origins, ctx.devices = origins, [source.device for source in sources]
        ctx.set_materialize_grads(False)
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    @_torch.mark_untraced
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        totals: list[Tensor | None] = [None] * len(ctx.devices)
        for (origin, _), grad in zip(ctx.origins, brought(ctx.origins, grads, ctx.devices), strict=True):
            totals[origin] = _plus(totals[origin], grad)
        return (None, None, *totals)


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def brought(
    origins: Sequence[tuple[int, int]], grads: Sequence[Tensor | None], devices: Sequence[torch.device]
) -> list[Tensor | None]:
    """Return the gradients on the devices of the originals; small ones from one device travel in one piece."""
    brought = list(grads)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, ((origin, _), grad) in enumerate(zip(origins, grads, strict=True)):
        if grad is None or grad.device == devices[origin]:
            continue
        if torch.is_grad_enabled() or grad.layout != torch.strided or grad.nbytes >= 2**20:
            brought[i] = grad.to(devices[origin])
        else:
            together.setdefault((grad.device, grad.dtype), []).append(i)
    for positions in together.values():
        chosen = [grad for i in positions if (grad := grads[i]) is not None]
        flat = torch.cat([grad.reshape(-1) for grad in chosen]).to(devices[origins[positions[0]][0]])
        parts = flat.split([grad.numel() for grad in chosen])
        for i, part, grad in zip(positions, parts, chosen, strict=True):
            brought[i] = part.view(grad.shape)
    return brought
