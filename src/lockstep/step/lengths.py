"""Epochs whose orders have another length on each rank, since a script has changed the datasets apart."""

from __future__ import annotations

from collections.abc import Iterable

#: What has happened, and what to do.
OTHER_LENGTHS = (
    "The dataset does not have the same length on every rank, so each has made an order of its own: some samples would "
    "be trained on twice and others never. A dataset that grows or shrinks has to do so alike on all ranks. If each "
    "rank finds samples, exchange them first: `for found in world.gather(mine): dataset.items += found`"
)


def differ(epochs: Iterable[tuple[object, int]]) -> bool:
    """Return whether an epoch occurs with several lengths, in pairs of an epoch and the length that a rank has."""
    seen: dict[object, int] = {}
    return any(seen.setdefault(epoch, length) != length for epoch, length in epochs)
