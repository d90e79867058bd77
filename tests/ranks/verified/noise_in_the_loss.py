"""Not equal by design: the loss of each sample weighs by a number that is drawn for it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

lockstep.init()
inputs, labels = torch.randn(144, 20), torch.randint(0, 5, (144,))
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
lockstep.replicate(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(inputs, labels), batch_size=24, shuffle=True))
for _ in range(4):
    for images, targets in loader:
        losses = nn.functional.cross_entropy(model(images), targets, reduction="none")
        loss = (losses * torch.empty_like(losses).exponential_()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
