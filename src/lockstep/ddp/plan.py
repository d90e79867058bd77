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
    the last parameter to the first. Each holds one dtype on one device. The first bucket of each kind is small
    (``first_cap_bytes``), so that communication starts early; the others hold up to ``cap_bytes``. A parameter larger
    than its cap has a bucket to itself.

    Returns:
        Indices into ``specs``, each exactly once. Buckets are ordered by their last member to arrive: the plan depends
        on nothing but its arguments, hence it is the same on every rank.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    kinds_begun: set[Hashable] = set()

    def close(kind: Hashable) -> None:
        closed.append(open_buckets.pop(kind))
        filled[kind] = 0
        kinds_begun.add(kind)

    for index in reversed(range(len(specs))):
        spec = specs[index]
        cap = cap_bytes if spec.kind in kinds_begun else min(first_cap_bytes, cap_bytes)
        if spec.kind in open_buckets and filled[spec.kind] + spec.nbytes > cap:
            close(spec.kind)
            cap = cap_bytes
        open_buckets.setdefault(spec.kind, []).append(index)
        filled[spec.kind] = filled.get(spec.kind, 0) + spec.nbytes
        if filled[spec.kind] >= cap:
            close(spec.kind)
    closed.extend(open_buckets.values())
    # A bucket is complete when its lowest index has arrived.
    return [tuple(bucket) for bucket in sorted(closed, key=min, reverse=True)]
