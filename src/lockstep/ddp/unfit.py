"""Modules that can't be replicas, each with what to do instead.

torch's own classes are looked up among the modules that are loaded: who has one of theirs has loaded it, and nobody
else is to wait until they are.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import _torch
from lockstep.ddp.members import buffers_of, parameters_of

_SHARDED = (
    "it averages its gradients itself. Train it as it is, without lockstep.replicate and DistributedDataParallel (on a "
    "mesh of two dimensions it shards within a group of ranks and replicates across the groups), or replicate the "
    "plain module"
)
_PARALLEL = (
    "tensor parallelism spreads it over a mesh of ranks, and replicas hold whole parameters. For both together call "
    "torch.distributed.fsdp.fully_shard(model, mesh=mesh['dp']), which knows such parameters; or replicate the plain "
    "module"
)


def why_unfit(module: nn.Module, *, sends_buffers: bool, runs_hooks: bool) -> str | None:
    """Return why ``module`` can't be a replica, and what to do instead; None if it can.

    Args:
        sends_buffers: buffers are sent to all ranks.
        runs_hooks: the forward hooks of ``module`` announce its forwards.
    """
    return (
        _why_module(module, runs_hooks=runs_hooks)
        or _why_layer(module)
        or next((why for name, param in parameters_of(module) if (why := _why_parameter(name, param))), None)
        or next((why for name, buffer in buffers_of(module) if (why := _why_buffer(name, buffer, sends_buffers))), None)
    )


def _why_module(module: nn.Module, *, runs_hooks: bool) -> str | None:
    if runs_hooks and isinstance(module, torch.jit.ScriptModule):
        return (
            f"{type(module).__name__} is TorchScript, which runs no hooks of a whole module: wrap it in "
            "lockstep.DistributedDataParallel(model), or replicate the module before torch.jit has compiled it"
        )
    for name, part in module.named_modules():
        where = f"'{name}'" if name else "the module"
        if _is_one(part, "torch.distributed.fsdp", "FSDPModule"):
            return f"{where} is sharded (FSDP2): {_SHARDED}"
        if _is_one(part, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            return f"{where} is a FullyShardedDataParallel: {_SHARDED}"
        if isinstance(part, nn.parallel.DistributedDataParallel):
            return (
                f"{where} is torch's DistributedDataParallel, which averages the same gradients already: pass its "
                ".module, and let go of the wrapper"
            )
    return None


def _why_layer(module: nn.Module) -> str | None:
    """torch's SyncBatchNorm would fail in the first training forward, in words that name neither layer nor remedy."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.training:
            tensors = [tensor for tensor in (layer.weight, layer.running_mean) if tensor is not None]
            if any(tensor.device.type == "cpu" for tensor in tensors):
                return (
                    f"'{name}' is a torch.nn.SyncBatchNorm on the CPU, and torch's works on GPUs only: call "
                    "lockstep.convert_sync_batchnorm(model) before, whose layers work on both"
                )
    return None


def _why_parameter(name: str, param: Tensor) -> str | None:
    if _is_one(param, "torch.distributed.tensor", "DTensor"):
        return f"parameter '{name}' is a DTensor: {_PARALLEL}"
    if param.layout != torch.strided:
        return f"parameter '{name}' has layout {param.layout}; replicas can be made of dense parameters only"
    return _why_tensor(f"parameter '{name}'", param)


def _why_buffer(name: str, buffer: Tensor, sends_buffers: bool) -> str | None:
    if isinstance(buffer, nn.UninitializedBuffer):
        return _why_tensor(f"buffer '{name}'", buffer)
    if not sends_buffers:
        return None
    if _is_one(buffer, "torch.distributed.tensor", "DTensor"):
        return f"buffer '{name}' is a DTensor, of which each rank holds a part: pass broadcast_buffers=False"
    if buffer.layout != torch.strided:
        return (
            f"buffer '{name}' has layout {buffer.layout}, and only dense ones can be sent to all ranks: pass "
            "broadcast_buffers=False, and each rank keeps its own"
        )
    return _why_tensor(f"buffer '{name}'", buffer)


def _why_tensor(what: str, tensor: Tensor) -> str | None:
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return f"{what} has no shape yet: run one batch through the lazy module before replicating it"
    if tensor.is_meta:
        return (
            f"{what} is on the meta device, so it has no values to share: model.to_empty(device=...) gives it memory; "
            "then initialize it or load weights, and replicate the module after that"
        )
    if _torch.is_made_of_tensors(tensor):
        return (
            f"{what} is a {type(tensor).__name__}, made of other tensors, so its bytes can't be sent: replicate the "
            f"module before it is converted; or if it is not trained, name it in model.{_torch.IGNORED_BY_DDP}"
        )
    if tensor.is_inference() and tensor.requires_grad:
        return f"{what} was made under torch.inference_mode, so it can't be trained: build the model outside of it"
    return None


def _is_one(value: Any, home: str, name: str) -> bool:
    kind = getattr(sys.modules.get(home), name, None)
    return isinstance(kind, type) and isinstance(value, kind)
