"""Which parameter's gradient goes into which bucket. Pure: no tensors, no ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterSpec:
    """What the plan needs to know of one parameter."""

    #: Elements.
    numel: int
    #: Bytes of one element.
    element_size: int
    #: Parameters with equal kinds may share a bucket: (dtype, device).
    kind: Hashable

    @property
    def nbytes(self) -> int:
        return self.numel * self.element_size


def plan_buckets(specs: Sequence[ParameterSpec], *, caps: Sequence[int]) -> list[tuple[int, ...]]:
    """**Local.** Cut the parameters into buckets, in the order in which the buckets are to be reduced.

    Gradients come roughly in the reverse of the order in which parameters were registered, so buckets are filled from
    the last parameter to the first. Each holds one dtype on one device, and is closed as soon as it holds its cap, so
    it exceeds the cap by less than its last parameter.

    Args:
        specs: the parameters.
        caps: bytes that the first bucket of each kind may hold (few, so that communication starts early), the second,
            and so on; the last of them is for all that follow.

    Returns:
        Indices into ``specs``, each exactly once. Buckets are ordered by their last member to arrive: the plan depends
        on nothing but its arguments, hence it is the same on every rank.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    made: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    for index in reversed(range(len(specs))):
        kind = specs[index].kind
        open_buckets.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + specs[index].nbytes
        if filled[kind] >= caps[min(made.get(kind, 0), len(caps) - 1)]:
            closed.append(open_buckets.pop(kind))
            filled[kind], made[kind] = 0, made.get(kind, 0) + 1
    closed.extend(open_buckets.values())
    # A bucket is complete when its lowest index has arrived.
    return [tuple(bucket) for bucket in sorted(closed, key=min, reverse=True)]
