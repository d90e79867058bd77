"""Digests of what the replicas of a run held after some of its steps, as its record has them. Pure.

The rank that takes them says when, and why they are comparable between runs: Note [Digest chain] in
``ddp/digest_chain.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Steps of one start with digests at most.
MOST = 512


class Held(NamedTuple):
    """Digests after a step, as hexadecimal digits: of the parameters and of the optimizers' state; empty: none."""

    parameters: str
    state: str


def add_digests(start: dict[str, Any], note: Mapping[str, Any]) -> None:
    """Add a note of digests to a start. Of too many those go whose steps are multiples of the smallest power of two."""
    kept = start.setdefault("digests", {})
    kept[str(note["step"])] = [note["parameters"], note["state"]]
    power = 2
    while len(kept) > MOST:
        for step in [step for step in kept if int(step) % power and int(step) & (int(step) - 1)]:
            del kept[step]
        power *= 2


def digests_of(starts: Sequence[Mapping[str, Any]]) -> dict[int, Held]:
    """Return the digests of a run by step, in order. Of a step that was taken in several starts the last one counts."""
    found = {int(step): Held(*held) for start in starts for step, held in start.get("digests", {}).items()}
    return dict(sorted(found.items()))
