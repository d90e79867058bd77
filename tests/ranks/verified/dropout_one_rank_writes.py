"""The mistake, under dropout: one rank writes to the model in the middle of training."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

world = lockstep.init()
inputs, labels = torch.randn(144, 20), torch.randint(0, 5, (144,))
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))
lockstep.replicate(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(inputs, labels), batch_size=24, shuffle=True))
steps = 0
for _ in range(4):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps == 3 and world.rank == 1:
            with torch.no_grad():
                next(model.parameters()).add_(0.01)
