"""The mistake, under dropout: a loss that is a sum."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

lockstep.init()
inputs, labels = torch.randn(144, 20), torch.randint(0, 5, (144,))
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))
lockstep.replicate(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(inputs, labels), batch_size=24, shuffle=True))
for _ in range(4):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets, reduction="sum") / 24
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
