"""Digits with Composer: ``composer -n 2 composer_before.py``."""

import argparse
import hashlib
import math
from pathlib import Path

import torch
from composer import Callback, Trainer
from composer.algorithms import GradientClipping
from composer.models import ComposerModel
from composer.utils import dist
from composer.utils.reproducibility import seed_all
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/composer"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--until", type=int, help="stop after so many epochs; started again, it resumes")
    parser.add_argument("--batch-size", type=int, default=64, help="of each device")
    parser.add_argument("--microbatch-size", type=int, default=32, help="of each device, in one backward")
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


class Digits(ComposerModel):
    def __init__(self):
        super().__init__()
        convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
        self.net = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 10))
        self.metrics = {"loss": MeanMetric(), "accuracy": MulticlassAccuracy(10, average="micro")}

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train):
        return {} if is_train else self.metrics

    def update_metric(self, batch, outputs, metric):
        labels = batch[1]
        if isinstance(metric, MeanMetric):
            metric.update(F.cross_entropy(outputs, labels), weight=len(labels))
        else:
            metric.update(outputs, labels)


class PrintEpoch(Callback):
    def eval_end(self, state, _logger):
        loss, accuracy = (each.compute() for each in state.eval_metrics["eval"].values())
        if dist.get_global_rank() == 0:
            print(f"epoch {int(state.timestamp.epoch) - 1}: test loss {loss:.6f}, accuracy {accuracy:.4f}")


def main():
    args = parse_arguments()
    seed_all(0)
    train_set, test_set = load_data()
    train_sampler = dist.get_sampler(train_set, shuffle=not args.in_order, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=args.microbatch_size, sampler=dist.get_sampler(test_set))
    model = Digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(train_loader)
    trainer = Trainer(
        model=model,
        train_dataloader=train_loader,
        eval_dataloader=test_loader,
        max_duration=f"{args.until or args.epochs}ep",
        optimizers=optimizer,
        schedulers=LambdaLR(optimizer, warmup_then_cosine(steps)),
        step_schedulers_every_batch=True,
        device_train_microbatch_size=args.microbatch_size,
        algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=1.0)],
        callbacks=[PrintEpoch()],
        progress_bar=False,
        run_name="digits",
        save_folder=str(args.folder),
        save_interval="1ep",
        autoresume=True,
        seed=0,
    )
    trainer.fit()

    if dist.get_global_rank() == 0:
        weights = trainer.state.model.net.state_dict().values()
        digest = hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in weights)).hexdigest()
        print(f"weights {digest[:16]}")
    trainer.close()


if __name__ == "__main__":
    main()
