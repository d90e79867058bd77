"""Replicas that train apart between rounds; see ``local_steps.py`` for what a round is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lockstep import _torch
from lockstep.comm.exchange import group_device
from lockstep.comm.init import current_world
from lockstep.comm.waiting import wait_for
from lockstep.ddp.comm_hooks import CommHook
from lockstep.ddp.hooks import Forward
from lockstep.ddp.local_steps import LocalRounds, LocalSteps
from lockstep.ddp.members import parameters_of
from lockstep.ddp.reducer import Reducer
from lockstep.ddp.synchroniser import Replicated
from lockstep.errors import LockstepError
from lockstep.job import flight
from lockstep.job.page import Phase
from lockstep.step import local_training
from lockstep.step.share import Items

_batch_norm = _torch.batch_norm()


class InRounds:
    """Counts the steps of one replica, and ends rounds between them; see
    :class:`~lockstep.ddp.synchroniser.Synchroniser`.

    Its reducer has no buckets and averages nothing. A round ends before the first training forward that comes after its
    last step: by then all optimizers have stepped, unless a GradScaler has left their step out. (Where the module is
    trained by another method than forward, or in evaluation mode, a round ends at the end of the next backward: the
    gradients of that one step are of the parameters before.)

    Args:
        replica: the replica that trains.
        rule: the options that the user chose.
    """

    def __init__(self, replica: Replicated, rule: LocalSteps) -> None:
        self._replica, self._rule, self._group = replica, rule, replica.group
        self._world_size = dist.get_world_size(replica.group)
        self._names: list[str] = []
        #: True if a backward of the step under way had samples.
        self._has_samples = False

    # Layout -----------------------------------------------------------------------------------------------------------

    def lay_out(
        self, module: nn.Module, params: list[Parameter], names: list[str]
    ) -> tuple[Reducer, list[RemovableHandle]]:
        """Watch the parameters that are trained now; none of their gradients are averaged."""
        del module
        replica, self._names = self._replica, names
        reducer = Reducer(params, names, buckets=[], group=self._group, listener=replica)

        @_torch.mark_untraced
        def on_gradient(param: Tensor) -> None:
            if reducer.backward is None:
                assert isinstance(param, nn.Parameter)  # it has the hook
                reducer.begin_unannounced(param)

        return reducer, [param.register_post_accumulate_grad_hook(on_gradient) for param in params]

    def begin(self) -> None:
        """**Collective.** Take the anchors."""
        replica = self._replica
        self._channel = _open_channel(self._group) if self._rule.overlap else self._group
        self._rounds = LocalRounds(
            self._rule, replica.reducer.params, self._names, group=self._group, channel=self._channel
        )
        #: The optimizer of the anchors; see :class:`~lockstep.step.local_training.LocalTraining`.
        self.outer = self._rounds.outer
        local_training.enter(replica.tensors.module(), self)

    def laid_out_again(self) -> None:
        """Train newly unfrozen parameters as well."""
        self._rounds.extend(self._replica.reducer.params, self._names)

    def release(self) -> None:
        """Leave the module as it was before; see :func:`lockstep.release`."""
        self._rounds.apply_pending()
        module = self._replica.module
        if module is not None:
            local_training.leave(module)
        if self._channel is not self._group:
            dist.destroy_process_group(self._channel)

    # Steps ------------------------------------------------------------------------------------------------------------

    def forward_begins(self, module: nn.Module, inputs: Any, *, records: bool) -> Forward:
        """**Collective** if a round's steps are done. End the round, and begin a forward."""
        if records and module.training:
            self.between_steps()
        in_hand = self._replica.in_hand()
        if in_hand is None:
            return Forward(self._replica.syncs, 1.0, sends_buffers=False)
        weight, items, _ = in_hand.read(inputs, for_backward=records)
        return Forward(self._replica.syncs, _all_or_nothing(weight), sends_buffers=False, items=items)

    def weight(self) -> float:
        """See :class:`~lockstep.ddp.synchroniser.Synchroniser`."""
        in_hand = self._replica.in_hand()
        return 1.0 if in_hand is None else _all_or_nothing(in_hand.weigh_unseen())

    def take_share(self, forward: Forward) -> Items | None:
        """Take the share, whatever else is in hand: each rank's mean is its own."""
        items, in_hand = self._replica.items_of(forward), self._replica.in_hand()
        if in_hand is not None:
            in_hand.take(items)
        return items

    def backward_begins(self, forward: Forward, items: Items | None) -> None:
        """Begin, where the first backward of a round finds what was loaded into the model since the last one."""
        if items is not None:
            raise LockstepError(
                f"{self._replica.whoami()}: world.weigh with LocalSteps: it weights gradients, and here parameters are "
                "averaged, with equal weights for all ranks. Remove the call, or average every gradient (without "
                "sync=)"
            )
        self._rounds.adopt_loaded()
        self._has_samples |= forward.weight != 0
        self._replica.reducer.begin(sync=False, weight=forward.weight)

    def require_sync(self) -> None:
        """Do nothing: the backward counts as a step now, and averages nothing."""

    def backward_ended(self, forward: Forward) -> None:
        """**Collective** if a round should have ended before this backward. Count the step."""
        del forward  # buffers are made equal at the end of a round
        if self._rounds.is_due:  # no training forward has come in between
            self.between_steps()
        self._rounds.count_step(has_samples=self._has_samples)
        self._has_samples = False

    # Rounds, for a Checkpointer: see LocalTraining --------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Return the number of exchanges begun."""
        return self._rounds.rounds

    @property
    def lead(self) -> int:
        """See Note [Rounds and agreements] in ``step/local_training.py``."""
        return 2 if self._rule.overlap else 1

    @property
    def sent(self) -> int:
        """Return the bytes that this rank has sent to others for the averages so far."""
        return self._rounds.sent

    def between_steps(self) -> None:
        """**Collective** if a round's steps are done: end the round; with overlap, begin to end it."""
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
        if self._replica.is_in_backward:
            raise LockstepError(
                f"{self._replica.whoami()}: finish_round was called inside a backward: call it between steps"
            )
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
        if uneven and self._replica.in_hand() is not None:
            self._replica.tensors.send_random_numbers(0)
        flight.current.resume(before, after=Phase.REDUCE)

    def common_state(self) -> dict[str, Any]:
        """Return the state that all ranks share besides the model and the outer optimizer."""
        return self._rounds.common_state()

    def own_state(self) -> dict[str, Any]:
        """Return the state of this rank alone."""
        return self._rounds.own_state()

    def load_state(self, common: Mapping[str, Any], owns: Sequence[Mapping[str, Any]]) -> None:
        """Resume."""
        self._rounds.load_state(common, owns)

    @torch.no_grad()
    def _equalize_buffers(self) -> None:
        """**Collective.** Average batch statistics, and take rank 0's other buffers."""
        tensors = self._replica.tensors
        module = tensors.module()
        if not tensors.sends_buffers or self._world_size == 1:
            return
        statistics = _batch_statistics(module)
        if statistics:
            flat = torch.cat([each.view(-1).float() for each in statistics]).to(group_device(self._group))
            wait_for(
                lambda: dist.all_reduce(flat, group=self._group),
                lambda: f"{self._replica.whoami()}: averaging batch statistics",
                name="averaging batch statistics",
            )
            flat /= self._world_size
            parts = flat.split([each.numel() for each in statistics])
            for each, part in zip(statistics, parts, strict=True):
                each.copy_(part.view_as(each))
        tensors.send_buffers(0)

    # Without a meaning here -------------------------------------------------------------------------------------------

    def why_not_in_slices(self) -> str:
        """Return the reason: no gradients would be averaged."""
        return (
            "a step in slices averages gradients, and with LocalSteps none are averaged: shard the loader without "
            "slices=, or replicate the model without sync="
        )

    def join_hook(self, *, divide_by_initial_world_size: bool) -> JoinHook:
        """Refuse to join: that would take an exchange with all ranks in every forward."""
        del divide_by_initial_world_size
        raise LockstepError(
            f"{self._replica.whoami()}: lockstep.join asks all ranks before every forward, which LocalSteps avoids: "
            "remove it, and call lockstep.finish_round(model) after the loop. A rank that calls it first takes part "
            "in the others' rounds until they have called it too"
        )

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Refuse the hook: no gradients are averaged."""
        del state, hook
        raise LockstepError(
            f"{self._replica.whoami()}: a comm hook averages gradients, and with LocalSteps none are averaged: choose "
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
    """**Collective.** Open another process group of the same ranks, which sends while they compute."""
    world = current_world()
    opened = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=None if world is None else timedelta(seconds=world.timeout),
        backend=_channel_backend(group),
        use_local_synchronization=group is not dist.group.WORLD,
    )
    assert isinstance(opened, dist.ProcessGroup)  # this rank is a member
    return opened


def _channel_backend(group: dist.ProcessGroup) -> str | None:
    """Return the backend for a process group of the same ranks that sends while they compute; None: the default one."""
    if group_device(group).type != "cpu":
        return None
    bound = None if dist.group.WORLD is None else dist.group.WORLD.bound_device_id
    if bound is None or bound.type in dist.Backend.backend_capability["gloo"]:
        return "gloo"
    return (
        f"cpu:gloo,{bound.type}:gloo"  # torch asks each group for a backend for the device that the process is bound to
    )


def _all_or_nothing(weight: float) -> float:
    """Return 0 for an empty share, whose gradients are NaN, and 1 for any other: each rank's mean is its own."""
    return 1.0 if weight else 0.0
