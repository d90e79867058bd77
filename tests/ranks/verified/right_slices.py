"""No mistake, though it has a batch norm and dropout: batches in slices, which any number of ranks computes alike."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

lockstep.init()
inputs, labels = torch.randn(150, 20), torch.randint(0, 5, (150,))
layers = nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5)
model = lockstep.replicate(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = lockstep.shard(DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True), slices=6)
for _ in range(2):
    for step in loader.steps():
        for images, targets in step:
            nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
