"""Tell which ranks of a group share a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.comm.group.meeting import Whereabouts
from lockstep.identity import Identity


@dataclass(frozen=True)
class Hosts:
    """The ranks of a group by host, seen from one of them. The hosts are in the order of their first ranks."""

    #: Host -> its ranks, in order.
    members: tuple[tuple[int, ...], ...]
    #: This rank, the number of its host, and its index among the ranks there.
    rank: int
    host: int
    local: int

    @classmethod
    def of(cls, labels: Sequence[str], rank: int) -> Hosts:
        """Group ranks by ``labels``: ranks with equal ones share a host.

        Args:
            labels: by rank.
            rank: this rank.
        """
        by_label: dict[str, list[int]] = {}
        for peer, label in enumerate(labels):
            by_label.setdefault(label, []).append(peer)
        members = tuple(tuple(ranks) for ranks in by_label.values())
        host = list(by_label).index(labels[rank])
        return cls(members, rank, host, members[host].index(rank))

    @property
    def mine(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return self.members[self.host]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each host, which exchanges data with the other hosts."""
        return tuple(ranks[0] for ranks in self.members)

    @property
    def other_leaders(self) -> tuple[int, ...]:
        """The leaders of the other hosts."""
        return tuple(leader for host, leader in enumerate(self.leaders) if host != self.host)

    @property
    def leads(self) -> bool:
        """Whether this rank is its host's leader."""
        return self.local == 0

    def where(self, rank: int) -> tuple[int, int]:
        """Return the host of ``rank``, and its place among the ranks there."""
        for host, ranks in enumerate(self.members):
            if rank in ranks:
                return host, ranks.index(rank)
        raise ValueError(f"there is no rank {rank} among {self.members}")


def my_host() -> str:
    """Return a label that is equal on the ranks that share this one's host and launcher, and on no others."""
    where = Whereabouts.mine()
    return f"{Identity.from_environment().node_rank} {where.boot_id} {where.pid_namespace}"
