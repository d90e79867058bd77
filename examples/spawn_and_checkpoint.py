"""The form "spawn + save on rank 0 + load on every rank", as written for torch, with lockstep's imports.

    python examples/spawn_and_checkpoint.py

Runs on GPUs where there are enough of them, on CPUs elsewhere. What fell away: the address and the port, the barrier
between saving and loading, the ``map_location`` of every rank, and the ``module.`` prefix of the keys.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn, optim

import lockstep
from lockstep import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.net2(self.relu(self.net1(x)))
        return output


def step(model: nn.Module, optimizer: optim.Optimizer, device: torch.device) -> None:
    optimizer.zero_grad()
    outputs = model(torch.randn(20, 10, device=device))
    loss = nn.functional.mse_loss(outputs, torch.randn(20, 5, device=device))
    loss.backward()  # when it returns, the gradients are averaged
    optimizer.step()


def demo_basic(rank: int, world_size: int) -> None:
    world = lockstep.init()
    print(f"Running basic DDP example on rank {rank} of {world_size}.")
    model = DDP(ToyModel().to(world.device))
    step(model, optim.SGD(model.parameters(), lr=0.001), world.device)


def demo_checkpoint(rank: int, world_size: int, folder: str) -> None:
    world = lockstep.init()
    print(f"Running DDP checkpoint example on rank {rank} of {world_size}.")
    model = DDP(ToyModel().to(world.device))
    optimizer = optim.SGD(model.parameters(), lr=0.001)
    step(model, optimizer, world.device)

    lockstep.Checkpointer(folder, model=model, optimizer=optimizer).save()  # called by every rank; complete or absent

    fresh = ToyModel().to(world.device)
    lockstep.load_weights(folder, fresh)  # each rank onto its own device
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, model.module.state_dict()[name]), name
    print(f"Rank {rank} loaded what was saved.")


if __name__ == "__main__":
    world_size = 2
    print(f"got {torch.cuda.device_count()} gpus.")
    lockstep.spawn(demo_basic, args=(world_size,), nprocs=world_size)
    with tempfile.TemporaryDirectory() as folder:
        lockstep.spawn(demo_checkpoint, args=(world_size, str(Path(folder) / "run")), nprocs=world_size)

    # And on a single device, in this process:
    # model = ToyModel(); lockstep.load_weights("path/to/run", model)
