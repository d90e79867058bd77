"""split(): this rank's part of a list, or of a loop, for work other than training: predictions, preprocessing.

Note [Contiguous parts]
~~~~~~~~~~~~~~~~~~~~~~~
A list is cut into one contiguous part for each rank, as a global batch is. Neighbours in a list are mostly neighbours
on a disk, too: a contiguous part is read in one go, a part of an array is a view of it, and what a rank writes is one
piece of the whole. Every n-th item instead is fairer where the cost of an item depends on its place (texts sorted by
length), and nothing else shows a rank which items are its own while the end of a loop is not known: ``strided=True``
asks for it, and an iterable without a length is always divided so.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from itertools import count
from typing import Any, TypeVar, overload

from torch.utils.data import DataLoader, Dataset

from lockstep.comm.calls import of_all_ranks
from lockstep.comm.in_order.places import Counts, HandedOut
from lockstep.comm.init import current_world
from lockstep.comm.peers import OverGroup
from lockstep.comm.together import agreed
from lockstep.data.contents import contents_of
from lockstep.data.order import share_bounds
from lockstep.errors import LockstepError

Item = TypeVar("Item")

#: The splits of this process so far: their numbers are the same on all ranks.
_splits = count()
_REMEDY = (
    ". Each rank would take its part of another list, so that some items come twice and others never. If files were "
    "listed, sort them; if items were drawn or shuffled at random, seed all ranks alike; a list made of a set of str "
    "has another order in each process"
)


@of_all_ranks("lockstep.split()")
def split(items: Iterable[Item] | Dataset[Item], *, strided: bool = False) -> Split[Item]:
    """**Collective.** Return this rank's part of ``items``: each item is in the part of exactly one rank.

    ::

        part = lockstep.split(sorted(folder.glob("*.png")))
        found = [describe(image) for image in part]
        everything = world.gather_in_order(found, part)  # on rank 0: one for each file, in the order of the list

    Nothing is padded or repeated, so ranks may have one item more than others, or none. A part of a list is a
    map-style dataset, too: ``DataLoader(lockstep.split(dataset), batch_size=32, num_workers=4)``.

    Args:
        items: the same on all ranks. A list, or anything with a length that is indexed from 0 (arrays, tensors,
            map-style datasets, tables with ``iloc``): only this rank's items are fetched. Or any other iterable, of
            unknown length: each rank then goes through all of it and takes every n-th item of n ranks, so let it yield
            what is cheap to make (names, not images). Its contents can't be compared, only its number of items, by
            :meth:`World.gather_in_order`; an iterator, like a generator, can be gone through once.
        strided: take every n-th item of a list instead of a contiguous part: fairer if the cost depends on the
            position, as in texts sorted by length. See Note [Contiguous parts] in ``data/split.py``.

    Raises:
        LockstepError: ``lockstep.init()`` has not been called.
        TypeError: ``items`` is a DataLoader, a mapping, a set, a str or bytes, or no iterable; on every rank.
        ValueError: the ranks' items differ in number or in contents, as far as these can be read without fetching an
            item (Note [What ranks compare] in ``data/contents.py``); on every rank.
    """
    world = current_world()
    if world is None:
        raise LockstepError("lockstep.split: no world yet; call lockstep.init() first")

    def check() -> int | None:
        _refuse_unfit(items)
        return len(items) if isinstance(items, Sized) and _is_indexed(items) else None

    def facts(length: int | None) -> dict[str, Any]:
        told = {"the number of items": length, "strided": strided or length is None}
        return told | (contents_of(items, "items") if length is not None and world.world_size > 1 else {})

    remedies = {"strided": "", "": _REMEDY}
    length = agreed(OverGroup(world), "lockstep.split", check, facts, remedies=remedies)
    return Split(items, rank=world.rank, world_size=world.world_size, length=length, strided=strided)


class Split(Dataset[Item]):
    """One rank's part of some items, in their order. Made by :func:`split`; iterates, and counts and indexes if it can.

    Args:
        items: the items of all ranks.
        rank: the rank whose part this is.
        world_size: the number of parts.
        length: the number of all items; None: it is not known.
        strided: whether the parts are strided rather than contiguous.
    """

    def __init__(
        self, items: Iterable[Item] | Dataset[Item], *, rank: int, world_size: int, length: int | None, strided: bool
    ) -> None:
        self._items: Any = items
        self._rank, self._world_size, self._length = rank, world_size, length
        self._name = f"split {next(_splits)}"
        #: The indices of this rank's items; None: the end is not known.
        self._indices: range | None = None
        if length is not None:
            bounds = share_bounds(length, rank=rank, world_size=world_size)
            self._indices = range(rank, length, world_size) if strided else range(*bounds)
        #: Numbers of items of an iterable that the last pass has seen and handed out; True if it has come to its end.
        self._seen = self._taken = 0
        self._is_through = False

    @property
    def indices(self) -> range:
        """The indices of this rank's items among all.

        Raises:
            TypeError: the number of items is not known: they are then ``rank``, ``rank + world_size`` and so on.
        """
        if self._indices is None:
            raise TypeError(
                f"rank {self._rank} of {self._world_size}: this split of a {type(self._items).__name__} without a "
                f"length has no indices or length; items {self._rank}, {self._rank + self._world_size} and so on are "
                "this rank's, as far as there are any"
            )
        return self._indices

    def __len__(self) -> int:
        """Return the number of this rank's items; a TypeError, like that of :attr:`indices`, if it is not known."""
        return len(self.indices)

    @overload
    def __getitem__(self, number: int) -> Item: ...

    @overload
    def __getitem__(self, number: slice) -> list[Item]: ...

    def __getitem__(self, number: int | slice) -> Item | list[Item]:
        """Return one of this rank's items, by its number among them, or a list of those of a slice."""
        if isinstance(number, slice):
            return [_element(self._items, index) for index in self.indices[number]]
        item: Item = _element(self._items, self.indices[number])
        return item

    def __getitems__(self, numbers: Sequence[int]) -> list[Item]:
        """Return several of this rank's items, all at once if the items can do that; a DataLoader asks for it."""
        at_once = getattr(self._items, "__getitems__", None)
        if callable(at_once):
            return [*at_once([self.indices[number] for number in numbers])]
        return [self[number] for number in numbers]

    def __iter__(self) -> Iterator[Item]:
        """Go through this rank's items, in order."""
        if self._indices is not None:
            for index in self._indices:
                yield _element(self._items, index)
            return
        self._seen, self._taken, self._is_through = 0, 0, False
        for number, item in enumerate(self._items):
            self._seen = number + 1
            if number % self._world_size == self._rank:
                self._taken += 1
                yield item
        self._is_through = True

    def __repr__(self) -> str:
        of = "" if self._length is None else f"{len(self.indices)} of {self._length} "
        return f"<{of}items of a {type(self._items).__name__}, on rank {self._rank} of {self._world_size}>"

    def _handed_out(self) -> HandedOut:
        """See :class:`~lockstep.comm.in_order.places.HandsOut`."""
        if self._indices is None:
            unfinished = "" if self._is_through else "the loop over the split did not come to its end"
            return HandedOut(self._name, "item", Counts([[1, self._taken]]), self._seen, unfinished)
        runs = [[1, len(self._indices)]] if self._indices.step != 1 else [[len(self._indices), 1]]
        return HandedOut(self._name, "item", Counts(runs), self._length)


def _refuse_unfit(items: object) -> None:
    kind = type(items).__name__
    if isinstance(items, DataLoader) or hasattr(items, "batches_left"):
        raise TypeError(
            f"lockstep.split divides items, and a {kind} gives batches of them: lockstep.shard(loader) gives each rank "
            "its share of every batch, and DataLoader(lockstep.split(dataset)) batches of its part"
        )
    if isinstance(items, (str, bytes)):
        raise TypeError(f"lockstep.split takes a list or another iterable, not a {kind}: {items[:40]!r}")
    if isinstance(items, AbstractSet) and not isinstance(items, (KeysView, ItemsView)):  # (these are in a dict's order)
        raise TypeError(f"lockstep.split: a {kind} has no order that all ranks share: pass sorted(items)")
    if isinstance(items, Mapping):
        raise TypeError(f"lockstep.split: a {kind} is no list: pass list(items) for its keys, or list(items.items())")
    if not isinstance(items, Iterable) and not _is_indexed(items):
        raise TypeError(f"lockstep.split takes a list or another iterable, not a {kind}")


def _is_indexed(items: object) -> bool:
    return hasattr(items, "__len__") and (hasattr(items, "__getitem__") or hasattr(items, "iloc"))


def _element(items: Any, index: int) -> Any:
    return items.iloc[index] if hasattr(items, "iloc") else items[index]
