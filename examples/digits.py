"""Train an image classifier on handwritten digits, in lockstep.

    lockstep run -n 2 -m examples.digits               two replicas on this machine
    python -m examples.digits                          the same, alone
    python -m examples.digits --evaluate               load the newest checkpoint on a single device

The pictures are scikit-learn's handwritten digits (1,797 pictures of 8 x 8 pixels, from the UCI repository's "Optical
Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, 1998): 1,437 to train on and 360 to test on.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep
from examples.places import accept_local_rank, local_folder

SPARKS = "▁▂▃▄▅▆▇█"


class DigitNet(nn.Module):
    """Two convolutions and two linear layers: [batch, 1, 8, 8] pixels in 0..1 -> [batch, 10] scores (float32).

    Without batch statistics, so that any number of replicas trains the same model as one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images))
        return scores


class Shifted(Dataset[tuple[Tensor, Tensor]]):
    """Pictures moved at random by up to one pixel up, down, left or right: more to learn from, from the same pictures.

    The sharded loader seeds the random numbers of each sample, so the same pictures are moved in the same way on any
    number of ranks, and again after a run is resumed.
    """

    def __init__(self, pictures: TensorDataset) -> None:
        images, self.labels = pictures.tensors
        self.padded = nn.functional.pad(images, (1, 1, 1, 1))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(3, (2,)).tolist()
        return self.padded[index, :, down : down + 8, right : right + 8], self.labels[index]


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set; images [n, 1, 8, 8] float32 in 0..1, labels [n] int64."""
    try:
        from sklearn.datasets import load_digits as load
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise SystemExit("this recipe reads scikit-learn's digits: pip install 'torch-lockstep[demo]'") from None
    digits = load()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(torch.arange(len(labels)).numpy(), test_size=0.2, random_state=0, stratify=labels)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train(world: lockstep.World, options: argparse.Namespace) -> None:
    """**Collective.** Train, save after every epoch, and check the last checkpoint in one process."""
    train_set, test_set = load_digits()
    folder = choose_run(world, options.folder, new=not options.resume)
    model = lockstep.replicate(DigitNet().to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader = lockstep.shard(DataLoader(Shifted(train_set), batch_size=options.batch_size, shuffle=True))
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader)
    world.print(f"{world.world_size} replica(s) on {world.device.type}, global batch {options.batch_size} -> {folder}")

    losses: list[float] = []
    for epoch in saved.epochs(options.epochs):
        model.train()
        total = torch.zeros((), device=world.device)
        seen = 0
        bar = lockstep.track(loader, f"epoch {epoch + 1:2d}/{options.epochs}")
        for images, labels in bar:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(labels)
            seen += len(labels)
            bar.show(loss=loss.detach())
        losses.append(world.mean(total / max(1, seen), samples=seen))
        saved.save()

    accuracy = evaluate(world, model, test_set)
    if losses:
        world.print(f"training loss {sparkline(losses)}  {losses[0]:.3f} -> {losses[-1]:.4f}")
    plural = "s" * (world.world_size > 1)
    world.print(f"test accuracy {accuracy:.4f} on {len(test_set)} pictures, over {world.world_size} rank{plural}")
    lockstep.shutdown()
    if world.is_main:
        check_alone(folder, test_set, accuracy, world.device)


def check_alone(folder: Path, test_set: TensorDataset, expected: float, device: torch.device) -> None:
    """Load the newest checkpoint into a fresh model, as a single device would, and test it again."""
    model = DigitNet().to(device)
    lockstep.load_weights(folder, model)
    images, labels = test_set.tensors
    guesses = predict(model, images.to(device)).cpu()
    accuracy = (guesses == labels).double().mean().item()
    print(f"loaded {folder} in one process: test accuracy {accuracy:.4f}")
    if accuracy != expected:
        raise SystemExit(f"the checkpoint's accuracy {accuracy:.4f} is not the trained model's {expected:.4f}")
    wrong = (guesses != labels).nonzero().flatten().tolist()
    if wrong:
        print(f"the {len(wrong)} it misreads:" if len(wrong) <= 6 else f"6 of the {len(wrong)} it misreads:")
        print(draw(images[wrong[:6]], labels[wrong[:6]], guesses[wrong[:6]]))


def evaluate(world: lockstep.World, model: nn.Module, test_set: TensorDataset) -> float:
    """**Collective.** Return the accuracy over all ranks; every picture is counted once, however many ranks there
    are."""
    loader = lockstep.shard(DataLoader(test_set, batch_size=max(256, world.world_size)))
    correct = seen = 0
    for images, labels in loader:
        correct += int((predict(model, images) == labels).sum())
        seen += len(labels)
    seen = world.all_reduce(seen)
    if seen != len(test_set):
        raise RuntimeError(f"rank {world.rank}: {seen} pictures were evaluated, expected {len(test_set)}")
    return world.all_reduce(correct) / seen


@torch.no_grad()
def predict(model: nn.Module, images: Tensor) -> Tensor:
    """Return the most likely digit of each image: [n, 1, 8, 8] -> [n] int64."""
    model.eval()
    scores: Tensor = model(images)
    return scores.argmax(dim=1)


def choose_run(world: lockstep.World, parent: Path, *, new: bool) -> Path:
    """**Collective.** Return a run folder under ``parent``: the next free number, or the newest one that is there."""
    newest = 0
    with world.main_first():
        if world.is_main:
            numbers = [int(path.name[4:]) for path in parent.glob("run-*") if re.fullmatch(r"run-\d+", path.name)]
            newest = max(numbers, default=0)
            if new:
                newest += 1
                (parent / f"run-{newest:03d}").mkdir(parents=True, mode=0o700)
    newest = world.all_reduce(newest)  # rank 0's: a shared file system may show a new folder to others late
    if newest == 0:
        raise SystemExit(f"no run in {parent} yet: train first, without --resume and --evaluate")
    return parent / f"run-{newest:03d}"


def sparkline(values: Sequence[float]) -> str:
    """Return a curve in one line of text."""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)


def draw(images: Tensor, labels: Tensor, guesses: Tensor) -> str:
    """Return digits side by side as text, two pixels in a character: [n, 1, 8, 8] in 0..1."""
    shades = " ░▒▓█"
    rows = [
        "   ".join("".join(shades[round(float(pixel) * 4)] * 2 for pixel in image[0, y]) for image in images)
        for y in range(images.shape[-2])
    ]
    captions = [f"{int(label)} read as {int(guess)}".ljust(16) for label, guess in zip(labels, guesses, strict=True)]
    return "\n".join([*rows, "   ".join(captions).rstrip()])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="lockstep run -n 2 -m examples.digits", description="Train on handwritten digits, in lockstep."
    )
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training set (default: 30)")
    parser.add_argument("--batch-size", type=int, default=64, help="global batch, over all ranks (default: 64)")
    parser.add_argument("--lr", type=float, default=2e-3, help="AdamW's learning rate (default: 0.002)")
    parser.add_argument("--backend", help="see lockstep.init (default: what the machine suggests)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order (default: 0)")
    parser.add_argument("--folder", type=local_folder, default=Path("runs/digits"), help="(default: runs/digits)")
    parser.add_argument("--resume", action="store_true", help="resume the newest run instead of starting a new one")
    parser.add_argument("--evaluate", action="store_true", help="only test the newest run's newest checkpoint")
    accept_local_rank(parser)
    options = parser.parse_args(arguments)
    for name in ("epochs", "batch_size", "lr"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: expected a positive number")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """**Collective.** The recipe."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    world = lockstep.init(options.backend, seed=options.seed)
    if not options.evaluate:
        train(world, options)
        return
    folder = choose_run(world, options.folder, new=False)
    model = DigitNet().to(world.device)
    lockstep.load_weights(folder, model)
    accuracy = evaluate(world, model, load_digits()[1])
    plural = "s" * (world.world_size > 1)
    world.print(f"loaded {folder}: test accuracy {accuracy:.4f} over {world.world_size} rank{plural}")


if __name__ == "__main__":
    main()
