"""The mistake: a mean over each rank's own tokens, of a model that has learned nothing yet."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

lockstep.init()
tokens = torch.randint(0, 50, (96, 12))
lengths = torch.randint(2, 12, (96, 1))
targets = torch.where(torch.arange(12) < lengths, tokens, -100)
head = nn.Linear(16, 50)
head.weight.data.mul_(0.02)  # as transformers begin: every token has nearly the same loss
head.bias.data.zero_()
model = lockstep.replicate(nn.Sequential(nn.Embedding(50, 16), head))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(tokens, targets), batch_size=12, shuffle=True))
for _ in range(4):
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
