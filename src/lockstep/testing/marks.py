"""The arguments of ``@pytest.mark.ranks(…)``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Seconds that a test on ranks may take, unless its mark or pytest's configuration says otherwise.
DEFAULT_LIMIT = 60.0


@dataclass(frozen=True)
class RankCase:
    """One run of a test: on so many ranks, over one backend."""

    world_size: int
    #: The backend; None: ``lockstep.init()`` chooses it.
    backend: str | None = None


@dataclass(frozen=True)
class RanksMark:
    """The arguments of a mark."""

    world_sizes: tuple[int, ...]
    #: The backends; empty: ``lockstep.init()`` chooses one.
    backends: tuple[str, ...]
    #: Seconds; None: as pytest's configuration says.
    limit: float | None
    #: The fixtures that are set up once, in pytest's own process.
    shared: tuple[str, ...]

    @classmethod
    def read(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RanksMark:
        """Return the mark with these arguments.

        Raises:
            ValueError: an argument is unknown or invalid; the message says what is expected.
        """
        unknown = sorted(set(kwargs) - {"backends", "limit", "shared"})
        if unknown:
            raise ValueError(f"ranks(…, {unknown[0]}=…): expected backends, limit or shared")
        if not args or not all(type(size) is int and size > 0 for size in args) or len({*args}) < len(args):
            given = ", ".join(map(repr, args))
            raise ValueError(
                f"ranks({given}): expected world sizes, whole numbers of at least 1, each once: ranks(1, 2)"
            )
        backends, shared = (_names(name, kwargs.get(name, ())) for name in ("backends", "shared"))
        limit = kwargs.get("limit")
        return cls(tuple(args), backends, None if limit is None else seconds(limit, "limit"), shared)

    def cases(self) -> dict[str, RankCase]:
        """Return the runs that a test has, by the part of its name that tells them apart; empty if there is only
        one."""
        return {
            "-".join(
                [*([f"{size}ranks"] if len(self.world_sizes) > 1 else []), *([backend] if backend is not None else [])]
            ): RankCase(size, backend)
            for size in self.world_sizes
            for backend in self.backends or (None,)
        }


def _names(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(each, str) and each for each in value):
        raise ValueError(f"ranks(…, {name}={value!r}): expected names, such as {name}=({value!r},)")
    if len({*value}) < len(value):
        raise ValueError(f"ranks(…, {name}={value!r}): expected each name once")
    return tuple(value)


def seconds(value: Any, name: str) -> float:
    """Return a time limit.

    Raises:
        ValueError: ``value`` is not a positive number of seconds.
    """
    try:
        limit = float(value)
    except (TypeError, ValueError):
        limit = math.nan
    if not (math.isfinite(limit) and limit > 0):
        raise ValueError(f"{name}={value!r}: expected a positive number of seconds")
    return limit
