"""Replicas that average the gradients of every backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lockstep.ddp.comm_hooks import CommHook, keeps_equal
from lockstep.ddp.gradient_order import GradientOrder, is_worth
from lockstep.ddp.hooks import Forward
from lockstep.ddp.join import ReplicaJoinHook, shake_hands
from lockstep.ddp.layout import cut, lay_out
from lockstep.ddp.members import tensors_of
from lockstep.ddp.options import ReplicaOptions
from lockstep.ddp.reducer import Reducer
from lockstep.ddp.synchroniser import Replicated
from lockstep.errors import LockstepError
from lockstep.step import gradient_order
from lockstep.step.share import Items


class EveryStep:
    """Averages every gradient; see :class:`~lockstep.ddp.synchroniser.Synchroniser`.

    Args:
        replica: the replica whose gradients are averaged.
        options: the replica's options.
    """

    def __init__(self, replica: Replicated, options: ReplicaOptions) -> None:
        self._replica, self._options = replica, options
        self._group, self._world_size = replica.group, dist.get_world_size(replica.group)
        self._in_hand = replica.in_hand()
        self._divides_by_initial_world_size = True
        #: The names of the parameters in the order in which their gradients come, once the buckets are laid out by it.
        self._order: list[str] | None = None
        #: Learns that order in the first averaged backward; None: not, or not any more.
        self._learning: GradientOrder | None = None
        gradient_order.enter(replica.tensors.module(), self)

    def lay_out(
        self, module: nn.Module, params: list[Parameter], names: list[str]
    ) -> tuple[Reducer, list[RemovableHandle]]:
        """Plan the buckets."""
        replica = self._replica
        replica.checks.look_at(params, names)
        if self._order is not None and {*self._order} != {*names}:
            self._order = None  # others are trained now
        place = {name: position for position, name in enumerate(names)}
        reducer = lay_out(
            module,
            params,
            names,
            group=self._group,
            options=self._options,
            checks=replica.checks,
            batches=replica.in_hand() is not None,
            order=None if self._order is None else [place[name] for name in self._order],
            listener=replica,
        )
        self._learn_no_more()
        if self._order is None and self._world_size > 1 and reducer.overlaps and len(reducer.buckets) > 1:
            self._learning = GradientOrder(params, self._group)
        hooks = map(reducer.ready_hook, range(len(params)))
        return reducer, [
            param.register_post_accumulate_grad_hook(hook) for param, hook in zip(params, hooks, strict=True)
        ]

    def begin(self) -> None:
        """Do nothing: there is nothing else to prepare."""

    def laid_out_again(self) -> None:
        """Do nothing: the new reducer has all that changed."""

    # Forward and backward ---------------------------------------------------------------------------------------------

    def forward_begins(self, module: nn.Module, inputs: Any, *, records: bool) -> Forward:
        """**Collective** in training, outside no_sync, if there are buffers to send or inside join. Begin a forward."""
        replica = self._replica
        averages = replica.syncs and records
        sends_buffers = averages and module.training and replica.tensors.sends_buffers
        source, divisor = 0, None
        joins = replica._join_config.enable
        if joins:
            Join.notify_join_context(replica.joinable)
            step = shake_hands(self._group, active=True, sends_buffers=sends_buffers, averages=averages)
            source = step.active[0]
            divisor = None if self._divides_by_initial_world_size else len(step.active)
        drift = replica.checks.drift
        if drift is not None and drift.is_paused is not joins:
            drift.pause(joins)
        if sends_buffers:
            sends_buffers = replica.tensors.send_buffers(source)
        number = replica.forwards.next if averages and module.training and not joins else 0
        if self._in_hand is None:
            return Forward(replica.syncs, 1.0, sends_buffers, divisor, number)
        weight, items, batch = self._in_hand.read(inputs, for_backward=records)
        batch = None if joins or not averages else batch
        return Forward(replica.syncs, weight, sends_buffers, divisor, number, items, batch=batch)

    def weight(self) -> float:
        """Return the weight of Note [Exact mean]; 1 without a sharded batch or if the group is not the whole world."""
        return 1.0 if self._in_hand is None else self._in_hand.weigh_unseen()

    def take_share(self, forward: Forward) -> Items | None:
        """See :class:`~lockstep.ddp.synchroniser.Synchroniser`."""
        in_hand = self._in_hand
        if in_hand is None:
            return self._replica.items_of(forward)
        if forward.slice is not None:  # a slice weighs what it holds, whatever else is in hand
            in_hand.take(None)
            return None
        items = in_hand.weigh(forward.items)
        if items is not None and in_hand.is_outside(items):
            self._replica.checks.weighs(items)
        return items

    def backward_begins(self, forward: Forward, items: Items | None) -> None:
        """See :class:`~lockstep.ddp.synchroniser.Synchroniser`."""
        joins = self._replica._join_config.enable
        if items is not None and joins:
            raise LockstepError(
                f"{self._replica.whoami()}: world.weigh inside lockstep.join: a rank that has run out of batches does "
                "not know that the others count items. Let lockstep.shard cut the batches, so that every rank takes "
                "every step"
            )
        if self._learning is not None:
            self._learning.begin()
        self._replica.reducer.begin(
            sync=forward.sync,
            weight=forward.weight,
            divisor=forward.divisor,
            items=None if items is None else items.count,
            joins=joins,
        )

    def require_sync(self) -> None:
        """See :class:`~lockstep.ddp.synchroniser.Synchroniser`."""
        self._replica.reducer.require_sync()

    def backward_ended(self, forward: Forward) -> None:
        """**Collective** if there are buffers to send. Send them."""
        # Buffers are sent once more, so that replicas are equal after every step: an evaluation or a checkpoint that
        # follows sees the same buffers on every rank and needs no communication. See Note [Buffers] in api.py.
        if forward.sends_buffers and not self._replica._join_config.enable:
            self._replica.tensors.send_buffers(0)
        if self._learning is not None and not self._replica._join_config.enable:
            self._learn_order(self._learning)

    # The order of gradients: see Note [Order of gradients] ------------------------------------------------------------

    def _learn_order(self, learning: GradientOrder) -> None:
        """**Collective.** Lay the buckets out by the order in which the gradients have come, if that is worth it."""
        reducer = self._replica.reducer
        self._learn_no_more()
        if reducer.hook_name():
            return
        order = learning.agree()
        plan = [bucket.positions for bucket in reducer.buckets]
        dense = sorted(position for bucket in plan for position in bucket)
        new = cut(reducer.params, dense, caps=self._options.bucket_caps, order=order)
        if is_worth(plan, new, order=order, sizes=[param.nbytes for param in reducer.params]):
            self.take_order([reducer.names[position] for position in order])

    def _learn_no_more(self) -> None:
        if self._learning is not None:
            self._learning.close()
            self._learning = None

    @property
    def order(self) -> Sequence[str] | None:
        """See :class:`~lockstep.step.gradient_order.OrderedGradients`."""
        return self._order

    def take_order(self, names: Sequence[str] | None) -> None:
        """See :class:`~lockstep.step.gradient_order.OrderedGradients`."""
        reducer, order = self._replica.reducer, None if names is None else [*names]
        fits = order is None or sorted(order) == sorted(reducer.names)
        if order != self._order and fits and reducer.overlaps and not reducer.hook_name():
            self._order = order
            self._replica.lay_out_anew()

    # What users ask for -----------------------------------------------------------------------------------------------

    def why_not_in_slices(self) -> str:
        """Return "": a step in slices averages gradients."""
        return ""

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """See :func:`lockstep.register_comm_hook`."""
        if not callable(hook):
            raise TypeError(f"a comm hook must be callable, not {type(hook).__name__}")
        self._replica.reducer.register_comm_hook(state, hook)
        if self._replica.checks.compares and self._options.compare_every == "auto" and not keeps_equal(hook):
            self._replica.compare_no_more()

    def release(self) -> None:
        """Learn no more, and tell checkpoints of no order."""
        self._learn_no_more()
        module = self._replica.module
        if module is not None:
            gradient_order.leave(module)

    # Join: see Joiner -------------------------------------------------------------------------------------------------

    def join_hook(self, *, divide_by_initial_world_size: bool) -> JoinHook:
        """See :class:`~lockstep.ddp.synchroniser.Synchroniser`."""
        self._divides_by_initial_world_size = divide_by_initial_world_size
        return ReplicaJoinHook(self, divide_by_initial_world_size=divide_by_initial_world_size)

    def answer_step(self, *, divide_by_initial_world_size: bool) -> None:
        """**Collective.** Take part in one step of the ranks that still have data; see Note [Join handshake]."""
        replica = self._replica
        step = shake_hands(self._group, active=False, sends_buffers=False, averages=False)
        if replica.checks.drift is not None:
            replica.checks.drift.pause(True)
        if step.sends_buffers:
            replica.tensors.module()
            replica.tensors.send_buffers(step.active[0])
        if step.averages:
            divisor = self._world_size if divide_by_initial_world_size else len(step.active)
            replica.reducer.match_without_gradients(divisor)

    def adopt_final_state(self, *, is_last_joiner: bool) -> None:
        """**Collective.** Take the parameters and buffers of the lowest rank that trained to the end."""
        replica = self._replica
        step = shake_hands(self._group, active=is_last_joiner, sends_buffers=False, averages=False)
        tensors = replica.tensors
        state = tensors_of(tensors.module(), buffers=tensors.sends_buffers)
        tensors.send(state, step.active[0], "sending the final parameters")
        if self._in_hand is not None:
            tensors.send_random_numbers(step.active[0])
