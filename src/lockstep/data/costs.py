"""What samples cost, and global batches divided into parts of equal cost instead of equal number.

Note [Parts of equal cost]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Where samples differ in cost (the length of a text, an image's pixels), ranks with equally many of them take different
times for a step, and all wait for the slowest. So a global batch, which stays what it is, is divided such that the
parts cost about the same: samples in order of falling cost, each to the part that costs least so far (LPT, "longest
processing time first": Graham, "Bounds on multiprocessing timing anomalies", 1969; the most expensive part costs at
most 4/3 of that in the best division). Ties go to the sample that comes first in the batch, and to the part with fewer
samples, then to the lower number, so that every rank computes the same division. Within a part samples keep their
order. The parts have different numbers of samples, which is why means are weighted: Note [Exact mean] in
``step/share.py``.

Slices are such parts, too, and know nothing of ranks: with ``slices=8`` a batch is divided into eight slices of equal
cost on any number of ranks, and the bits are the same. They are not those of slices of equal number.

Costs must be the same on every rank, or samples would be trained on twice and others never. A table is compared when
the loader is sharded; a function, and a batch sampler that says what its samples cost, are asked on rank 0 alone, which
hands the costs out with the batches: Note [Drawn batches] in ``data/batches.py``.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from lockstep.data.order import share_bounds

#: The value of ``costs=`` that means what a batch sampler yields beside the indices.
OF_SAMPLER = "sampler"

#: The places in a global batch of the samples of each part.
Parts = Sequence[Sequence[int]]


class SampleCosts(Protocol):
    """The source of the costs of samples."""

    @property
    def is_told_by_rank_0(self) -> bool:
        """True if rank 0 alone knows the costs, and ships them with the batches."""
        ...

    @property
    def fact(self) -> str:
        """The fact about the costs that must be the same on every rank."""
        ...

    def of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the costs of the samples with these indices: float64, of the same shape."""
        ...


class CostTable:
    """A cost for each sample of the dataset.

    Args:
        table: float64, one element for each sample.
    """

    is_told_by_rank_0 = False

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self.fact = f"a table with digest {hashlib.blake2b(table.numpy().data, digest_size=8).hexdigest()}"

    def of(self, indices: torch.Tensor) -> torch.Tensor:
        """See :class:`SampleCosts`.

        Raises:
            ValueError: the table has no such sample.
        """
        count = len(self._table)
        if len(indices) and not (-count <= int(indices.min()) and int(indices.max()) < count):
            outside = next(index for index in indices.tolist() if not -count <= index < count)
            raise ValueError(f"costs= has {count} costs, and the sampler gave the index {outside}")
        return self._table[indices]


class CostFunction:
    """A function from a sample's index to its cost; asked on rank 0.

    Args:
        function: the user's.
    """

    is_told_by_rank_0 = True
    fact = "a function"

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function = function

    def of(self, indices: torch.Tensor) -> torch.Tensor:
        """See :class:`SampleCosts`.

        Raises:
            TypeError, ValueError: the function returned something else than a cost.
        """
        return as_costs([self._function(index) for index in indices.tolist()], "the function costs= returned")


class CostsOfSampler:
    """The costs that a batch sampler yields beside the indices; they are read where the batches are drawn."""

    is_told_by_rank_0 = True
    fact = "what the batch sampler yields"

    def of(self, indices: torch.Tensor) -> torch.Tensor:
        """Refuse: these costs come with the batch."""
        raise LookupError(f"the costs of {len(indices)} samples come with their batch")


def read_costs(given: object, dataset: Any, *, is_stream: bool, draws_batches: bool) -> SampleCosts | None:
    """Return the costs that a user gave, checked.

    Args:
        given: the argument ``costs=``.
        dataset: that of the loader.
        is_stream: whether the dataset is a stream.
        draws_batches: whether the loader has a batch sampler that is drawn.

    Raises:
        TypeError: they are not costs, or not numbers.
        ValueError: they don't fit the loader, or one is negative, infinite or NaN.
    """
    if given is None:
        return None
    if is_stream:
        raise ValueError(
            "costs= needs samples with indices, and this dataset is a stream: every rank would have to read a whole "
            "batch before it knew its part"
        )
    if isinstance(given, str):
        if given != OF_SAMPLER:
            raise ValueError(f'costs={given!r}: expected one cost for each sample, a function, or "{OF_SAMPLER}"')
        if not draws_batches:
            raise ValueError(
                f'costs="{OF_SAMPLER}" takes what a batch sampler yields beside the indices, and this DataLoader has '
                "none of its own: give it batch_sampler=, or costs= a list or a function of the index"
            )
        return CostsOfSampler()
    if callable(given):
        return CostFunction(given)
    if not isinstance(given, Iterable):
        raise TypeError(
            f'costs={given!r}: expected one cost for each sample of the dataset, a function of the index, or "sampler"'
        )
    table = as_costs(given, "costs= has")
    if hasattr(dataset, "__len__") and len(dataset) != len(table):
        raise ValueError(
            f"costs= has {len(table)} costs, and the dataset {len(dataset)} samples: expected one for each"
        )
    return CostTable(table)


def as_costs(given: Any, said: str) -> torch.Tensor:
    """Return costs as float64 of shape (number,), checked.

    Args:
        given: a sequence, array or tensor.
        said: where they come from, for the message: "costs= has".

    Raises:
        TypeError: they are not numbers.
        ValueError: one is negative, infinite or NaN, or they have another shape.
    """
    try:
        plain = given if isinstance(given, (torch.Tensor, np.ndarray)) else list(given)
        costs = torch.as_tensor(plain, dtype=torch.float64, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{said} something else than numbers: {error}") from None
    if costs.ndim != 1:
        raise ValueError(f"{said} costs of shape {tuple(costs.shape)}: expected one number for each sample")
    bad = (~costs.isfinite() | (costs < 0)).nonzero().flatten()
    if len(bad):
        place = int(bad[0])
        raise ValueError(f"{said} {costs[place].item()} for sample {place}: expected costs of 0 or more")
    return costs


def parts_of_equal_cost(
    costs: Sequence[float], *, may_have: Sequence[bool], shares: Sequence[float]
) -> list[list[int]]:
    """Return the places of the samples of each part; see Note [Parts of equal cost].

    Args:
        costs: of each sample of the batch.
        may_have: by part, False if it gets nothing.
        shares: each part's proportion of the whole cost.
    """
    parts: list[list[int]] = [[] for _ in shares]
    loads = [(0.0, 0, -shares[number], number, 0.0) for number, allowed in enumerate(may_have) if allowed]
    heapq.heapify(loads)
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        _, count, minus, number, load = loads[0]
        parts[number].append(place)
        load += costs[place]
        heapq.heapreplace(loads, (load / shares[number], count + 1, minus, number, load))
    return [sorted(part) for part in parts]


@dataclass
class Balance:
    """The cost of the most expensive rank in a batch, added up over batches."""

    batches: int = 0
    #: With parts of equal number, with parts of equal cost, and if the whole could be divided exactly.
    by_number: float = 0.0
    by_cost: float = 0.0
    exact: float = 0.0

    def add(self, costs: Sequence[float], by_number: Parts, by_cost: Parts, shares: Sequence[float]) -> None:
        """Add a batch, of which each rank has the places in one of the parts, in proportion to ``shares``."""
        self.batches += 1
        self.by_number += _dearest(costs, by_number, shares)
        self.by_cost += _dearest(costs, by_cost, shares)
        self.exact += math.fsum(costs) / math.fsum(shares)

    def take(self) -> dict[str, float]:
        """Return what was added up, and begin anew."""
        found = asdict(self)
        self.__init__()  # type: ignore[misc]  # all fields have a default
        return found


def _dearest(costs: Sequence[float], parts: Parts, shares: Sequence[float]) -> float:
    return max(math.fsum(costs[place] for place in part) / share for part, share in zip(parts, shares, strict=True))


class Division(Protocol):
    """The division of a global batch among ranks, or into slices; the same on every rank."""

    def among_ranks(self, count: int, costs: torch.Tensor | None, *, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the places of a rank's samples, and how many each rank has; empty if the shares say so.

        Args:
            count: samples of the batch.
            costs: of its samples.
            rank: the rank whose places are returned.
        """
        ...

    def in_slices(
        self, bounds: Sequence[tuple[int, int]], costs: torch.Tensor | None, *, runs: Sequence[tuple[int, int]]
    ) -> Parts:
        """Return the places of each slice's samples.

        Args:
            bounds: of the slices, by number.
            costs: of the batch's samples.
            runs: by rank, its first slice and the one after its last.
        """
        ...

    @property
    def balance(self) -> Balance | None:
        """The gain by parts of equal cost so far; None: the parts have equal numbers."""
        ...


class ByNumber:
    """Contiguous parts in proportion to the shares, by number of samples.

    Args:
        world_size: the number of ranks.
        shares: each rank's proportion; None: all are equal.
    """

    balance = None

    def __init__(self, world_size: int, shares: tuple[float, ...] | None) -> None:
        self._world_size, self._shares = world_size, shares
        #: See :class:`Division`. (Nearly all batches have the same size.)
        self.among_ranks = lru_cache(maxsize=256)(self._among_ranks)

    def _among_ranks(
        self,
        count: int,
        costs: torch.Tensor | None,  # noqa: ARG002
        *,
        rank: int,
    ) -> tuple[Sequence[int], Sequence[int]]:
        return range(*share_bounds(count, rank=rank, world_size=self._world_size, shares=self._shares)), ()

    def in_slices(
        self,
        bounds: Sequence[tuple[int, int]],
        costs: torch.Tensor | None,  # noqa: ARG002
        *,
        runs: Sequence[tuple[int, int]],  # noqa: ARG002
    ) -> Parts:
        """See :class:`Division`."""
        return [range(*each) for each in bounds]


class ByCost:
    """Parts of equal cost, in proportion to the shares; see Note [Parts of equal cost].

    Args:
        world_size: the number of ranks.
        shares: each rank's proportion; None: all are equal.
    """

    def __init__(self, world_size: int, shares: tuple[float, ...] | None) -> None:
        self._shares = shares or (1.0,) * world_size
        self._by_number = ByNumber(world_size, shares)
        self.balance = Balance()

    def among_ranks(self, count: int, costs: torch.Tensor | None, *, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        """See :class:`Division`."""
        known, ranks = _known(costs), range(len(self._shares))
        by_number = [self._by_number.among_ranks(count, None, rank=each)[0] for each in ranks]
        parts = parts_of_equal_cost(known, may_have=[True] * len(ranks), shares=self._shares)
        self.balance.add(known, by_number, parts, self._shares)
        return parts[rank], [len(part) for part in parts]

    def in_slices(
        self, bounds: Sequence[tuple[int, int]], costs: torch.Tensor | None, *, runs: Sequence[tuple[int, int]]
    ) -> Parts:
        """See :class:`Division`."""
        known = _known(costs)
        parts = parts_of_equal_cost(known, may_have=[begin < end for begin, end in bounds], shares=(1.0,) * len(bounds))
        by_number = self._by_number.in_slices(bounds, costs, runs=runs)
        # (A rank without slices is not waited for.)
        ranks = [run for run in runs if run[0] < run[1]]
        shares = [float(end - first) for first, end in ranks]
        self.balance.add(known, _of_ranks(by_number, ranks), _of_ranks(parts, ranks), shares)
        return parts


def _of_ranks(slices: Parts, runs: Sequence[tuple[int, int]]) -> Parts:
    """Return the places that each rank has of those of the slices."""
    return [[place for part in slices[first:end] for place in part] for first, end in runs]


def _known(costs: torch.Tensor | None) -> list[float]:
    assert costs is not None  # a division by cost is made where batches come with costs
    known: list[float] = costs.tolist()
    return known
