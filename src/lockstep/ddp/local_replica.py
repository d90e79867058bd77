"""A replica that trains apart from the others between rounds; see ``local_steps.py`` for what a round is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook

from lockstep import _torch
from lockstep.comm.exchange import group_device
from lockstep.comm.init import current_world
from lockstep.comm.waiting import wait_for
from lockstep.ddp.comm_hooks import CommHook
from lockstep.ddp.hooks import Forward
from lockstep.ddp.local_steps import LocalRounds, LocalSteps
from lockstep.ddp.members import parameters_of
from lockstep.ddp.options import ReplicaOptions
from lockstep.ddp.reducer import Reducer
from lockstep.ddp.replica import Replica
from lockstep.errors import LockstepError
from lockstep.job import flight
from lockstep.job.page import Phase
from lockstep.step import local_training, slicing
from lockstep.step.share import BatchesInHand, Items

_batch_norm = _torch.batch_norm()


class LocalReplica(Replica):
    """Counts the steps of one module, and ends rounds between them. Made by :func:`lockstep.replicate`.

    What a :class:`Replica` knows of forwards and backwards it takes over; its reducer has no buckets and averages
    nothing. A round ends before the first training forward that comes after its last step: there the optimizers, as
    many as there are, have stepped, and what a GradScaler has left out is left out. (Where the module is trained by
    another method than forward, or in evaluation mode, a round ends at the end of the next backward: the gradients of
    that one step are of the parameters before.)
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        options: ReplicaOptions,
        rule: LocalSteps,
        *,
        unfit: str | None = None,
    ) -> None:
        super().__init__(module, group, options, unfit=unfit)
        self._rule = rule
        self._channel = _open_channel(group) if rule.overlap else group
        self._rounds = LocalRounds(rule, self._reducer.params, self._names, group=group, channel=self._channel)
        #: The optimizer of the anchors; see :class:`~lockstep.step.local_training.LocalTraining`.
        self.outer = self._rounds.outer
        local_training.enter(module, self)

    # Layout ---------------------------------------------------------------------------------------------------------

    def _lay_out(self, module: nn.Module) -> Reducer:
        """Listen to the parameters that are trained now; nothing of theirs is averaged."""
        self._names, params = self._find_trained(module)
        reducer = Reducer(params, self._names, buckets=[], group=self._group, listener=self)

        @_torch.mark_untraced
        def on_gradient(_: Tensor) -> None:
            if reducer.backward is None:
                self.gradient_unannounced()

        self._handles = [param.register_post_accumulate_grad_hook(on_gradient) for param in params]
        return reducer

    def _lay_out_again(self, module: nn.Module) -> None:
        super()._lay_out_again(module)
        self._rounds.extend(self._reducer.params, self._names)

    def release(self) -> None:
        """Leave the module as it was before; see :func:`lockstep.release`."""
        super().release()
        self._rounds.apply_pending()
        module = self._module()
        if module is not None:
            local_training.leave(module)
        if self._channel is not self._group:
            dist.destroy_process_group(self._channel)

    # Steps ----------------------------------------------------------------------------------------------------------

    def _announce(self, module: nn.Module, *, records: bool) -> Forward:
        if slicing.current() is not None:
            return self._announce_in_slice(trains=records or module.training)
        if records and module.training:
            self.between_steps()
        in_hand = self._in_hand()
        items = None if in_hand is None else in_hand.read(for_backward=records)
        return Forward(self.syncs, self._weight(in_hand), sends_buffers=False, items=items)

    def _weight(self, in_hand: BatchesInHand | None) -> float:
        """Return 0 for an empty slice, whose gradients are NaN, and 1 for any other: each rank's mean is its own."""
        return 1.0 if super()._weight(in_hand) else 0.0

    def _take_share(self, forward: Forward) -> Items | None:
        """Take it, whatever else is in hand: each rank's mean is its own."""
        items, in_hand = self._items_of(forward), self._in_hand()
        if in_hand is not None:
            in_hand.take(items)
        return items

    def _begin(self, forward: Forward) -> None:
        if self._items is not None:
            raise LockstepError(
                f"{self.whoami()}: world.weigh with LocalSteps: it weighs gradients where they are averaged, and here "
                "parameters are, each rank's alike. Leave it out, or average every gradient (without sync=)"
            )
        self._reducer.begin(sync=False, weight=forward.weight)

    def _require_sync(self) -> None:
        """Do nothing: the backward counts as a step now, and averages nothing."""

    def backward_ends(self) -> None:
        """**Collective** if a round should have ended before this backward. Count the step."""
        forward = self._current
        super().backward_ends()
        if forward is not None and forward.sync:
            if self._rounds.is_due:  # no training forward has come in between
                self.between_steps()
            self._rounds.steps += 1

    def _send_buffers_again(self, forward: Forward) -> None:
        del forward  # buffers are made equal at the end of a round

    # Rounds: what a Checkpointer needs, see LocalTraining -------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Exchanges begun."""
        return self._rounds.rounds

    @property
    def lead(self) -> int:
        """See Note [Rounds and agreements] in ``step/local_training.py``."""
        return 2 if self._rule.overlap else 1

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to others for the averages so far."""
        return self._rounds.sent

    def between_steps(self) -> None:
        """**Collective** if a round's steps are done: end it; with overlap begin to."""
        due = self._rounds.is_due
        before = flight.current.phase
        if due:
            flight.current.enter(Phase.REDUCE)
        if self._rounds.between_steps() is not None:
            self._equalize_buffers()
        if due:
            flight.current.resume(before, after=Phase.REDUCE)

    def finish_round(self) -> None:
        """**Collective.** See :func:`lockstep.finish_round`."""
        if self.is_in_backward:
            raise LockstepError(f"{self.whoami()}: finish_round was called inside a backward: call it between steps")
        before = flight.current.phase
        flight.current.enter(Phase.REDUCE)
        uneven = False
        while True:
            outcome = self._rounds.end(final=True)
            uneven |= not outcome.is_even
            if outcome.is_final or not self._rule.overlap:
                self._equalize_buffers()
            if outcome.is_final:
                break
        if uneven:
            self._share_random_numbers(0)
        flight.current.resume(before, after=Phase.REDUCE)

    def common_state(self) -> dict[str, Any]:
        """Return what all ranks hold alike besides the model and the outer optimizer."""
        return self._rounds.common_state()

    def own_state(self) -> dict[str, Any]:
        """Return what this rank holds alone."""
        return self._rounds.own_state()

    def load_state(self, common: Mapping[str, Any], owns: Sequence[Mapping[str, Any]]) -> None:
        """Resume."""
        self._rounds.load_state(common, owns)

    @torch.no_grad()
    def _equalize_buffers(self) -> None:
        """**Collective.** Average batch statistics, and take rank 0's other buffers."""
        module = self._living_module()
        if not self.sends_buffers or self._world_size == 1:
            return
        statistics = _batch_statistics(module)
        if statistics:
            flat = torch.cat([each.view(-1).float() for each in statistics]).to(group_device(self._group))
            wait_for(
                lambda: dist.all_reduce(flat, group=self._group),
                lambda: f"{self.whoami()}: averaging batch statistics",
                name="averaging batch statistics",
            )
            flat /= self._world_size
            parts = flat.split([each.numel() for each in statistics])
            for each, part in zip(statistics, parts, strict=True):
                each.copy_(part.view_as(each))
        self._send_buffers(module, 0)

    # What has no meaning here -----------------------------------------------------------------------------------------

    def why_not_in_slices(self) -> str:
        """Say that nothing would be averaged."""
        return (
            "a step in slices averages gradients, and with LocalSteps none are averaged: shard the loader without "
            "slices=, or replicate the model without sync="
        )

    def join_hook(self, **_: Any) -> JoinHook:
        """Refuse: it would ask all ranks in every forward."""
        raise LockstepError(
            f"{self.whoami()}: lockstep.join asks all ranks before every forward, which LocalSteps is there to avoid: "
            "leave it out, and call lockstep.finish_round(model) after the loop. A rank that is there first takes part "
            "in the rounds of the others until they have come too"
        )

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Refuse: there are no gradients to average."""
        del state, hook
        raise LockstepError(
            f"{self.whoami()}: a comm hook averages gradients, and with LocalSteps none are averaged: choose "
            "LocalSteps(compress=...) instead"
        )


def why_unfit_for_local_steps(module: nn.Module) -> str | None:
    """Return why the ranks can't train ``module`` apart, and what to do instead; None if they can."""
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            return (
                f"'{name}' has sparse gradients, and what a round of LocalSteps sends is dense, the whole table each "
                "time: make the module with sparse=False, or average every gradient (without sync=)"
            )
        if part.training and type(part).__name__ == "SyncBatchNorm":
            return (
                f"'{name}' is a SyncBatchNorm, which waits for all ranks in every forward; LocalSteps is for links "
                "that are too slow for that: use a plain batch norm, whose statistics are averaged when a round ends"
            )
    for name, param in parameters_of(module):
        if param.is_complex():
            return f"parameter '{name}' is complex, and LocalSteps averages real ones: keep it as pairs of reals"
    return None


def _batch_statistics(module: nn.Module) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for part in module.modules():
        if isinstance(part, _batch_norm):
            statistics = (part.running_mean, part.running_var)
            found.update((id(tensor), tensor) for tensor in statistics if isinstance(tensor, Tensor))
    return [*found.values()]


def _open_channel(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """**Collective.** Open another process group of the same ranks, one that sends while they compute."""
    world = current_world()
    opened = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=None if world is None else timedelta(seconds=world.timeout),
        backend="gloo" if group_device(group).type == "cpu" else None,
        use_local_synchronization=group is not dist.group.WORLD,
    )
    assert isinstance(opened, dist.ProcessGroup)  # this rank is a member
    return opened
