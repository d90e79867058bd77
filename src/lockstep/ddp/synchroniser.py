"""What a replica does about those of the other ranks, and what that needs of the replica: two protocols.

``every_step.py`` averages the gradients of each backward, ``in_rounds.py`` the parameters after some steps. A step in
slices is beside both: ``slice_member.py``.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lockstep.ddp.buffers import ReplicaTensors
from lockstep.ddp.checks import GradientChecks
from lockstep.ddp.comm_hooks import CommHook
from lockstep.ddp.hooks import BackwardListener, Forward, Forwards
from lockstep.ddp.reducer import Reducer
from lockstep.step.share import BatchesInHand, Items


class Synchroniser(Protocol):
    """Keeps one replica in step with the others."""

    def lay_out(
        self, module: nn.Module, params: list[Parameter], names: list[str]
    ) -> tuple[Reducer, list[RemovableHandle]]:
        """Return what takes the gradients of ``params``, and what undoes the hooks through which it gets them."""
        ...

    def begin(self) -> None:
        """**Collective** for rounds. Begin, now that all ranks hold the same parameters and buffers."""
        ...

    def laid_out_again(self) -> None:
        """Train parameters as well that were frozen."""
        ...

    def forward_begins(self, module: nn.Module, *, records: bool) -> Forward:
        """**Collective** as a forward is. Return what a forward that is about to begin knows."""
        ...

    def weight(self) -> float:
        """Return what the gradients of the batch in hand are multiplied by before they meet others."""
        ...

    def take_share(self, forward: Forward) -> Items | None:
        """Take what the backward under way is weighed by from what is in hand; see Note [Batches in hand].

        Returns:
            Items, if they are counted (Note [Counted items]); None: the share of samples that the forward has found.
        """
        ...

    def backward_begins(self, forward: Forward, items: Items | None) -> None:
        """**Collective** if it averages and items are counted. Let the reducer begin."""
        ...

    def require_sync(self) -> None:
        """Average in the backward that is under way, which did not begin as one that does."""
        ...

    def backward_ended(self, forward: Forward) -> None:
        """**Collective** if it averages. Do what follows a backward that counts as a step."""
        ...

    def why_not_in_slices(self) -> str:
        """Return what this way of training has against slices; empty: nothing."""
        ...

    def join_hook(self, *, divide_by_initial_world_size: bool) -> JoinHook:
        """Return what answers the others where this rank has run out of batches."""
        ...

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """See :func:`lockstep.register_comm_hook`."""
        ...

    def release(self) -> None:
        """Leave the module as it was before."""
        ...


class Replicated(BackwardListener, Protocol):
    """What a synchroniser needs of its replica."""

    #: Whether backwards average.
    syncs: bool
    #: What gives all ranks one rank's parameters or buffers.
    tensors: ReplicaTensors
    #: What its forwards leave to be done.
    forwards: Forwards
    reducer: Reducer
    #: torch's, as of every Joinable: whether ranks may have run out of batches.
    _join_config: Any

    @property
    def group(self) -> dist.ProcessGroup: ...

    @property
    def module(self) -> nn.Module | None: ...

    @property
    def checks(self) -> GradientChecks: ...

    @property
    def joinable(self) -> Joinable: ...

    def whoami(self) -> str: ...

    def in_hand(self) -> BatchesInHand | None: ...

    def items_of(self, forward: Forward) -> Items | None: ...

    def compare_no_more(self) -> None: ...
