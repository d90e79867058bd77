"""Which machines still give signs of life, by counters that change: clocks need not agree."""

from __future__ import annotations

from collections.abc import Iterable


class Beats:
    """When each of the other machines was last heard of, on this machine's monotonic clock.

    Args:
        nodes: the other machines.
        now: since when they have been known.
        silent: seconds after which a machine without a sign of life counts as lost.
    """

    def __init__(self, nodes: Iterable[int], now: float, *, silent: float) -> None:
        self._silent = silent
        self._heard: dict[int, tuple[int, float]] = dict.fromkeys(nodes, (-1, now))

    @property
    def nodes(self) -> list[int]:
        """The other machines."""
        return list(self._heard)

    def hear(self, node: int, count: int, now: float) -> None:
        """Note a machine's counter as it is now."""
        if count != self._heard[node][0]:
            self._heard[node] = count, now

    def pause(self, seconds: float) -> None:
        """Leave out a time in which this machine itself stood still, and could hear nobody."""
        self._heard = {node: (count, at + seconds) for node, (count, at) in self._heard.items()}

    def lost(self, now: float) -> list[int]:
        """Return the machines that have been silent for too long."""
        return [node for node, (_, at) in self._heard.items() if now - at > self._silent]

    def heard_since(self, moment: float) -> bool:
        """Return whether every machine has given a sign of life after ``moment``."""
        return all(at > moment for _, at in self._heard.values())
