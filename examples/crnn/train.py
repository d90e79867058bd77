"""Train, save, resume and test: the same loop in every mode."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import lockstep
from examples.crnn.lines import Lines, collate
from examples.crnn.modes import Computing, prepare
from examples.crnn.options import KEPT, Options
from examples.crnn.reading import Score, decode, score, written
from examples.digits import load_digits
from examples.kept import Kept
from examples.stream import Stream

#: Gradients longer than this are scaled down to it.
_CLIP = 5.0
_WEIGHT_DECAY = 0.05
#: The test lines are the same whatever the seed of a run, so that runs can be compared.
_TEST_SEED = 0
#: Lines that are read at once in a test, over all ranks.
_TEST_BATCH = 250
#: Steps between two lines of metrics.jsonl.
_LOG_EVERY = 10


@dataclass
class Run:
    """A run and how far it is."""

    world: lockstep.World
    options: Options
    computing: Computing
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    loader: lockstep.ShardedLoader
    saved: lockstep.Checkpointer
    log: lockstep.Log
    #: The loss of each step taken here, the mean over the lines of all ranks, in nats.
    losses: list[float] = field(default_factory=list)
    #: Seconds of each step on this rank, with the rendering of its lines.
    seconds: list[float] = field(default_factory=list)
    #: Of the last test; no lines before the first.
    score: Score = field(default_factory=Score)


def lines_of(options: Options) -> tuple[Lines, Lines]:
    """Return the lines to train on and the lines to test on; no digit is in both."""
    train, test = load_digits()
    return (
        Lines(train, split="train", count=options.lines, seed=options.seed, longest=options.longest),
        Lines(test, split="test", count=options.test_lines, seed=_TEST_SEED, longest=options.longest),
    )


def begin(world: lockstep.World, options: Options, folder: Path) -> Run:
    """**Collective.** Everything that a run in ``folder`` needs; nothing is restored yet."""
    lines = lines_of(options)[0]
    batches: DataLoader[Any] = DataLoader(
        Stream(lines, seed=options.seed) if options.stream else lines,
        batch_size=options.batch_size,
        shuffle=not options.stream,
        num_workers=options.workers,
        collate_fn=collate,
    )
    # The lines are seeded by themselves: nothing is drawn from the generators that the loader could seed.
    loader = lockstep.shard(batches, seed_samples=False)
    computing = prepare(world, options)
    optimizer = torch.optim.AdamW(computing.model.parameters(), lr=options.lr, weight_decay=_WEIGHT_DECAY)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.epochs * len(batches))
    saved = lockstep.Checkpointer(
        folder,
        model=computing.model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        extra={"options": Kept(options, KEPT)},
    )
    log = lockstep.Log(saved, every=_LOG_EVERY)
    return Run(world, options, computing, optimizer, scheduler, loader, saved, log)


def fit(run: Run) -> None:
    """**Collective.** Train to the last epoch, from where the run stands; save and test after each."""
    epochs = run.options.epochs
    if run.saved.restore() is None and run.options.resume:
        run.world.print(f"{run.saved.folder.name} has no checkpoint yet: it begins anew")
    for epoch in run.saved.epochs(epochs):
        before = len(run.losses)
        train_epoch(run, f"epoch {epoch + 1:2d}/{epochs}")
        run.saved.save()
        run.score = evaluate(run.world, run.computing, lines_of(run.options)[1])
        run.log({"test/accuracy": run.score.accuracy, "test/error_rate": run.score.error_rate}, samples=1)
        run.log.line()
        if len(run.losses) > before:
            median = statistics.median(run.seconds[before:])
            run.world.print(
                f"epoch {epoch + 1:2d}/{epochs}  loss {statistics.fmean(run.losses[before:]):7.4f}  "
                f"step {median * 1e3:.1f} ms  {run.score}"
            )


def train_epoch(run: Run, title: str) -> None:
    """**Collective.** A pass over the training lines, or over what is left of it."""
    model, save_every = run.computing.model, run.options.save_every
    model.train()
    sums: list[torch.Tensor] = []
    counts: list[int] = []
    bar = lockstep.track(run.loader, title)
    begun = time.perf_counter()
    for batch in bar:
        loss = run.computing.loss(batch)
        run.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        run.optimizer.step()
        run.log(loss=loss, grad_norm=norm, lr=run.scheduler.get_last_lr()[0])
        run.scheduler.step()
        sums.append(loss.detach().double() * len(batch.widths))
        counts.append(len(batch.widths))
        bar.show(loss=loss.detach())
        run.seconds.append(time.perf_counter() - begun)
        if save_every and run.saved.step % save_every == 0:
            run.saved.save()
        begun = time.perf_counter()
    if sums:  # as many on every rank; none if the run was saved after the last step of an epoch
        losses = run.world.all_reduce(torch.stack(sums).cpu()) / run.world.all_reduce(torch.tensor(counts))
        run.losses += losses.tolist()


@torch.no_grad()
def evaluate(world: lockstep.World, computing: Computing, lines: Lines) -> Score:
    """**Collective.** Read all test lines. Exact over any number of ranks: what is summed up are counts."""
    batches = DataLoader(lines, batch_size=max(_TEST_BATCH, world.world_size), collate_fn=collate)
    computing.model.eval()
    mine = Score()
    for batch in lockstep.shard(batches, seed_samples=False):
        mine += score(decode(computing.scores(batch), batch.widths), written(batch))
    everyones = Score.of(world.all_reduce(mine.counts()))
    if everyones.lines != len(lines):
        raise RuntimeError(f"rank {world.rank}: {everyones.lines} lines were read, expected {len(lines)}")
    return everyones
