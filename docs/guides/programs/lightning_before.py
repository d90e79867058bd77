"""Digits with Lightning: ``python lightning_before.py --devices 2``."""

import argparse
import hashlib
import math
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--until", type=int, help="stop after so many epochs; started again, it resumes")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32, help="of each device")
    parser.add_argument("--accumulate", type=int, default=2, help="batches for one step")
    parser.add_argument("--lr", type=float, default=0.004)
    parser.add_argument("--in-order", action="store_true", help="take the samples as they lie, to compare runs")
    return parser.parse_args()


def load_data():
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(digits).long())
    return random_split(data, [1437, 360], generator=torch.Generator().manual_seed(0))


def warmup_then_cosine(steps, warmup=20):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    return factor


class Digits(lightning.LightningModule):
    def __init__(self, lr, steps):  # noqa: ARG002  (save_hyperparameters reads them)
        super().__init__()
        self.save_hyperparameters()
        convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
        self.net = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 10))
        self.test_loss, self.accuracy = MeanMetric(), MulticlassAccuracy(10, average="micro")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = LambdaLR(optimizer, warmup_then_cosine(self.hparams.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch, _index):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, _index):
        images, labels = batch
        outputs = self.net(images)
        self.test_loss.update(F.cross_entropy(outputs, labels), weight=len(labels))
        self.accuracy.update(outputs, labels)

    def on_validation_epoch_end(self):
        loss, accuracy = self.test_loss.compute(), self.accuracy.compute()
        self.log_dict({"test/loss": loss, "test/accuracy": accuracy})
        self.print(f"epoch {self.current_epoch}: test loss {loss:.6f}, accuracy {accuracy:.4f}")
        self.test_loss.reset()
        self.accuracy.reset()


def main():
    args = parse_arguments()
    lightning.seed_everything(0)
    train_set, test_set = load_data()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=not args.in_order, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    model = Digits(args.lr, steps=args.epochs * len(train_loader) // args.devices // args.accumulate)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        max_epochs=args.until or args.epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=CSVLogger(args.folder),
        callbacks=[ModelCheckpoint(args.folder, save_last=True), LearningRateMonitor()],
        log_every_n_steps=10,
        enable_progress_bar=False,
    )
    last = args.folder / "last.ckpt"
    trainer.fit(model, train_loader, test_loader, ckpt_path=last if last.exists() else None)

    if trainer.is_global_zero:
        weights = model.net.state_dict().values()
        digest = hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in weights)).hexdigest()
        print(f"weights {digest[:16]}")


if __name__ == "__main__":
    main()
