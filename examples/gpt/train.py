"""Train, save, resume and test."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep
from examples.gpt.model import GPT
from examples.gpt.options import KEPT, Options
from examples.gpt.text import IGNORED, Text, Windows
from examples.kept import Kept
from examples.stream import Stream

_WEIGHT_DECAY = 0.1
#: Part of the highest learning rate that is left at the end.
_LOWEST = 0.1
#: Steps between two lines of metrics.jsonl.
_LOG_EVERY = 10


class Curve:
    """The mean training loss of each epoch, over all samples of all ranks.

    It is saved with the run, so that a run that is resumed within an epoch knows the mean of the whole epoch.
    """

    def __init__(self) -> None:
        self.epochs: list[float] = []
        self._sum = 0.0
        self._samples = 0

    def add(self, loss: float, samples: int) -> None:
        """A step's mean over so many samples."""
        self._sum += loss * samples
        self._samples += samples

    def end_epoch(self) -> float:
        """Return the epoch's mean; the next one begins with nothing."""
        self.epochs.append(self._sum / self._samples)
        self._sum, self._samples = 0.0, 0
        return self.epochs[-1]

    def state_dict(self) -> dict[str, Any]:
        """Return the epochs so far."""
        return {"epochs": self.epochs, "sum": self._sum, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` gave."""
        self.epochs, self._sum, self._samples = list(state["epochs"]), state["sum"], state["samples"]


@dataclass
class Run:
    """The parts of a run, and the loss of its last test."""

    world: lockstep.World
    options: Options
    model: GPT
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    loader: lockstep.ShardedLoader
    #: Of an epoch.
    steps: int
    held_out: lockstep.ShardedLoader
    saved: lockstep.Checkpointer
    log: lockstep.Log
    curve: Curve
    held_out_loss: float = math.nan


def build(options: Options, text: Text) -> GPT:
    """Return a new model on the CPU."""
    return GPT(
        len(text.vocabulary),
        context=options.context,
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        dropout=options.dropout,
    )


def begin(world: lockstep.World, options: Options, text: Text, folder: Path) -> Run:
    """**Collective.** Everything that a run in ``folder`` needs; nothing is restored yet."""
    model = lockstep.replicate(build(options, text).to(world.device))
    windows = Windows(text.train, options.context, shifted=True)
    batches: DataLoader[Any]
    if options.stream:
        batches = DataLoader(Stream(windows, seed=options.seed), options.batch_size)
    else:
        batches = DataLoader(windows, options.batch_size, shuffle=True)
    # Slices: the same bits on any number of ranks.
    loader = lockstep.shard(batches, slices=options.slices)
    optimizer = torch.optim.AdamW(grouped(model), lr=options.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors(options, options.epochs * len(batches)))
    curve = Curve()
    saved = lockstep.Checkpointer(
        folder,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        extra={"options": Kept(options, KEPT, text=text.digest), "curve": curve},
    )
    log = lockstep.Log(saved, every=_LOG_EVERY)
    held_out = share_held_out(options, text)
    return Run(world, options, model, optimizer, scheduler, loader, len(batches), held_out, saved, log, curve)


def share_held_out(options: Options, text: Text) -> lockstep.ShardedLoader:
    """**Collective.** Return a loader of this rank's slices of the held-out windows."""
    windows = Windows(text.held_out, options.context, shifted=False)
    return lockstep.shard(DataLoader(windows, options.batch_size), slices=options.slices, seed_samples=False)


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters for AdamW: matrices decay, gains and biases do not."""
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    others = [param for param in model.parameters() if param.dim() < 2]
    return [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


def factors(options: Options, steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate at each step, from 0: it grows linearly, then falls along a cosine
    (I. Loshchilov and F. Hutter, "SGDR", 2016, arXiv:1608.03983)."""

    def factor(step: int) -> float:
        if step < options.warmup_steps:
            return (step + 1) / (options.warmup_steps + 1)
        done = min(1.0, (step - options.warmup_steps) / max(1, steps - options.warmup_steps))
        return _LOWEST + (1 - _LOWEST) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def fit(run: Run) -> None:
    """**Collective.** Train to the last epoch, from where the run stands; test and save after each."""
    epochs = run.options.epochs
    if run.saved.restore() is None and run.options.resume:
        run.world.print(f"{run.saved.folder.name} has no checkpoint yet: it begins anew")
    for epoch in run.saved.epochs(epochs):
        begun, before = time.monotonic(), run.saved.step
        title = f"epoch {epoch + 1:2d}/{epochs}"
        train_epoch(run, title)
        tokens = (run.saved.step - before) * run.options.batch_size * run.options.context
        speed = tokens / (time.monotonic() - begun)
        run.held_out_loss = evaluate(run.world, run.model, run.held_out)
        run.log({"held_out/loss": run.held_out_loss}, samples=1)
        loss = run.curve.end_epoch()
        run.saved.save()
        run.world.print(f"{title}  loss {loss:.4f}  held out {run.held_out_loss:.4f}  {speed:,.0f} tokens/s")


def train_epoch(run: Run, title: str) -> None:
    """**Collective.** A pass over the text, or over what is left of it."""
    options, model, saved = run.options, run.model, run.saved
    model.train()
    bar = lockstep.track(run.loader.steps(), title)
    for step in bar:  # a global batch
        for inputs, targets in step:  # this rank's slices of it
            loss = loss_of(model(inputs), targets)
            step.add_loss(loss)
            loss.backward()
        # The loop is over on all ranks: gradients are those of the whole batch, and so is step.loss.
        norm = lockstep.clip_grad_norm_(model, options.clip)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.log(loss=step.loss, grad_norm=norm, lr=run.scheduler.get_last_lr()[0])
        run.scheduler.step()
        run.curve.add(step.loss, step.samples)
        bar.show(loss=step.loss)
        if options.save_every and saved.step % options.save_every == 0:
            saved.save()


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats over the places that count: [batch, time, vocabulary], [batch, time]."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def evaluate(world: lockstep.World, model: GPT, held_out: lockstep.ShardedLoader) -> float:
    """**Collective.** Return the mean loss over all held-out tokens: the same bits on any number of ranks."""
    model.eval()
    total, count = 0.0, 0
    for step in held_out.steps():
        mine = 0
        for inputs, targets in step:
            tokens = int((targets != IGNORED).sum())  # the last window of the text has fewer than the others
            step.weigh(tokens)  # what the loss is a mean of
            step.add_loss(loss_of(model(inputs), targets))
            mine += tokens
        everyones = world.all_reduce(mine)
        total += step.loss * everyones
        count += everyones
    return total / count
