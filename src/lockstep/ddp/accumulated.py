"""The weights of gradients that accumulate on a rank before the ranks average them.

Note [Accumulated weights]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A backward's gradients count ``w`` (Note [Exact mean]), and the reducer multiplies by it once, when it fills a bucket.
Gradients that were accumulated without synchronisation are multiplied together with the new ones, which is right as
long as the weights are equal. If they are not, then at the start of the backward

- each incoming gradient is multiplied by its own weight and divided by the weight of the accumulated gradients, before
  it is added, by a hook on the parameter;
- the reducer multiplies by the latter. If that is 0, the accumulated gradients are zeroed instead.

The value of ``grad`` before the accumulation began is the same on all ranks, and the weights of all ranks sum to the
world size, so multiplying it as well changes nothing in the end. An empty share (w = 0) holds NaN, which no factor
removes: the incoming gradient is replaced by zeros, and a ``grad`` that was None is None again afterwards.

Where items are counted (Note [Items of all ranks] in ``items.py``), w is their number until the whole is known, and
the accumulated gradients are one mean over all of them: the rank sends the sum of its counts. The weights of the first
backward then do not sum to the whole, and an earlier value of ``grad`` would lose part of itself: it is put aside when
the accumulation begins, and added to the average in the end. A script that drops accumulated gradients (``zero_grad``)
has dropped their items, too, which is detected: all gradients are gone, or are zero and were written to since.

Note [Unannounced gradients]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A backward that does not come through an output of forward begins with its first gradient (Note [When a backward begins
and ends] in ``hooks.py``), and the hook that shows it runs after that gradient was added to ``grad``: too late for the
steps above. One that was added to nothing is the new gradient alone, and is weighed there. It is told by being no view
of a bucket and never written to in place, as autograd adds to a gradient that is there; or, since autograd also adds up
the parts of a new gradient in place, by no other parameter having a gradient while this one has not accumulated any.
One that was added to what may have been there can't be taken apart, and if the weights differ that is an error.

From the first such backward on hooks in front of the parameters begin these backwards before anything is added, so the
error strikes only there. They cost a microsecond for each parameter, which models that are called as lockstep expects
don't pay. (torch calls them for ``torch.autograd.grad``, too, which adds nothing: it is told apart as in Note [When a
backward begins and ends].)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep import _torch
from lockstep.errors import LockstepError
from lockstep.step.share import MOST_ITEMS
from lockstep.trees import moved


def _are_not_zero(grads: Sequence[Tensor]) -> Iterator[bool]:
    """Yield whether each of some gradients has elements that are not 0; of sparse ones always. Devices are waited for
    once, for all of them."""
    looks = [grad.layout == torch.strided for grad in grads]
    on_devices = [grad for grad, is_dense in zip(grads, looks, strict=True) if is_dense and not grad.is_cpu]
    read: Iterator[bool] = iter(())
    if on_devices:
        home = on_devices[0].device
        read = iter(torch.stack([moved(grad.any(), home) for grad in on_devices]).tolist())
    for grad, is_dense in zip(grads, looks, strict=True):
        yield True if not is_dense else bool(grad.any()) if grad.is_cpu else next(read)


class AccumulatedWeights:
    """The weight by which the gradients in ``grad`` still have to be multiplied; see Note [Accumulated weights].

    Args:
        params: the parameters.
        describe: returns the words for a parameter, which say on which rank and in which step as well.
    """

    def __init__(
        self, params: Sequence[Parameter], describe: Callable[[Parameter], str] = lambda _: "a parameter"
    ) -> None:
        self._params, self._describe = list(params), describe
        #: The parameter whose gradient came before the backward that begins; see Note [Unannounced gradients].
        self.early: Parameter | None = None
        #: True if that parameter has a gradient of an earlier backward that was not averaged.
        self.early_has_accumulated = False
        #: The weight that accumulated gradients are still to be multiplied by; None if none have accumulated.
        self.waiting: float | None = None
        self._bucket_weight = 1.0
        #: What the gradients of the backward under way are multiplied by before they are added; 1: not.
        self._incoming = 1.0
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._absent: list[Parameter] = []
        #: Number of items of the accumulated gradients and of the backward under way; None: not counted.
        self.items: int | None = None
        #: True if only some of the accumulated gradients were counted.
        self.is_mixed = False
        #: Parameters, and the gradients that they had before the accumulation.
        self.aside: list[tuple[Parameter, Tensor]] = []
        #: The accumulated gradients after the last backward, with their version counters.
        self._accumulated: list[tuple[Tensor, int]] = []

    def count(self, items: int, *, sync: bool) -> None:
        """Begin a backward whose gradients are of ``items`` items; before :meth:`enter`.

        Raises:
            LockstepError: too many items have accumulated to be sent.
        """
        if self.waiting is not None and self._is_dropped():
            self.waiting = None
        if self.waiting is None:
            self.items, self.is_mixed = 0, False
            self.aside.clear()
            if not sync:
                self._put_aside()
        elif self.items is None:
            self.items, self.is_mixed = 0, True
        self.items = (self.items or 0) + items
        if self.items >= MOST_ITEMS:
            raise LockstepError(f"{self.items} items have accumulated without an average: expected less than 2**48")

    def leave_uncounted(self) -> None:
        """Begin a backward whose items are not counted, after one whose items were."""
        if self.waiting is None or self._is_dropped():
            self.waiting, self.items = None, None
            self.aside.clear()
        else:
            self.is_mixed = True

    def _is_dropped(self) -> bool:
        """Return whether the script has dropped the accumulated gradients."""
        if self._are_gone():
            return True
        early = None if self.early is None else self.early.grad
        before = [(grad, version) for grad, version in self._accumulated if grad is not early]
        if not before or any(grad._version == version for grad, version in before):
            return False
        return not any(_are_not_zero([grad for grad, _ in before]))

    def _are_gone(self) -> bool:
        """Return whether no parameter had a gradient when the backward began."""
        early = self.early
        return all(param.grad is None for param in self._params if param is not early) and (
            early is None or len(self._params) > 1 or self._is_new(early)
        )

    def _is_new(self, param: Parameter) -> bool:
        """Return whether all of the gradient of ``param``, which came early, is of this backward."""
        grad = param.grad
        if grad is None:
            return True
        if _torch.is_view(grad) or torch.is_grad_enabled():
            return False
        return grad._version == 0 or (
            not self.early_has_accumulated
            and len(self._params) > 1
            and all(other.grad is None for other in self._params if other is not param)
        )

    @torch.no_grad()
    def _put_aside(self) -> None:
        early = self.early
        if early is not None and not self._is_new(early):
            raise self._inseparable(early)
        there = [(param, param.grad) for param in self._params if param.grad is not None and param is not early]
        for (param, grad), is_not_zero in zip(there, _are_not_zero([grad for _, grad in there]), strict=True):
            if is_not_zero:
                self.aside.append((param, grad.clone()))
                grad.zero_()

    @torch.no_grad()
    def add_back(self) -> None:
        """Add the gradients from before the accumulation to the averages."""
        for param, before in self.aside:
            grad = param.grad
            if grad is not None:
                param.grad = grad.add_(before) if grad.layout == torch.strided else grad + before
        self.aside.clear()

    def enter(self, weight: float, pending: set[int], *, sync: bool = True) -> tuple[float, dict[int, Tensor]]:
        """Begin a backward with ``weight``.

        Args:
            weight: this rank's weight.
            pending: positions of the parameters with accumulated gradients.
            sync: whether the backward averages.

        Returns:
            The weight that the buckets are to use, and copies, by position, of the gradients that were zeroed although
            perhaps no rank has used their parameter.

        Raises:
            LockstepError: a gradient came early, and can't be weighed any more; see Note [Unannounced gradients].
        """
        waiting = self.waiting
        kept: dict[int, Tensor] = {}
        if waiting is None or self._are_gone():
            waiting = weight
        elif waiting == 0 and weight != 0:
            if self.early is not None and not self._is_new(self.early):
                raise self._inseparable(self.early)
            kept = self._drop_accumulated(pending)
            waiting = weight
        early, differs = self.early, weight == 0 or weight != waiting
        is_new = early is not None and self._is_new(early)
        if early is not None and differs and not is_new and not (sync and waiting == 0):  # (buckets are zeroed then)
            raise self._inseparable(early)
        self._bucket_weight = waiting
        if weight == 0:
            self._absent = [param for param in self._params if param.grad is None or (is_new and param is early)]
        if differs:
            self._incoming = weight and weight / waiting
            self._weigh_incoming()
            if early is not None and is_new and early.grad is not None:
                early.grad = self.weighed(early.grad)
        return waiting, kept

    def leave(self, *, synced: bool) -> None:
        """End the backward, before its gradients are averaged."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._incoming = 1.0
        for param in self._absent:
            param.grad = None
        self._absent = []
        self.waiting = None if synced else self._bucket_weight
        if self.items is not None:
            grads = [] if synced else [param.grad for param in self._params if param.grad is not None]
            self._accumulated = [(grad, grad._version) for grad in grads if grad.layout == torch.strided]
            if synced:
                self.items, self.is_mixed = None, False

    def take_over(self, old: AccumulatedWeights) -> None:
        """Continue where the weights of other parameters of the same module stand."""
        self.waiting = old.waiting
        self.items, self.is_mixed = old.items, old.is_mixed
        self.aside, self._accumulated = old.aside, old._accumulated

    def forget(self) -> None:
        """Forget that anything has accumulated."""
        self.waiting = None

    @torch.no_grad()
    def _drop_accumulated(self, pending: set[int]) -> dict[int, Tensor]:
        kept: dict[int, Tensor] = {}
        for position, param in enumerate(self._params):
            if param.grad is not None and param is not self.early:
                if position not in pending:
                    kept[position] = param.grad.clone()
                param.grad.zero_()
        return kept

    def _weigh_incoming(self) -> None:
        @_torch.mark_untraced
        def weigh(grad: Tensor | None) -> Tensor | None:
            return self.weighed(grad)

        for param in self._params:
            if param.requires_grad:
                self._handles.append(param.register_hook(weigh))

    def weighed(self, grad: Tensor | None) -> Tensor | None:
        """Return a gradient of the backward under way as it is to be added to others; ``grad`` itself if their weights
        are equal. (A function of the user's may have none to give.)"""
        if self._incoming == 1 or grad is None:
            return grad
        return torch.zeros_like(grad) if self._incoming == 0 else grad * self._incoming

    def _inseparable(self, param: Parameter) -> LockstepError:
        return LockstepError(
            f"{self._describe(param)} got its gradient before an output of the module was reached (the loss came by "
            "another method than forward, or has a term of the parameters alone), and it was added to the gradient "
            "that was there, of which this batch has another share: they can't be averaged together. Call the module "
            "itself for the loss, or let nothing be there: zero_grad(set_to_none=True)"
        )
