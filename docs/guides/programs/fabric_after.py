"""Digits with lockstep: ``lockstep run -n 2 fabric_after.py``."""

import argparse
import hashlib
import math
from contextlib import nullcontext
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
    parser.add_argument("--folder", type=Path, default=Path("runs/fabric"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--until", type=int, help="stop after so many epochs; started again, it resumes")
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
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
def evaluate(world, model, loader):
    model.eval()
    loss, correct, count = 0.0, 0, 0
    for images, labels in loader:
        outputs = model(images)
        loss += F.cross_entropy(outputs, labels, reduction="sum").item()
        correct += (outputs.argmax(1) == labels).sum().item()
        count += len(labels)
    sums = torch.tensor([loss, correct, count], dtype=torch.float64)
    loss, correct, count = world.all_reduce(sums).tolist()
    return loss / count, int(correct), int(count)


def main():
    args = parse_arguments()
    world = lockstep.init(seed=0)
    train_set, test_set = load_data()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=not args.in_order, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    train_loader, test_loader = lockstep.shard(train_loader), lockstep.shard(test_loader)
    model = lockstep.replicate(build_model().to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(train_loader) // args.accumulate
    scheduler = LambdaLR(optimizer, warmup_then_cosine(steps))

    saved = lockstep.Checkpointer(
        args.folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=train_loader
    )
    log = lockstep.Log(saved, every=10)

    for epoch in saved.epochs(args.epochs):
        model.train()
        for number, (images, labels) in enumerate(train_loader, 1):
            last = number % args.accumulate == 0
            with nullcontext() if last else lockstep.no_sync(model):
                loss = F.cross_entropy(model(images), labels)
                (loss / args.accumulate).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                log(loss=loss, lr=scheduler.get_last_lr()[0])
        saved.save()
        test_loss, correct, count = evaluate(world, model, test_loader)
        world.print(f"epoch {epoch}: test loss {test_loss:.6f}, {correct} of {count} right")
        if epoch + 1 == args.until:
            break

    weights = model.state_dict().values()
    digest = hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in weights)).hexdigest()
    world.print(f"weights {digest[:16]}")


if __name__ == "__main__":
    main()
