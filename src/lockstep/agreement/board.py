"""Where ranks write what they propose and read what the others do: a mapped file, or the process group's store."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from lockstep.agreement.standing import Place, Slots


class Kind(enum.IntEnum):
    """What the ranks do together at a step; at the same step, the first goes before the others."""

    STOP = 0
    SAVE = 1


@dataclass(frozen=True, order=True)
class Proposal:
    """Do ``kind`` at the first boundary with at least ``step`` optimizer steps done."""

    step: int
    kind: Kind


class Board(Protocol):
    """Proposals by round, the first round being 1. Ranks read the same smallest proposal once all have been written."""

    def propose(self, round_: int, proposal: Proposal) -> None:
        """**Local.** Write this rank's proposal, once a round."""

    def smallest(self, round_: int) -> Proposal | None:
        """**Local.** The smallest proposal of the round so far."""


class SlotBoard:
    """On one host: a number in each rank's slot; see Note [One writer a slot]. Reading takes a few hundred
    nanoseconds."""

    _STEPS = 1 << 40
    _KINDS = len(Kind)

    def __init__(self, slots: Slots, *, rank: int) -> None:
        self._slots = slots
        self._rank = rank

    def propose(self, round_: int, proposal: Proposal) -> None:
        """**Local.** See :class:`Board`."""
        number = (round_ * self._STEPS + proposal.step) * self._KINDS + proposal.kind
        self._slots.set(self._rank, Place.PROPOSAL, number)

    def smallest(self, round_: int) -> Proposal | None:
        """**Local.** See :class:`Board`."""
        first, last = (number * self._STEPS * self._KINDS for number in (round_, round_ + 1))
        numbers = [number for number in self._slots.all(Place.PROPOSAL) if first <= number < last]
        if not numbers:
            return None
        number = min(numbers)
        return Proposal(step=number // self._KINDS % self._STEPS, kind=Kind(number % self._KINDS))


class Store(Protocol):
    """What is needed of a process group's store."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...


class StoreBoard:
    """On several hosts, or under another launcher: a key of the process group's store, looked up once a step. The first
    proposal of a round is the only one."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def propose(self, round_: int, proposal: Proposal) -> None:
        """**Local.** See :class:`Board`."""
        self._store.compare_set(self._key(round_), "", f"{proposal.step} {proposal.kind:d}")

    def smallest(self, round_: int) -> Proposal | None:
        """**Local.** See :class:`Board`."""
        key = self._key(round_)
        if not self._store.check([key]):
            return None
        step, kind = self._store.get(key).decode().split()
        return Proposal(step=int(step), kind=Kind(int(kind)))

    @staticmethod
    def _key(round_: int) -> str:
        return f"lockstep/agreement/{round_}"
