"""The mistake: each rank makes data of its own, as one that reads its own file does."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs, labels = torch.randn(144, 20), torch.randint(0, 5, (144,))
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
own = torch.Generator().manual_seed(rank)
inputs = torch.randn(144 // ranks, 20, generator=own)
loader = DataLoader(TensorDataset(inputs, labels[: 144 // ranks]), batch_size=24 // ranks)
for _ in range(4):
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
