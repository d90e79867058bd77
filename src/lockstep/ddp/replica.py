"""One module in a group of replicas: its reducer, its buffers, its forwards and backwards."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.utils.hooks import RemovableHandle

from lockstep import _torch
from lockstep.comm import apart, ending
from lockstep.comm.init import current_world
from lockstep.ddp import refusals
from lockstep.ddp.buffers import ReplicaTensors
from lockstep.ddp.checks import GradientChecks
from lockstep.ddp.compare import compare_replicas
from lockstep.ddp.every_step import EveryStep
from lockstep.ddp.frozen import FrozenParameters
from lockstep.ddp.hooks import BackwardListener, BackwardWatch, Forward
from lockstep.ddp.in_rounds import InRounds
from lockstep.ddp.layout import sparse_parameters
from lockstep.ddp.members import parameters_of, tensors_of
from lockstep.ddp.options import ReplicaOptions
from lockstep.ddp.parameters import OwnParameters, thawed
from lockstep.ddp.slice_member import SliceMember, forward_in_slice, of_other_slice
from lockstep.ddp.synchroniser import Synchroniser
from lockstep.errors import LockstepError
from lockstep.job import flight
from lockstep.job.page import Phase
from lockstep.step import slicing, streams
from lockstep.step.share import BatchesInHand, BatchId, Items, latest_of

#: Returns whether a forward is part of a function that torch.func transforms, and so of no training step.
_transformed = _torch.transforms_active()
_ddp_in_forward = _torch.ddp_in_forward()
_compiled_autograd, _is_at_work = _torch.compiled_autograd()
_requires_grad = attrgetter("requires_grad")
_FORWARD, _EVALUATE, _BACKWARD, _REDUCE = map(int, (Phase.FORWARD, Phase.EVALUATE, Phase.BACKWARD, Phase.REDUCE))


class Replica(Joinable, BackwardListener):
    """Keeps one module equal to its replicas on the other ranks. Made by :func:`lockstep.replicate`."""

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, options: ReplicaOptions, *, unfit: str | None = None
    ) -> None:
        Joinable.__init__(self)
        self._module = weakref.ref(module)
        self._group, self._options = group, options
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        #: True if backwards average. The user may turn this off for a while.
        self.syncs = True
        #: Gives all ranks one rank's parameters or buffers.
        self.tensors = ReplicaTensors(module, group, sends_buffers=options.broadcast_buffers)
        #: Handles of the hooks that announce the module's forwards if it is not wrapped.
        self.announcing: list[RemovableHandle] = []
        self._is_released = False
        self._latest: Forward | None = None
        self._current: Forward | None = None
        #: The checks of its gradients.
        self.checks = GradientChecks(group, options, lambda: self.reducer)
        #: Keeps the replica in step with those of the other ranks.
        self._sync: Synchroniser
        self._sync = EveryStep(self, options) if options.sync is None else InRounds(self, options.sync)
        #: The items that weigh the backward under way, if they are counted.
        self._items: Items | None = None
        #: The batch of the backward under way; see Note [Batches compared].
        self._batch: BatchId | None = None
        if _torch.traces_backward():
            raise refusals.traces_backward()
        self._compare(module, unfit=unfit)
        if options.init_sync:
            buffers = options.broadcast_buffers if options.init_sync_buffers is None else options.init_sync_buffers
            self.tensors.send(tensors_of(module, buffers=buffers), 0, "sending rank 0's parameters")
        self._lay_out(module)
        self._watch = BackwardWatch(self, self.reducer.params)
        self.forwards = self._watch.forwards
        # torch's hooks and graph nodes hold references that Python's collector can't see, so without this a replica
        # and its buckets would stay for ever.
        self._closing = weakref.finalize(module, self._close)
        self._closing.atexit = False
        #: True while a backward begins with a gradient that has already come.
        self._is_unannounced = False
        #: The replica's part in steps in slices; None if the group is not the whole world, which slices need.
        self._slices = SliceMember(self) if self.in_hand() is not None else None
        if self._slices is not None and self.checks.compares:
            ending.follow(self._slices.number, self)
        apart.note_replica(module, is_equal=self._slices is not None and self.checks.compares)
        self._sync.begin()

    def _compare(self, module: nn.Module, *, unfit: str | None = None) -> None:
        compare_replicas(
            module,
            self._options.must_match(),
            self._group,
            sparse=sparse_parameters(module),
            buffers=self._options.sends_buffers,
            unfit=unfit,
        )

    # Layout ---------------------------------------------------------------------------------------------------------

    def _lay_out(self, module: nn.Module) -> None:
        """Watch the parameters that are trained now."""
        named = [*parameters_of(module)]
        trained = [(name, param) for name, param in named if param.requires_grad]
        self._own = OwnParameters(module, self.whoami)
        self.checks.turn_to(module)
        #: Averages the gradients; it is replaced when frozen parameters begin to be trained.
        self.reducer, self._handles = self._sync.lay_out(
            module, [param for _, param in trained], [name for name, _ in trained]
        )
        frozen = [(name, param) for name, param in named if not param.requires_grad]
        self._frozen = FrozenParameters(frozen, self._thawed_gradient_came)

    def whoami(self) -> str:
        """Say which rank this is."""
        return f"rank {self._rank} of {self._world_size}"

    def _lay_out_again(self, module: nn.Module) -> None:
        """Lay the buckets out anew: parameters that were frozen are trained now."""
        self._compare(module)
        old = self.reducer
        self._remove_hooks()
        self._frozen.close()
        self._lay_out(module)
        self.reducer.take_over(old)
        self._sync.laid_out_again()
        if self._slices is not None:
            self._slices.turn_to_new_layout()
        self._watch.turn_to(self.reducer.params)

    def lay_out_anew(self) -> None:
        """**Collective** as :meth:`Reducer.take_over` is. Lay the buckets of the same parameters out anew, between two
        backwards: the synchroniser plans otherwise."""
        old = self.reducer
        with thawed(old.params):
            reducer, handles = self._sync.lay_out(self.tensors.module(), old.params, [*old.names])
        self._remove_hooks()
        self.reducer, self._handles = reducer, handles
        self.reducer.take_over(old)

    def _close(self) -> None:
        if self._slices is not None:
            ending.say_now(self._slices.number, self)
            self._slices.close()
        self._remove_hooks()
        self._frozen.close()
        self.checks.stop()
        self._watch.close()
        self._own.close()

    @property
    def is_in_backward(self) -> bool:
        """Return whether a backward is under way."""
        return self.reducer.backward is not None

    def release(self) -> None:
        """Leave the module as it was before; see :func:`lockstep.release`.

        Raises:
            LockstepError: a backward is under way.
        """
        if self.is_in_backward:
            raise LockstepError(
                f"rank {self._rank} of {self._world_size}: release was called inside a backward: call it between steps"
            )
        self._is_released = True
        if self._slices is not None:
            ending.leave(self._slices.number)
            self._slices.close()
        module = self._module()
        if module is not None:
            apart.note_replica(module, is_equal=False)
        streams.current.end(module)
        for handle in self.announcing:
            handle.remove()
        self._remove_hooks()
        self._frozen.close()
        self.checks.stop()
        self._watch.end()
        self._own.close()
        self.reducer.free()
        self._sync.release()
        self._closing.detach()  # it would keep this replica for as long as the module lives

    def _remove_hooks(self) -> None:
        for handle in [*self._handles, *self.reducer.in_front]:
            handle.remove()

    def at_end(self) -> tuple[str, list[tuple[str, str]]] | None:
        """Return a name and the digests that the ranks compare at the end of the job; None if nothing was trained."""
        has_sliced = self._slices is not None and self._slices.has_trained
        if not self.reducer.params or not (self.reducer.step or has_sliced or self.checks.has_accumulated):
            return None
        return f"the replica of {len(self.reducer.params)} parameters", self.reducer.digests()

    @property
    def module(self) -> nn.Module | None:
        """Return the module, while it exists."""
        return self._module()

    @property
    def synchroniser(self) -> Synchroniser:
        """Return the synchroniser of this replica."""
        return self._sync

    @property
    def bucket_caps(self) -> Sequence[int]:
        """Return the caps in bytes of the buckets that are sent during backward, or would be; see ``plan_buckets``."""
        return self._options.bucket_caps

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the ranks that hold replicas."""
        return self._group

    # Forward --------------------------------------------------------------------------------------------------------

    @_torch.mark_untraced
    def before_forward(self, module: nn.Module, inputs: tuple[Any, Any]) -> None:
        """**Collective** in training, outside no_sync, if there are buffers to send or inside join. Begin a forward.

        Args:
            module: the module.
            inputs: its arguments, by position and by name.
        """
        if self._is_released:
            raise refusals.was_released(self.whoami(), module)
        # Checkpointing repeats a forward inside backward, which must not send anything twice.
        if self.reducer.backward is None and not _transformed():
            records, training = torch.is_grad_enabled(), module.training
            ddp = _ddp_in_forward()
            if ddp is not None or _torch.COPY_BY_DATA_PARALLEL in module.__dict__:
                _raise_if(refusals.is_wrapped(self.whoami(), module, ddp))
            if records and self._own.registered:
                _raise_if(self._own.find_registered())
            flight.current.enter(_FORWARD if training else _EVALUATE)
            if not training:
                flight.current.batch = 0  # no step is taken with it
            if any(map(_requires_grad, self._frozen.params)):
                self._train_unfrozen(module)
            if slicing.current is None:
                forward = self._sync.forward_begins(module, inputs, records=records)
                for look in self.checks.looks[:] if records else ():
                    look.forward_begins(forward, inputs)
            else:
                forward = self._announce_in_slice(trains=records or training)
            if records:  # no backward can come through any other
                self._latest = forward
        # This comes last, since a stream that was entered must be left again, also if the forward fails.
        streams.current.enter(module, draws=module.training)

    def _train_unfrozen(self, module: nn.Module) -> None:
        if slicing.current is not None:
            raise refusals.unfrozen_in_step(self.whoami())
        if self._own.are_all(module):  # otherwise at the next forward that uses the module's own
            self._lay_out_again(module)

    @_torch.mark_untraced
    def after_forward(self, output: Any) -> None:
        """Look out for the backward through ``output``."""
        if torch.is_grad_enabled() and not _transformed():
            forward = self._latest if self._latest is not None and slicing.current is None else self._known_last()
            expects = forward.number and self.reducer.backward is None  # not if checkpointing repeats it
            self._watch.watch(output, forward, self._own.stand_ins(), expects=bool(expects))

    def _known_last(self) -> Forward:
        """Return the state of the last forward, or of one that begins now if none came since the last backward."""
        if slicing.in_slice():
            return forward_in_slice()
        if self._latest is not None:
            return self._latest
        module = self._module()
        training = module is not None and module.training
        return Forward(self.syncs, self._sync.weight(), self.syncs and training and self.tensors.sends_buffers)

    def in_hand(self) -> BatchesInHand | None:
        """Return the batches that sharded loaders have handed out; None if they are not for this group."""
        world = current_world()
        return None if world is None or world.world_size != self._world_size else world._in_hand

    def items_of(self, forward: Forward) -> Items | None:
        """Return the items counted for ``forward``, if any were."""
        world = current_world()
        return None if world is None or slicing.current is not None else world._in_hand.items_for(forward.items)

    # Backward -------------------------------------------------------------------------------------------------------

    def gradient_unannounced(self, *, has_come: bool) -> None:
        """Begin the backward that brings a gradient unannounced, unless it adds it to no parameter."""
        if not has_come and not self._watch.accumulates():
            return  # torch.autograd.grad
        if self._own.registered:
            _raise_if(self._own.find_registered())
        module, reducer = self._module(), self.reducer
        if module is not None and any(map(_requires_grad, self._frozen.params)):
            self._train_unfrozen(module)
            if self.reducer is not reducer:
                return  # the new one begins it; see Note [Thawed parameters]
        self._is_unannounced = has_come
        try:
            self._watch.open(self._known_last())
        finally:
            self._is_unannounced = False

    def _thawed_gradient_came(self, param: nn.Parameter) -> None:
        """Begin the backward that brings the gradient of a parameter that was frozen; see Note [Thawed parameters]."""
        if self.reducer.backward is None:
            self.reducer.begin_unannounced(param)
        name = self._frozen.name_of(param)
        if name is not None:
            raise refusals.thawed_too_late(self.reducer.whoami(), name)

    def parameters_unreached(self) -> None:
        """Raise if the parameters are no longer the module's own."""
        _raise_if(self._own.find_changed())

    def backward_begins(self, forward: Forward) -> None:
        """Let the reducer begin."""
        streams.current.end(self._module())
        if (forward.slice is not None or slicing.current is not None) and forward.slice != slicing.here():
            raise of_other_slice(self.whoami())
        self._items = self._sync.take_share(forward)
        compiled = _compiled_autograd()
        if compiled is not None and _is_at_work(compiled):
            raise refusals.in_compiled_autograd(self.whoami())
        if not self.reducer.fits():
            _raise_if(self._own.find_changed())
        flight.current.enter(_BACKWARD)
        self._current, self._batch = forward, forward.batch
        if forward.slice is not None and self._slices is not None:
            self._slices.backward_begins(unannounced=self._is_unannounced)
        self._sync.backward_begins(forward, self._items)

    def backward_joins(self, forward: Forward) -> None:
        """Raise if this forward has another weight; average if it averages."""
        current = self._current
        if current is None or forward is current:
            return
        if forward.slice != slicing.here():
            raise of_other_slice(self.whoami())
        # A backward need not come through the same forward first on all ranks, so the latest batch is taken.
        if forward.batch is not None:
            self._batch = latest_of(self._batch or (), forward.batch)
        if self.items_of(forward) is not self._items:
            raise refusals.weighed_apart(self.whoami())
        if self._items is None and forward.weight != current.weight:
            raise refusals.with_other_shares(self.whoami(), current, forward)
        joined = current
        if forward.sync and not current.sync:
            self._sync.require_sync()
            joined = forward
        # Whichever of them the backward has reached first, and on whatever ranks: any of them may ask for buffers.
        if not joined.sends_buffers and (forward.sends_buffers or current.sends_buffers):
            joined = joined._replace(sends_buffers=True)
        self._current = joined

    def backward_ends(self) -> None:
        """**Collective** if it averages. Write the averages, and make the buffers equal."""
        forward = self._current
        assert forward is not None  # backward_begins set it
        self._current = self._latest = None
        flight.current.enter(_REDUCE)
        left_out = self.forwards.settle() if forward.sync else 0
        outcome = self.reducer.finish(left_out=left_out, batch=self._batch)
        self.checks.backward_ended(forward, self._place_words)
        mistake = outcome.mistake
        if forward.sync:
            if outcome.missing or self._own.watches_all:
                mistake = mistake or self._own.left_out([self.reducer.params[i] for i in outcome.missing])
            if self.checks.warns_of_unused and outcome.unused is not None:
                self.checks.warn_of_unused([] if self._own.has_told else outcome.unused)
            self._sync.backward_ended(forward)
        if mistake is not None:
            raise mistake
        flight.current.leave(_BACKWARD)

    def _place_words(self) -> str:
        return f"{self.whoami()}, step {flight.current.run_step or self.reducer.step}"

    def backward_dies(self) -> None:
        """Let the reducer forget the backward."""
        self._current = self._latest = None
        self.reducer.abandon()

    # Steps in slices: see Sliceable ---------------------------------------------------------------------------------

    def _announce_in_slice(self, *, trains: bool) -> Forward:
        if self._slices is None or self._join_config.enable:
            reason = "its process group is not the whole world" if self._slices is None else "it is inside join"
            raise refusals.not_in_slices(self.whoami(), reason)
        return self._slices.forward_begins(trains=trains)

    def lay_out_if_unfrozen(self, module: nn.Module) -> None:
        """**Collective** if parameters that were frozen are trained now. Lay the buckets out for them."""
        if any(map(_requires_grad, self._frozen.params)):
            self._lay_out_again(module)

    # What users ask for ---------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See :func:`lockstep.no_sync`."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def compare_no_more(self) -> None:
        """Expect the ranks' replicas to differ from now on, as the user has chosen."""
        self.checks.expect_differences()
        if self._slices is not None:
            ending.leave(self._slices.number)

    # Join -----------------------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Serve :class:`torch.distributed.algorithms.Join`."""
        return self._sync.join_hook(divide_by_initial_world_size=bool(kwargs.get("divide_by_initial_world_size", True)))

    @property
    def joinable(self) -> Joinable:
        """Return the object that takes part in join: the replica itself."""
        return self

    @property
    def join_device(self) -> torch.device:
        """Return the device on which ranks tell each other that they have run out of data."""
        return self.tensors.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Return the replicas' process group."""
        return self._group


def _raise_if(error: LockstepError | None) -> None:
    if error is not None:
        raise error
