"""The moments at which nothing of a step is half done, and what a checkpoint of the latest of them needs.

Note [Points of rest]
~~~~~~~~~~~~~~~~~~~~~
Between two optimizer steps the parameters and the optimizers' states are as the last step has left them. So a
checkpoint of the moment at which that step was over can still be made long after it, as long as no optimizer has taken
the next one. What else has changed since then was noted at that moment, the *point of rest*:

- the loader's position, the options of the optimizers' groups, the states of the scheduler and of extra objects
  (Note [Small states] in ``noted.py``) and the random numbers, which are small: together they take some ten
  microseconds;
- what the model's forwards change by themselves, such as the statistics of batch norm, whose values are copied. Which
  tensors these are is learned. Batch norms are known: they change theirs in C++, where torch counts no change. Of all
  others that no optimizer steps, torch's counter of changes tells when one has changed, and at the first three points
  the beginning of its bits is compared as well, for writes that torch does not count (``buffer.data``). Of these three,
  those that follow no step teach nothing and do not count: a run that resumes at the end of a pass has three at once.

Where the training loop asks for its next batch there is such a point if an optimizer has stepped since the last one
(gradients that are being accumulated would be lost at any other), and there is one where the loader's pass is over, and
where an epoch is. Points between which no optimizer has stepped are kept side by side, since the ranks may have come to
different ones of them, and save that which all have come to.

From an optimizer's step until the next point of rest the rest of a turn of the user's loop is missing: the scheduler's
step, an average of weights. Only an evaluation is known not to be part of a step, by the model's mode, and a run can be
left in it with the batch in hand done. (A model that is in eval mode at an optimizer's step is trained so, and its mode
says nothing.)
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from lockstep import _torch, accelerator, bits
from lockstep.checkpoint.match import bare, plain_names
from lockstep.checkpoint.noted import Group, Noted, Objects, copied, with_groups
from lockstep.checkpoint.rng import Generators
from lockstep.checkpoint.state import Moment, Position, RunState, Stateful, Tally
from lockstep.errors import CheckpointError
from lockstep.step import loss_scale
from lockstep.text import listed

_copy = _torch.foreach_copy()

#: The number of points at which the bits of tensors are compared, to find those that change without a count, and the
#: bytes of each that are.
_LEARNS, _BEGINNING = 3, 2**16
#: Bytes of tensors that are copied at these points although they have not been seen to change.
_SMALL = 64 * 2**20


class LoaderPosition(Protocol):
    """A loader's position at one moment."""

    @property
    def state(self) -> Callable[[], dict[str, Any]]:
        """Returns the loader's state of that moment."""
        ...


class RestPoint(NamedTuple):
    """What a checkpoint of one moment needs besides what only optimizers change; see Note [Points of rest]."""

    counts: Tally
    #: Whether the epoch is done, by the user's word; None: the user did not say.
    epoch_done: bool | None
    #: None: there is no loader.
    loader: LoaderPosition | None
    scheduler: dict[str, Any] | None
    #: The groups of each of the run's optimizers.
    groups: list[list[Group]]
    #: What the extra objects held that are neither modules nor optimizers, by their names.
    extra: dict[str, Noted]
    #: The state of the loss scale; None: no losses are scaled.
    loss_scale: dict[str, Any] | None
    generators: Generators
    #: Reached when the device is done with all that was queued before; None: there is no device.
    queued: torch.Event | None

    @property
    def moment(self) -> Moment:
        """The place at which a run resumes that is saved as it was then."""
        return self.counts.moment(self.loader, epoch_done=self.epoch_done, metric=None)


class _Position(NamedTuple):
    """The position of a loader of another kind than lockstep's."""

    state: Callable[[], dict[str, Any]]
    epoch: object
    in_epoch: object


@dataclass(frozen=True)
class RunAtRest(RunState):
    """A run's objects with the states that they had at a point of rest."""

    point: RestPoint | None = None
    objects: Objects | None = None
    #: What forwards may have changed since, by its name in the model's state: the values of that moment.
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def model_state(self) -> dict[str, Any]:
        """See the base class."""
        state = super().model_state()
        renamed = self.kept.keys() - state.keys()
        if renamed:
            raise CheckpointError(
                f"model: {listed(sorted(renamed))} changes from step to step, and the state dict has it under another "
                "name, so the value between two steps is not known in the middle of one"
            )
        return {**state, **self.kept}

    def loader_state(self) -> dict[str, Any] | None:
        """See the base class."""
        return None if self.point is None or self.point.loader is None else self.point.loader.state()

    def scheduler_state(self) -> dict[str, Any] | None:
        """See the base class."""
        return None if self.point is None else self.point.scheduler

    def optimizer_state(self) -> dict[str, Any] | None:
        """See the base class."""
        return None if self.optimizer is None else self._state_of("optimizer", self.optimizer)

    @property
    def optimizer_groups(self) -> int | None:
        """See the base class."""
        return None if self.optimizer is None or self.point is None else len(self.point.groups[0])

    def extra_state(self, name: str) -> Mapping[str, Any]:
        """See the base class."""
        thing = self.extra[name]
        if isinstance(thing, torch.optim.Optimizer):
            return self._state_of(f"extra {name!r}", thing)
        if self.point is None or self.objects is None or name not in self.point.extra:
            return super().extra_state(name)
        state: Mapping[str, Any] = self.objects.state(name, self.point.extra[name])
        return state

    def loss_scale_state(self) -> dict[str, Any] | None:
        """See the base class."""
        state = super().loss_scale_state()
        return state if state is None or self.point is None else self.point.loss_scale

    def _state_of(self, name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self.point is None:
            return optimizer.state_dict()
        number = next(i for i, each in enumerate(self.optimizers()) if each is optimizer)
        return with_groups(name, optimizer, self.point.groups[number])

    def generators(self, device: torch.device) -> Generators:
        """See the base class."""
        return super().generators(device) if self.point is None else self.point.generators


@dataclass
class _Watched:
    """A tensor of the model's that no optimizer steps."""

    #: The module's dict that holds it, and its key there: modules may put another tensor in its place.
    holder: dict[str, torch.Tensor | None]
    key: str
    #: Its name in the model's state.
    name: str
    #: True if it is copied at every point, since torch does not count its changes.
    always: bool
    #: It, its version and a digest of its beginning at the last look; None: there was none.
    tensor: torch.Tensor | None = None
    version: int = -1
    digest: str = ""

    def look(self, *, compare: bool) -> bool:
        """Return whether it was seen to change since the last look, and note what it is now.

        Args:
            compare: compare its bits as well.
        """
        before, version, digest = self.tensor, self.version, self.digest
        now = self.tensor = self.holder.get(self.key)
        self.version = -1 if now is None or now.is_inference() else now._version
        self.digest = self._digest() if compare else ""
        if now is not before or now is None:
            return now is not None and before is not None
        if self.version != version or self.version == -1:
            return True
        if digest and self.digest and digest != self.digest:
            self.always = True
        return self.always

    def has_moved(self) -> bool:
        """Return whether it is not what it was at the last look, as far as can be seen."""
        now = self.holder.get(self.key)
        if now is not self.tensor or now is None:
            return now is not self.tensor
        return now.is_inference() or now._version != self.version or bool(self.digest and self._digest() != self.digest)

    def _digest(self) -> str:
        return "" if self.tensor is None or self.always else bits.hexdigest(self.tensor, _BEGINNING)


class Rest:
    """The points of rest of a run on this rank, as its main thread passes them. See Note [Points of rest].

    Args:
        run: the run.
        position: its place, as this rank counts it; made before, so that it has counted a step when this hears of it.
        device: this rank's.
    """

    def __init__(self, run: RunState, position: Position, device: torch.device) -> None:
        self._run, self._position, self._device = run, position, device
        #: Those since an optimizer's last step, in order.
        self.points: list[RestPoint] = []
        #: The random numbers at the last point of all.
        self.last_generators: Generators | None = None
        #: Optimizers' steps that have begun.
        self.begun = 0
        self._is_stepping = False
        #: True if the model was in eval mode when an optimizer stepped last.
        self._steps_in_eval = False
        #: Called where an optimizer is about to step, and calls :meth:`steps` when it may; None: it may at once.
        self.gate: Callable[[], None] | None = None
        self._watched: list[_Watched] | None = None
        self._kept: dict[str, torch.Tensor] = {}
        self._optimizers = run.optimizers()
        others = (nn.Module, torch.optim.Optimizer)
        self._objects = Objects(
            {name: thing for name, thing in run.extra.items() if not isinstance(thing, others)},
            lambda: [*run.model.parameters(), *run.model.buffers()],
        )
        #: The points that have taught something, and the steps that had begun at the last point.
        self._notes, self._begun_then = 0, 0
        weak = weakref.ref(self)
        for optimizer in run.optimizers():
            optimizer.register_step_pre_hook(partial(_before_step, weak))
            optimizer.register_step_post_hook(partial(_after_step, weak))

    def note(self, epoch_done: bool | None, *, only_after_a_step: bool = False) -> None:
        """Note a point of rest.

        Args:
            epoch_done: whether the epoch is done, by the user's word; None: the user did not say.
            only_after_a_step: do so only if an optimizer has stepped since the last one.
        """
        self._is_stepping = False  # a step that failed is over as well
        if only_after_a_step and self.points:
            return
        if self._watched != [] and self._keep_what_changed():
            self.points.clear()
        self.points.append(point := self._point(epoch_done))
        self.last_generators = point.generators

    @property
    def knows_steps(self) -> bool:
        """Whether the run has an optimizer, by which it is known when the parameters change."""
        return bool(self._run.optimizers())

    @property
    def is_stepping(self) -> bool:
        """Whether an optimizer's step is under way, or has failed since the last point."""
        return self._is_stepping

    @property
    def evaluates(self) -> bool:
        """Whether the model is in eval mode, and was not when an optimizer has stepped: some are trained so."""
        return not self._run.model.training and not self._steps_in_eval

    def evaluating(self, epoch_done: bool | None) -> RestPoint:
        """Return the present as a point of rest, in an evaluation in the middle of a turn of the loop.

        Args:
            epoch_done: as for :meth:`note`.
        """
        return self._point(epoch_done)

    def at(self, point: RestPoint) -> RunAtRest:
        """Return the run as it was at ``point``, one of :attr:`points` or one of :meth:`evaluating`.

        Raises:
            CheckpointError: something has changed since that was not copied.
        """
        run = self._run
        noted = any(point is one for one in self.points)
        stepped = self._stepped()  # what was frozen once may be trained by now
        watched = [each for each in self._watched or () if noted and id(each.holder.get(each.key)) not in stepped]
        kept = {each.name: self._kept[each.name] for each in watched if each.name in self._kept}
        unknown = [each.name for each in watched if each.name not in kept and each.has_moved()]
        if unknown:
            raise CheckpointError(
                f"model: {listed(unknown)} has changed for the first time in the middle of a step, so the value that "
                "it had between the last two is not known"
            )
        return RunAtRest(run.model, run.optimizer, run.scheduler, run.loader, run.extra, point, self._objects, kept)

    def _point(self, epoch_done: bool | None) -> RestPoint:
        run, device = self._run, self._device
        loader, scheduler, scale = run.loader, run.scheduler, loss_scale.in_force()
        return RestPoint(
            self._position.now(),
            epoch_done,
            None if loader is None else getattr(loader, "position_now", partial(_position_of, loader))(),
            None if scheduler is None else copied(scheduler.state_dict()),
            [*map(Group.all_of, self._optimizers)],
            self._objects.note(),
            None if scale is None else scale.state_dict(),
            Generators.now(device),
            None if device.type == "cpu" else accelerator.mark(device),
        )

    def steps(self) -> None:
        """Note that an optimizer's step begins; for the gate."""
        self._is_stepping = True

    def _keep_what_changed(self) -> bool:
        """Copy the tensors that forwards have changed. Return whether the copies of the last point are others now."""
        if self._watched is None:
            self._watched = self._list_watched()
        learns = self._notes < _LEARNS
        if self._notes == 0 or self._begun_then != self.begun or not self.knows_steps:
            self._notes += 1
        self._begun_then = self.begun
        changed = {id(each) for each in self._watched if each.look(compare=learns)}
        small = learns and sum(each.tensor.nbytes for each in self._watched if each.tensor is not None) <= _SMALL
        into, of, others = [], [], False
        for each in self._watched:
            now, held = each.tensor, self._kept.get(each.name)
            if now is None:
                others |= self._kept.pop(each.name, None) is not None
            elif each.always or small or held is not None or id(each) in changed:
                if held is None or held.shape != now.shape or held.dtype != now.dtype or held.device != now.device:
                    self._kept[each.name], others = now.detach().clone(), True
                elif each.always or id(each) in changed:
                    into.append(held)
                    of.append(now)
        # Where an optimizer has stepped there is no point left that has the old copies.
        if into and self.points and all(each.is_cpu for each in of):
            others |= not all(map(bits.same, of, into))
        if into:
            with torch.no_grad():
                _copy(into, of)
        return others

    def _stepped(self) -> set[int]:
        """Return the ids of the parameters that optimizers step."""
        groups = [group for each in self._run.optimizers() for group in each.param_groups]
        return {id(param) for group in groups for param in group["params"] if param.requires_grad}

    def _list_watched(self) -> list[_Watched]:
        model = bare(self._run.model)
        plain = plain_names(model)
        stepped = self._stepped()
        norms = _torch.batch_norm()
        found = []
        for path, module in model.named_modules(remove_duplicate=False):
            always = isinstance(module, norms)
            held = [(module._buffers, key) for key in module._buffers if key not in module._non_persistent_buffers_set]
            held += [(module._parameters, key) for key, one in module._parameters.items() if id(one) not in stepped]
            for holder, key in held:
                name = plain(f"{path}.{key}" if path else key)
                found.append(_Watched(holder, key, name, always and holder is module._buffers))
        return found


def _position_of(loader: Stateful) -> _Position:
    state = copy.deepcopy(loader.state_dict())
    return _Position(lambda: state, getattr(loader, "epoch", None), getattr(loader, "in_epoch", False))


@_torch.mark_untraced
def _before_step(weak: weakref.ref[Rest], *_: object) -> None:
    rest = weak()
    if rest is None:
        return
    # First said, then asked: who holds this rank sees it step, or is seen by it.
    rest._is_stepping = True
    gate = rest.gate
    if gate is not None:
        rest._is_stepping = False
        gate()
    rest.begun += 1


@_torch.mark_untraced
def _after_step(weak: weakref.ref[Rest], *_: object) -> None:
    rest = weak()
    if rest is not None:
        rest._is_stepping, rest._steps_in_eval = False, not rest._run.model.training
        rest.points.clear()
