"""Uneven inputs: ranks that have run out of batches answer the collectives of those that have not.

Note [Join handshake]
~~~~~~~~~~~~~~~~~~~~~
Inside ``join``, every forward of a rank that still has data begins with one all-reduce of a small vector. It says which
ranks are active and what they are going to do: send buffers before this forward, average gradients in the backward. A
rank that has run out of data adds zeros and reads from the sum which collectives to answer. torch's ``Join`` tells it
before that whether any rank is left at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from lockstep import _torch
from lockstep.comm.exchange import group_device
from lockstep.comm.waiting import wait_for


@dataclass(frozen=True)
class JoinStep:
    """The collectives of all ranks in one step inside ``join``."""

    #: Ranks that still have data.
    active: tuple[int, ...]
    #: True if buffers are sent before forward.
    sends_buffers: bool
    #: True if gradients are averaged in backward.
    averages: bool


def shake_hands(group: dist.ProcessGroup, *, active: bool, sends_buffers: bool, averages: bool) -> JoinStep:
    """**Collective.** Exchange the ranks' plans for this step; see Note [Join handshake]."""
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    votes = torch.zeros(world_size + 2, device=group_device(group))
    if active:
        votes[rank] = 1
        votes[world_size], votes[world_size + 1] = float(sends_buffers), float(averages)
    wait_for(lambda: dist.all_reduce(votes, group=group), lambda: f"rank {rank} of {world_size}: joining")
    *present, buffers, averaging = votes.tolist()
    return JoinStep(tuple(r for r, vote in enumerate(present) if vote), buffers > 0, averaging > 0)


class Joiner(Protocol):
    """The interface of a replica that the join hook needs."""

    def answer_step(self, *, divide_by_initial_world_size: bool) -> None: ...

    def adopt_final_state(self, *, is_last_joiner: bool) -> None: ...


class ReplicaJoinHook(JoinHook):
    """Answers the others' collectives while they still have data, then takes over their state."""

    def __init__(self, replica: Joiner, *, divide_by_initial_world_size: bool) -> None:
        self._replica = replica
        self._divide_by_initial_world_size = divide_by_initial_world_size

    @_torch.mark_untraced
    def main_hook(self) -> None:
        """**Collective.** Take one step without data."""
        self._replica.answer_step(divide_by_initial_world_size=self._divide_by_initial_world_size)

    @_torch.mark_untraced
    def post_hook(self, is_last_joiner: bool) -> None:
        """**Collective.** Once every rank has run out, take the state of a rank that trained to the end."""
        self._replica.adopt_final_state(is_last_joiner=is_last_joiner)
