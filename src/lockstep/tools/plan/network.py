"""Estimate what an all-reduce takes over a network, from its successive messages and its bytes. Pure.

Note [All-reduce by formula]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A message of n bytes takes ``a + n * b``: a latency, and the bytes at the link's rate (Hockney's model, as in Thakur,
Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1), 2005). For p ranks:

- *ring*: a reduce-scatter and an all-gather around a ring, ``2 (p - 1) (a + n b / p)`` (Thakur et al.; as few bytes as
  can be: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69(2), 2009).
  Ranks of a host are neighbours, so that one message goes into a host at a time, and the slowest link sets the pace.
- *tree*: to the root and back, in pieces that follow each other, along two binary trees that share the load (Sanders,
  Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel Computing 35(12),
  2009): with pieces of the best size ``2 (sqrt(h a) + sqrt(n b)) ** 2``, h levels deep. Latency grows with log p, and
  twice the bytes go over each link that the ring would send to two ranks.
- *hierarchical*: a reduce-scatter and an all-gather inside each host, and between them the faster of the other two
  between hosts, for which the ranks of a host share its link.

None of the formulas models congestion, unequal links, or the time for adding up, unless the rate includes that.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.text import as_duration, as_rate


@dataclass(frozen=True)
class Link:
    """A link that carries messages from one rank to another."""

    #: Seconds of a message without bytes.
    latency: float
    #: Bytes a second in each direction.
    bandwidth: float

    def seconds(self, size: float) -> float:
        """Return how many seconds a message of ``size`` bytes takes."""
        return self.latency + size / self.bandwidth

    def words(self) -> str:
        """Say it in words: ``20 µs and 25 Gbit/s``."""
        return f"{as_duration(self.latency)} and {as_rate(self.bandwidth)}"


@dataclass(frozen=True)
class Network:
    """Hosts with equally many ranks each, and the links between them."""

    #: Between hosts; the ranks of a host share it.
    between: Link
    #: The link between ranks of a host.
    inside: Link
    #: Ranks of a host that is full.
    ranks_per_host: int

    def hosts(self, ranks: int) -> int:
        """Return how many hosts ``ranks`` ranks need."""
        return -(-ranks // self.ranks_per_host)

    def all_reduce(self, size: float, ranks: int, algorithm: str) -> tuple[float, str]:
        """Return the seconds of an all-reduce, and the algorithm: the fastest if ``algorithm`` is ``best``.

        Args:
            size: bytes.
            ranks: the number of ranks that take part.
            algorithm: ``ring``, ``tree``, ``hierarchical`` or ``best``.
        """
        ways = {"ring": self._ring, "tree": self._tree, "hierarchical": self._hierarchical}
        tried = ways if algorithm == "best" else {algorithm: ways[algorithm]}
        found = {name: way(size, ranks) for name, way in tried.items()}
        name = min(found, key=lambda name: found[name])
        return found[name], name

    def to_json(self) -> dict[str, Any]:
        """Return it in JSON's types."""
        return asdict(self)

    def _links(self, ranks: int) -> list[tuple[Link, int]]:
        """Return the links that are used, and how many ranks or hosts meet over each."""
        local, hosts = min(ranks, self.ranks_per_host), self.hosts(ranks)
        return [(link, count) for link, count in ((self.inside, local), (self.between, hosts)) if count > 1]

    def _ring(self, size: float, ranks: int) -> float:
        step = max((link.seconds(size / ranks) for link, _ in self._links(ranks)), default=0.0)
        return 2 * (ranks - 1) * step

    def _tree(self, size: float, ranks: int) -> float:
        links = self._links(ranks)
        if not links:
            return 0.0
        latency = sum(math.ceil(math.log2(count)) * link.latency for link, count in links)
        return 2 * (math.sqrt(latency) + math.sqrt(max(size / link.bandwidth for link, _ in links))) ** 2

    def _hierarchical(self, size: float, ranks: int) -> float:
        local, hosts = min(ranks, self.ranks_per_host), self.hosts(ranks)
        inside = 2 * (local - 1) * self.inside.seconds(size / local)
        leaders = Network(self.between, self.inside, 1)
        return inside + min(leaders._ring(size, hosts), leaders._tree(size, hosts))
