"""All ranks succeed, or all fail: what one rank finds wrong is an error on every rank, and none waits for another."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lockstep import errors
from lockstep.comm.peers import Peers
from lockstep.errors import LockstepError, named, said

Result = TypeVar("Result")

#: Errors that other ranks raise as what they are; RankFailed takes more than a message.
_KNOWN: dict[type[Any], str] = {
    kind: kind.__name__
    for kind in (*vars(errors).values(), ValueError, TypeError)
    if isinstance(kind, type)
    and issubclass(kind, (LockstepError, ValueError, TypeError))
    and kind is not errors.RankFailed
}
_BY_NAME = {name: kind for kind, name in _KNOWN.items()}


def together(
    peers: Peers, attempt: Callable[[], Result], tell: Callable[[Result], Any], *, what: str
) -> tuple[Result, list[Any]]:
    """**Collective.** Return the result of ``attempt`` on this rank, and what ``tell`` says of every rank's result.

    Args:
        peers: the ranks, and how they talk.
        attempt: what this rank attempts; it may raise.
        tell: makes, from the result, what the other ranks are told, in JSON types.
        what: what is being attempted, for the message.

    Raises:
        LockstepError: ``attempt`` raised one of lockstep's errors on the first rank where it failed: all ranks raise
            it, of the same class and in the same words.
        Exception: anything else, on the rank where ``attempt`` raised it. The other ranks raise the error of the first
            rank that failed: a ValueError or TypeError if it was one, else a LockstepError.
    """
    mine: Exception | None = None
    record: dict[str, Any]
    try:
        result = attempt()
        record = {"told": json.loads(json.dumps(tell(result)))}
    except Exception as error:  # noqa: BLE001  (the other ranks wait: they must get any failure)
        mine = error
        record = _described(error)
    records = peers.gather(record)
    for rank, other in enumerate(records):
        if "error" in other:
            if mine is not None and not isinstance(mine, LockstepError):
                raise mine
            raise _failure(rank, other, peers, what) from mine
    return result, [other["told"] for other in records]


def agreed(
    peers: Peers,
    what: str,
    check: Callable[[], Result],
    facts: Callable[[Result], dict[str, Any]],
    *,
    remedies: Mapping[str, str] | None = None,
) -> Result:
    """**Collective.** Return the result of ``check``, once it passed on every rank with the same ``facts``.

    Args:
        peers: the ranks, and how they talk.
        what: what is being checked, for the message.
        check: makes the result, or raises.
        facts: what must be the same on every rank, in JSON types.
        remedies: the advice about a fact that differs, by the fact's name; that of "" is for all others.

    Raises:
        ValueError: the facts differ; the message names each rank's. Or ``check`` raised one on another rank.
        TypeError: ``check`` raised one on another rank.
        LockstepError: ``check`` failed in another way on another rank.
    """
    result, told = together(peers, check, facts, what=what)
    for name in dict.fromkeys(name for each in told for name in each):
        values = [each.get(name, "not there") for each in told]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            remedy = (remedies or {}).get(name, (remedies or {}).get("", ""))
            raise ValueError(f"{what}: {name} must be the same on every rank, but it is {listed}{remedy}")
    return result


def class_name(error: BaseException) -> str:
    """Return the name of the class that other ranks raise for this error; empty: a LockstepError."""
    return next((_KNOWN[kind] for kind in type(error).__mro__ if kind in _KNOWN), "")


def class_named(name: str) -> type[Exception]:
    """Return the class that :func:`class_name` has named."""
    kind: type[Exception] = _BY_NAME.get(name, LockstepError)
    return kind


def _described(error: Exception) -> dict[str, str]:
    known = class_name(error)
    return {"error": said(error) if known else named(error), "class": known}


def _failure(rank: int, record: dict[str, str], peers: Peers, what: str) -> Exception:
    where = "" if peers.world_size == 1 else f"rank {rank}: "
    kind = _BY_NAME.get(record["class"])
    if kind is None:
        return LockstepError(f"{what} failed on {where}{record['error']}")
    failure: Exception = kind(f"{where}{record['error']}")
    return failure
