"""Ranks compare what they were given before they rely on it: a difference is an error on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lockstep.comm.peers import OverGroup
from lockstep.comm.together import together
from lockstep.comm.world import World

Checked = TypeVar("Checked")


def agreed(
    world: World,
    what: str,
    check: Callable[[], Checked],
    facts: Callable[[Checked], dict[str, Any]],
    *,
    remedies: Mapping[str, str] | None = None,
) -> Checked:
    """**Collective.** Return the result of ``check``, once it passed on every rank with the same ``facts``.

    Args:
        what: what is being checked, for the message.
        check: makes the result, or raises.
        facts: what must be the same on every rank, as JSON can say it.
        remedies: what to do about a fact that differs, by its name; "" for all others.

    Raises:
        ValueError: the facts differ; the message names who has what. Or ``check`` raised one on another rank.
        LockstepError: it failed in another way on another rank.
    """
    result, told = together(OverGroup(world), check, facts, what=what)
    for name in dict.fromkeys(name for each in told for name in each):
        values = [each.get(name, "not there") for each in told]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            remedy = (remedies or {}).get(name, (remedies or {}).get("", ""))
            raise ValueError(f"{what}: {name} must be the same on every rank, but it is {listed}{remedy}")
    return result
