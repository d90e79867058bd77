"""Digits with Fabric: ``python fabric_before.py --devices 2``."""

import argparse
import hashlib
import math
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset, random_split


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/fabric"))
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


def build_model():
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 10))


def warmup_then_cosine(steps, warmup=20):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    return factor


@torch.no_grad()
def evaluate(fabric, model, loader):
    model.eval()
    loss, correct, count = 0.0, 0, 0
    for images, labels in loader:
        outputs = model(images)
        loss += F.cross_entropy(outputs, labels, reduction="sum").item()
        correct += (outputs.argmax(1) == labels).sum().item()
        count += len(labels)
    sums = torch.tensor([loss, correct, count], dtype=torch.float64)
    loss, correct, count = fabric.all_reduce(sums, reduce_op="sum").tolist()
    return loss / count, int(correct), int(count)


def main():
    args = parse_arguments()
    strategy = "ddp" if args.devices > 1 else "auto"
    logger = CSVLogger(args.folder, flush_logs_every_n_steps=1)
    fabric = Fabric(devices=args.devices, strategy=strategy, loggers=logger)
    fabric.launch()
    fabric.seed_everything(0)
    train_set, test_set = load_data()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=not args.in_order, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(train_loader) // args.accumulate
    scheduler = LambdaLR(optimizer, warmup_then_cosine(steps))
    model, optimizer = fabric.setup(model, optimizer)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epochs": 0, "steps": 0}
    saved = sorted(args.folder.glob("epoch-*.ckpt"))
    if saved:
        fabric.load(saved[-1], state)

    for epoch in range(state["epochs"], args.until or args.epochs):
        model.train()
        for number, (images, labels) in enumerate(train_loader, 1):
            last = number % args.accumulate == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = F.cross_entropy(model(images), labels)
                fabric.backward(loss / args.accumulate)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                state["steps"] += 1
                if state["steps"] % 10 == 0:
                    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
                    fabric.log_dict({"loss": mean, "lr": scheduler.get_last_lr()[0]}, state["steps"])
        state["epochs"] = epoch + 1
        fabric.save(args.folder / f"epoch-{epoch + 1:03}.ckpt", state)
        test_loss, correct, count = evaluate(fabric, model, test_loader)
        fabric.print(f"epoch {epoch}: test loss {test_loss:.6f}, {correct} of {count} right")

    weights = model.state_dict().values()
    digest = hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in weights)).hexdigest()
    fabric.print(f"weights {digest[:16]}")


if __name__ == "__main__":
    main()
