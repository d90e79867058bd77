"""Ranks compare what they were given before they rely on it: a difference is an error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lockstep.comm.exchange import all_gather_records
from lockstep.comm.world import World

Checked = TypeVar("Checked")


def agreed(
    world: World, what: str, check: Callable[[], Checked], facts: Callable[[Checked], dict[str, Any]]
) -> Checked:
    """**Collective.** The result of ``check`` on this rank, once it passed on every rank with the same ``facts``.

    Args:
        what: what is being checked, for the message.
        check: makes the result, or raises ValueError or TypeError.
        facts: what must be the same on every rank, as JSON can say it.

    Raises:
        ValueError: ``check`` failed on another rank, or the facts differ; the message names who has what.
    """
    try:
        result = check()
    except (ValueError, TypeError) as error:
        all_gather_records({"error": str(error)}, world.group)
        raise
    records = all_gather_records({"facts": facts(result)}, world.group)
    for rank, record in enumerate(records):
        if "error" in record:
            raise ValueError(f"rank {rank}: {record['error']}")
    for name in records[0]["facts"]:
        values = [record["facts"][name] for record in records]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ValueError(f"{what}: {name} must be the same on every rank, but it is {listed}")
    return result
