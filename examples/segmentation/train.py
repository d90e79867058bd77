"""Train, save, resume and test: the same loop in every mode."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

import lockstep
from examples.imagenet.losses import Losses
from examples.kept import Kept
from examples.segmentation.data import Data
from examples.segmentation.models import build, grouped
from examples.segmentation.modes import Computing, prepare
from examples.segmentation.options import KEPT, Options
from examples.segmentation.overlap import Score, confusion
from examples.segmentation.shapes import IGNORED

#: Of the polynomial along which the learning rate falls to 0.
_POWER = 0.9
#: Steps between two lines of metrics.jsonl.
_LOG_EVERY = 10


@dataclass
class Run:
    """The parts of a run, and its last test."""

    world: lockstep.World
    options: Options
    data: Data
    computing: Computing
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    saved: lockstep.Checkpointer
    log: lockstep.Log
    losses: Losses
    score: Score | None = None


def begin(world: lockstep.World, options: Options, data: Data, folder: Path) -> Run:
    """**Collective.** Everything that a run in ``folder`` needs; nothing is restored yet."""
    computing = prepare(world, options, build(options, len(data.classes)))
    optimizer = torch.optim.SGD(
        grouped(computing.model, options),
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
    )
    steps = options.epochs * data.steps
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=steps, power=_POWER)
    losses = Losses(world, computing.device)
    saved = lockstep.Checkpointer(
        folder,
        model=computing.model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=data.train,
        extra={"options": Kept(options, KEPT, classes=list(data.classes)), "losses": losses},
    )
    log = lockstep.Log(saved, every=_LOG_EVERY)
    return Run(world, options, data, computing, optimizer, scheduler, saved, log, losses)


def fit(run: Run) -> None:
    """**Collective.** Train to the last epoch, from where the run stands; test and save after each."""
    epochs = run.options.epochs
    if run.saved.restore() is None and run.options.resume:
        run.world.print(f"{run.saved.folder.name} has no checkpoint yet: it begins anew")
    for epoch in run.saved.epochs(epochs):
        begun = time.monotonic()
        title = f"epoch {epoch + 1:2d}/{epochs}"
        train_epoch(run, title)
        loss, _ = run.losses.epoch()
        run.score = evaluate(run.world, run.computing, run.data)
        run.log({"test/mean_iou": run.score.mean_iou, "test/accuracy": run.score.accuracy}, samples=1)
        run.saved.save()
        run.world.print(f"{title}  loss {loss:.4f}  test: {run.score}  {time.monotonic() - begun:.0f} s")


def train_epoch(run: Run, title: str) -> None:
    """**Collective.** A pass over the training pictures, or over what is left of it."""
    options, saved, loader = run.options, run.saved, run.data.train
    run.computing.model.train()
    bar = lockstep.track(loader.steps() if options.slices else loader, title)
    for step in bar:
        # In slices a step is a loop over this rank's parts of the global batch; else it is the one part itself.
        total = torch.zeros((), dtype=torch.float64, device=run.computing.device)
        counted = 0  # the losses are added up once a step, since another rank may have more parts
        for batch in step if options.slices else [step]:
            pixels = int((batch.masks != IGNORED).sum())
            run.world.weigh(pixels)  # what the loss is the mean of: the average is exact over the pixels of all ranks
            loss = run.computing.losses(batch).sum() / max(1, pixels)
            loss.backward()
            run.log(loss=loss, lr=run.scheduler.get_last_lr()[0])
            total += loss.detach().to(total) * pixels
            counted += pixels
        run.losses.add(total / max(1, counted), counted)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.scheduler.step()
        if options.save_every and saved.step % options.save_every == 0:
            saved.save()


@torch.no_grad()
def evaluate(world: lockstep.World, computing: Computing, data: Data) -> Score:
    """**Collective.** Test the model. Exact for any number of ranks: what is added up are counts of pixels."""
    computing.model.eval()
    classes = len(data.classes)
    matrix = torch.zeros(classes, classes, dtype=torch.int64)
    seen = 0
    for batch in lockstep.track(data.test, "test"):
        seen += len(batch.masks)
        if len(batch.masks):  # of the last few pictures a rank may have none
            guesses = computing.guesses(batch.pictures)
            matrix += confusion(guesses, batch.masks.to(guesses.device), classes)
    everyones = world.all_reduce(seen)
    if everyones != len(data.test.dataset):
        raise RuntimeError(f"rank {world.rank}: {everyones} pictures were tested, expected {len(data.test.dataset)}")
    return Score(world.all_reduce(matrix))
