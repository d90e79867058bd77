"""Ranks compare what they were given before they rely on it: a difference is an error on all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lockstep.comm.exchange import all_gather_records
from lockstep.comm.world import World
from lockstep.errors import LockstepError

Checked = TypeVar("Checked")


def agreed(
    world: World,
    what: str,
    check: Callable[[], Checked],
    facts: Callable[[Checked], dict[str, Any]],
    *,
    remedies: Mapping[str, str] | None = None,
) -> Checked:
    """**Collective.** The result of ``check`` on this rank, once it passed on every rank with the same ``facts``.

    Args:
        what: what is being checked, for the message.
        check: makes the result, or raises.
        facts: what must be the same on every rank, as JSON can say it.
        remedies: what to do about a fact that differs, by its name; "" for all others.

    Raises:
        ValueError: ``check`` or ``facts`` found something wrong on another rank (a ValueError or TypeError there), or
            the facts differ; the message names who has what.
        LockstepError: it failed in another way on another rank.
    """
    try:
        result = check()
        told = json.loads(json.dumps(facts(result)))
    except Exception as error:
        # Whatever it is: the other ranks wait for this record.
        wrong = isinstance(error, (ValueError, TypeError))
        text = str(error) if wrong else f"{type(error).__name__}: {error}"
        all_gather_records({"error": text, "wrong": wrong}, world.group)
        raise
    records = all_gather_records({"facts": told}, world.group)
    for rank, record in enumerate(records):
        if "error" in record:
            text = f"rank {rank}: {record['error']}"
            raise ValueError(text) if record["wrong"] else LockstepError(f"{what} failed on {text}")
    for name in dict.fromkeys(name for record in records for name in record["facts"]):
        values = [record["facts"].get(name, "not there") for record in records]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            remedy = (remedies or {}).get(name, (remedies or {}).get("", ""))
            raise ValueError(f"{what}: {name} must be the same on every rank, but it is {listed}{remedy}")
    return result
