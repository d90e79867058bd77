"""The number of items that all ranks' gradients are the mean of, added up before the gradients are averaged.

Note [Items of all ranks]
~~~~~~~~~~~~~~~~~~~~~~~~~
Rank r's gradient g_r is a mean over n_r items, and the gradient of the mean over all items is

    sum over r of n_r * g_r   /   sum over r of n_r.

A rank knows its own n_r (``World.weigh``), and that of the gradients it has accumulated. So where a backward that
averages begins, the ranks add these up, by one all-reduce of whole numbers. From there on n_r is a share of a known
whole, as that of samples is (Note [Exact mean] in ``step/share.py``), and nothing else differs.

A rank that has weighed must not meet one that has not. A backend that compares labels tells them apart before any data
moves. Other backends would pair the count of one with the gradients of the other; where gradients on an accelerator
have a backend of their own, both would wait. So over these the ranks exchange in their first averaged backward whether
they weigh, and if they do, in each later one. (One case remains: a rank weighs for the first time in a later backward
when others don't. Over gloo the messages have different sizes, and it ends the job for that, in its own words; over
NCCL the rank waits until its time limit.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.comm.exchange import group_device
from lockstep.comm.labels import compares_labels, labelled
from lockstep.comm.waiting import wait_for
from lockstep.errors import CollectiveMismatch, LockstepError
from lockstep.text import sentence

#: Description of the operation, and label of its message, by which a mismatch is explained.
ADDING = "adding up the items of all ranks (World.weigh)"
#: The same for a rank that has not weighed.
COMPARING = "averaging gradients, before which the ranks compare whether they weigh (World.weigh)"
#: The mistake and its remedy, for errors.
MIXED = (
    "some ranks have weighed this backward's gradients by items (World.weigh), and others have not, or not those of "
    "every batch that they accumulated: call world.weigh before each backward, on all ranks, with 0 where it has none"
)


class ItemTotals:
    """Adds up the items of all ranks; see Note [Items of all ranks].

    Args:
        group: the ranks that hold replicas.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._world_size = group, dist.get_world_size(group)
        self._device = group_device(group)
        #: True if ranks that have not weighed take part as well; the same on all ranks. At first they do.
        self.asks_all = self._can_mix = self._world_size > 1 and not compares_labels(group, self._device)

    def weight(self, items: int | None, *, is_mixed: bool, whoami: Callable[[], str]) -> float | None:
        """**Collective** if this rank has weighed, or :attr:`asks_all`. Return the weight of one item of this rank.

        Args:
            items: the number of items that its gradients are the mean of; None: it has not weighed.
            is_mixed: whether it has weighed only some of the gradients that it has accumulated.
            whoami: returns a description of this rank and its step.

        Returns:
            The factor for the mean of a single item that makes a plain average over ranks exact; None if no rank has
            weighed.

        Raises:
            CollectiveMismatch: some ranks have weighed and others have not.
            LockstepError: no rank has any items.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        if items is None and not self.asks_all:
            return None
        weighs, does_not = int(items is not None), int(items is None or is_mixed)
        sums = torch.tensor([items or 0, weighs, does_not], dtype=torch.int64, device=self._device)
        if self._world_size > 1:
            self._add_up(sums, whoami, COMPARING if items is None else ADDING)
        total, weighing, others = map(int, sums.tolist())
        if weighing and others:
            raise CollectiveMismatch(f"{whoami()}: {MIXED}")
        self.asks_all = self._can_mix and weighing > 0
        if not weighing:
            return None
        if total == 0:
            raise LockstepError(
                f"{whoami()}: every rank has called world.weigh(0), so there is no mean over items: skip this step, on "
                "all ranks"
            )
        return self._world_size / total

    def _add_up(self, sums: torch.Tensor, whoami: Callable[[], str], name: str) -> None:
        try:
            with labelled(name):
                wait_for(lambda: dist.all_reduce(sums, group=self._group), lambda: f"{whoami()}: {name}", name=name)
        except CollectiveMismatch as error:
            raise explain_mixed(error) from error

    def take_over(self, old: ItemTotals) -> None:
        """Continue where the totals of other parameters of the same module stand."""
        self.asks_all = old.asks_all


def explain_mixed(error: CollectiveMismatch) -> CollectiveMismatch:
    """Return ``error`` with a remedy, if some rank was adding up items when the others were not."""
    text = str(error)
    return CollectiveMismatch(f"{sentence(text)} That is, {MIXED}") if ADDING in text and MIXED not in text else error
