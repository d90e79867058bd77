"""Digits with lockstep: ``lockstep run -n 2 composer_after.py``."""

import argparse
import hashlib
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset, random_split

import lockstep


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/composer"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--until", type=int, help="stop after so many epochs; started again, it resumes")
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--slices", type=int, default=2, help="of a batch, each with a backward of its own")
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


def build_model():
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 10))


@torch.no_grad()
def evaluate(world, model, loader):
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)  # of losses, of samples that are right, of samples
    for images, labels in loader:
        outputs = model(images)
        loss = F.cross_entropy(outputs, labels, reduction="sum")
        sums += torch.tensor([loss, (outputs.argmax(1) == labels).sum(), len(labels)])
    loss, correct, count = world.all_reduce(sums).tolist()
    return loss / count, correct / count


def main():
    args = parse_arguments()
    world = lockstep.init(seed=0)
    train_set, test_set = load_data()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=not args.in_order, drop_last=True)
    test_loader = lockstep.shard(DataLoader(test_set, batch_size=32))
    train_loader = lockstep.shard(train_loader, slices=args.slices)
    model = lockstep.replicate(build_model().to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(train_loader)
    scheduler = LambdaLR(optimizer, warmup_then_cosine(steps))
    saved = lockstep.Checkpointer(
        args.folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=train_loader
    )

    for epoch in saved.epochs(args.epochs):
        model.train()
        for step in train_loader.steps():
            for images, labels in step:
                F.cross_entropy(model(images), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        saved.save()
        test_loss, accuracy = evaluate(world, model, test_loader)
        world.print(f"epoch {epoch}: test loss {test_loss:.6f}, accuracy {accuracy:.4f}")
        if epoch + 1 == args.until:
            break

    weights = model.state_dict().values()
    digest = hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in weights)).hexdigest()
    world.print(f"weights {digest[:16]}")


if __name__ == "__main__":
    main()
