"""The text to learn from: where it comes from, which part is held out, and windows of it.

Note [Held out]
~~~~~~~~~~~~~~~
Topics of Python's help repeat paragraphs of each other, and so do many collections of text. Each different paragraph is
therefore taken once, before the last tenth of the text is held out: what a model is tested on is not what it has read.
The vocabulary is learned from the training part alone.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from examples.gpt.pairs import Vocabulary, learn

#: One part in so many is held out.
_HELD_OUT = 10
#: The target of a place that does not count, as cross_entropy knows it.
IGNORED = -100


@dataclass(frozen=True)
class Text:
    """A text in tokens; see Note [Held out]."""

    vocabulary: Vocabulary
    #: int64 [tokens].
    train: Tensor
    held_out: Tensor
    #: Bytes that a held-out token stands for, on average.
    bytes_per_token: float
    #: Of the whole text: the same digest, the same tokens.
    digest: str


def load(path: Path | None, vocabulary: int) -> Text:
    """Return the text of a file, or of Python's help, in a vocabulary of that many tokens at most."""
    text = without_repetitions(read(path))
    cut = text.rfind(b"\n\n", 0, len(text) - len(text) // _HELD_OUT)
    if cut <= 0:
        raise SystemExit(
            f"{path}: expected several paragraphs with an empty line between them, of which to hold some out"
        )
    train, held_out = text[:cut], text[cut:]
    learned = learn(train, vocabulary)
    tokens = torch.tensor(learned.encode(held_out))
    return Text(
        vocabulary=learned,
        train=torch.tensor(learned.encode(train)),
        held_out=tokens,
        bytes_per_token=len(held_out) / len(tokens),
        digest=hashlib.sha256(text).hexdigest()[:16],
    )


def read(path: Path | None) -> bytes:
    """Return a file, or for None the topics of Python's help, which differ a little between versions of Python."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        return path.read_bytes()
    except OSError as error:
        raise SystemExit(f"--text {path}: {error.strerror}") from error


def without_repetitions(text: bytes) -> bytes:
    """Return the paragraphs of a text, each different one where it comes first."""
    return b"\n\n".join(dict.fromkeys(text.split(b"\n\n")))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text: inputs and, shifted by one token, targets, both int64 [context].

    They lie side by side and cover the text once; in the last of them what is beyond the text is ``IGNORED``. With
    ``shifted``, each begins at random up to one window later: the sharded loader seeds the random numbers of each
    sample, so they are the same on any number of ranks, and again after a run is resumed.
    """

    def __init__(self, tokens: Tensor, context: int, *, shifted: bool) -> None:
        if len(tokens) < context + 2:
            raise SystemExit(f"a text of {len(tokens)} tokens is too short for windows of {context}: see --context")
        self._tokens, self._context, self._shifted = tokens, context, shifted

    def __len__(self) -> int:
        return math.ceil((len(self._tokens) - 1) / self._context)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first, context = index * self._context, self._context
        if self._shifted:
            later = int(torch.randint(context, ()))
            first = min(first + later, len(self._tokens) - 1 - context)
        there = self._tokens[first : first + context + 1]
        inputs, targets = torch.zeros(context, dtype=torch.int64), torch.full((context,), IGNORED)
        inputs[: len(there) - 1], targets[: len(there) - 1] = there[:-1], there[1:]
        return inputs, targets
