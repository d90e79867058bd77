"""The mistake: a loss that is divided by the number of ranks."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

world = lockstep.init()
inputs, labels = torch.randn(144, 20), torch.randint(0, 5, (144,))
model = lockstep.replicate(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(inputs, labels), batch_size=24, shuffle=True))
for _ in range(4):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        (loss / world.world_size).backward()
        optimizer.step()
