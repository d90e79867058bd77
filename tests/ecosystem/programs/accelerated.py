"""accelerate's loop: accelerated.py FOLDER [--init plain|lockstep] [--default-device] [--accumulate N]."""

from __future__ import annotations

import argparse
import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ecosystem.programs.handing import hand_over, net, samples

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--init", default="plain", choices=["plain", "lockstep"])
parser.add_argument("--default-device", action="store_true", help="leave out cpu=True")
parser.add_argument("--accumulate", type=int, default=1)
options = parser.parse_args()

if options.init == "lockstep":
    import lockstep

    lockstep.init("shm")
accelerator = Accelerator(cpu=not options.default_device, gradient_accumulation_steps=options.accumulate)
print(f"processes {accelerator.num_processes}", flush=True)
world_size = int(os.environ.get("WORLD_SIZE", "1"))
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batch_size = 12 // world_size // options.accumulate
loader = DataLoader(TensorDataset(*samples()), batch_size=batch_size, shuffle=True, generator=torch.Generator())
uneven = DataLoader(TensorDataset(*samples(50)), batch_size=batch_size)
model, optimizer, loader, uneven = accelerator.prepare(model, optimizer, loader, uneven)
for _epoch in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
model.eval()
outputs = []
with torch.no_grad():
    for inputs, _ in uneven:
        outputs.append(accelerator.gather_for_metrics(model(inputs)))
accelerator.wait_for_everyone()
gathered = torch.cat(outputs)
hand_over(options.folder, [*accelerator.unwrap_model(model).state_dict().items(), ("gathered", gathered)])
accelerator.end_training()
