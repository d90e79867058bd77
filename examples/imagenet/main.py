"""The recipe, from the command line to the last line that it prints."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import lockstep
from examples.digits import choose_run
from examples.imagenet import data as pictures
from examples.imagenet.evaluate import evaluate
from examples.imagenet.models import build, load_pretrained
from examples.imagenet.modes import prepare, start
from examples.imagenet.options import Kept, Options, parse
from examples.imagenet.schedule import scaled_rate
from examples.imagenet.train import EMA_FILE, begin, fit, test
from examples.imagenet.unreadable import Unreadable
from examples.imagenet.vision import require_installed


def main(arguments: Sequence[str] | None = None) -> None:
    """**Collective.** Train or test a classifier, as the options say."""
    # Not by lockstep.init(): in the mode that starts its own processes this one must not join a world.
    launched = "RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ or "PMI_RANK" in os.environ
    options = parse(sys.argv[1:] if arguments is None else arguments, launched=launched)
    require_installed(tensorboard=options.tensorboard and not options.evaluate)
    start(options, run)


def run(options: Options) -> None:
    """**Collective.** What every rank does."""
    world = lockstep.init(options.backend, seed=options.seed, timeout=options.timeout)
    options.refuse_in(world)
    data = pictures.load(world, options)
    (load_and_test if options.evaluate else train)(world, options, data)
    lockstep.shutdown()


def train(world: lockstep.World, options: Options, data: pictures.Data) -> None:
    """**Collective.** Train to the last epoch, and say what came of it."""
    begun = time.monotonic()
    job = begin(world, options, data)
    parameters = sum(parameter.numel() for parameter in job.computing.model.parameters())
    world.print(f"{options.arch}, {parameters:,} parameters, {len(data.classes)} classes: {job.computing.words}")
    world.print(scaled_rate(options)[1])
    world.print(
        f"{len(job.loader.dataset)} pictures to train on, {len(data.val.dataset)} to test on, "
        f"{len(job.loader)} steps in each of {options.epochs} epochs -> {options.folder / job.saved.folder.name}"
    )
    score = fit(job)
    if score is None:
        world.print(f"all {options.epochs} epochs of this run were done already")
        score = test(job)
    if job.unreadable.count:
        world.print(f"{job.unreadable.count} pictures could not be read and were left out")
    plural = "s" * (world.world_size > 1)
    world.print(f"test: {score}, over {world.world_size} rank{plural}, after {time.monotonic() - begun:.0f} s")


def load_and_test(world: lockstep.World, options: Options, data: pictures.Data) -> None:
    """**Collective.** Test a weight file, or the newest checkpoint or the averaged weights of the newest run."""
    source = options.pretrained
    if source is None:
        source = choose_run(world, options.folder, new=False)
        Kept(options, data.classes).refuse_other(source, testing=True)
        source = source / EMA_FILE if options.ema else source
    model = build(options.arch, len(data.classes), options.norm)
    load_pretrained(world, source, model, strict=True)
    computing = prepare(world, options, model)
    model.eval()
    unreadable = Unreadable(world, most=options.max_bad_images)
    score = evaluate(world, computing.scores, data.val, unreadable)
    if unreadable.count:
        world.print(f"{unreadable.count} pictures could not be read and were left out")
    world.print(f"test: {score}, over {world.world_size} rank{'s' * (world.world_size > 1)}: {computing.words}")
