"""An epoch's order drawn by the user's own sampler: once, on rank 0, for everyone."""

from __future__ import annotations

import hashlib
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.exchange import group_device
from lockstep.comm.peers import OverGroup
from lockstep.comm.together import together
from lockstep.comm.world import World
from lockstep.data.order import mix
from lockstep.data.seeding import preserved_generators, seed_generators
from lockstep.errors import LockstepError


def draw_order(sampler: Any, world: World, *, seed: int, epoch: int) -> torch.Tensor:
    """**Collective.** The indices that ``sampler`` gives on rank 0, on every rank: int64, as many as its length.

    A weighted or custom sampler draws at random, so ranks that each asked their own could disagree. Rank 0 draws with
    the generators (the global ones, and the sampler's ``generator`` if it has one) seeded from (seed, epoch), so that
    an interrupted epoch is drawn again just so. A ``set_epoch`` of the sampler is called first.

    Raises:
        LockstepError: the sampler failed, or gave something else than whole numbers; on every rank.
    """

    def attempt() -> torch.Tensor | None:
        try:
            return _draw(sampler, seed=seed, epoch=epoch) if world.is_main else None
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise LockstepError(f"the sampler {type(sampler).__name__} could not draw epoch {epoch}: {text}") from error

    order, lengths = together(
        OverGroup(world),
        attempt,
        lambda drawn: None if drawn is None else drawn.numel(),
        what="drawing an epoch's order",
    )
    device = group_device(world.group)
    shared = torch.empty(lengths[0], dtype=torch.int64, device=device) if order is None else order.to(device)
    dist.broadcast(shared, src=0, group=world.group)
    return shared.cpu()


def digest_of(order: torch.Tensor) -> str:
    """Return a short digest of an order, to notice that a sampler drew another one."""
    return hashlib.blake2b(order.numpy().data, digest_size=16).hexdigest()


def _draw(sampler: Any, *, seed: int, epoch: int) -> torch.Tensor:
    drawing_seed = mix(seed, epoch)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator.manual_seed(drawing_seed)
    length = len(sampler)
    with preserved_generators():
        seed_generators(drawing_seed)
        indices = list(islice(sampler, length))  # a sampler may go on for ever; its length says where an epoch ends
    if len(indices) < length:
        raise ValueError(f"it says it has {length} samples but gave {len(indices)}")
    for index in indices:
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(f"it gave {index!r}; lockstep.shard needs whole numbers as indices")
    return torch.tensor([int(index) for index in indices], dtype=torch.int64)
