"""What a run writes down about itself, on rank 0: two tables and TensorBoard's events.

Rows are written before the checkpoint that includes them. A run that is killed between the two repeats the steps from
the checkpoint before, and their rows are taken out when it is resumed: so a table has every step once.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import lockstep
from examples.imagenet.vision import require

STEPS = ("step", "epoch", "lr", "loss", "pictures")
EPOCHS = (
    "step", "epoch", "lr", "train_loss", "val_loss", "top1", "top5", "ema_loss", "ema_top1", "ema_top5", "pictures",
    "unreadable", "seconds",
)  # fmt: skip


class Table:
    """A CSV file that can be cut back to a step."""

    def __init__(self, path: Path, columns: Sequence[str], *, up_to_step: int) -> None:
        self._path, self._columns = path, columns
        kept = [row for row in read_table(path) if row.get("step", "").isdecimal() and int(row["step"]) <= up_to_step]
        beside = path.with_suffix(".tmp")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(kept)
        os.replace(beside, path)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row; what it lacks stays empty."""
        with open(self._path, "a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the complete rows of a table; none if there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]  # the last may have been cut off


class Records:
    """**Rank 0.** ``steps.csv``, ``epochs.csv`` and ``tensorboard/`` in the run's folder; nothing on other ranks."""

    def __init__(self, world: lockstep.World, folder: Path, *, step: int, tensorboard: bool) -> None:
        self._tables: dict[str, Table] = {}
        self._events: Any = None
        if not world.is_main:
            return
        for name, columns in (("steps", STEPS), ("epochs", EPOCHS)):
            self._tables[name] = Table(folder / f"{name}.csv", columns, up_to_step=step)
        if tensorboard:
            events = require("torch.utils.tensorboard")
            # Events after the step are those of steps that will be repeated.
            self._events = events.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Add a row, with its ``step``, to the table "steps" or "epochs"."""
        table = self._tables.get(name)
        if table is None:
            return
        table.add({key: f"{value:.9g}" if isinstance(value, float) else value for key, value in row.items()})
        if self._events is not None:
            for key, value in row.items():
                if key != "step":
                    self._events.add_scalar(f"{name}/{key}", value, row["step"])
            self._events.flush()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._events is not None:
            self._events.close()
