"""Not equal by design: noise, levels of it and skipped layers, drawn for each sample before and in the model."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(21, 32), nn.Linear(32, 20)
        self.texts = nn.LSTM(32, 32, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, noisy: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(torch.cat([noisy, levels.unsqueeze(1) / 10], 1)))
        kept = hidden.new_empty(len(hidden), 1).bernoulli_(0.8)
        hidden = hidden + kept * self.texts(hidden.unsqueeze(1))[0].squeeze(1)
        made: torch.Tensor = self.last(hidden + 0.1 * torch.randn_like(hidden))
        return made


lockstep.init()
images = torch.randn(144, 20)
model = lockstep.replicate(Denoiser())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(images), batch_size=24, shuffle=True))
for _ in range(4):
    for (batch,) in loader:
        noise, levels = torch.randn_like(batch), torch.randint(0, 10, (len(batch),))
        noisy = batch + noise * levels.unsqueeze(1) / 10
        loss = (model(noisy, levels) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
