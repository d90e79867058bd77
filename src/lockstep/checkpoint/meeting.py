"""Let ranks act together at a kind of place that some of them may not reach.

Note [Meeting in an evaluation]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An evaluation has no steps to agree on, and ranks may have different numbers of iterations in it, or none. So a rank
that is to save and leave there announces itself, and waits until all others have done so too, or one of them can't
come: its page says that it waits in a collective, most likely for this rank. The decision is one key of the group's
store, written by compare-and-set: a rank that sees all ranks here writes "go", a rank that gives up writes "off", and
the first counts for all. After "off" the ranks go on as if nothing had been asked, and the next attempt has the next
number. So no rank waits for one that waits for it, and no rank saves alone. An evaluation with a collective in each
turn comes to "go" one turn later, when all ranks have left the collective; in one where some have finished, all go on
to the next step and save there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from lockstep.job.stop import KeyValueStore

#: Seconds to wait for ranks that are busy, between two checks for them, and between two attempts of this rank.
_PATIENCE, _NAP, _PAUSE = 5.0, 0.005, 0.2


class Meeting:
    """One rank's view of a meeting. See Note [Meeting in an evaluation].

    Args:
        store: the process group's store.
        waiting: returns the ranks that wait in a collective, as far as this rank knows.
    """

    def __init__(
        self, store: KeyValueStore, *, rank: int, world_size: int, waiting: Callable[[], Iterable[int]]
    ) -> None:
        self._store = store
        self._rank, self._ranks = rank, range(world_size)
        self._waiting = waiting
        self._attempt = 0
        self._not_before = 0.0

    def attend(self) -> bool:
        """Return, within some seconds, whether all ranks are here and act together now."""
        if time.monotonic() < self._not_before and not any(self._is_here(rank) for rank in self._ranks):
            return False
        self._store.compare_set(self._place(self._rank), "", "here")
        limit = time.monotonic() + _PATIENCE
        while (decision := self._decision()) is None:
            missing = {rank for rank in self._ranks if not self._is_here(rank)}
            if not missing:
                self._store.compare_set(self._key, "", "go")
            elif missing & set(self._waiting()) or time.monotonic() > limit:
                self._store.compare_set(self._key, "", "off")
            else:
                time.sleep(_NAP)
        self._attempt += 1
        self._not_before = time.monotonic() + _PAUSE
        return decision == "go"

    @property
    def _key(self) -> str:
        return f"lockstep/meeting/{self._attempt}"

    def _place(self, rank: int) -> str:
        return f"{self._key}/{rank}"

    def _is_here(self, rank: int) -> bool:
        return self._store.check([self._place(rank)])

    def _decision(self) -> str | None:
        return self._store.get(self._key).decode() if self._store.check([self._key]) else None
