"""Samplers with torch's interface: DistributedSampler, with torch's order and a state that can be saved, and what a
sharded loader shows as its sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from lockstep.comm.init import current_world
from lockstep.errors import CheckpointMismatch, LockstepError


class DistributedSampler(TorchDistributedSampler[int]):
    """Sample this rank's part of a dataset, in exactly torch's order, with a position that can be saved.

    As in torch, the epoch is padded with repeated samples (or cut, with ``drop_last``) to a multiple of the number of
    replicas, and :meth:`set_epoch` must be called before each epoch; :func:`lockstep.shard` does neither.

    Args:
        dataset: a dataset with a length.
        num_replicas: the number of ranks that share it. None: that of lockstep's world or the open process group.
        rank: this rank's number among them. None: likewise.
        shuffle: shuffle anew for each (seed, epoch).
        seed: the seed of the order, the same on all ranks.
        drop_last: drop the tail that does not divide evenly, instead of repeating samples.

    Raises:
        TypeError: ``dataset`` is a DataLoader, or has no length.
        ValueError: ``rank`` is not in ``range(num_replicas)``.
        LockstepError: ``num_replicas`` or ``rank`` is None and there is neither a world nor a process group.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if isinstance(dataset, DataLoader):
            raise TypeError(
                "DistributedSampler takes the dataset, not the DataLoader: DistributedSampler(loader.dataset), and "
                "give it to the DataLoader as sampler= without shuffle; or let lockstep.shard(loader) do all of it"
            )
        if not hasattr(dataset, "__len__"):
            raise TypeError(f"DistributedSampler needs a dataset with a length; {type(dataset).__name__} has none")
        if num_replicas is None or rank is None:
            here, there = _rank_and_world_size()
            rank = here if rank is None else rank
            num_replicas = there if num_replicas is None else num_replicas
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._position = 0
        #: The position at which the next pass begins: 0 except after load_state_dict.
        self._resume_at = 0

    def __iter__(self) -> Iterator[int]:
        indices = list(super().__iter__())
        # A state saved after the last sample, and no set_epoch since: the next pass is a full one.
        start = self._resume_at if self._resume_at < len(indices) else 0
        self._resume_at = 0
        self._position = start
        for index in indices[start:]:
            self._position += 1
            yield index

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. An epoch other than the loaded one starts from its beginning."""
        if epoch != self.epoch:
            self._resume_at = 0
            self._position = 0
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and this rank's position in it, in JSON types; the same on every rank.

        The position counts the samples that were *handed out*. A DataLoader asks for samples ahead of the ones it
        returns (by ``prefetch_factor * num_workers`` batches, by one batch without workers), so in the middle of an
        epoch give :meth:`load_state_dict` the number of samples trained on, or use :func:`lockstep.shard`, which
        counts what your loop has seen.
        """
        return {
            "epoch": self.epoch,
            "position": self._resume_at or self._position,
            "num_replicas": self.num_replicas,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "dataset_length": len(self.dataset),  # type: ignore[arg-type]  # checked in __init__
        }

    def load_state_dict(self, state: dict[str, Any], *, position: int | None = None) -> None:
        """Continue a saved epoch: the next pass begins after the samples that were handed out.

        ``len()`` stays that of a full epoch. ``set_epoch`` with the same epoch keeps the position, with another one
        begins it anew.

        Args:
            state: from :meth:`state_dict`, of any number of replicas that divides the samples handed out in all.
            position: samples of this rank that were trained on, if they are fewer than were handed out.

        Raises:
            CheckpointMismatch: the state is of another dataset length, seed or setting, or its position can't be
                divided among this number of replicas.
        """
        mine = self.state_dict()
        for name in ("dataset_length", "seed", "shuffle", "drop_last"):
            if state[name] != mine[name]:
                raise CheckpointMismatch(
                    f"DistributedSampler: the saved state has {name}={state[name]!r}, this sampler {mine[name]!r}; "
                    "an epoch can only be continued in the same order"
                )
        in_all = (state["position"] if position is None else position) * state["num_replicas"]
        here, rest = divmod(in_all, self.num_replicas)
        if rest or in_all < 0:
            raise CheckpointMismatch(
                f"DistributedSampler: {in_all} samples were handed out to {state['num_replicas']} replicas, which "
                f"{self.num_replicas} replicas can't continue evenly; lockstep.shard resumes at any world size"
            )
        super().set_epoch(state["epoch"])
        self._position = here
        self._resume_at = here


def _rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size, from lockstep's world or the open process group."""
    world = current_world()
    if world is not None:
        return world.rank, world.world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    raise LockstepError(
        "DistributedSampler does not know its rank: call lockstep.init() first, or pass num_replicas= and rank="
    )


class OrderedHere(Sampler[Any]):
    """A DataLoader's sampler for readers of ``loader.sampler``; lockstep draws the order.

    Args:
        sampler: the DataLoader's sampler.
        set_epoch: the function behind the method of this name.
    """

    def __init__(self, sampler: Any, set_epoch: Callable[[int], None]) -> None:
        self._sampler = sampler
        self.set_epoch = set_epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        # (What Python itself asks for is for this object to have: a copy asks before it has any attribute.)
        if name == "_sampler" or name.startswith("__"):
            raise AttributeError(name, name=name, obj=self)
        return getattr(self._sampler, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # (A copy has no loader: the one that it comes from stays where it is, and has process groups.)
        return OrderedHere, (self._sampler, _choose_nothing)

    def __repr__(self) -> str:
        return repr(self._sampler)


def _choose_nothing(epoch: int) -> None:
    """Stand in for the ``set_epoch`` of a loader."""
