"""No mistake: LBFGS, whose closure returns the loss of the global batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

world = lockstep.init()
inputs, labels = torch.randn(120, 20), torch.randint(0, 5, (120,))
model = lockstep.replicate(nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 5)))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
loader = lockstep.shard(DataLoader(TensorDataset(inputs, labels), batch_size=15, shuffle=True))
for images, targets in loader:

    def closure(images: torch.Tensor = images, targets: torch.Tensor = targets) -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        mean: float = world.mean(loss)
        return mean

    optimizer.step(closure)
