"""The mistake: ranks with unequal parts of a batch, which torch's DDP averages as if they were equal."""

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
loader = DataLoader(TensorDataset(inputs, labels), batch_size=24)
for _ in range(4):
    for images, targets in loader:
        parts = torch.tensor_split(torch.arange(24), [8])[rank] if ranks == 2 else torch.arange(24)
        loss = nn.functional.cross_entropy(model(images[parts]), targets[parts])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
