"""torch's own parts on ranks: each function trains on its part of a global batch, or alone on the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from tests.ecosystem.ranks import Arrays, arrays, batches, join, net, part, train, weights


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def alone() -> Arrays:
    """One process, plain torch."""
    model = net()
    before = weights(model)
    train(model, _adam(model))
    after = weights(model)
    assert all(abs(after[name] - before[name]).max() > 1e-2 for name in before), "nothing was trained"
    return after


def ddp(backend: str) -> Arrays:
    rank, size = join(backend)
    model = DistributedDataParallel(net())
    train(model, _adam(model), rank, size)
    return weights(model)


def replica(backend: str) -> Arrays:
    rank, size = join(backend)
    model = lockstep.replicate(net())
    train(model, _adam(model), rank, size)
    return weights(model)


def compiled_ddp(backend: str) -> Arrays:
    rank, size = join(backend)
    model = DistributedDataParallel(net())
    compiled: Any = torch.compile(model)
    train(compiled, _adam(model), rank, size)
    return weights(model)


def compiled_replica(backend: str) -> Arrays:
    rank, size = join(backend)
    model = lockstep.replicate(net())
    compiled: Any = torch.compile(model)
    train(compiled, _adam(model), rank, size)
    return weights(model)


def powersgd(backend: str) -> Arrays:
    """Compressed to the full rank of each matrix: nothing is lost, and all of the hook runs."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    rank, size = join(backend)
    model = DistributedDataParallel(net())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=24, start_powerSGD_iter=2, min_compression_rate=0.1, use_error_feedback=False
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, _adam(model), rank, size)
    return weights(model)


def fsdp1(backend: str) -> Arrays:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    rank, size = join(backend)
    model = FullyShardedDataParallel(
        net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"), use_orig_params=True
    )
    train(model, _adam(model), rank, size)
    with FullyShardedDataParallel.summon_full_params(model):
        return arrays((name.replace("_fsdp_wrapped_module.", ""), each) for name, each in model.named_parameters())


def _fully_sharded(size: int) -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = net(), init_device_mesh("cpu", (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _whole(model: nn.Module) -> Arrays:
    return arrays((name, each.full_tensor()) for name, each in model.state_dict().items())


def fsdp2(backend: str) -> Arrays:
    rank, size = join(backend)
    model = _fully_sharded(size)
    train(model, _adam(model), rank, size)
    return _whole(model)


def tensor_parallel(backend: str) -> Arrays:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    _, size = join(backend)
    model = net()
    parallelize_module(
        model,
        init_device_mesh("cpu", (size,)),
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    )
    train(model, _adam(model))  # every rank has the whole batch and a part of the layers
    return arrays(
        (name, each.full_tensor() if hasattr(each, "full_tensor") else each)
        for name, each in model.state_dict().items()
    )


def zero(backend: str) -> Arrays:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, size = join(backend)
    model = DistributedDataParallel(net())
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
    train(model, optimizer, rank, size)
    return weights(model)


def dcp_save(backend: str, folder: Path) -> Arrays:
    """Train sharded over the ranks for half of the batches, and save."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    rank, size = join(backend)
    model = _fully_sharded(size)
    optimizer = _adam(model)
    train(model, optimizer, rank, size, data=batches()[:3])
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save(  # type: ignore[attr-defined]  # public, but not in torch's stubs
        {"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder
    )
    return _whole(model)


def dcp_go_on(backend: str, folder: Path) -> Arrays:
    """Load it on any number of ranks, and train on the other half."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    rank, size = join(backend)
    model = _fully_sharded(size)
    optimizer = _adam(model)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=folder)  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, rank, size, data=batches()[3:])
    return _whole(model)


def pipeline(backend: str, schedule: str) -> Arrays:
    """Two stages, four micro-batches; each rank hands back what it holds."""
    from torch.distributed import pipelining

    rank, size = join(backend)
    whole = net()
    cut = [0, 2, 5] if size == 2 else [0, 2, 4, 5]
    stage_module = whole[cut[rank] : cut[rank + 1]]
    stage = pipelining.PipelineStage(stage_module, rank, size, torch.device("cpu"))
    steps = getattr(pipelining, schedule)(stage, 4, loss_fn=nn.functional.cross_entropy)
    optimizer = _adam(stage_module)
    for inputs, targets in batches():
        optimizer.zero_grad()
        if rank == 0:
            steps.step(inputs)
        elif rank == size - 1:
            steps.step(target=targets)
        else:
            steps.step()
        optimizer.step()
    gathered: list[Arrays] = [{}] * size
    own = arrays(
        (name, each) for name, each in whole.named_parameters() if int(name[0]) in range(*cut[rank : rank + 2])
    )
    dist.all_gather_object(gathered, own)
    return {name: array for part_of in gathered for name, array in part_of.items()}


def functional(backend: str | None) -> Arrays:
    """torch.func.functional_call on the module's own parameters, for forty steps."""
    rank, size = join(backend)
    model = net()
    if backend is not None:
        lockstep.replicate(model)
    optimizer = _adam(model)
    for batch in batches(40):
        inputs, targets = part(batch, rank, size)
        optimizer.zero_grad()
        outputs = torch.func.functional_call(model, dict(model.named_parameters()), (inputs,))
        nn.functional.cross_entropy(outputs, targets).backward()
        optimizer.step()
    return weights(model)


def per_sample(backend: str | None) -> Arrays:
    """torch.func.vmap of grad on a replica: each rank's own samples, beside ordinary steps."""
    rank, size = join(backend)
    model = net()
    if backend is not None:
        lockstep.replicate(model)
    optimizer = _adam(model)

    def loss(parameters: dict[str, torch.Tensor], one: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        outputs = torch.func.functional_call(model, parameters, (one[None],))
        return nn.functional.cross_entropy(outputs, target[None])

    norms = []
    for batch in batches(40):
        inputs, targets = part(batch, rank, size)
        parameters = {name: each.detach() for name, each in model.named_parameters()}
        each_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
        squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in each_sample.values()])
        norm = squares.sum(0).sqrt().mean()
        if backend is not None:
            dist.all_reduce(norm)
        norms.append(norm / size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return weights(model) | arrays([("norms", torch.stack(norms))])


def averaged(backend: str | None) -> Arrays:
    """torch.optim.swa_utils: an averaged copy of the replica, and statistics of batch norms anew."""
    rank, size = join(backend)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 4)).double()
    if backend is not None:
        model = lockstep.replicate(lockstep.convert_sync_batchnorm(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    for batch in batches():
        train(model, optimizer, rank, size, data=[batch])
        average.update_parameters(model)
        schedule.step()
    torch.optim.swa_utils.update_bn((part(batch, rank, size)[0] for batch in batches()), average)
    return weights(model) | {f"average {name}": each for name, each in weights(average).items()}


def scaled(backend: str | None, how: str) -> Arrays:
    """torch.amp.GradScaler, which skips the step in which one rank's gradient is infinite."""
    rank, size = join(backend)
    model: Any = net()
    if backend is not None:
        model = lockstep.replicate(model) if how == "replicate" else DistributedDataParallel(model)
    optimizer = _adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step, batch in enumerate(batches()):
        inputs, targets = part(batch, rank, size)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if step == 3 and rank == size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(torch.tensor(scaler.get_scale()))
    return weights(model) | arrays([("scales", torch.stack(scales))])


#: Trained to what one process trains: name, function, ranks.
PLAIN: list[tuple[str, Callable[[str], Arrays], int]] = [
    ("DistributedDataParallel", ddp, 3),
    ("DistributedDataParallel with PowerSGD's hook", powersgd, 2),
    ("torch.compile(DistributedDataParallel), inductor", compiled_ddp, 2),
    ("torch.compile(lockstep.replicate), inductor", compiled_replica, 2),
    ("FullyShardedDataParallel (FSDP1)", fsdp1, 2),
    ("fully_shard (FSDP2)", fsdp2, 3),
    ("parallelize_module, columns and rows (TP)", tensor_parallel, 2),
    ("ZeroRedundancyOptimizer", zero, 2),
]
