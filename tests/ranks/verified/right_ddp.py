"""No mistake: torch's DDP, with the batch size divided by the number of ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs, labels = torch.randn(144, 20), torch.randint(0, 5, (144,))
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler: DistributedSampler[object] = DistributedSampler(TensorDataset(inputs, labels), seed=0)
loader = DataLoader(sampler.dataset, batch_size=24 // ranks, sampler=sampler)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
