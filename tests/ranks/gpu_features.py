"""What a rank trains on a GPU or a CPU, one feature at a time: the same comes out, however slow a stream is."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.device import simulation
from tests.device.simulation import Counts, Stress

SAMPLES, FEATURES, CLASSES, BATCH = 160, 20, 4, 32


Values = NDArray[Any]


@dataclass(frozen=True)
class Trained:
    """What came of a rank's training."""

    #: Every parameter and buffer.
    state: list[Values]
    losses: list[float]
    #: What else the feature has computed.
    more: list[float]


def begin(on: str, stress: Stress | None) -> lockstep.World:
    """Open this rank's world on the GPUs, whose streams are as uneven as ``stress`` says, or on the "cpu"."""
    if stress is not None:
        simulation.stress(stress)
    world = lockstep.init("gloo" if on == "cpu" else None)
    assert (world.device.type == "cpu") is (on == "cpu")
    return world


class WithSpare(nn.Module):
    """A model with parameters that no forward uses."""

    def __init__(self, used: nn.Module) -> None:
        super().__init__()
        self.used, self.spare = used, nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.used(inputs)
        return found


def net(feature: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, CLASSES)]
    if "batchnorm" in feature:
        layers.insert(1, nn.BatchNorm1d(64))
    if "dropout" in feature:
        layers.insert(2, nn.Dropout(0.3))
    model: nn.Module = nn.Sequential(*layers)
    if feature == "synchronised batchnorm":
        model = lockstep.convert_sync_batchnorm(model)
    if feature == "unused parameter":
        model = WithSpare(model)
    return model.to(device)


def loader(feature: str) -> Any:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    data = TensorDataset(inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator))
    workers = 2 if feature == "workers" else 0
    given = DataLoader(
        data, batch_size=BATCH, shuffle=True, pin_memory=torch.accelerator.is_available(), num_workers=workers
    )
    return lockstep.shard(given, slices=4) if feature.startswith("slices") else lockstep.shard(given)


def replica(feature: str, model: nn.Module) -> nn.Module:
    # Buckets so small that several are on their way at once.
    options: dict[str, Any] = {"bucket_cap_mb": 0.01, "first_bucket_mb": 0.001}
    if feature == "local steps":
        options = {"sync": lockstep.LocalSteps(4)}
    if feature == "raises if not finite":
        options["check_finite"] = "raise"
    if feature == "skips what is not finite":
        options["check_finite"] = "skip"
    if feature == "compared":
        options["compare_every"] = 2
    return lockstep.replicate(model, **options)


def train(feature: str, on: str, stress: Stress | None, folder: str) -> Trained:
    """Train for two epochs with one feature."""
    world = begin(on, stress)
    model, batches = replica(feature, net(feature, world.device)), loader(feature)
    adaptive = feature in ("norms", "adamw")
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        if adaptive
        else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    )
    losses, more = [], []
    log = lockstep.Log(Path(folder) / on, every=2) if feature == "log" else None
    scaler = torch.amp.GradScaler(world.device.type, init_scale=256.0) if feature == "scaler" else None
    step = 0
    for _ in range(2):
        for slices in _steps(feature, batches):
            step += 1
            optimizer.zero_grad()
            for inputs, labels in slices:
                assert inputs.device == world.device
                if feature == "weighed":
                    world.weigh(int(labels.shape[0]) + world.rank)
                later = lockstep.no_sync(model) if feature == "accumulation" and step % 2 else contextlib.nullcontext()
                with later, torch.autocast(world.device.type, torch.bfloat16, enabled=feature == "autocast"):
                    loss = F.cross_entropy(model(inputs), labels)
                    if feature == "skips what is not finite" and step == 3 and world.rank == 0:
                        loss = loss * float("inf")
                    (loss if scaler is None else scaler.scale(loss)).backward()
                losses.append(loss.detach())
            if feature == "norms":
                more.append(lockstep.clip_grad_norm_(model, 0.1))
            if feature == "mean":
                more.append(world.mean(loss.detach()))
            if log is not None:
                log(loss=loss.detach())
            if feature == "accumulation" and step % 2:
                continue
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    if feature == "local steps":
        lockstep.finish_round(model)
    if log is not None:
        log.close()
    return _trained(model, losses, more)


def _steps(feature: str, batches: Any) -> Iterable[Any]:
    return batches.steps() if feature.startswith("slices") else ([batch] for batch in batches)


def _trained(model: nn.Module, losses: list[Any], more: list[Any]) -> Trained:
    return Trained(
        _values(model.state_dict().values()), [float(each) for each in losses], [float(each) for each in more]
    )


def _values(tensors: Iterable[Tensor]) -> list[Values]:
    return [np.array(tensor.detach().cpu()) for tensor in tensors]


def saved_beside_training(on: str, stress: Stress | None, folder: str) -> tuple[list[Values], list[Values]]:
    """Save in the background while the device is behind the host, and train on. Return what was there when the save
    was asked for, and what the checkpoint holds."""
    world = begin(on, stress)
    model = lockstep.replicate(net("plain", world.device), bucket_cap_mb=0.01)
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.05), loader("plain")
    saved = lockstep.Checkpointer(Path(folder) / on, model=model, optimizer=optimizer, loader=batches)
    then: list[Tensor] = []
    for _ in saved.epochs(1):
        for step, (inputs, labels) in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if step == 2:
                if stress is not None:
                    simulation.stress(replace(stress, main=20_000))  # each copy takes longer than a file
                saved.async_save()
                then = [tensor.detach().clone() for tensor in model.state_dict().values()]
        break
    saved.wait()
    fresh = net("plain", torch.device("cpu"))
    lockstep.load_weights(Path(folder) / on, fresh)
    return _values(then), _values(fresh.state_dict().values())


def resumed(stop: int | None, folder: str, stress: Stress | None, *, is_saved: bool) -> list[Values]:
    """Train with dropout; stop after so many steps, having saved, or go on from there to the end."""
    world = begin("gpu", stress)
    model = lockstep.replicate(net("dropout", world.device))
    optimizer, batches = torch.optim.AdamW(model.parameters()), loader("dropout")
    saved = lockstep.Checkpointer(Path(folder), model=model, optimizer=optimizer, loader=batches) if is_saved else None
    step = 0
    for _ in saved.epochs(2) if saved is not None else range(2):
        for inputs, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            step += 1
            if step == stop and saved is not None:
                saved.save()
                return []
    return _values(model.parameters())


def steps_behind_a_held_stream(feature: str, folder: str) -> Counts:
    """Queue a whole step while the device does nothing; a wait would be an error. Return what was asked of the device.

    The step after it may wait for this one, so that a host is never further ahead than a step.
    """
    world = begin("gpu", None)
    model = replica(feature, net(feature, world.device))
    optimizer = (
        torch.optim.AdamW(model.parameters()) if feature == "adamw" else torch.optim.SGD(model.parameters(), lr=0.05)
    )
    generator = torch.Generator().manual_seed(2 + world.rank)
    inputs = torch.randn(8, FEATURES, generator=generator).to(world.device)
    labels = torch.randint(CLASSES, (8,), generator=generator).to(world.device)

    log = lockstep.Log(folder, every=1000) if feature == "log" else None

    def one_step() -> None:
        if feature == "weighed":
            world.weigh(8 + world.rank)
        if feature == "accumulation":
            with lockstep.no_sync(model):
                F.cross_entropy(model(inputs), labels).backward()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        if log is not None:
            log(loss=loss.detach(), samples=8)
        if feature == "norms":
            lockstep.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):  # the first steps learn and compare
        one_step()
    torch.cuda.synchronize()
    counting = simulation.Counting()
    with simulation.held_back(torch.cuda.current_stream()):
        one_step()
        counts = counting.so_far()
    torch.cuda.synchronize()
    return counts


def peaks_of_steps(overlap: bool | None) -> tuple[int, list[int]]:
    """Return the bytes of the model's gradients, and what each step needs at most beyond what lies there before."""
    world = begin("gpu", None)
    layers = [nn.Linear(256, 256, device=world.device) for _ in range(8)]
    model = lockstep.replicate(nn.Sequential(*layers), overlap=overlap, compare_every=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.ones(4, 256, device=world.device)
    copy.deepcopy(layers[0])(inputs).sum().backward()  # cuBLAS takes memory of its own at its first call
    peaks = []
    for _ in range(3):
        optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(inputs).sum().backward()
        optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return sum(p.nbytes for p in model.parameters()), peaks


def sparse_batches(stress: Stress | None) -> list[float]:
    """Read batches with a dense and a sparse tensor, which are copied ahead. Return a sum over each."""
    world = begin("gpu", stress)
    batches = lockstep.shard(DataLoader(Numbered(24), batch_size=6, collate_fn=_sparse))
    sums = []
    for position, sparse in batches:
        assert sparse.device == position.device == world.device
        sums.append((sparse.to_dense() * position.view(-1, 1)).sum())
    return [float(each) for each in sums]


class Numbered(torch.utils.data.Dataset[int]):
    """Samples that are their numbers."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def _sparse(samples: list[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(samples, dtype=torch.float32), torch.eye(len(samples), 50).mul(3).to_sparse()


def not_finite(bad: int) -> tuple[int, str]:
    """Train on a device that is behind, with gradients that are not finite in one step of rank 0. Return the step in
    whose backward that is told, and how."""
    world = begin("gpu", Stress(main=500))
    model = replica("plain", net("plain", world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        optimizer.zero_grad()
        factor = float("inf") if step == bad and world.rank == 0 else 1.0
        loss = model(torch.ones(4, FEATURES, device=world.device)).sum() * factor
        try:
            loss.backward()
        except lockstep.NonFiniteGradient as error:
            return step, str(error)
        optimizer.step()
    return -1, ""


def drifted(at: int) -> tuple[int, str]:
    """Change a parameter of rank 1 and train on. Return the step in whose backward that is told, and how."""
    world = begin("gpu", Stress(main=500))
    # (A look at whether gradients are finite would wait for the step before.)
    model = lockstep.replicate(net("plain", world.device), compare_every=1, check_finite="off")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(12):
        if step == at and world.rank == 1:
            next(model.parameters()).data[3, 7] += 1
        optimizer.zero_grad()
        try:
            model(torch.ones(4, FEATURES, device=world.device)).sum().backward()
        except lockstep.ReplicaMismatch as error:
            return step, str(error)
        optimizer.step()
    return -1, ""


def own_device_and_numbers() -> tuple[str, int, list[float], list[float]]:
    """Return this rank's device, the current one, and what is drawn there and on the CPU."""
    world = begin("gpu", None)
    return (
        str(world.device),
        torch.cuda.current_device(),
        torch.rand(8, device="cuda").tolist(),
        torch.rand(8).tolist(),
    )


def captured_steps() -> tuple[list[Values], list[Values]]:
    """Train with a graph of a whole step, and without one. Return the parameters of each."""
    world = begin("gpu", None)
    generator = torch.Generator().manual_seed(3 + world.rank)
    batches = [torch.randn(8, FEATURES, generator=generator).to(world.device) for _ in range(4)]
    found = []
    for captures in (True, False):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # hooks and their nodes belong to the stream in which they were made
            model = replica("plain", net("plain", world.device))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            given = torch.zeros(8, FEATURES, device=world.device)

            def one_step(model: nn.Module = model, optimizer: Any = optimizer, given: Tensor = given) -> None:
                optimizer.zero_grad()
                model(given).square().mean().backward()
                optimizer.step()

            for batch in batches[:3]:  # what a first step learns
                given.copy_(batch)
                one_step()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        if captures:
            with torch.cuda.graph(graph, stream=side):
                one_step()
        for batch in batches:
            with torch.cuda.stream(side):
                given.copy_(batch)
                graph.replay() if captures else one_step()
        side.synchronize()
        found.append(_values(model.parameters()))
        lockstep.release(model)
    return found[0], found[1]
