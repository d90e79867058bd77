"""The recipe, from the command line to the last line that it prints."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import lockstep
from examples.digits import choose_run, sparkline
from examples.gpt.model import GPT, write
from examples.gpt.options import Options, parse
from examples.gpt.text import IGNORED, Text, Windows, load
from examples.gpt.train import begin, build, evaluate, fit, loss_of, share_held_out


def main(arguments: Sequence[str] | None = None) -> None:
    """**Collective.** Train or test a model, as the options say; rank 0 lets it write."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    world = lockstep.init(options.backend, seed=options.seed)
    text = load(options.text, options.vocabulary)
    folder = choose_run(world, options.folder, new=not (options.resume or options.evaluate))
    if not options.evaluate:
        train(world, options, text, folder)
        return
    model = build(options, text).to(world.device)
    lockstep.load_weights(folder, model)
    loss = evaluate(world, model, share_held_out(options, text))
    plural = "s" * (world.world_size > 1)
    world.print(f"loaded {folder}: held-out loss {words_of(loss, text)}, over {world.world_size} rank{plural}")
    world.print(sample(model, options, text))


def train(world: lockstep.World, options: Options, text: Text, folder: Path) -> None:
    """**Collective.** Train to the last epoch, and check the last checkpoint in one process."""
    begun = time.monotonic()
    run = begin(world, options, text, folder)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    world.print(f"{world.world_size} replica(s) on {world.device.type}, {parameters:,} parameters -> {folder}")
    world.print(
        f"{len(text.train):,} tokens to train on, {len(text.held_out):,} held out, {len(text.vocabulary)} different "
        f"ones; {run.steps} steps in each of {options.epochs} epochs, each in {options.slices} slices"
    )
    fit(run)
    loss = run.held_out_loss
    if math.isnan(loss):
        world.print(f"all {options.epochs} epochs of this run were done already")
        loss = evaluate(world, run.model, run.held_out)
    curve = run.curve.epochs
    world.print(
        f"training loss {sparkline(curve)}  {curve[0]:.3f} -> {curve[-1]:.4f} in {time.monotonic() - begun:.0f} s"
    )
    plural = "s" * (world.world_size > 1)
    world.print(f"held-out loss {words_of(loss, text)}, over {world.world_size} rank{plural}")
    lockstep.shutdown()
    if world.is_main:
        check_alone(folder, options, text, loss, world.device)


def check_alone(folder: Path, options: Options, text: Text, expected: float, device: torch.device) -> None:
    """Load the newest checkpoint into a fresh model, as a single device would, test it again, and let it write."""
    model = build(options, text).to(device)
    lockstep.load_weights(folder, model)
    loss = test_alone(model, options, text)
    print(f"loaded {folder} in one process: held-out loss {words_of(loss, text)}")
    if not math.isclose(loss, expected, rel_tol=1e-5):
        raise SystemExit(f"the checkpoint's loss {loss} is not the trained model's {expected}")
    print(sample(model, options, text))


@torch.no_grad()
def test_alone(model: GPT, options: Options, text: Text) -> float:
    """Return the mean loss over all held-out tokens, in plain torch."""
    model.eval()
    device = model.tokens.weight.device
    total, count = 0.0, 0
    for inputs, targets in DataLoader(Windows(text.held_out, options.context, shifted=False), options.batch_size):
        tokens = int((targets != IGNORED).sum())
        total += float(loss_of(model(inputs.to(device)), targets.to(device))) * tokens
        count += tokens
    return total / count


def words_of(loss: float, text: Text) -> str:
    """Return a loss for people: per token, and as bits per byte, which do not depend on the vocabulary."""
    return f"{loss:.4f} a token ({loss / math.log(2) / text.bytes_per_token:.3f} bits a byte)"


def sample(model: GPT, options: Options, text: Text) -> str:
    """Return what the model makes of the prompt; the same for the same weights and seed."""
    begins = text.vocabulary.encode(options.prompt.encode())
    tokens = write(model, begins, count=options.length, temperature=options.temperature, seed=options.seed)
    return f"it writes:\n\n{text.vocabulary.decode(tokens)}"
