"""Tell which machines give signs of life, by counters that change: clocks need not agree."""

from __future__ import annotations

from collections.abc import Iterable


class Signs:
    """The counters of other machines, and when they changed, on this machine's monotonic clock.

    Args:
        silent: seconds without a sign of life after which a machine is lost.
    """

    def __init__(self, silent: float) -> None:
        self._silent = silent
        #: Name -> the counter, the time of its last change, and True if it has changed since it was first read.
        self._heard: dict[str, tuple[int, float, bool]] = {}

    def expect(self, name: str, now: float) -> None:
        """Note since when a machine has been known, unless something was heard of it already."""
        self._heard.setdefault(name, (-1, now, False))

    def hear(self, name: str, count: int, now: float) -> None:
        """Note a machine's counter as it is now. Its first value is not a sign of life: it may be old."""
        known = self._heard.get(name)
        if known is None or (known[0] == -1 and not known[2]):
            self._heard[name] = count, now, False
        elif count != known[0]:
            self._heard[name] = count, now, True

    def pause(self, seconds: float) -> None:
        """Leave out a time in which this machine itself stood still, and could hear no other machine."""
        self._heard = {name: (count, at + seconds, lives) for name, (count, at, lives) in self._heard.items()}

    def lives(self, name: str, now: float) -> bool:
        """Return whether a machine has given a sign of life while this one listened, and not too long ago."""
        _, at, lives = self._heard.get(name, (-1, now, False))
        return lives and now - at <= self._silent

    def is_silent(self, name: str, now: float) -> bool:
        """Return whether a machine has been silent for too long."""
        known = self._heard.get(name)
        return known is not None and now - known[1] > self._silent

    def heard_since(self, names: Iterable[str], moment: float) -> bool:
        """Return whether every one of these machines has given a sign of life after ``moment``."""
        return all(self._heard[name][2] and self._heard[name][1] > moment for name in names)
