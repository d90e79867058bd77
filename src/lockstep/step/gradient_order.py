"""Models whose gradients are averaged in an order that was learned: what a checkpoint has to know of it.

The order decides which gradients share a bucket, and so in which order a backend adds up the ranks' values: a run that
is resumed comes to the bits of an undisturbed one only if it goes on in the same order. ``ddp`` learns it and
``checkpoint`` keeps it, and neither knows the other. They meet here: a replica is entered under its module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import nn


class OrderedGradients(Protocol):
    """A replica whose gradients are averaged in some order."""

    @property
    def order(self) -> Sequence[str] | None:
        """The names of the parameters in the order that was learned; None: that of their registration, from the end."""
        ...

    def take_order(self, names: Sequence[str] | None) -> None:
        """Average in this order from the next backward on. It was learned before, and is the same on all ranks.

        Args:
            names: None: none had been learned. Nothing changes if these are not the parameters that are trained now.
        """
        ...


#: Module -> the replica that averages its gradients.
averaged_in_order: WeakKeyDictionary[nn.Module, OrderedGradients] = WeakKeyDictionary()


def enter(module: nn.Module, replica: OrderedGradients) -> None:
    """Note that ``replica`` averages the gradients of ``module``."""
    averaged_in_order[module] = replica


def leave(module: nn.Module) -> None:
    """Note that it does so no longer."""
    averaged_in_order.pop(module, None)


def orders_in(model: nn.Module) -> dict[str, list[str]]:
    """Return the path of each module in ``model`` whose gradients have an order that was learned -> that order."""
    found = {path: averaged_in_order.get(module) for path, module in model.named_modules()}
    return {path: list(each.order) for path, each in found.items() if each is not None and each.order is not None}


def take_orders(model: nn.Module, orders: Mapping[str, Sequence[str]]) -> None:
    """Let the replicas in ``model`` average in the orders that :func:`orders_in` returned, and the others in none."""
    for path, module in model.named_modules():
        replica = averaged_in_order.get(module)
        if replica is not None:
            replica.take_order(orders.get(path))
