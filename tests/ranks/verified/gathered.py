"""The mistake: a loss over embeddings gathered from all ranks, with unequal parts of the batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader, TensorDataset

import lockstep

world = lockstep.init("gloo")
model = lockstep.replicate(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(torch.randn(150, 20)), batch_size=15, shuffle=True))
largest = -(-15 // world.world_size)
for _ in range(4):
    for (images,) in loader:
        own = nn.functional.normalize(model(images))
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world.world_size)]
        dist.all_gather(counts, torch.tensor([len(own)]))
        padded = torch.cat([own, own.new_zeros(largest - len(own), 8)])
        everyone = torch.cat([part[: int(n)] for part, n in zip(all_gather(padded), counts, strict=True)])
        likeness = own @ everyone.T / 0.5
        loss = (torch.logsumexp(likeness, 1) - (own * own.roll(1, 1)).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
