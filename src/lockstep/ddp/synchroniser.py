"""Two protocols: the synchroniser, which keeps a replica in step with those of the other ranks, and its replica.

``every_step.py`` averages the gradients of each backward, ``in_rounds.py`` the parameters after some steps. Steps in
slices are separate from both: ``slice_member.py``.
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
        """Return the reducer of the gradients of ``params``, and the handles of its hooks on them."""
        ...

    def begin(self) -> None:
        """**Collective** for rounds. Begin, now that all ranks hold the same parameters and buffers."""
        ...

    def laid_out_again(self) -> None:
        """Train newly unfrozen parameters as well."""
        ...

    def forward_begins(self, module: nn.Module, inputs: Any, *, records: bool) -> Forward:
        """**Collective** as a forward is. Return the state of a forward that is about to begin.

        Args:
            module: the module.
            inputs: a tree of all its arguments.
            records: whether it computes gradients.
        """
        ...

    def weight(self) -> float:
        """Return the factor of the gradients of the batch in hand, before they are averaged."""
        ...

    def take_share(self, forward: Forward) -> Items | None:
        """Take the weight of the backward under way from the batches in hand; see Note [Batches in hand].

        Returns:
            Items, if they are counted (Note [Counted items]); None: the forward's share of samples is the weight.
        """
        ...

    def backward_begins(self, forward: Forward, items: Items | None) -> None:
        """**Collective** if it averages and items are counted. Let the reducer begin."""
        ...

    def require_sync(self) -> None:
        """Average in the backward under way, although it began as one that does not."""
        ...

    def backward_ended(self, forward: Forward) -> None:
        """**Collective** if it averages. Finish a backward that counts as a step."""
        ...

    def why_not_in_slices(self) -> str:
        """Return the reason why this way of training can't take slices; empty: it can."""
        ...

    def join_hook(self, *, divide_by_initial_world_size: bool) -> JoinHook:
        """Return the hook that answers the others when this rank has run out of batches."""
        ...

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """See :func:`lockstep.register_comm_hook`."""
        ...

    def release(self) -> None:
        """Leave the module as it was before."""
        ...


class Replicated(BackwardListener, Protocol):
    """The interface of a replica that a synchroniser needs."""

    #: True if backwards average.
    syncs: bool
    #: Gives all ranks one rank's parameters or buffers.
    tensors: ReplicaTensors
    #: The forwards that a backward is to come through.
    forwards: Forwards
    reducer: Reducer
    #: torch's attribute of every Joinable: whether ranks may have run out of batches.
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

    def lay_out_anew(self) -> None: ...
