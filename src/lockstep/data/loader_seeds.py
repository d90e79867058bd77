"""The seed of each sharded loader that is given none.

Note [Seeds of loaders]
~~~~~~~~~~~~~~~~~~~~~~~
What a loader hands out follows from its seed and the epoch. Two loaders of one seed over the same data would have the
same order in every epoch (a batch of pairs would be pairs of a sample with itself), and a loader that is made anew for
each epoch would repeat the first one. So of the loaders to which the script gives no seed only the first has the
world's; the n-th after it has one that is made from the world's and n. A program with one loader that shuffles has the
order of the world's seed, whatever else it makes.

Loaders are counted by what makes their order, each kind by itself: those whose samples are shuffled or drawn, those in
the order of the dataset, and streams. An evaluation that is added to a program, in front of the training or beside it,
is of another kind and changes nothing for the training. Loaders of different kinds may have the same seed: their
samples do not come in the same order, so that the random numbers of a position go to different samples.

A ``generator=`` that the DataLoader was given decides in the place of the world's seed. torch goes on drawing from it
for each loader that has it, so the loaders of one generator are counted, too; if the script seeds it again, anew.

The count is that of the calls of ``shard`` in a world, which all ranks make together, and ``shard`` compares the seeds.
It does not depend on the number of ranks. (In a notebook a cell that makes a loader has another order when it is run
again, as with torch.) A position and the run's record hold the loader's own seed: a loader that takes up a position, or
that a record tells of, needs no count. The count itself is in neither: a program that makes its loader anew for each
epoch and is resumed counts from the beginning (docs/guide.md says what to do instead).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from weakref import WeakKeyDictionary

from lockstep.comm.world import World
from lockstep.data.mixing import mix
from lockstep.data.source import Shardable


class LoaderSeeds:
    """The seeds of a world's loaders so far; see Note [Seeds of loaders]."""

    def __init__(self) -> None:
        #: What loaders are counted by -> how many there are. (It holds a generator, whose place in memory no other one
        #: must have.)
        self._made: Counter[Hashable] = Counter()

    def give(self, source: Shardable) -> Shardable:
        """Return ``source`` with the seed of the loader that is made of it next."""
        number = 0 if source.counted_by is None else self._made[source.counted_by]
        return replace(source, seed=mix(source.seed, number) >> 1) if number else source  # (a seed= that shard takes)

    def count(self, source: Shardable) -> None:
        """Count the loader that is made of ``source``, on all ranks."""
        if source.counted_by is not None:
            self._made[source.counted_by] += 1


_of_worlds: WeakKeyDictionary[World, LoaderSeeds] = WeakKeyDictionary()


def seeds_of(world: World) -> LoaderSeeds:
    """Return the seeds of the loaders of ``world``."""
    return _of_worlds.setdefault(world, LoaderSeeds())
