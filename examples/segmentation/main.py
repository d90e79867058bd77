"""The recipe, from the command line to the last line that it prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import lockstep
from examples.digits import choose_run
from examples.imagenet.vision import require_installed
from examples.segmentation import picture
from examples.segmentation.data import Data, datasets, load
from examples.segmentation.models import build
from examples.segmentation.modes import Computing, prepare
from examples.segmentation.options import Options, parse
from examples.segmentation.overlap import Score
from examples.segmentation.train import begin, evaluate, fit

#: Pictures that are shown with --picture.
_SHOWN = 4


def main(arguments: Sequence[str] | None = None) -> None:
    """**Collective.** Train or test a network, as the options say."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    require_installed(tensorboard=False)
    world = lockstep.init(options.backend, seed=options.seed)
    options.refuse_in(world)
    data = load(world, options)
    folder = choose_run(world, options.folder, new=not (options.resume or options.evaluate))
    computing = (load_and_test if options.evaluate else train)(world, options, data, folder)
    if options.picture is not None and world.is_main:
        draw_some(options.picture, computing, options)
        print(f"pictures, what is on them, and what the model sees: {options.picture}")


def train(world: lockstep.World, options: Options, data: Data, folder: Path) -> Computing:
    """**Collective.** Train to the last epoch, and say what came of it."""
    begun = time.monotonic()
    run = begin(world, options, data, folder)
    parameters = sum(parameter.numel() for parameter in run.computing.model.parameters())
    world.print(f"{options.arch}, {parameters:,} parameters, {len(data.classes)} classes: {run.computing.words}")
    world.print(
        f"{len(data.train.dataset)} pictures to train on, {len(data.test.dataset)} to test on, {data.steps} steps "
        f"in each of {options.epochs} epochs -> {folder}"
    )
    fit(run)
    if run.score is None:
        world.print(f"all {options.epochs} epochs of this run were done already")
        run.score = evaluate(world, run.computing, data)
    say(world, data, run.score, f", after {time.monotonic() - begun:.0f} s")
    return run.computing


def load_and_test(world: lockstep.World, options: Options, data: Data, folder: Path) -> Computing:
    """**Collective.** Test the newest checkpoint in ``folder``; what computes with it."""
    computing = prepare(world, options, build(options, len(data.classes)))
    lockstep.load_weights(folder, computing.model)
    world.print(f"loaded {folder}: {computing.words}")
    say(world, data, evaluate(world, computing, data), "")
    return computing


def say(world: lockstep.World, data: Data, score: Score, after: str) -> None:
    """**Rank 0.** Print what a test found, of each class and of all."""
    named = zip(data.classes, score.ious, strict=True)
    world.print("IoU: " + ", ".join(f"{name} {iou:.4f}" for name, iou in named if iou == iou))
    world.print(f"test: {score}, over {world.world_size} rank{'s' * (world.world_size > 1)}{after}")


@torch.no_grad()
def draw_some(path: Path, computing: Computing, options: Options) -> None:
    """A picture of the first test pictures, what is on them, and what the model sees."""
    computing.model.eval()
    test = datasets(options)[1]
    rows = []
    for index in range(min(_SHOWN, len(test))):
        pixels, mask = test[index]
        rows.append((pixels, mask, computing.guesses(pixels.unsqueeze(0))[0].cpu()))
    picture.draw(path, rows)
