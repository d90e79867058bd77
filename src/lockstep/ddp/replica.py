"""One module in a group of replicas: its reducer, its buffers, and what each forward and backward does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.utils.hooks import RemovableHandle

from lockstep import _torch, callsite
from lockstep.comm import ending
from lockstep.comm.init import current_world
from lockstep.ddp.bucket import Bucket
from lockstep.ddp.buffers import broadcast_tensors
from lockstep.ddp.checks import GradientChecks
from lockstep.ddp.comm_hooks import CommHook, keeps_equal
from lockstep.ddp.compare import compare_replicas
from lockstep.ddp.finite import FiniteCheck
from lockstep.ddp.hooks import BackwardListener, BackwardWatch, Forward
from lockstep.ddp.join import ReplicaJoinHook, shake_hands
from lockstep.ddp.layout import lay_out, sparse_parameters
from lockstep.ddp.members import Buffers, buffers_of, parameters_of, tensors_of
from lockstep.ddp.options import ReplicaOptions
from lockstep.ddp.parameters import OwnParameters
from lockstep.ddp.reducer import Reducer
from lockstep.ddp.slice_member import SliceMember, forward_in_slice, of_other_slice
from lockstep.errors import LockstepError, listed
from lockstep.job import flight
from lockstep.job.page import Phase
from lockstep.step import slicing, streams
from lockstep.step.share import BatchesInHand, Items, Place

#: Whether a forward is part of a function that torch.func transforms: of nobody's training step.
_transformed = _torch.transforms_active()
_wrapper_around = _torch.wrapper_around()
_FORWARD, _EVALUATE, _BACKWARD = int(Phase.FORWARD), int(Phase.EVALUATE), int(Phase.BACKWARD)
_REDUCE = int(Phase.REDUCE)


class Replica(Joinable, BackwardListener):
    """Keeps one module equal to its replicas on the other ranks. Made by :func:`lockstep.replicate`."""

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, options: ReplicaOptions, *, unfit: str | None = None
    ) -> None:
        Joinable.__init__(self)
        self._module = weakref.ref(module)
        self._group, self._options = group, options
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        #: Whether backwards average, and whether buffers are sent around them; the user may turn either off for a
        #: while.
        self.syncs = True
        self.sends_buffers = options.broadcast_buffers
        #: What undoes the hooks of the module itself, such as those that announce its forwards if it is not wrapped.
        self.announcing: list[RemovableHandle] = []
        self._is_released = False
        self._divides_by_initial_world_size = True
        self._buffers = Buffers(module)
        self._latest: Forward | None = None
        self._current: Forward | None = None
        self._checks = GradientChecks(group, options, lambda: self._reducer)
        #: What the backward under way is weighed by, if its items are counted.
        self._items: Items | None = None
        #: Which batch it is of; see Note [Batches compared].
        self._batch: Place | None = None
        _refuse_traced_backward()
        self._compare(module, unfit=unfit)
        if options.init_sync:
            buffers = options.broadcast_buffers if options.init_sync_buffers is None else options.init_sync_buffers
            self._broadcast(tensors_of(module, buffers=buffers), 0, "sending rank 0's parameters")
        self._reducer = self._lay_out(module)
        self._watch = BackwardWatch(self, self._reducer.params)
        # torch's hooks and graph nodes hold what they refer to where Python's collector can't see it, so a replica and
        # its buckets would stay for ever.
        self._closing = weakref.finalize(module, self._close)
        self._closing.atexit = False
        self._warns_of_unused = not options.find_unused_parameters and self._rank == 0
        #: Whether a backward begins with a gradient that is there already.
        self._is_unannounced = False
        #: Its part in steps in slices, which are the whole world's.
        self._slices = SliceMember(self) if self._in_hand() is not None else None
        if self._slices is not None and self._checks.compares:
            ending.follow(self._slices.number, self)

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

    def _lay_out(self, module: nn.Module) -> Reducer:
        """Plan the buckets for the parameters that are trained now, and listen to them."""
        names, params = self._find_trained(module)
        self._checks.look_at(params, names)
        reducer = lay_out(
            module,
            params,
            names,
            group=self._group,
            options=self._options,
            checks=self._checks,
            batches=self._in_hand() is not None,
            listener=self,
        )
        self._handles = [
            param.register_post_accumulate_grad_hook(reducer.ready_hook(i)) for i, param in enumerate(params)
        ]
        return reducer

    def _find_trained(self, module: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
        """Return names and parameters of those that are trained now, and note the others."""
        named = [(name, param) for name, param in parameters_of(module) if param.requires_grad]
        self._frozen = [param for _, param in parameters_of(module) if not param.requires_grad]
        self._own = OwnParameters(module, self.whoami)
        self._checks.turn_to(module)
        return [name for name, _ in named], [param for _, param in named]

    def whoami(self) -> str:
        """Say which rank this is."""
        return f"rank {self._rank} of {self._world_size}"

    def _lay_out_again(self, module: nn.Module) -> None:
        """Lay the buckets out anew: parameters that were frozen are trained now."""
        self._compare(module)
        old = self._reducer
        self._remove_hooks()
        self._reducer = self._lay_out(module)
        self._reducer.take_over(old)
        if self._slices is not None:
            self._slices.turn_to_new_layout()
        self._watch.turn_to(self._reducer.params)

    def _close(self) -> None:
        if self._slices is not None:
            ending.say_now(self._slices.number, self)
            self._slices.close()
        self._remove_hooks()
        self._checks.stop()
        self._watch.close()
        self._own.close()

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward is under way."""
        return self._reducer.backward is not None

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
        streams.current().end(self._module())
        for handle in self.announcing:
            handle.remove()
        self._remove_hooks()
        self._checks.stop()
        self._watch.end()
        self._own.close()
        self._reducer.free()
        self._closing.detach()  # it would keep this replica for as long as the module lives

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def at_end(self) -> tuple[str, list[tuple[str, str]]] | None:
        """Return what the ranks compare at the end of the job; None if nothing was averaged."""
        has_sliced = self._slices is not None and self._slices.has_trained
        if not self._reducer.params or not (self._reducer.step or has_sliced):
            return None
        return f"the replica of {len(self._reducer.params)} parameters", self._reducer.digests()

    @property
    def module(self) -> nn.Module | None:
        """The module, while it exists."""
        return self._module()

    @property
    def reducer(self) -> Reducer:
        """What averages its gradients; another one when parameters that were frozen are trained."""
        return self._reducer

    @property
    def bucket_caps(self) -> Sequence[int]:
        """Bytes of the buckets that are sent during backward, or would be; see ``plan_buckets``."""
        return self._options.bucket_caps

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets that gradients lie in, in the order in which they are reduced."""
        return self._reducer.buckets

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold replicas."""
        return self._group

    # Forward --------------------------------------------------------------------------------------------------------

    @_torch.mark_untraced
    def before_forward(self, module: nn.Module) -> None:
        """**Collective** in training, outside no_sync, if there are buffers to send or inside join."""
        if self._is_released:
            raise LockstepError(
                f"rank {self._rank} of {self._world_size}: this {type(module).__name__} was released: lockstep.release "
                "has undone its wrapper. Train the module itself, or wrap it again"
            )
        # (Checkpointing repeats a forward inside backward: nothing is sent twice.)
        if self._reducer.backward is None and not _transformed():
            self._prepare_forward(module)
        # Last, since a forward that was announced must be left again, also if it fails.
        streams.current().enter(module, draws=module.training)

    def _prepare_forward(self, module: nn.Module) -> None:
        records = torch.is_grad_enabled()
        wrapper = _wrapper_around(module)
        if wrapper is not None:
            raise LockstepError(
                f"{self.whoami()}: this {type(module).__name__} is a replica of lockstep's inside torch's {wrapper}, "
                "and both would average its gradients, which is not exact and twice the work: leave one of them out. "
                "lockstep.release(model) makes a plain module again, and lockstep.DistributedDataParallel has the "
                "interface of torch's"
            )
        if records and self._own.has_registered:
            _raise_if(self._own.find_registered())
        if module.training:
            flight.current.enter(_FORWARD)
        else:
            flight.current.enter(_EVALUATE)
            flight.current.batch = 0  # no step is taken with it
        for param in self._frozen:
            if param.requires_grad:
                _raise_if(self._find_unfrozen_in_step())
                if self._own.are_all(module):  # else at the next forward that uses the module's own
                    self._lay_out_again(module)
                break
        self._latest = self._announce(module, records=records)

    def _announce(self, module: nn.Module, *, records: bool) -> Forward:
        """**Collective** as :meth:`before_forward`. Return what a forward that is about to begin knows."""
        if slicing.current() is not None:
            return self._announce_in_slice(trains=records or module.training)
        averages = self.syncs and records
        sends_buffers = averages and module.training and self.sends_buffers
        source, divisor, joins = 0, None, self._join_config.enable
        if joins:
            Join.notify_join_context(self)
            step = shake_hands(self._group, active=True, sends_buffers=sends_buffers, averages=averages)
            source = step.active[0]
            divisor = None if self._divides_by_initial_world_size else len(step.active)
        if self._checks.drift is not None:
            self._checks.drift.pause(joins)
        if sends_buffers:
            self._send_buffers(module, source)
        in_hand = self._in_hand()
        items = None if in_hand is None else in_hand.read(for_backward=records)
        number = self._watch.forwards.begin() if averages and module.training and not joins else 0
        batch = None if in_hand is None or joins or not averages else in_hand.place()
        return Forward(self.syncs, self._weight(in_hand), sends_buffers, divisor, number, items, batch=batch)

    @_torch.mark_untraced
    def after_forward(self, output: Any) -> None:
        """Look out for the backward through ``output``."""
        if torch.is_grad_enabled() and not _transformed():
            self._watch.watch(output, self._known_last(), self._own.stand_ins())

    def _send_buffers(self, module: nn.Module, source: int) -> None:
        buffers = self._buffers.current(module) if self._world_size > 1 else []
        if buffers:
            self._broadcast(buffers, source, "sending the buffers")

    def _known_last(self) -> Forward:
        """Return what the last forward knew, or would know now if none came since the last backward."""
        if slicing.in_slice():
            return forward_in_slice()
        if self._latest is not None:
            return self._latest
        module = self._module()
        training = module is not None and module.training
        return Forward(self.syncs, self._weight(self._in_hand()), self.syncs and training and self.sends_buffers)

    def _weight(self, in_hand: BatchesInHand | None) -> float:
        """See Note [Exact mean]; 1 where no sharded batch is in hand, or in a group that is not the whole world."""
        share = None if in_hand is None else in_hand.share
        return 1.0 if share is None or isinstance(share, Items) else share.weight(self._world_size)

    def _in_hand(self) -> BatchesInHand | None:
        """Return what sharded loaders have handed out; None where that is not this group's."""
        world = current_world()
        return None if world is None or world.world_size != self._world_size else world.in_hand

    def _take_share(self, forward: Forward) -> Items | None:
        """Take what the backward under way is weighed by from what is in hand; see Note [Batches in hand].

        Returns:
            Items, if they are counted (Note [Counted items]); None: the share of samples that the forward has found.
        """
        world = current_world()
        if world is None:
            return None
        is_sliced = slicing.current() is not None  # a slice weighs what it holds, whatever else is in hand
        items = None if is_sliced else world.in_hand.items_for(forward.items)
        if world.world_size == self._world_size:
            if not is_sliced:
                world.refuse_contested_share("this backward", of_backward=True)
            world.in_hand.take(items)
            if items is not None and world.in_hand.is_outside(items):
                self._checks.weighs(items)
        return items

    def _items_of(self, forward: Forward) -> Items | None:
        world = current_world()
        return None if world is None or slicing.current() is not None else world.in_hand.items_for(forward.items)

    # Backward -------------------------------------------------------------------------------------------------------

    def gradient_unannounced(self) -> None:
        """Begin the backward that brings the gradient."""
        self._is_unannounced = True
        try:
            self._watch.open(self._known_last())
        finally:
            self._is_unannounced = False

    def parameters_unreached(self) -> None:
        """Raise if that is because they are not the module's any more."""
        _raise_if(self._own.find_changed())

    def backward_begins(self, forward: Forward) -> None:
        """Let the reducer begin."""
        streams.current().end(self._module())
        if forward.slice != slicing.here():
            raise of_other_slice(self.whoami())
        self._items = self._take_share(forward)
        if _torch.in_compiled_autograd():
            raise LockstepError(
                f"rank {self._rank} of {self._world_size}: compiled autograd runs this backward, and it does not tell "
                "when a backward has ended, so the gradients would not be averaged: switch it off "
                "(torch._dynamo.config.compiled_autograd, torch._dynamo.compiled_autograd). torch.compile compiles "
                "the backward of what it compiles without it"
            )
        if not self._reducer.fits():
            _raise_if(self._own.find_changed())
        flight.current.enter(_BACKWARD)
        self._current, self._batch = forward, forward.batch
        if forward.slice is not None and self._slices is not None:
            self._slices.backward_begins(unannounced=self._is_unannounced)
        self._begin(forward)

    def _begin(self, forward: Forward) -> None:
        items = None if self._items is None else self._items.count
        if items is not None and self._join_config.enable:
            raise LockstepError(
                f"{self.whoami()}: world.weigh inside lockstep.join: a rank that has run out of batches does not know "
                "that the others count items. Let lockstep.shard cut the batches, so that every rank takes every step"
            )
        self._reducer.begin(
            sync=forward.sync,
            weight=forward.weight,
            divisor=forward.divisor,
            items=items,
            joins=self._join_config.enable,
        )

    def backward_joins(self, forward: Forward) -> None:
        """Raise if this forward weighs differently; average if it does."""
        current = self._current
        if current is None or forward is current:
            return
        if forward.slice != slicing.here():
            raise of_other_slice(self.whoami())
        # (Through which forward a backward comes first need not be the same on all ranks.)
        if forward.batch is not None:
            self._batch = max(self._batch or (), forward.batch)
        if self._items_of(forward) is not self._items:
            raise LockstepError(
                f"{self.whoami()}: one backward goes through forwards that were weighed apart (World.weigh), so no "
                "one number of items makes their mean exact: call backward once for each (inside lockstep.no_sync for "
                "all but the last)"
            )
        if self._items is None and forward.weight != current.weight:
            raise LockstepError(
                f"rank {self._rank} of {self._world_size}: one backward goes through forwards of batches with "
                f"different shares (weights {current.weight:g} and {forward.weight:g}), so no mean of them is exact: "
                "call backward once for each batch (inside lockstep.no_sync for all but the last)"
            )
        if forward.sync and not current.sync:
            self._require_sync()
            self._current = forward

    def _require_sync(self) -> None:
        self._reducer.require_sync()

    def backward_ends(self) -> None:
        """**Collective** if it averages. Write the averages, and make the buffers equal."""
        forward = self._current
        assert forward is not None  # backward_begins set it
        self._current = self._latest = None
        flight.current.enter(_REDUCE)
        left_out = self._watch.forwards.settle() if forward.sync else 0
        outcome = self._reducer.finish(left_out=left_out, batch=self._batch)
        self._checks.backward_ended(forward, self._place_words)
        mistake = outcome.mistake
        if forward.sync:
            if outcome.missing or self._own.watches_all:
                mistake = mistake or self._own.left_out([self._reducer.params[i] for i in outcome.missing])
            if self._warns_of_unused and outcome.unused is not None:
                self._warns_of_unused = False
                self._warn_unused(outcome.unused)
            self._send_buffers_again(forward)
        _raise_if(mistake)
        flight.current.leave(_BACKWARD)

    def _place_words(self) -> str:
        return f"{self.whoami()}, step {self._reducer.step}"

    def backward_dies(self) -> None:
        """Let the reducer forget the backward."""
        self._current = self._latest = None
        self._reducer.abandon()

    def _send_buffers_again(self, forward: Forward) -> None:
        module = self._module()
        # Once more, so that replicas are equal after every step: an evaluation or a checkpoint that follows sees the
        # same buffers on every rank and needs no communication. See Note [Buffers] in api.py.
        if forward.sends_buffers and module is not None and not self._join_config.enable:
            self._send_buffers(module, 0)

    def _warn_unused(self, names: Sequence[str]) -> None:
        if not names or self._own.has_told:
            return  # the user knows of what was used in their places
        shown = listed([*map(repr, names)], most=10)
        callsite.warn(
            f"no rank used the parameter(s) {shown} in the first backward. That is fine for the gradients of the "
            "others; if it is what you mean, find_unused_parameters=True ends this warning"
        )

    # Steps in slices: see Sliceable ---------------------------------------------------------------------------------

    def _find_unfrozen_in_step(self) -> LockstepError | None:
        if slicing.current() is None:
            return None
        return LockstepError(
            f"{self.whoami()}: parameters that were frozen when the step began are trained in one of its slices, "
            "which all ranks have to agree on: unfreeze parameters between steps"
        )

    def _announce_in_slice(self, *, trains: bool) -> Forward:
        if self._slices is None or self._join_config.enable:
            reason = "its process group is not the whole world" if self._slices is None else "it is inside join"
            raise LockstepError(
                f"{self.whoami()}: a step in slices has been through a replica that can't take part: {reason}"
            )
        return self._slices.forward_begins(trains=trains)

    @property
    def check(self) -> FiniteCheck | None:
        """What looks at gradients that are averaged; None if nothing does, or in front of the optimizer's step."""
        return self._checks.finite

    def lay_out_if_unfrozen(self, module: nn.Module) -> None:
        """**Collective** if parameters that were frozen are trained now. Lay the buckets out for them."""
        if any(param.requires_grad for param in self._frozen):
            self._lay_out_again(module)

    def buffers_to_send(self, module: nn.Module) -> list[Tensor]:
        """Return the buffers that are to be the same on all ranks."""
        return self._buffers.current(module) if self.sends_buffers else []

    def why_not_in_slices(self) -> str:
        """Return what its way of training has against slices; empty: nothing."""
        return ""

    def sliced_step_ended(self, step: slicing.SlicedStep) -> None:
        """**Collective** in some steps. Check what came of it."""
        self._checks.sliced_step_ended(step)

    # What users ask for ---------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See :func:`lockstep.no_sync`."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def send_now(self, *, params: bool) -> None:
        """**Collective.** Send rank 0's buffers to all ranks, and its parameters if asked for."""
        module = self._living_module()
        tensors = tensors_of(module, buffers=True) if params else [buffer for _, buffer in buffers_of(module)]
        self._broadcast(tensors, 0, "sending rank 0's parameters and buffers" if params else "sending the buffers")

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """See :func:`lockstep.register_comm_hook`."""
        if not callable(hook):
            raise TypeError(f"a comm hook must be callable, not {type(hook).__name__}")
        self._reducer.register_comm_hook(state, hook)
        if self._checks.compares and self._options.compare_every == "auto" and not keeps_equal(hook):
            self._checks.expect_differences()
            if self._slices is not None:
                ending.leave(self._slices.number)

    # Join -----------------------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Serve :class:`torch.distributed.algorithms.Join`."""
        self._divides_by_initial_world_size = bool(kwargs.get("divide_by_initial_world_size", True))
        return ReplicaJoinHook(self, divide_by_initial_world_size=self._divides_by_initial_world_size)

    @property
    def join_device(self) -> torch.device:
        """The device on which ranks tell each other that they have run out of data."""
        module = self._module()
        first = None if module is None else next(module.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The replicas' process group."""
        return self._group

    def answer_step(self, *, divide_by_initial_world_size: bool) -> None:
        """**Collective.** Take part in one step of the ranks that still have data; see Note [Join handshake]."""
        step = shake_hands(self._group, active=False, sends_buffers=False, averages=False)
        if self._checks.drift is not None:
            self._checks.drift.pause(True)
        if step.sends_buffers:
            self._send_buffers(self._living_module(), step.active[0])
        if step.averages:
            divisor = self._world_size if divide_by_initial_world_size else len(step.active)
            self._reducer.match_without_gradients(divisor)

    def adopt_final_state(self, *, is_last_joiner: bool) -> None:
        """**Collective.** Take the parameters and buffers of the first rank among those that trained to the end."""
        step = shake_hands(self._group, active=is_last_joiner, sends_buffers=False, averages=False)
        tensors = tensors_of(self._living_module(), buffers=self.sends_buffers)
        self._broadcast(tensors, step.active[0], "sending the final parameters")
        self._share_random_numbers(step.active[0])

    def _share_random_numbers(self, source: int) -> None:
        """**Collective.** Take rank ``source``'s common random numbers: ranks that took fewer steps drew fewer."""
        if self._in_hand() is not None:
            common = streams.current().state.to(self.join_device)
            self._broadcast([common], source, "sending the common random numbers")
            streams.current().state = common.cpu()

    def _living_module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise LockstepError("the replicated module no longer exists: keep a reference to it inside join")
        return module

    def _broadcast(self, tensors: Iterable[Tensor], source: int, what: str) -> None:
        say: Callable[[], str] = lambda: f"rank {self._rank} of {self._world_size}: {what}"  # noqa: E731
        broadcast_tensors(tensors, group=self._group, source=source, what=say)


def _raise_if(error: LockstepError | None) -> None:
    if error is not None:
        raise error


def _refuse_traced_backward() -> None:
    if _torch.traces_backward():
        raise LockstepError(
            "torch._dynamo.config.trace_autograd_ops is on: torch then silently leaves out the backward of a compiled "
            "step whose forward it could not trace as one graph, and it can't trace a replica's: switch it off. The "
            "step's parts are compiled all the same"
        )
