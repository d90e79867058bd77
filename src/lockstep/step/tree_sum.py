"""Slices of a global batch: the one order in which what comes of them is added up, whoever holds which.

Note [One tree]
~~~~~~~~~~~~~~~
Sums of floating-point numbers depend on their order. So what the slices of a step give (gradients) is added up in an
order that knows nothing of ranks: a binary tree over the slices, whose node ``(level, at)`` stands for the slices
from ``at * 2**level`` on, ``2**level`` of them; where there is nothing on the right, a node is what is on its left.
Whoever holds all the slices of a node can add them up by himself, and a rank that holds a contiguous run of slices
holds at most two such nodes for each level. It keeps the nodes that are complete and joins two as soon as they are
siblings, as the carries of a binary counter do: memory for log2(slices) sums and no more. The ranks exchange these
sums alone, and what is above them in the tree is added in the same way by everybody. Each element is the result of the
same additions of the same numbers, in the same order, for any number of ranks.

A slice that has nothing for some parameter (it did not use it, or has no samples) counts as +0.0, everywhere: x + 0.0
is x, but for x = -0.0, which becomes +0.0 whether the zero came in a message or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """The sum of the slices from ``at * 2**level`` on, ``2**level`` of them or as many as there are."""

    level: int
    at: int


class Carries:
    """Nodes that are told one after the other, in order of their slices; siblings become their parent.

    Args:
        slices: how many there are in all.
    """

    def __init__(self, slices: int) -> None:
        self._slices = slices
        #: The nodes that have not met their sibling yet, in order.
        self.nodes: list[Node] = []

    def push(self, node: Node) -> int:
        """Add ``node``. Return how many times the last two sums are to be joined: the last is added to the one before.

        Raises:
            ValueError: it does not come after those that are there.
        """
        nodes, joins = self.nodes, 0
        if nodes and _end(nodes[-1]) > node.at << node.level:
            raise ValueError(f"{node} comes after {nodes[-1]}")
        nodes.append(node)
        while True:
            level, at = nodes[-1]
            if at % 2 and len(nodes) > 1 and nodes[-2] == (level, at - 1):
                joins += 1
                nodes.pop()
            elif at % 2 or _end(nodes[-1]) < self._slices or (at == 0 and 1 << level >= self._slices):
                return joins  # its sibling is elsewhere or still to come, or it is the root
            nodes[-1] = Node(level + 1, at // 2)


def _end(node: Node) -> int:
    return (node.at + 1) << node.level


def nodes_of(first: int, end: int, slices: int) -> list[Node]:
    """Return the nodes that a rank is left with which holds the slices from ``first`` to before ``end``, in order."""
    carries = Carries(slices)
    for number in range(first, end):
        carries.push(Node(0, number))
    return carries.nodes


def additions(nodes: Sequence[Node], slices: int) -> list[tuple[int, int]]:
    """Return in which order the sums of ``nodes`` are added up, as pairs of positions: add the second to the first.

    Args:
        nodes: of all ranks, in order of their slices; together they have each slice once.
        slices: how many there are.

    Returns:
        The pairs; at their end the sum of all is at position 0.
    """
    carries, stack, pairs = Carries(slices), [], []
    for position, node in enumerate(nodes):
        stack.append(position)
        for _ in range(carries.push(node)):
            last = stack.pop()
            pairs.append((stack[-1], last))
    return pairs
