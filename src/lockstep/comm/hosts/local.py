"""The ranks of one host, as a part of a group that spans several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep.comm.group.meeting import Whereabouts
from lockstep.comm.hosts.between import Between
from lockstep.comm.shm.health import Health
from lockstep.comm.shm.memory_engine import MemoryEngine
from lockstep.errors import LockstepError


class LocalHealth(Health):
    """The health of one host's ranks. It tells the other hosts what ends the group, and hears it from them."""

    def __init__(self, between: Between, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._between = between
        between.watch(self)

    def end(self, error: LockstepError) -> LockstepError:
        """See :class:`Health`."""
        first = self.known() is None
        error = super().end(error)
        if first:
            self._between.tell(error)
        return error

    def asked(self) -> bool:
        """See :class:`Health`."""
        return self._between.asked()


class LocalEngine(MemoryEngine):
    """The engine of the ranks of one host."""

    def __init__(self, store: Store, between: Between, *, numbers: Sequence[int], **options: Any) -> None:
        """**Collective.** See :class:`MemoryEngine`.

        Args:
            store: where the ranks of the host meet.
            between: connects them to the other hosts.
            numbers: these ranks' numbers in the whole group.
            options: as for :class:`MemoryEngine`.
        """
        self._between = between
        self._numbers = numbers
        super().__init__(store, **options)

    def _make_health(self, whereabouts: list[Whereabouts], members: Sequence[int]) -> Health:
        return LocalHealth(
            self._between,
            self._segment,
            self._layout,
            whereabouts,
            rank=self.rank,
            members=members,
            numbers=self._numbers,
        )
