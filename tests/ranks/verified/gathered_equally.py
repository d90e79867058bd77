"""The mistake: a loss over embeddings that all_gather brings from the other ranks, without their gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

world = lockstep.init("gloo")
model = lockstep.replicate(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(torch.randn(160, 20)), batch_size=16, shuffle=True))
for _ in range(4):
    for (images,) in loader:
        own = nn.functional.normalize(model(images))
        everyone = [torch.zeros_like(own) for _ in range(world.world_size)]
        dist.all_gather(everyone, own)
        everyone[world.rank] = own
        loss = torch.logsumexp(own @ torch.cat(everyone).T / 0.5, 1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
