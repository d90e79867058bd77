"""A vocabulary of byte pairs: from text to numbers and back.

Byte-pair encoding after R. Sennrich, B. Haddow and A. Birch, "Neural Machine Translation of Rare Words with Subword
Units", 2015, arXiv:1508.07909. Tokens begin as single bytes, so any text can be written in them. The pair of tokens
that stands side by side most often becomes a token of its own, again and again, until there are as many as asked for.
Pairs are counted within pieces (a word with the space before it, a run of signs, a run of spaces), so no token spans
two words.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

#: A word or a run of signs, with the space before it, or a run of white space. Every byte is in one of these.
_PIECE = re.compile(rb" ?\w+| ?[^\s\w]+|\s+")
_BYTES = 256

Pair = tuple[int, int]


class Vocabulary:
    """Tokens 0 to 255 are the bytes; token 256 + i is the i-th pair of ``merges``, joined."""

    def __init__(self, merges: Sequence[Pair]) -> None:
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._tokens = [bytes([value]) for value in range(_BYTES)]
        for left, right in merges:
            self._tokens.append(self._tokens[left] + self._tokens[right])
        #: Pieces that have been encoded before.
        self._known: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a text."""
        return [token for piece in _PIECE.findall(text) for token in self._encode_piece(piece)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become replacement characters."""
        return b"".join(self._tokens[token] for token in tokens).decode(errors="replace")

    def _encode_piece(self, piece: bytes) -> list[int]:
        tokens = self._known.get(piece)
        if tokens is None:
            tokens = list(piece)
            while pairs := [pair for pair in pairwise(tokens) if pair in self._ranks]:
                first = min(pairs, key=self._ranks.__getitem__)  # in the order in which they were learned
                tokens = _join(tokens, first, _BYTES + self._ranks[first])
            self._known[piece] = tokens
        return tokens


def learn(text: bytes, size: int) -> Vocabulary:
    """Return a vocabulary of ``size`` tokens, or fewer if no pair is left that stands in the text twice.

    The same text gives the same vocabulary: of pairs that are as frequent, the one with the lower numbers comes first.
    """
    counted = Counter(_PIECE.findall(text))
    pieces, counts = [list(piece) for piece in counted], list(counted.values())
    totals: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)  # pair -> the pieces that may have it

    def count(index: int, sign: int) -> None:
        for pair in pairwise(pieces[index]):
            totals[pair] += sign * counts[index]
            places[pair].add(index)

    for index in range(len(pieces)):
        count(index, 1)
    merges: list[Pair] = []
    while len(merges) < size - _BYTES:
        most = max(totals.values(), default=0)
        if most < 2:
            break
        best = min(pair for pair, total in totals.items() if total == most)
        for index in places.pop(best):
            count(index, -1)
            pieces[index] = _join(pieces[index], best, _BYTES + len(merges))
            count(index, 1)
        merges.append(best)
        totals = Counter({pair: total for pair, total in totals.items() if total > 0})
        places.pop(best, None)
    return Vocabulary(merges)


def _join(tokens: list[int], pair: Pair, joined: int) -> list[int]:
    """Replace each occurrence of a pair, from the left, by one token."""
    found: list[int] = []
    index = 0
    while index < len(tokens):
        if tuple(tokens[index : index + 2]) == pair:
            found.append(joined)
            index += 2
        else:
            found.append(tokens[index])
            index += 1
    return found
