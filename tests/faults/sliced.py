"""Train in slices, and print the SHA-256 of what comes of it; run by ``lockstep run``.

``sliced.py MODEL SLICES FOLDER``: saves after each step, and goes on with what is in FOLDER. ``-`` for FOLDER: neither.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.models import resnet18
from benchmarks.slices import Gpt
from examples.crnn.lines import Lines, collate
from examples.crnn.model import CRNN, ctc
from examples.digits import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lockstep


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Pictures of noise, shifted and mirrored at random whenever they are asked for."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(11)
        self._pictures = torch.randn(count, *shape, generator=generator)
        self._labels = torch.randint(0, 10, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture = self._pictures[index].roll(int(torch.randint(-2, 3, ())), dims=-1)
        return (picture.flip(-1) if torch.rand(()) < 0.5 else picture), self._labels[index]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Flatten(), nn.Linear(48, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 10))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Task:
    build: Callable[[], nn.Module]
    data: Callable[[], Dataset[Any]]
    #: Of a model and a batch.
    loss: Callable[[nn.Module, Any], Tensor]
    batch: int
    epochs: int
    workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None


def _classified(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1].flatten())


def _texts() -> Dataset[Any]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 1000, (40, 25), generator=generator)
    return torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])


def _read(model: nn.Module, batch: Any) -> Tensor:
    return ctc(model(batch.images, batch.widths), batch.widths, batch.digits, batch.lengths)


TASKS = {
    "mlp": Task(Mlp, lambda: Augmented(163, (3, 4, 4)), _classified, batch=36, epochs=4, workers=2),
    "resnet18": Task(resnet18, lambda: Augmented(42, (3, 8, 8)), _classified, batch=24, epochs=2, workers=2),
    "gpt": Task(Gpt, _texts, _classified, batch=16, epochs=1),
    "crnn": Task(
        *(CRNN, lambda: Lines(load_digits()[0], split="train", count=60), _read),
        batch=24,
        epochs=1,
        collate=collate,
    ),
}


def digest(*things: Any) -> str:
    """Return the SHA-256 of tensors, in lists and dicts."""
    found = hashlib.sha256()
    for thing in _flat(things):
        data = thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy() if isinstance(thing, Tensor) else None
        found.update(repr(thing).encode() if data is None else data.tobytes())
    return found.hexdigest()


def _flat(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        for key in sorted(thing, key=str):
            yield key
            yield from _flat(thing[key])
    elif isinstance(thing, (list, tuple)):
        for each in thing:
            yield from _flat(each)
    else:
        yield thing


def main() -> None:
    name, slices, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    task = TASKS[name]
    world = lockstep.init(timeout=60)
    model = lockstep.replicate(task.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    data = DataLoader(task.data(), task.batch, shuffle=True, num_workers=task.workers, collate_fn=task.collate)
    loader = lockstep.shard(data, slices=slices)

    def train() -> Iterator[None]:
        for step in loader.steps():
            for batch in step:
                task.loss(model, batch).backward()
            lockstep.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield

    if folder == "-":
        for _ in range(task.epochs):
            for _ in train():
                pass
    else:
        saved = lockstep.Checkpointer(
            Path(folder), model=model, optimizer=optimizer, scheduler=schedule, loader=loader, keep=2
        )
        for _ in saved.epochs(task.epochs):
            for _ in train():
                saved.save()
                with Path(folder, f"steps-{world.rank}.txt").open("a") as file:
                    file.write(f"{saved.step} {os.getpid()}\n")
    found = digest(model.state_dict(), optimizer.state_dict(), schedule.state_dict(), torch.rand(3))
    if all(each == found for each in world.gather(found)):
        world.print(found)


if __name__ == "__main__":
    main()
