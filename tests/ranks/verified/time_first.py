"""Not equal by design: each rank drops units of its own. The model's input is time-first, as of recurrent layers."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.dropout, self.last = nn.LSTM(6, 16), nn.Dropout(0.2), nn.Linear(16, 5)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.dropout(self.recurrent(sequences)[0][-1]))
        return made


lockstep.init()
inputs, labels = torch.randn(144, 7, 6), torch.randint(0, 5, (144,))
model = lockstep.replicate(Recurrent())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(inputs, labels), batch_size=24, shuffle=True))
for _ in range(4):
    for sequences, targets in loader:
        loss = nn.functional.cross_entropy(model(sequences.transpose(0, 1)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
