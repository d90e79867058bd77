"""Norms of gradients, and clipping by them, over the buckets that the gradients lie in.

Note [Norms are of what is there]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Between backward and clipping a script may change gradients: ``GradScaler.unscale_`` does, so do hooks and weight decay
by hand. A norm computed while the ranks averaged would be stale then, and there is no sure sign of it: a tensor
counts its in-place changes, but not those through ``grad.data``, NumPy or memory that was handed to C. So a norm is
always computed from the gradients as they are when it is asked for. Their place is known, though: gradients that are
views of one bucket are one flat tensor, for which a few calls replace one for each parameter. It is viewed as
a matrix, because a sum of squares in float32 over millions of elements loses most of its digits: each row is added by
itself, and the norms of the rows in float64. And on a CPU, where the factor can be read without waiting for it,
gradients below the limit are left as they are instead of being multiplied by one: one pass over them instead of three.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lockstep import _torch
from lockstep.ddp.api import replicas
from lockstep.ddp.bucket import Bucket

#: Number of a bucket's elements that are added in their own precision. See Note [Norms are of what is there].
_ROW = 1 << 10
#: Constant that torch adds to a norm before it divides by it.
_APART = 1e-6
#: The p of p-norms for which the norm of the rows' norms is the norm of the whole.
_OF_ROWS = (1.0, 2.0, float("inf"))


@dataclass(frozen=True)
class GradNorms:
    """The norms of a model's gradients, from :func:`lockstep.grad_norms`."""

    #: The norm of all gradients as one vector. 0-dim, on the device of the first gradient.
    total: Tensor
    #: Name of a module in the model (``""``: the model itself) -> norm of the gradients of its own parameters. 0-dim,
    #: on the gradients' devices.
    layers: Mapping[str, Tensor]


@_torch.mark_untraced
def grad_norms(model: nn.Module, *, norm_type: float = 2.0) -> GradNorms:
    """Compute the norms of the gradients that ``model`` has now, in total and by layer.

    After a backward of a replica they are the norms of the global batch and the same on every rank; inside ``no_sync``,
    or with ``sync=LocalSteps()``, they are of this rank's own gradients. Nothing is sent, and no device is waited for.

    Args:
        model: any module; parameters without a gradient do not count.
        norm_type: the p of the p-norm; ``inf`` for the greatest absolute value.

    Returns:
        The norms, of the gradients' dtype; 0 for a model without gradients.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, not {type(model).__name__}")
    by_layer: dict[str, list[Tensor]] = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            by_layer.setdefault(name.rpartition(".")[0], []).append(param.grad.detach())
    layers = {name: get_total_norm(grads, norm_type) for name, grads in by_layer.items()}
    return GradNorms(get_total_norm(layers.values(), norm_type), layers)


@_torch.mark_untraced
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

    Norm and gradients are the same to rounding, with fewer calls where gradients lie in a replica's buckets, and
    without writing to gradients on a CPU that are within the limit. The gradients are taken as they are now, even if
    changed since backward. After a backward of a replica the result is the same on every rank, and nothing is sent.

    Args:
        parameters: a module, or parameters (one, or several), as for torch's function.
        max_norm: the greatest norm that the gradients may have.
        norm_type: the p of the p-norm; ``inf`` for the greatest absolute value.
        error_if_nonfinite: raise if the norm is infinite or NaN; this waits for the device. False: gradients become
            zero or NaN then, as with torch's function.
        foreach: as for torch's function, for gradients that are in no bucket.

    Returns:
        The norm before scaling, of all gradients as one vector; a 0-dim tensor, which can be logged as it is.

    Raises:
        RuntimeError: the norm is infinite or NaN, and ``error_if_nonfinite`` is set; nothing is changed then.
    """
    if isinstance(parameters, nn.Module):
        params: list[Tensor] = list(parameters.parameters())
    else:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm_type = float(norm_type)
    buckets, rest = _in_buckets(params) if norm_type in _OF_ROWS else ([], params)
    if not buckets:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    with torch.no_grad():
        grads = [param.grad for param in rest if param.grad is not None]
        norms = [_norm_of(bucket.values, norm_type) for bucket in buckets]
        if grads:
            norms.append(get_total_norm(grads, norm_type, foreach=foreach))
        norm = norms[0] if len(norms) == 1 else get_total_norm(norms, norm_type)
        is_at_hand = norm.device.type == "cpu"
        if error_if_nonfinite and not math.isfinite(float(norm)):
            raise RuntimeError(
                f"the total norm of order {norm_type:g} of the gradients is {float(norm)}, so they can't be clipped; "
                "with error_if_nonfinite=False they are scaled by it all the same"
            )
        if is_at_hand and float(max_norm) / (float(norm) + _APART) >= 1:
            return norm
        factor = torch.clamp(float(max_norm) / (norm + _APART), max=1.0)
        for bucket in buckets:
            bucket.values.mul_(factor.to(bucket.values.device))
        if grads:
            clip_grads_with_norm_(rest, max_norm, norm, foreach=foreach)
    return norm


def _norm_of(values: Tensor, norm_type: float) -> Tensor:
    """Return the norm of a bucket's gradients, 1-D, in few calls; see Note [Norms are of what is there]."""
    norm: Tensor
    rows, rest = divmod(values.numel(), _ROW)
    if not rows:
        norm = torch.linalg.vector_norm(values, norm_type)
        return norm
    norms = torch.linalg.vector_norm(values[: rows * _ROW].view(rows, _ROW), norm_type, dim=1)
    if rest:
        norms = torch.cat([norms, torch.linalg.vector_norm(values[rows * _ROW :], norm_type).view(1)])
    norm = torch.linalg.vector_norm(norms.to(torch.float64), norm_type)
    return norm.to(norms.dtype)


def _in_buckets(params: Sequence[Tensor]) -> tuple[list[Bucket], list[Tensor]]:
    """Return the buckets that hold nothing but gradients of ``params``, as they are now, and the other parameters.

    (Not those with gaps: an accelerator takes a list of gradients by one kernel.)
    """
    left: dict[int, Any] = {id(param): param for param in params}
    found: list[Bucket] = []
    for replica in replicas():
        for bucket in replica.reducer.buckets:
            pairs = zip(bucket.params, bucket.views, strict=True)
            if not bucket.has_gaps and all(id(param) in left and param.grad is view for param, view in pairs):
                found.append(bucket)
                for param in bucket.params:
                    del left[id(param)]
    return found, list(left.values())
