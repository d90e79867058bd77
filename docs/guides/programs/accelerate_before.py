"""Digits with Accelerate: ``accelerate launch --cpu --num_processes 2 accelerate_before.py``."""

import argparse
import hashlib
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset, random_split


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--until", type=int, help="stop after so many epochs; started again, it resumes")
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
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


class Progress:
    """The epochs that are done, for a checkpoint."""

    epochs = 0

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    loss, correct, count = 0.0, 0, 0
    for images, labels in loader:
        outputs, labels = accelerator.gather_for_metrics((model(images), labels))
        loss += F.cross_entropy(outputs, labels, reduction="sum").item()
        correct += (outputs.argmax(1) == labels).sum().item()
        count += len(labels)
    return loss / count, correct, count


def main():
    args = parse_arguments()
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    set_seed(0)
    train_set, test_set = load_data()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=not args.in_order, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(train_loader) // args.accumulate
    scheduler = LambdaLR(optimizer, warmup_then_cosine(steps))
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    saved = sorted(args.folder.glob("epoch-*"))
    if saved:
        accelerator.load_state(str(saved[-1]))

    for epoch in range(progress.epochs, args.until or args.epochs):
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        progress.epochs = epoch + 1
        accelerator.save_state(str(args.folder / f"epoch-{progress.epochs:03}"))
        test_loss, correct, count = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: test loss {test_loss:.6f}, {correct} of {count} right")

    weights = accelerator.unwrap_model(model).state_dict().values()
    digest = hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in weights)).hexdigest()
    accelerator.print(f"weights {digest[:16]}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
