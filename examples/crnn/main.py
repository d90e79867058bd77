"""The recipe, from the command line to the last line that it prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import lockstep
from examples.crnn import picture
from examples.crnn.lines import Lines, collate
from examples.crnn.model import CRNN
from examples.crnn.modes import prepare
from examples.crnn.options import Options, parse
from examples.crnn.reading import decode, written
from examples.crnn.train import begin, evaluate, fit, lines_of
from examples.digits import choose_run, sparkline


def main(arguments: Sequence[str] | None = None) -> None:
    """**Collective.** Train or test a recogniser, as the options say."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    world = lockstep.init(options.backend, seed=options.seed)
    options.refuse_in(world)
    folder = choose_run(world, options.folder, new=not (options.resume or options.evaluate))
    model = load_and_test(world, options, folder) if options.evaluate else train(world, options, folder)
    if options.picture is not None and world.is_main:
        draw_some(options.picture, model, lines_of(options)[1])
        print(f"a few lines and what was read on them: {options.picture}")


def train(world: lockstep.World, options: Options, folder: Path) -> CRNN:
    """**Collective.** Train to the last epoch; the model."""
    begun = time.monotonic()
    run = begin(world, options, folder)
    parameters = sum(parameter.numel() for parameter in run.computing.model.parameters())
    world.print(f"{run.computing.words}, global batch {options.batch_size}, {parameters:,} parameters -> {folder}")
    fit(run)
    if run.losses:
        stride = max(1, len(run.losses) // 60)
        world.print(
            f"training loss {sparkline(run.losses[::stride])}  {run.losses[0]:.3f} -> {run.losses[-1]:.4f} "
            f"in {time.monotonic() - begun:.0f} s"
        )
    else:
        world.print(f"all {options.epochs} epochs of this run were done already")
        run.score = evaluate(world, run.computing, lines_of(options)[1])
    world.print(f"test: {run.score}, over {world.world_size} rank{'s' * (world.world_size > 1)}")
    return run.computing.model


def load_and_test(world: lockstep.World, options: Options, folder: Path) -> CRNN:
    """**Collective.** Test the newest checkpoint in ``folder``; its model."""
    computing = prepare(world, options)
    lockstep.load_weights(folder, computing.model)
    score = evaluate(world, computing, lines_of(options)[1])
    world.print(f"loaded {folder}: {computing.words}")
    world.print(f"test: {score}, over {world.world_size} rank{'s' * (world.world_size > 1)}")
    return computing.model


@torch.no_grad()
def draw_some(path: Path, model: CRNN, lines: Lines) -> None:
    """A picture of the first test lines, and of the first few that are misread."""
    model.eval()
    device = next(model.parameters()).device
    batch = collate([lines[index] for index in range(min(500, len(lines)))])
    readings = decode(model(batch.images.to(device), batch.widths.to(device)), batch.widths)
    truths = written(batch)
    wrong = [index for index, reading in enumerate(readings) if reading != truths[index]]
    shown = sorted({*range(min(7, len(truths))), *wrong[:3]})
    images = [batch.images[index, :, :, : int(batch.widths[index])] for index in shown]
    picture.draw(path, images, [readings[index] for index in shown], [truths[index] for index in shown])
