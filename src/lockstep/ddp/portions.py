"""Gradients that come in portions: the buckets that wait for the end of the backward because of them.

Note [More than one event]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Under re-entrant activation checkpointing a parameter can receive its gradient in several portions, with an event for
each, and nothing marks the last one. So the first synchronised backward issues nothing before its end, and every bucket
that saw a parameter twice is issued at the end for good; so is a bucket that is found to be incomplete although it
counted enough events. From then on large gradients are copied into their bucket as they come: they are still in the
cache, and their memory is free for the next. A portion that arrives for a gradient that was already copied or sent (a
graph that changed later on) is an error: that was not the whole gradient. ``overlap=False`` issues all at the end.

Where portions may still come, in the first backward and in such buckets, a large gradient moves into its bucket as it
is, if gradients are views of it: autograd adds the other portions there, and the factor follows when the bucket is
filled. So the first step needs no more memory than the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.ddp.bucket import Bucket


class Portions:
    """What the first synchronised backward, and mistakes after it, have shown; see Note [More than one event].

    Args:
        buckets: the buckets, in the order in which they are reduced.
        overlap: whether buckets are issued during backward.
    """

    def __init__(self, buckets: Sequence[Bucket], *, overlap: bool) -> None:
        #: True from the end of the first synchronised backward on.
        self.is_learned = False
        #: Indices of buckets that are issued at the end for good; positions of the parameters that are packed then.
        self._late = set() if overlap else {bucket.index for bucket in buckets}
        at_once = any(bucket.sum_up is not None for bucket in buckets)  # see Note [One reduction]
        self._positions: set[int] = set()
        if not overlap and not at_once:
            self._positions.update(position for bucket in buckets for position in bucket.positions)

    def packs_early(self, position: int) -> bool:
        """Return whether a large gradient that comes is whole, and may be packed at once."""
        return self.is_learned and position not in self._positions

    def holds_back(self, bucket: Bucket) -> bool:
        """Return whether a bucket is issued at the end for good."""
        return bucket.index in self._late

    def hold_back(self, bucket: Bucket) -> None:
        """Issue a bucket at the end from now on."""
        self._late.add(bucket.index)
        self._positions.update(bucket.positions)

    def learn(self, buckets: Sequence[Bucket]) -> None:
        """End the first synchronised backward: note the buckets that saw a parameter twice."""
        self.is_learned = True
        for bucket in buckets:
            if bucket.turn.in_portions():
                self.hold_back(bucket)

    def take_over(self, old: Portions, buckets: Sequence[Bucket]) -> None:
        """Continue with the same parameters in other buckets.

        Args:
            old: what is known of the buckets before.
            buckets: the buckets now.
        """
        self.is_learned = old.is_learned
        for bucket in buckets:
            if not old._positions.isdisjoint(bucket.positions):
                self.hold_back(bucket)
