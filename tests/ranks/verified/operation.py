"""The mistake: an operation that is not deterministic. Which of the values for one place stays depends on their order,
which nobody decides: here it is drawn anew in each run, as a race between threads draws it."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

lockstep.init()
nobody = np.random.default_rng()
inputs, labels = torch.randn(144, 20), torch.randint(0, 5, (144,))
model = lockstep.replicate(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(inputs, labels), batch_size=24, shuffle=True))
for _ in range(4):
    for images, targets in loader:
        losses = nn.functional.cross_entropy(model(images), targets, reduction="none")
        order = torch.from_numpy(nobody.permutation(len(losses)))
        weights = torch.ones(len(losses)).put_(order // 2, 1 + order / len(losses))
        loss = (losses * weights).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
