"""Messages between a program and its ranks that run cells, over one socket for each rank (job/messages.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunCell:
    """Run a cell; the answer is :class:`CellEnded`. On the rank whose value is wanted, a file for it comes along."""

    number: int
    source: str


@dataclass(frozen=True)
class InterruptCell:
    """Interrupt a cell: after a step on which the ranks agree, or ``at_once``."""

    number: int
    at_once: bool


@dataclass(frozen=True)
class FreeWaiting:
    """End the process groups, so that this rank waits no longer for others that will not come."""

    reason: str


@dataclass(frozen=True)
class StopGroups:
    """See ``stop`` in comm/renewal.py; the answer is :class:`GroupsDone`."""

    reason: str


@dataclass(frozen=True)
class RenewGroups:
    """See ``renew`` in comm/renewal.py; the answer is :class:`GroupsDone`."""


@dataclass(frozen=True)
class CellEnded:
    """A rank has come to the end of a cell."""

    #: The value of the last line as Python shows it; None: there is none, or this rank's value is not needed.
    shown: str | None
    #: The fields of a :class:`CellError`; None: all is well.
    error: dict[str, Any] | None
    #: The result of ``standing`` in comm/renewal.py.
    standing: dict[str, list[int]]


@dataclass(frozen=True)
class FigureDrawn:
    """The rank whose output is watched has drawn a figure."""

    #: A PNG, in base 64.
    png: str


@dataclass(frozen=True)
class GroupsDone:
    """The process groups were stopped, or renewed."""

    #: The steps that the user has to repeat; empty if there are none.
    todo: str
    #: The reason why it could not be done; empty: it was.
    error: str


@dataclass(frozen=True)
class CellError:
    """An exception that has ended a cell on one rank."""

    #: The type's name as Python prints it, and the message.
    type: str
    message: str
    #: The text that Python would print, with the user's frames.
    traceback: str
    #: The moment, in seconds on the monotonic clock, which all processes of a machine share.
    at: float

    @property
    def summary(self) -> str:
        """The type and the first line of the message."""
        first = self.message.strip().splitlines()[:1]
        return f"{self.type}: {first[0]}" if first else self.type


Request = RunCell | InterruptCell | FreeWaiting | StopGroups | RenewGroups
Report = CellEnded | FigureDrawn | GroupsDone


def must_renew(standings: list[dict[str, list[int]]], *, failed: bool) -> bool:
    """Return whether the process groups can't be used as they are.

    Args:
        standings: what each rank has said at the end of a cell (``standing`` in comm/renewal.py).
        failed: the cell has ended by an error on some rank. Else a rank may have begun something that the next cell
            goes on with.
    """
    for name in {name for each in standings for name in each}:
        said = [each[name] for each in standings if name in each]
        apart = len({number for number, *_ in said}) > 1
        if any(ended or (failed and (busy or apart)) for _, ended, busy in said):
            return True
    return False
