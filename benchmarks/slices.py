"""What equal bits cost: a step in slices against the same accumulation without them.

Each rank trains a model on the same micro-batches in both ways, one thread a rank: accumulated, inside ``no_sync`` for
all but the last, so that the last backward averages as it comes; and in slices, with deterministic algorithms. Rounds
of both follow each other in pairs, in random order, the same on all ranks. The figure is the median over the pairs of
the ratio of their times, of the slowest rank.

    python -m benchmarks.slices [--rounds N] [--write]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from benchmarks.models import resnet18
from benchmarks.naming import machine_name
from benchmarks.pairs import in_turn, row
from benchmarks.publishing import publish

#: The goal: a step in slices takes at most so much longer.
_GOAL = 1.05
_SLICES, _STEPS = 8, 3
_WORLDS = [(1, "shm"), (2, "shm"), (3, "shm"), (4, "shm"), (2, "gloo")]
_VOCABULARY, _CONTEXT = 1000, 64


class Gpt(nn.Module):
    """A small GPT with dropout: 6 layers of width 192, 3.1 million parameters."""

    def __init__(self, width: int = 192, layers: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(_VOCABULARY, width), nn.Embedding(_CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, _VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(_CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.blocks(hidden, mask=self.mask, is_causal=True))
        return logits.flatten(0, 1)


def _images(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,)))


def _texts(count: int) -> TensorDataset:
    return TensorDataset(*[torch.randint(0, _VOCABULARY, (count, _CONTEXT)) for _ in range(2)])


_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], TensorDataset], int]] = {
    "ResNet-18": (resnet18, _images, 4),
    "GPT": (Gpt, _texts, 4),
}


def _pairs(_: int, name: str, rounds: int) -> list[tuple[float, float]]:
    """A rank: return the seconds of a step of each round, accumulated and in slices."""
    world = lockstep.init(timeout=300)
    build, data, size = _MODELS[name]
    model: Any = lockstep.replicate(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = size * _SLICES
    loader: Any = lockstep.shard(DataLoader(data(batch * _STEPS), batch), slices=_SLICES)

    def take(x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(model(x), y.flatten()).backward()

    def accumulate() -> None:
        torch.use_deterministic_algorithms(False)
        first, end = world.rank * _SLICES // world.world_size, (world.rank + 1) * _SLICES // world.world_size
        for step in range(_STEPS):
            for number in range(first, end):
                begin = step * batch + number * size
                x, y = loader.dataset[begin : begin + size]
                if number < end - 1:
                    with lockstep.no_sync(model):
                        take(x, y)
                else:
                    take(x, y)
            optimizer.step()
            optimizer.zero_grad()

    def slice_up() -> None:
        torch.use_deterministic_algorithms(True)
        for step in loader.steps():
            for x, y in step:
                take(x, y)
            optimizer.step()
            optimizer.zero_grad()

    def timed(way: Callable[[], None]) -> float:
        world.barrier()
        begun = time.perf_counter()
        way()
        return float(world.all_reduce((time.perf_counter() - begun) / _STEPS, "max"))

    return in_turn(partial(timed, accumulate), partial(timed, slice_up), rounds=rounds)


def _world(text: str) -> tuple[int, str]:
    ranks, _, backend = text.partition("/")
    return int(ranks), backend or "shm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--models", nargs="*", default=list(_MODELS))
    parser.add_argument("--worlds", nargs="*", type=_world, default=_WORLDS, help="such as 2/gloo")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = [
        row(_pairs, name, ranks, backend, options.rounds)
        for name in options.models
        for ranks, backend in options.worlds
    ]
    report = f"""# What equal bits cost

{machine_name()}. A global batch of {_SLICES} slices, {options.rounds} pairs of {_STEPS} steps each, one thread a rank:
accumulated with `no_sync`, and in slices. Goal: at most {_GOAL} times as long.

| model | ranks | over | accumulated, ms a step | in slices (quartiles) |
|---|---|---|---|---|
{chr(10).join(rows)}
"""
    publish(report, name="slices", write=options.write)


if __name__ == "__main__":
    main()
