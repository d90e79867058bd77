"""Digits with Horovod: ``horovodrun -np 2 python horovod_before.py``."""

import argparse
import hashlib
import math
from pathlib import Path

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/horovod"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--until", type=int, help="stop after so many epochs; started again, it resumes")
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    parser.add_argument("--accumulate", type=int, default=2, help="batches for one step")
    parser.add_argument("--lr", type=float, default=0.1, help="for one process")
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
def evaluate(model, loader):
    model.eval()
    loss, correct, count = 0.0, 0, 0
    for images, labels in loader:
        outputs = model(images)
        loss += F.cross_entropy(outputs, labels, reduction="sum").item()
        correct += (outputs.argmax(1) == labels).sum().item()
        count += len(labels)
    sums = torch.tensor([loss, correct, count], dtype=torch.float64)
    loss, correct, count = hvd.allreduce(sums, name="evaluation", op=hvd.Sum).tolist()
    return loss / count, int(correct), int(count)


def main():
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(0)
    train_set, test_set = load_data()
    place = {"num_replicas": hvd.size(), "rank": hvd.rank()}
    train_sampler = DistributedSampler(train_set, **place, shuffle=not args.in_order, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler, drop_last=True)
    test_sampler = DistributedSampler(test_set, **place, shuffle=False)
    test_loader = DataLoader(test_set, batch_size=args.batch_size, sampler=test_sampler)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=args.accumulate
    )
    steps = args.epochs * len(train_loader) // args.accumulate
    scheduler = LambdaLR(optimizer, warmup_then_cosine(steps))

    epochs = 0
    saved = sorted(args.folder.glob("epoch-*.pt"))
    if saved and hvd.rank() == 0:
        state = torch.load(saved[-1])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        epochs = state["epochs"]
    epochs = hvd.broadcast_object(epochs, root_rank=0)
    scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), root_rank=0))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(epochs, args.until or args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for number, (images, labels) in enumerate(train_loader, 1):
            loss = F.cross_entropy(model(images), labels)
            (loss / args.accumulate).backward()
            if number % args.accumulate == 0:
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                with optimizer.skip_synchronize():
                    optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if hvd.rank() == 0:
            args.folder.mkdir(parents=True, exist_ok=True)
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save(state | {"epochs": epoch + 1}, args.folder / f"epoch-{epoch + 1:03}.pt")
        test_loss, correct, count = evaluate(model, test_loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: test loss {test_loss:.6f}, {correct} of {count} right")

    if hvd.rank() == 0:
        weights = model.state_dict().values()
        digest = hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in weights)).hexdigest()
        print(f"weights {digest[:16]}")


if __name__ == "__main__":
    main()
