"""The reducer: the state that stays from one backward to the next, and the events that may issue a bucket.

It is a state machine driven by three events, and it never touches autograd: ``begin`` (a backward starts), the callable
from ``ready_hook(i)`` (parameter i has its gradient), ``finish`` (the backward has ended). ``hooks`` turns autograd's
events into these; tests make them up. Sending and handing out in one backward is ``backward``'s concern.

Note [One reduction]
~~~~~~~~~~~~~~~~~~~~
A backend that reduces in this process's own time (the backend "shm" does: its ranks' cores are busy with backward, and
there is no other engine) has nothing to overlap with. Then every dtype has one bucket, which lies in the backend's
memory and is reduced in place, by one call that returns when it is done, at the end of backward. A parameter's hook
only notes then that the gradient has come, see Note [A hook for every parameter].

Note [A hook for every parameter]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Where everything is reduced at the end (Note [One reduction]) a look at every ``grad`` would show which came, and cost
less than a hook that runs a microsecond of Python for each parameter. But only hooks reveal a backward that does not
come through the module's outputs: a gradient penalty's, which differentiates a gradient, another method's, a term of
the parameters alone. Without them its gradients would stay on their rank, and the replicas would silently diverge.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep import _torch
from lockstep.bits import hexdigest
from lockstep.comm.waiting import wait_for
from lockstep.ddp.absent import AbsentGradients
from lockstep.ddp.accumulated import AccumulatedWeights
from lockstep.ddp.backward import Averaging, Backward
from lockstep.ddp.bucket import SMALL, Bucket
from lockstep.ddp.comm_hooks import CommHook
from lockstep.ddp.hooks import BackwardListener
from lockstep.ddp.items import ItemTotals, explain_mixed
from lockstep.ddp.left_out import explain_left_out
from lockstep.ddp.parameters import thawed
from lockstep.ddp.portions import Portions
from lockstep.ddp.rider import Rider
from lockstep.ddp.sparse import SparseSlot
from lockstep.errors import CollectiveMismatch, LockstepError
from lockstep.step.share import BatchId

#: Most bytes of all parameters together, and least bytes of each, that are compared at the end of a job.
_MOST_DIGESTED, _LEAST_DIGESTED = 1 << 22, 256
_dtype, _device = operator.attrgetter("dtype"), operator.attrgetter("device")


class BackwardOutcome(NamedTuple):
    """The outcome of a backward."""

    #: The error to raise once all ranks have ended it: a mistake that only this rank can see, or replicas that differ.
    mistake: LockstepError | None = None
    #: Positions of the parameters that got no gradient on this rank, if the backward was synchronised.
    missing: Sequence[int] = ()
    #: Names of the parameters that no rank used; None if the backward was not synchronised, or skipped.
    unused: Sequence[str] | None = None


class Reducer:
    """Averages gradients over a process group, bucket by bucket.

    Args:
        params: the parameters that are trained; a parameter's position is its index here.
        names: the parameters' names.
        buckets: the buckets, in the order in which they are reduced.
        sparse: the parameters with sparse gradients.
        group: the ranks that hold replicas.
        as_view: whether every grad becomes a view of its bucket.
        overlap: whether buckets are issued during backward.
        riders: the riders, in the order of their flags in the buckets.
        absent: predicts gradients that will not come; None: all are waited for.
        listener: the object to tell of a gradient that comes while no backward is under way.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        names: Sequence[str],
        *,
        buckets: Sequence[Bucket],
        sparse: Sequence[SparseSlot] = (),
        group: dist.ProcessGroup,
        as_view: bool = True,
        overlap: bool = True,
        riders: Sequence[Rider] = (),
        absent: AbsentGradients | None = None,
        listener: BackwardListener | None = None,
    ) -> None:
        #: The parameters that are trained.
        self.params = list(params)
        #: The backward under way, if any.
        self.backward: Backward | None = None
        self._all = Averaging(self.params, list(names), list(buckets), list(sparse), group, as_view, riders)
        self._listener, self._overlap = listener, overlap
        self._home = {position: bucket for bucket in buckets for position in bucket.positions}
        self._sparse = {slot.position: slot for slot in sparse}
        self._weights, self._totals = AccumulatedWeights(params, self._all.describe_parameter), ItemTotals(group)
        #: The weight of the backward under way if it is a plain one: it averages, and nothing has accumulated.
        self._plain: float | None = None
        # The buckets are laid out for these: all dtypes, and the devices of the first and the last parameter.
        self._ends = [*self.params[:1], *self.params[-1:]]
        self._dtypes, self._devices = [*map(_dtype, self.params)], [*map(_device, self._ends)]
        self._portions = Portions(buckets, overlap=overlap)
        #: True if large gradients go into their buckets as they come.
        self._moves = False
        #: Predicts gradients that will not come; the positions of those in the backward under way.
        self._absent, self._absent_now = absent, set[int]()
        self._lock = threading.Lock()
        #: Buckets whose reduction, of an earlier backward that failed, is still under way.
        self._under_way: list[Bucket] = []
        #: Number of synchronised backwards begun, and of forwards reported without one; see Note [Labels].
        self._begun = 0
        self._left_out = 0
        #: Handles of the hooks in front of the parameters; none as long as forward announces all backwards.
        self.in_front: list[torch.utils.hooks.RemovableHandle] = []
        #: The reducer that has taken over.
        self._successor: Reducer | None = None

    @property
    def step(self) -> int:
        """Return the number of synchronised backwards that have ended."""
        return self._all.step

    @property
    def names(self) -> Sequence[str]:
        """Return the parameters' names."""
        return self._all.names

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Return the buckets, in the order in which they are reduced."""
        return self._all.buckets

    @property
    def overlaps(self) -> bool:
        """Return whether buckets are issued during backward."""
        return self._overlap

    @property
    def sparse(self) -> Sequence[SparseSlot]:
        """Return the parameters with sparse gradients."""
        return self._all.sparse

    # Events ---------------------------------------------------------------------------------------------------------

    def begin(
        self,
        *,
        sync: bool,
        weight: float = 1.0,
        divisor: int | None = None,
        items: int | None = None,
        joins: bool = False,
    ) -> None:
        """Begin a backward. **Collective** if it averages and items are counted, see Note [Items of all ranks].

        Args:
            sync: whether gradients are averaged in it; if not, they accumulate on this rank.
            weight: the weight of this rank's gradients; see Note [Exact mean]. 0 discards them.
            divisor: the divisor of the sum over ranks; the world size if None.
            items: the number of items that they are the mean of, if these are counted: instead of ``weight``.
            joins: whether ranks may have run out of batches, and count no items.

        Raises:
            CollectiveTimeout, PeerLost: an earlier backward ended with an error while buckets were under way, and
                they can't be completed.
            CollectiveMismatch, LockstepError: as :meth:`~lockstep.ddp.items.ItemTotals.weight`.
        """
        if self._under_way:
            self._drain()
        weights = self._weights
        if items is not None:
            weights.count(items, sync=sync)
        elif weights.items is not None:
            weights.leave_uncounted()
        own = weight if items is None else float(items)
        asks = sync and not joins and (weights.items is not None or self._totals.asks_all)
        item = self._weigh_item() if asks else 1.0
        is_plain = sync and own != 0 and weights.waiting is None and weights.items is None
        self._plain = own if is_plain else None
        in_buckets, kept = (own, {}) if is_plain else weights.enter(own, self._all.pending, sync=sync)
        try:
            self._open(
                sync=sync, factor=in_buckets * item, divisor=divisor, kept=kept, discards=own == 0 or in_buckets == 0
            )
        except BaseException:
            self._leave_weights(synced=False)
            raise
        self._absent_now = self._absent.expect() if sync and self._absent is not None else set()
        for position in self._absent_now:
            if (home := self._home.get(position)) is not None:
                home.turn.expected -= 1

    def _leave_weights(self, *, synced: bool) -> None:
        if self._plain is None:
            self._weights.leave(synced=synced)
        elif not synced:
            self._weights.waiting = self._plain

    def _weigh_item(self) -> float:
        """**Collective** if items are counted. Return the factor of this rank's weight."""
        weights = self._weights
        try:
            weight = self._totals.weight(weights.items, is_mixed=weights.is_mixed, whoami=self._all.whoami)
        except LockstepError:
            weights.leave(synced=True)
            raise
        return 1.0 if weight is None else weight

    def _open(self, *, sync: bool, factor: float, divisor: int | None, kept: dict[int, Tensor], discards: bool) -> None:
        self._begun += sync
        self._moves = sync and self._all.sends and factor != 0
        backward = Backward(
            self._all,
            sync=sync,
            factor=factor,
            divisor=self._all.world_size if divisor is None else divisor,
            kept=kept,
            discards=discards,
            number=self._begun,
        )
        if sync:
            backward.prepare()
        self.backward = backward

    def require_sync(self) -> None:
        """Average in the backward under way, although it began as an unsynchronised one."""
        backward = self._present()
        if not backward.sync:
            backward.factor *= self._weigh_item()
            self._begun += 1
            backward.sync, backward.number = True, self._begun
            backward.prepare()

    def begin_unannounced(self, early: Parameter | None = None) -> Reducer:
        """Begin a backward that comes through no output of forward; see Note [Unannounced gradients].

        Args:
            early: the parameter that has got its gradient; None: nothing was added to any ``grad`` yet.

        Returns:
            The reducer that averages it: another one where the buckets had to be laid out anew, which knows by now of
            the early gradient. See Note [Thawed parameters] in ``frozen.py``.
        """
        if self._listener is None:
            raise LockstepError(f"{self._all.whoami()}: a gradient arrived, but no backward began")
        weights = self._weights
        with self._lock:  # a module on several devices has a backward thread for each
            if self.backward is not None:
                return self
            if self._successor is not None:
                return self._successor._continue_unannounced(early)
            if early is not None:
                self.look_in_front()
            weights.early = early
            weights.early_has_accumulated = any(self.params[position] is early for position in self._all.pending)
            try:
                self._listener.gradient_unannounced(has_come=early is not None)
            finally:
                weights.early = None
            return self if self._successor is None else self._successor._continue_unannounced(early)

    def _continue_unannounced(self, early: Parameter | None) -> Reducer:
        """Begin a backward in the place of the reducer before this one, unless it has begun; see
        :meth:`begin_unannounced`."""
        self.begin_unannounced(early)
        for position, param in enumerate(self.params) if early is not None else ():
            if param is early and (place := self._sparse.get(position, self._home.get(position))) is not None:
                (place.arrived if isinstance(place, SparseSlot) else place.turn.arrived).append(position)
        return self

    def look_in_front(self) -> None:
        """Have unannounced backwards begin before their first gradient is added; see Note [Unannounced gradients]."""

        @_torch.mark_untraced
        def on_incoming(grad: Tensor | None) -> Tensor | None:
            if self.backward is not None:
                return None
            reducer = self.begin_unannounced()
            return None if reducer.backward is None else reducer._weights.weighed(grad)

        for handle in self.in_front:
            handle.remove()
        hook = torch.utils.hooks.unserializable_hook(on_incoming)  # a copy of the model goes without it
        with thawed(self.params):
            self.in_front = [param.register_hook(hook) for param in self.params]

    def ready_hook(self, position: int) -> Callable[[object], None]:
        """Return the hook to call when parameter ``position`` has got a gradient; its argument is ignored.

        It runs once for each parameter in each step, so it does nothing but count.
        """
        home = self._home.get(position)
        append = (self._sparse[position] if home is None else home.turn).arrived.append

        @_torch.mark_untraced
        def on_gradient_at_last(_: object = None) -> None:
            if self.backward is None and self.begin_unannounced(self.params[position]) is not self:
                return
            append(position)

        if home is None:
            return on_gradient_at_last
        bucket, turn, param = home, home.turn, self.params[position]
        arrived = turn.arrived

        @_torch.mark_untraced
        def on_gradient(_: object = None) -> None:
            if self.backward is None and self.begin_unannounced(self.params[position]) is not self:
                return
            append(position)
            if len(arrived) >= turn.expected:
                self._issue_full_buckets()

        if param.numel() < SMALL:
            return on_gradient if self._overlap else on_gradient_at_last
        slot = bucket.positions.index(position)

        @_torch.mark_untraced
        def on_large_gradient(_: object = None) -> None:
            if self.backward is None and self.begin_unannounced(self.params[position]) is not self:
                return
            append(position)
            if self._moves and not torch.is_grad_enabled() and not _has_other_hooks(param):
                if self._portions.packs_early(position):
                    bucket.pack_early(slot, self._present().scale(bucket), as_view=self._all.as_view)
                elif self._all.as_view:
                    bucket.adopt(slot)
            if len(arrived) >= turn.expected:
                self._issue_full_buckets()

        return on_large_gradient

    def finish(self, *, left_out: int = 0, batch: BatchId | None = None) -> BackwardOutcome:
        """**Collective** if the backward is synchronised. End the backward: send the rest, write the averages.

        Args:
            left_out: the number of forwards without a backward, to report; see Note [Left-out backwards].
            batch: the batch that the gradients are of; see Note [Batches compared].

        Raises:
            NonFiniteGradient: as :meth:`~lockstep.ddp.finite.FiniteCheck.verdict`, on all ranks.
            CollectiveMismatch: the ranks are in different backwards.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        backward = self.backward
        assert backward is not None, "no backward is under way"
        if self._plain is None:
            self._weights.leave(synced=backward.sync)
        try:
            mistake = backward.find_mistake()
            if not backward.sync:
                self._all.pending.update(backward.arrivals())
                return BackwardOutcome(mistake)
            self._left_out += left_out
            backward.left_out, backward.progress = left_out, self._begun + self._left_out
            backward.batch = batch
            unused = backward.average_rest(write=True)
            if backward.skipped:
                self._drop_gradients()
            if self._weights.aside:
                self._weights.add_back()
            if not self._portions.is_learned:
                self._portions.learn(self._all.buckets)
            if self._absent is not None:
                self._absent.learn(backward.arrivals(), backward.missing)
            self._all.pending.clear()
            self._all.step += 1
            names = None if backward.skipped else [*map(self._all.names.__getitem__, sorted(unused))]
            return BackwardOutcome(mistake or backward.found, backward.missing, names)
        except CollectiveMismatch as error:
            raise explain_mixed(explain_left_out(error)) from error
        finally:
            self._close()

    def abandon(self) -> None:
        """Forget the backward under way, which ended with an error. ``begin`` waits for the buckets it sent."""
        if self.backward is not None:
            self._leave_weights(synced=False)
        self._close()

    def match_without_gradients(self, divisor: int) -> None:
        """**Collective.** Take part in the others' synchronised backward, adding zeros and writing no gradients."""
        self._drain()
        self._open(sync=True, factor=0.0, divisor=divisor, kept={}, discards=True)
        backward = self._present()
        backward.progress = self._begun + self._left_out
        try:
            backward.average_rest(write=False)
        finally:
            self._close()

    def forget_accumulated(self) -> None:
        """Forget gradients that have accumulated without synchronisation: they have been moved elsewhere."""
        self._all.pending.clear()
        self._weights.forget()

    def digests(self) -> list[tuple[str, str]]:
        """Return the parameters' names and a digest of the first bytes of each; takes a millisecond."""
        share = max(_LEAST_DIGESTED, _MOST_DIGESTED // len(self.params))
        return [
            (name, hexdigest(param.detach(), share)) for name, param in zip(self._all.names, self.params, strict=True)
        ]

    def accumulated(self) -> list[tuple[str, Parameter]]:
        """Return the parameters whose gradients have accumulated without synchronisation, with their names."""
        return [(self._all.names[position], self.params[position]) for position in sorted(self._all.pending)]

    # Between backwards ----------------------------------------------------------------------------------------------

    def whoami(self) -> str:
        """Say which rank this is, and in which step."""
        return self._all.whoami()

    def fits(self) -> bool:
        """Return whether the parameters have the dtypes and devices that the buckets were laid out for."""
        return [*map(_dtype, self.params)] == self._dtypes and [*map(_device, self._ends)] == self._devices

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook`` reduce the buckets; see :func:`lockstep.register_comm_hook`."""
        if self._all.comm_hook is not None:
            raise LockstepError(f"{self._all.whoami()}: a comm hook is registered already; a replica takes one")
        self._all.use_hook((state, hook))

    def take_over(self, old: Reducer) -> None:
        """**Collective** if a failed backward has left anything under way. Continue where a reducer over other
        parameters of the same module stands."""
        old._drain()
        old._successor = self
        self._all.step = old._all.step
        self._all.use_hook(old._all.comm_hook)
        self._totals.take_over(old._totals)
        self._begun, self._left_out = old._begun, old._left_out
        if old._all.pending:
            self._all.pending = {i for i, param in enumerate(self.params) if param.grad is not None}
        self._weights.take_over(old._weights)
        if old.in_front:
            self.look_in_front()
        if len(self.params) == len(old.params) and all(map(operator.is_, self.params, old.params)):
            self._take_over_gradients(old)

    @torch.no_grad()
    def _take_over_gradients(self, old: Reducer) -> None:
        """Continue with the same parameters in other buckets, to which their gradients move."""
        self._portions.take_over(old._portions, self._all.buckets)
        for bucket in self._all.buckets:
            for slot in range(len(bucket)) if self._all.as_view else ():
                bucket.adopt(slot)

    def free(self) -> None:
        """Make the gradients separate tensors, and let the buckets' memory go."""
        for bucket in self._all.buckets:
            bucket.leave()
        self._all.buckets.clear()
        self._home.clear()

    def bucket_bytes(self) -> list[int]:
        """Return the bytes of gradients in each bucket, in order of reduction."""
        return [bucket.numel * bucket.values.element_size() for bucket in self._all.buckets]

    def hook_name(self) -> str:
        """Return the name of the comm hook, empty without one."""
        return "" if self._all.comm_hook is None else getattr(self._all.comm_hook[1], "__qualname__", "a comm hook")

    # Inside ---------------------------------------------------------------------------------------------------------

    def _present(self) -> Backward:
        assert self.backward is not None, "no backward is under way"
        return self.backward

    def _close(self) -> None:
        if self.backward is not None:
            self._under_way += self.backward.close()
        self.backward = None

    def _drain(self) -> None:
        while self._under_way:
            bucket = self._under_way.pop(0)
            wait, bucket.turn.wait = bucket.turn.wait, None
            try:
                if wait is not None:
                    what = f"{self._all.whoami()}: completing what an earlier, failed backward had sent"
                    wait_for(wait, lambda what=what: what)  # type: ignore[misc]
            finally:
                bucket.held.put_back()

    def _issue_full_buckets(self) -> None:
        backward = self._present()
        if not backward.sync or not self._portions.is_learned:
            return
        last = len(self._all.buckets) - 1
        with self._lock:  # a module on several devices has a backward thread for each
            while backward.next < last and self._is_full(self._all.buckets[backward.next]) and backward.hook_is_done():
                with torch.no_grad():
                    backward.issue_next()

    def _is_full(self, bucket: Bucket) -> bool:
        if len(bucket.turn.arrived) < bucket.turn.expected or self._portions.holds_back(bucket):
            return False
        if not bucket.turn.is_complete(self._absent_now):
            self._portions.hold_back(bucket)
            return False
        # Another hook on the parameter that came last runs after ours, so it has not run yet.
        return not any(_has_other_hooks(param) for param in bucket.params)

    def _drop_gradients(self) -> None:
        """Drop all gradients, so that the optimizer's step changes no momentum, decay or count of steps."""
        for param in self.params:
            param.grad = None


def _has_other_hooks(param: Parameter) -> bool:
    """Return whether a user's hook follows ours: it must see this rank's own gradient and may change it."""
    return _torch.gradient_hooks(param) > 1
