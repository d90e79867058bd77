"""What parts of equal cost win: a step of a small GPT on texts of 16 to 1,024 tokens, against equal numbers of texts.

Each rank goes through its texts one after the other, without padding, and the loss is the mean over the tokens of all
ranks. An epoch with parts of equal number and one with parts of equal cost follow each other, in random order, the same
on all ranks; the order of the samples is the same in both. What a text costs is taken to be its tokens, or its tokens
and what attention adds, which grows with their square. The figure is the median over pairs of epochs of the ratio of
their times, of the slowest rank.

    python -m benchmarks.costs [--rounds N] [--write]
"""

from __future__ import annotations

import argparse
import random
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lockstep
from benchmarks.naming import machine_name
from benchmarks.pairs import in_turn, row
from benchmarks.publishing import publish

_SHORTEST, _LONGEST, _VOCABULARY, _WIDTH, _LAYERS = 16, 1024, 512, 64, 2
_TEXTS, _WORLDS, _A_RANK = 96, [(2, "shm"), (3, "shm"), (2, "gloo")], 8


class Texts(Dataset[Tensor]):
    """Texts of random tokens, of lengths between the shortest and the longest, evenly on a logarithmic scale."""

    def __init__(self) -> None:
        draw = random.Random(0)
        self.lengths = [round(_SHORTEST * (_LONGEST / _SHORTEST) ** draw.random()) for _ in range(_TEXTS)]

    def __len__(self) -> int:
        return _TEXTS

    def __getitem__(self, index: int) -> Tensor:
        numbers = torch.Generator().manual_seed(index)
        return torch.randint(0, _VOCABULARY, (self.lengths[index] + 1,), generator=numbers)


class Gpt(nn.Module):
    """A small GPT for one text at a time: 2 layers of width 64."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(_VOCABULARY, _WIDTH), nn.Embedding(_LONGEST, _WIDTH)
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, texts: list[Tensor]) -> Tensor:
        """Return the mean loss over the tokens of all texts."""
        losses = []
        for text in texts:
            length = len(text) - 1
            mask = nn.Transformer.generate_square_subsequent_mask(length)
            hidden = (self.tokens(text[:-1]) + self.places.weight[:length])[None]
            logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))[0]
            losses.append(nn.functional.cross_entropy(logits, text[1:], reduction="sum"))
        return torch.stack(losses).sum() / sum(len(text) - 1 for text in texts)


def _cost(kind: str, length: int) -> float:
    """Return multiplications of a text: in the layers' matrices and the head, and in attention."""
    in_matrices = length * (_LAYERS * 12 * _WIDTH**2 + _WIDTH * _VOCABULARY)
    return in_matrices + (_LAYERS * 2 * _WIDTH * length**2 if kind == "with attention" else 0)


def _pairs(_: int, kind: str, rounds: int) -> list[tuple[float, float]]:
    """A rank: return the seconds of a step of each round, by number and by cost."""
    world = lockstep.init(timeout=300)
    texts = Texts()
    costs = [_cost(kind, length) for length in texts.lengths]
    model: Any = lockstep.replicate(Gpt())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    options: dict[str, Any] = {"batch_size": _A_RANK * world.world_size, "shuffle": True, "collate_fn": list}
    loaders = [lockstep.shard(DataLoader(texts, **options), costs=each) for each in (None, costs)]

    def train(loader: lockstep.ShardedLoader) -> float:
        world.barrier()
        begun = time.perf_counter()
        for batch in loader:
            optimizer.zero_grad()
            world.weigh(sum(len(text) - 1 for text in batch))
            model(batch).backward()
            optimizer.step()
        return float(world.all_reduce((time.perf_counter() - begun) / len(loader), "max"))

    by_number, by_cost = (partial(train, loader) for loader in loaders)
    return in_turn(by_number, by_cost, rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    kinds = ("tokens", "with attention")
    rows = [row(_pairs, kind, ranks, backend, options.rounds) for kind in kinds for ranks, backend in _WORLDS]
    report = f"""# What parts of equal cost win

{machine_name()}. A GPT of {_LAYERS} layers and width {_WIDTH}, {_A_RANK} texts a rank of {_SHORTEST} to {_LONGEST:,}
tokens, {options.rounds} pairs of epochs.

| a text costs | ranks | over | equal numbers, ms a step | equal cost, times that (quartiles) |
|---|---|---|---|---|
{chr(10).join(rows)}
"""
    publish(report, name="costs", write=options.write)


if __name__ == "__main__":
    main()
