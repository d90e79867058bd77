"""The patience of a rank that waits for others: the time that a person takes in a debugger does not use it up."""

from __future__ import annotations

import time

from lockstep.job import flight


class Patience:
    """Tells which part of a wait its time limit leaves out: that in which a rank of the job is in a debugger."""

    def __init__(self) -> None:
        self._looked = time.monotonic()

    def excused(self, now: float) -> float:
        """Return the seconds since the last look if a rank is in a debugger, otherwise 0.

        Args:
            now: on the monotonic clock.
        """
        passed, self._looked = now - self._looked, now
        pages = flight.current.pages
        return passed if pages is not None and pages.debugging else 0.0
