"""The whole of a training script. Start it with ``lockstep run -n 2 examples/train.py``, or alone with ``python``."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

pixels, digits = (torch.from_numpy(values) for values in load_digits(return_X_y=True))
train_set = TensorDataset(pixels.float() / 16, digits.long())

world = lockstep.init()  # rank, world size, device; a world of one if not launched
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(world.device)
lockstep.replicate(model)  # in place: no wrapper, no "module." in its keys
optimizer = torch.optim.AdamW(model.parameters())
loader = lockstep.shard(DataLoader(train_set, batch_size=64, shuffle=True))  # 64 is the global batch
saved = lockstep.Checkpointer("runs/train", model=model, optimizer=optimizer, loader=loader)

for epoch in saved.epochs(3):  # resumes where the last run stopped
    for images, labels in lockstep.track(loader, f"epoch {epoch}"):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    saved.save()
