"""Train, save and resume: the same loop in every mode."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep
from examples.digits import choose_run
from examples.imagenet.data import Data
from examples.imagenet.evaluate import Score, evaluate
from examples.imagenet.losses import Losses
from examples.imagenet.models import build, load_pretrained
from examples.imagenet.modes import Computing, from_bytes, prepare
from examples.imagenet.options import Kept, Options
from examples.imagenet.pictures import Batch
from examples.imagenet.records import Records
from examples.imagenet.schedule import factors, scaled_rate
from examples.imagenet.unreadable import Unreadable

#: Of the averaged weights, in the run's folder; any tool opens it, and --pretrained.
EMA_FILE = "ema.safetensors"


@dataclass(frozen=True)
class Run:
    """The parts of a run. Their states change; which they are does not."""

    world: lockstep.World
    options: Options
    data: Data
    loader: lockstep.ShardedLoader
    computing: Computing
    ema: AveragedModel | None
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler
    losses: Losses
    unreadable: Unreadable
    saved: lockstep.Checkpointer


def begin(world: lockstep.World, options: Options, data: Data) -> Run:
    """**Collective.** Everything that a run needs; nothing is restored yet."""
    if data.train is None:
        raise ValueError("there is nothing to train on: the data was loaded for a test")
    model = build(options.arch, len(data.classes), options.norm)
    if options.pretrained is not None:
        load_pretrained(world, options.pretrained, model, strict=False)
    computing = prepare(world, options, model)
    ema = (
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(options.ema), use_buffers=True) if options.ema else None
    )
    rate, _ = scaled_rate(options)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=rate, momentum=options.momentum, weight_decay=options.weight_decay
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors(options, len(data.train)))
    scaler = torch.amp.GradScaler(computing.device.type, enabled=options.amp == "fp16")
    losses, unreadable = Losses(world, computing.device), Unreadable(world, most=options.max_bad_images)
    kept = Kept(options, data.classes)
    extra: dict[str, Any] = {
        "options": kept,
        "scaler": scaler,
        "losses": losses,
        "unreadable": unreadable,
        **({} if ema is None else {"ema": ema}),
    }
    # Last, so that no empty run is left over, to be resumed later, if something above is wrong.
    folder = choose_run(world, options.folder, new=not options.resume)
    if options.resume:
        kept.refuse_other(folder, testing=False)
    elif world.is_main:
        kept.write(folder)
    saved = lockstep.Checkpointer(
        folder,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=data.train,
        extra=extra,
        keep=options.keep,
    )
    parts = (world, options, data, data.train, computing, ema, optimizer, scheduler, scaler, losses, unreadable, saved)
    return Run(*parts)


def fit(run: Run) -> Score | None:
    """**Collective.** Train to the last epoch, from where the run stands; the last test's score, if there was one."""
    options, score = run.options, None
    if run.saved.restore() is None and options.resume:
        run.world.print(f"{run.saved.folder.name} has no checkpoint yet: it begins anew")
    with Records(run.world, Path(run.saved.folder), step=run.saved.step, tensorboard=options.tensorboard) as records:
        for epoch in run.saved.epochs(options.epochs):
            begun = time.monotonic()
            train_epoch(run, records, epoch)
            loss, pictures = run.losses.epoch()
            score = test(run)
            averaged = None if run.ema is None else test_averaged(run)
            row = {"step": run.saved.step, "epoch": epoch, "lr": _rate(run), "train_loss": loss, "pictures": pictures}
            row |= {"val_loss": score.loss, "top1": score.top1, "top5": score.top5, "unreadable": run.unreadable.count}
            if averaged is not None:
                row |= {"ema_loss": averaged.loss, "ema_top1": averaged.top1, "ema_top5": averaged.top5}
            records.add("epochs", {**row, "seconds": time.monotonic() - begun})
            save(run, epoch_done=True)
            run.world.print(
                f"epoch {epoch + 1}/{options.epochs}  loss {loss:.4f}  test: {score}"
                + (f"  averaged weights: {averaged}" if averaged is not None else "")
            )
    return score


def train_epoch(run: Run, records: Records, epoch: int) -> None:
    """**Collective.** A pass over the training pictures, or over what is left of it."""
    options, saved = run.options, run.saved
    run.computing.model.train()

    def write_row() -> None:
        loss, pictures = run.losses.row()
        if pictures:
            row = {"step": saved.step, "epoch": epoch, "lr": _rate(run), "loss": loss, "pictures": pictures}
            records.add("steps", row)

    bar = lockstep.track(run.loader, f"epoch {epoch + 1}/{options.epochs}")
    for batch in bar:
        loss = train_step(run, batch)
        saves = options.save_every and saved.step % options.save_every == 0 and loss is not None
        if saves or run.losses.batches == options.log_every:
            write_row()
        if saves:
            save(run, epoch_done=False)
        if loss is not None:
            bar.show(loss=loss, lr=_rate(run))
    write_row()


def train_step(run: Run, batch: Batch) -> torch.Tensor | None:
    """**Collective.** Take a step on a global batch and return this rank's loss; None, without a step, if none of it
    could be read."""
    share = run.unreadable.what_remains(batch)
    if not share.global_samples:
        return None
    run.world.share = share  # see Note [What remains]
    loss = run.computing.loss(batch.images, batch.labels)
    run.optimizer.zero_grad()
    run.scaler.scale(loss).backward()
    before = run.saved.step
    run.scaler.step(run.optimizer)
    run.scaler.update()
    if run.saved.step > before:  # else a gradient was infinite, and the scale is smaller now
        run.scheduler.step()
        if run.ema is not None:
            run.ema.update_parameters(run.computing.model)
    run.losses.add(loss, share.local_samples)
    return loss.detach()


def test(run: Run) -> Score:
    """**Collective.** Test the model as it is."""
    run.computing.model.eval()
    return evaluate(run.world, run.computing.scores, run.data.val, run.unreadable)


def test_averaged(run: Run) -> Score:
    """**Collective.** Test the averaged weights."""
    if run.ema is None:
        raise ValueError("this run averages no weights")
    return evaluate(run.world, averaged_scores(run), run.data.val, run.unreadable, "test of averaged weights")


def averaged_scores(run: Run) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what computes with the averaged weights: on one device of this rank, in every mode."""
    if run.ema is None:
        raise ValueError("this run averages no weights")
    run.ema.module.eval()
    return from_bytes(run.ema.module, run.options, run.computing.device)


def save(run: Run, *, epoch_done: bool) -> None:
    """**Collective.** A checkpoint, and beside it the averaged weights in a separate file."""
    if run.ema is not None:
        _write_averaged(run, run.ema.module)
    run.saved.save(epoch_done=epoch_done)


def _write_averaged(run: Run, model: nn.Module) -> None:
    """**Collective.** Rank 0 writes; the others hear whether it could."""
    failure: OSError | SafetensorError | None = None
    if run.world.is_main:
        path = run.saved.folder / EMA_FILE
        beside = path.with_suffix(".tmp")
        tensors = {name: value.cpu().contiguous() for name, value in model.state_dict().items()}
        try:
            save_file(tensors, beside)
            os.chmod(beside, 0o600)
            with open(beside, "rb") as file:
                os.fsync(file)
            os.replace(beside, path)
        except (OSError, SafetensorError) as error:
            failure = error
    if run.world.all_reduce(int(failure is not None)):
        raise RuntimeError(
            f"rank {run.world.rank}: rank 0 could not write {EMA_FILE} in {run.saved.folder}: is there room, and "
            "permission? The checkpoints before are as they were"
        ) from failure


def _rate(run: Run) -> float:
    """Return the learning rate of the step taken last; the scheduler itself is one ahead."""
    schedule = run.scheduler
    return float(schedule.base_lrs[0] * schedule.lr_lambdas[0](max(0, schedule.last_epoch - 1)))
