"""The options of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.places import accept_local_rank, local_folder

#: What decides which steps a run takes, to the bit.
KEPT = (
    "epochs", "batch_size", "slices", "lr", "warmup_steps", "clip", "seed", "context", "vocabulary", "width", "layers",
    "heads", "dropout", "stream",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What the command line says. The defaults of the fields stand in :func:`parse` alone."""

    text: Path | None
    vocabulary: int
    context: int
    stream: bool
    width: int
    layers: int
    heads: int
    dropout: float
    epochs: int
    batch_size: int
    slices: int
    lr: float
    warmup_steps: int
    clip: float
    seed: int
    backend: str | None
    folder: Path
    save_every: int
    resume: bool
    evaluate: bool
    prompt: str
    length: int
    temperature: float


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line; what makes no sense ends the program with a message."""
    parser = argparse.ArgumentParser(
        prog="lockstep run -n 2 -m examples.gpt",
        description="Train a small GPT on the text of Python's help, in lockstep.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = parser.add_argument_group("text and model").add_argument
    model("--text", type=Path, metavar="FILE", help="a text to learn from instead of Python's help")
    model("--vocabulary", type=int, default=1024, help="tokens, of which 256 are the bytes")
    model("--context", type=int, default=64, help="tokens that the model looks back at")
    model("--stream", action="store_true", help="read the windows as a stream, once on each machine")
    model("--width", type=int, default=128)
    model("--layers", type=int, default=4)
    model("--heads", type=int, default=4)
    model("--dropout", type=float, default=0.05)
    train = parser.add_argument_group("training").add_argument
    train("--epochs", type=int, default=10, help="passes over the text")
    train("-b", "--batch-size", type=int, default=16, help="windows in the global batch, over all ranks")
    train("--slices", type=int, default=8, help="parts that each batch is cut into, on any number of ranks")
    train("--lr", type=float, default=3e-3, help="AdamW's highest learning rate")
    train("--warmup-steps", type=int, default=50, help="steps in which the learning rate grows; then it falls (cosine)")
    train("--clip", type=float, default=1.0, help="norm that longer gradients are scaled down to")
    train("--seed", type=int, default=0, help="of weights, order, dropout, and what the model writes")
    run = parser.add_argument_group("the run").add_argument
    run("--backend", help="see lockstep.init (default: what the machine suggests)")
    run("--folder", type=local_folder, default=Path("runs/gpt"), help="each run gets a numbered folder in it")
    run("--save-every", type=int, default=0, metavar="STEPS", help="save within epochs too; 0: at their ends only")
    run("--resume", action="store_true", help="resume the newest run instead of starting a new one")
    run("--evaluate", action="store_true", help="only test the newest run's newest checkpoint, and let it write")
    run("--prompt", default="The", help="how the text begins that the model continues in the end")
    run("--length", type=int, default=150, help="tokens that it adds")
    run("--temperature", type=float, default=0.7, help="the lower, the likelier what it writes")
    accept_local_rank(parser)
    options = parser.parse_args(arguments)
    for name in (
        "epochs", "batch_size", "slices", "lr", "clip", "context", "width", "layers", "heads", "length", "temperature",
    ):  # fmt: skip
        if not getattr(options, name) > 0:
            parser.error(f"--{name} {getattr(options, name)}: expected a positive number".replace("_", "-"))
    for name in ("warmup_steps", "save_every", "seed"):
        if getattr(options, name) < 0:
            parser.error(f"--{name} {getattr(options, name)}: expected 0 or more".replace("_", "-"))
    if options.vocabulary < 256:
        parser.error(f"--vocabulary {options.vocabulary}: expected 256 or more, since every byte is a token")
    if options.width % options.heads:
        parser.error(f"--width {options.width} --heads {options.heads}: each head gets the same part of the width")
    if not 0 <= options.dropout < 1:
        parser.error(f"--dropout {options.dropout}: expected 0 or more, and less than 1")
    if not options.prompt:
        parser.error("--prompt: expected at least one character to begin with")
    return Options(**vars(options))
