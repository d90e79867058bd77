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


def plan_buckets(specs: Sequence[ParameterSpec], *, cap_bytes: int, first_cap_bytes: int) -> list[tuple[int, ...]]:
    """**Local.** Cut the parameters into buckets, in the order in which the buckets are to be reduced.

    Gradients come roughly in the reverse of the order in which parameters were registered, so buckets are filled from
    the last parameter to the first. Each holds one dtype on one device, and is closed as soon as it holds its cap, so
    it exceeds the cap by less than its last parameter. The first bucket of each kind has a small cap
    (``first_cap_bytes``), so that communication starts early; the others have ``cap_bytes``.

    Returns:
        Indices into ``specs``, each exactly once. Buckets are ordered by their last member to arrive: the plan depends
        on nothing but its arguments, hence it is the same on every rank.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    caps: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    for index in reversed(range(len(specs))):
        kind = specs[index].kind
        open_buckets.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + specs[index].nbytes
        if filled[kind] >= caps.get(kind, min(first_cap_bytes, cap_bytes)):
            closed.append(open_buckets.pop(kind))
            filled[kind], caps[kind] = 0, cap_bytes
    closed.extend(open_buckets.values())
    # A bucket is complete when its lowest index has arrived.
    return [tuple(bucket) for bucket in sorted(closed, key=min, reverse=True)]
