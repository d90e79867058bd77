"""Lightning's Trainer: lightning_trainer.py FOLDER [--backend NAME] [--init plain|lockstep]."""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.ecosystem.programs.handing import hand_over, net, samples

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--backend")
parser.add_argument("--init", default="plain", choices=["plain", "lockstep"])
options = parser.parse_args()

if options.backend == "shm":
    import lockstep  # registers the backend
if options.init == "lockstep":
    import lockstep

    lockstep.init("shm")


class Classifier(lightning.LightningModule):  # type: ignore[misc]  # untyped here
    """A net and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.heard: list[torch.Tensor] = []

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def on_train_epoch_end(self) -> None:
        self.heard.append(self.trainer.callback_metrics["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


world_size = int(os.environ.get("WORLD_SIZE", "1"))
strategy: Any = DDPStrategy(process_group_backend=options.backend) if options.backend else "ddp"
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=world_size,
    strategy=strategy if world_size > 1 else "auto",
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
    default_root_dir=options.folder,
    gradient_clip_val=1.0,
)
print(f"processes {trainer.world_size}", flush=True)
model = Classifier()
data = TensorDataset(*samples())
# Lightning's own sampler shuffles; this one gives the ranks the batches that one process has.
sampler: Any = DistributedSampler(data, world_size, int(os.environ.get("RANK", "0")), shuffle=False)
trainer.fit(model, DataLoader(data, batch_size=12 // world_size, sampler=sampler))
hand_over(options.folder, [*model.net.state_dict().items(), ("losses", torch.stack(model.heard))])
