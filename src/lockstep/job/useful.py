"""Work out which part of a run's time was useful, what the rest went to, and what both cost. Pure.

Note [Useful time]
~~~~~~~~~~~~~~~~~~
A second of a run is useful if a step that counts was under way in it. (Others call the useful part goodput.) What is
not useful has one of four causes, and counts for one of them only: the start-up of the first start, up to its
second step; restarts, with what they wait for, their start-up, and the steps that are taken a second time since the run
resumed from an earlier checkpoint; a rank that held up the others, as the verdict on the run blames it (Note [What a
slow rank costs] in account.py), or else in the stretches that are told; and saving, in the mean of the ranks.

A price is that of a node per hour. All nodes of a run are paid from its beginning to its end; where their number
changed, their mean over time counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from lockstep.text import as_clock, counted, joined

#: The fraction of the time or of the cost from which a cause is told.
_WORTH = 0.005
_HOUR = 3600.0


@dataclass(frozen=True)
class UsefulTime:
    """What a run's time went to, from its beginning to its end, in seconds."""

    lasted: float
    #: From the beginning to the second step of the first start.
    starting: float = 0.0
    #: The seconds that restarts took, and their number.
    restarting: float = 0.0
    restarts: int = 0
    #: The steps that were taken a second time; what they took is part of ``restarting``.
    repeated: int = 0
    #: Rank -> the seconds that the others waited for it.
    late: dict[int, float] = field(default_factory=dict)
    saving: float = 0.0
    #: The nodes of the job, in the mean over time.
    nodes: float = 1.0

    @property
    def useful(self) -> float:
        """Seconds in which steps that count were under way: what the losses leave."""
        return max(0.0, self.lasted - sum(seconds for _, seconds in self.losses))

    @property
    def losses(self) -> list[tuple[str, float]]:
        """What the time went to that was not useful, with its seconds, the largest first."""
        again = f" ({counted(self.repeated, 'step')} again)" if self.repeated else ""
        found = [("start-up", self.starting), ("saving", self.saving)]
        found += [(f"rank {rank}'s lateness", seconds) for rank, seconds in self.late.items()]
        found += [(f"{counted(self.restarts, 'restart')}{again}", self.restarting)] if self.restarts else []
        return sorted(found, key=lambda each: each[1], reverse=True)

    def describe(self) -> str:
        """Return ``useful time: 84% of 1:23:45; 2 restarts (40 steps again) 9%, rank 3's lateness 5%``."""
        told = [f"{what} {seconds / self.lasted:.0%}" for what, seconds in self._worth_telling()]
        rest = f"; {', '.join(told)}" if told else ""
        return f"useful time: {self.useful / (self.lasted or 1.0):.0%} of {as_clock(self.lasted)}{rest}"

    def cost(self, price: float, seconds: float | None = None) -> float:
        """Return what the run cost, or some seconds of it.

        Args:
            price: the price of a node per hour.
            seconds: how many; None: all of the run.
        """
        return cost_of(self.lasted if seconds is None else seconds, nodes=self.nodes, price=price)

    def describe_cost(self, price: float) -> str:
        """Return ``this run cost 41.00 (2 nodes for 6:24:22 at 3.2/h), of it 6.10 for rank 3's lateness and 2.00 for 2
        restarts``.

        Args:
            price: the price of a node per hour.
        """
        told = [f"{amount(self.cost(price, seconds))} for {what}" for what, seconds in self._worth_telling()]
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes:.3g} nodes"
        rest = f", of it {joined(told)}" if told else ""
        return f"this run cost {amount(self.cost(price))} ({nodes} for {as_clock(self.lasted)} at {price:g}/h){rest}"

    def _worth_telling(self) -> list[tuple[str, float]]:
        return [(what, seconds) for what, seconds in self.losses if seconds >= _WORTH * self.lasted > 0]

    def to_json(self) -> dict[str, Any]:
        """Return it in JSON's types; times are seconds."""
        return {
            "lasted": self.lasted,
            "useful": self.useful,
            "starting": self.starting,
            "restarting": self.restarting,
            "restarts": self.restarts,
            "repeated_steps": self.repeated,
            "late": {str(rank): seconds for rank, seconds in self.late.items()},
            "saving": self.saving,
            "nodes": self.nodes,
        }


def cost_of(seconds: float, *, nodes: float, price: float) -> float:
    """Return what ``nodes`` cost for some seconds, at the price of a node per hour."""
    return nodes * price * seconds / _HOUR


def amount(money: float) -> str:
    """Return a sum of money, without its currency."""
    return f"{money:,.2f}" if money >= 1 else f"{money:.2g}"


def parse_price(text: str) -> float:
    """Return the price of a node per hour that ``3.2/h`` or ``3.2`` says.

    Raises:
        ValueError: it says none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:/\s*h(?:our)?)?\s*", text)
    if found is None:
        raise ValueError(f"{text!r}: expected the price of one node per hour, such as 3.2/h")
    return float(found[1])
