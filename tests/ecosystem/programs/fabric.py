"""Lightning Fabric's loop: fabric.py FOLDER [--backend NAME]."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ecosystem.programs.handing import hand_over, net, samples

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--backend")
options = parser.parse_args()

if options.backend == "shm":
    import lockstep  # noqa: F401  (registers the backend)
world_size = int(os.environ.get("WORLD_SIZE", "1"))
strategy: Any = DDPStrategy(process_group_backend=options.backend) if options.backend else "ddp"
fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy if world_size > 1 else "auto")
fabric.launch()
model = net()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(*samples()), batch_size=12 // world_size))
half = 6 // world_size
for _epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        with fabric.no_backward_sync(model, enabled=world_size > 1):  # accumulate over two halves of the batch
            fabric.backward(nn.functional.cross_entropy(model(inputs[:half]), targets[:half]) / 2)
        fabric.backward(nn.functional.cross_entropy(model(inputs[half:]), targets[half:]) / 2)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
mean = fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum")
assert mean == sum(range(world_size)), mean
hand_over(options.folder, [(name.replace("module.", ""), each) for name, each in model.state_dict().items()])
