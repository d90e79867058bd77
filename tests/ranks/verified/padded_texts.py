"""Not equal by design: texts are padded to the longest of each rank's part, which the model sees."""

import torch
from torch import nn
from torch.utils.data import DataLoader

import lockstep

lockstep.init()
texts = [torch.randint(2, 50, (int(length),)) for length in torch.randint(3, 20, (96,))]


def pad(batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=1)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.words(words).mean(1))
        return out


model = lockstep.replicate(Bag())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(texts, batch_size=12, shuffle=True, collate_fn=pad))  # type: ignore[arg-type]
for _ in range(4):
    for batch in loader:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
