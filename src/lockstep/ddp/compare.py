"""Check the replicas before anything is sent: a difference is an error on every rank, never a wrong sum.

Modules that can't be replicas are refused here as well, each with what to do instead. torch's own classes are looked up
among the modules that are loaded: a program that uses one has loaded it, and no other has to wait for the import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import _torch
from lockstep.comm.exchange import all_gather_records
from lockstep.ddp.members import buffers_of, parameters_of
from lockstep.errors import ReplicaMismatch
from lockstep.text import joined

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


def compare_replicas(
    module: nn.Module,
    options: dict[str, Any],
    group: dist.ProcessGroup,
    *,
    sparse: Set[int] = frozenset(),
    buffers: bool = True,
    unfit: str | None = None,
) -> None:
    """**Collective.** Check that every rank has the same parameters, buffers and options.

    Args:
        module: the module to compare, by name, shape, dtype, strides, ``requires_grad`` and kind of gradient of its
            parameters, by name, shape and dtype of its buffers, and by which of them share a device; names that it
            ignores are left out.
        options: the options that must be equal.
        group: the ranks that compare.
        sparse: ids of the parameters whose gradients are expected to be sparse.
        buffers: whether buffers must be equal; each rank may have its own if they are never sent.
        unfit: why this rank's module can't be a replica, if so.

    Raises:
        ValueError: on every rank, if some rank's module can't be a replica.
        ReplicaMismatch: on every rank, naming the first parameter that differs and the first rank where it does.
    """
    # A device's number is its position among the module's devices: "cuda:0" here is "cuda:1" on the next rank.
    numbers: dict[torch.device, int] = {}
    mine = {
        "options": sorted([name, str(value)] for name, value in options.items()),
        "parameters": [
            _describe_parameter(name, param, numbers.setdefault(param.device, len(numbers)), id(param) in sparse)
            for name, param in (parameters_of(module) if unfit is None else ())
        ],
        "buffers": [
            [name, list(tensor.shape), str(tensor.dtype), numbers.setdefault(tensor.device, len(numbers))]
            for name, tensor in (buffers_of(module) if buffers and unfit is None else ())
        ],
        "unfit": unfit,
    }
    records = all_gather_records(mine, group)
    refusals = {rank: record["unfit"] for rank, record in enumerate(records) if record["unfit"] is not None}
    if refusals:
        rank, why = min(refusals.items())
        raise ValueError(unfit if unfit is not None else f"rank {rank} has a model that can't be a replica: {why}")
    for kind in ("parameters", "options", "buffers"):
        difference = first_difference([record[kind] for record in records])
        if difference is not None:
            whoami = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"
            raise ReplicaMismatch(
                f"{whoami}: {explain_difference(kind, records, *difference)}. Nothing was sent. Build the same model "
                "with the same options on every rank"
            )


def first_difference(lists: Sequence[Sequence[Any]]) -> tuple[int, int] | None:
    """Return (position, rank) of the first entry in which a rank's list differs from rank 0's, or None."""
    found: list[tuple[int, int]] = []
    for rank, entries in enumerate(lists[1:], start=1):
        for position in range(max(len(lists[0]), len(entries))):
            if lists[0][position : position + 1] != entries[position : position + 1]:
                found.append((position, rank))
                break
    return min(found, default=None)


def _describe_parameter(name: str, param: nn.Parameter, device: int, sparse: bool) -> list[Any]:
    layout = None if param.is_contiguous() else list(param.stride())
    return [name, list(param.shape), str(param.dtype), device, param.requires_grad, layout, sparse]


def explain_difference(kind: str, records: Sequence[Any], position: int, rank: int) -> str:
    """Return a description of the difference that :func:`first_difference` has found."""
    singular = {"parameters": "parameter", "buffers": "buffer", "options": "option"}[kind]
    expected, came = records[0][kind][position : position + 1], records[rank][kind][position : position + 1]
    name = (expected or came)[0][0]
    counts = ""
    if len(records[0][kind]) != len(records[rank][kind]):
        counts = f" (rank 0 has {len(records[0][kind])} {kind}, rank {rank} has {len(records[rank][kind])})"
    return (
        f"the replicas differ at {singular} {position}, '{name}': rank 0 has {_say(kind, expected)}, "
        f"rank {rank} has {_say(kind, came)}{counts}"
    )


def _say(kind: str, entry: Sequence[Any]) -> str:
    if not entry:
        return "none at this place"
    name, first, *rest = entry[0]
    if kind == "options":
        return f"{name}={first}"
    words = f"'{name}' of shape {tuple(first)}, {rest[0]}"
    words += "" if rest[1] == 0 else f", on the module's device {rest[1]} (counted from 0)"
    if kind == "parameters":
        words += "" if rest[2] else ", requires_grad=False"
        words += "" if rest[3] is None else f", strides {tuple(rest[3])}"
        words += ", with sparse gradients" if rest[4] else ""
    return words


def why_unfit(
    module: nn.Module, group: dist.ProcessGroup, *, sends_buffers: bool, runs_hooks: bool, stays_equal: bool
) -> str | None:
    """Return why ``module`` can't be a replica, and what to do instead; None if it can.

    Args:
        module: the module.
        group: the process group that is to carry its gradients.
        sends_buffers: buffers are sent to all ranks.
        runs_hooks: the forward hooks of ``module`` announce its forwards.
        stays_equal: replicas are to be equal after each step.
    """
    rescales = stays_equal and dist.get_world_size(group) > 1
    return (
        _why_module(module, runs_hooks=runs_hooks)
        or _why_layer(module)
        or (_why_embedding(module) if rescales else None)
        or next((why for name, param in parameters_of(module) if (why := _why_parameter(name, param))), None)
        or next((why for name, buffer in buffers_of(module) if (why := _why_buffer(name, buffer, sends_buffers))), None)
        or _why_device(module, group)
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
                ".module, and drop the wrapper"
            )
    return None


def _why_layer(module: nn.Module) -> str | None:
    """Refuse torch's SyncBatchNorm on CPUs: its own error in the first forward names neither layer nor remedy."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.training:
            tensors = [tensor for tensor in (layer.weight, layer.running_mean) if tensor is not None]
            if any(tensor.device.type == "cpu" for tensor in tensors):
                return (
                    f"'{name}' is a torch.nn.SyncBatchNorm on the CPU, and torch's runs on GPUs only: call "
                    "lockstep.convert_sync_batchnorm(model) first; its layers run on both"
                )
    return None


def _why_embedding(module: nn.Module) -> str | None:
    """Refuse embeddings that write to their table in each forward, to the rows of this rank's samples alone."""
    held = {id(param) for _, param in parameters_of(module)}
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            if id(layer.weight) not in held:
                continue
            return (
                f"'{name}' has max_norm={layer.max_norm:g}: each of its forwards rescales the rows that it looks up, "
                "and these are those of the rank's own samples, so that the replicas would differ. Let each step "
                f"rescale the whole table instead: with `layer = model.get_submodule({name!r})`, set `layer.max_norm "
                "= None`, and after each optimizer.step() `with torch.no_grad(): "
                f"layer.weight.renorm_({layer.norm_type:g}, 0, {layer.max_norm:g})`"
            )
    return None


def _why_device(module: nn.Module, group: dist.ProcessGroup) -> str | None:
    """Refuse a device whose tensors the group does not carry: the backend's own error would come at a collective, and
    without the name of a parameter."""
    carried = _torch.device_types(group)
    for name, param in parameters_of(module):
        if param.device.type not in carried:
            return (
                f"parameter '{name}' is on {param.device}, and this process group carries tensors on "
                f"{joined(carried)} only (backend {dist.get_backend_config(group)}): move the model to a device "
                "that it carries, model.to(lockstep.world().device), before it becomes a replica"
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
