"""The moments at which nothing of a step is half done, and what a checkpoint of the latest of them needs.

Note [Points of rest]
~~~~~~~~~~~~~~~~~~~~~
Between two optimizer steps the parameters and the optimizers' states are as the last step has left them. So a
checkpoint of the moment at which that step was over can still be made long after it, as long as no optimizer has taken
the next one. What else has changed since then was noted at that moment, the *point of rest*:

- the loader's position, the options of the optimizers' groups, the states of the scheduler, of extra objects and of
  modules beside their tensors (Note [Small states] in ``noted.py``) and the random numbers, which are small: together
  they take some ten microseconds;
- what forwards and the program change in tensors without an optimizer, such as the statistics of batch norm, whose
  values are copied (Note [Watched tensors] in ``watched.py``).

Where the training loop asks for its next batch there is such a point if an optimizer has stepped since the last one
(gradients that are being accumulated would be lost at any other), and so there is where the loop is left early; and
there is one where the loader's pass is over, and where an epoch is. Points between which no optimizer has stepped are
kept side by side, since the ranks may have come to different ones of them, and save that which all have come to. Where
what was copied changes between two of them, those before are dropped, and a rank that is still there is waited for.

On an accelerator the host may be past a step that the device has not begun, and the points before that step still hold:
Note [A host that is ahead of its device] in ``pending.py``.

From an optimizer's step until the next point of rest the rest of a turn of the user's loop is missing: the scheduler's
step, an average of weights. Only an evaluation is known not to be part of a step, by the model's mode, and a run can be
left in it with the batch in hand done. (A model that is in eval mode at an optimizer's step is trained so, and its mode
says nothing.) What the loop does between such an evaluation and its next batch is lost. So a scheduler or an extra
object that has changed in other turns of the loop must have changed in this one already; one that waits for what an
evaluation finds, ReduceLROnPlateau, steps after it unless it was seen to step between two epochs only; and parameters
must be what the step has left.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep import _torch, accelerator
from lockstep.checkpoint.match import bare, describe_optimizer
from lockstep.checkpoint.noted import BesideTensors, Objects, OptionGroup, copied, same, with_groups
from lockstep.checkpoint.pending import PendingStep, PendingSteps
from lockstep.checkpoint.rest_point import RestPoint
from lockstep.checkpoint.rng import Generators
from lockstep.checkpoint.state import Position, RunState, Stateful
from lockstep.checkpoint.watched import MODEL, After, Place, Watch
from lockstep.errors import CheckpointError
from lockstep.step import loss_scale
from lockstep.text import listed

#: The scheduler, among the names of extra objects.
_SCHEDULER = ""
#: The objects whose state is known by their tensors.
_TENSORS = (nn.Module, torch.optim.Optimizer)


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
    beside: Objects | None = None
    #: What may have changed since without an optimizer, by its place: the values of that moment.
    kept: dict[Place, torch.Tensor] = field(default_factory=dict)
    #: The step that the host has taken since, and the device must not have begun; None: it has taken none.
    pending: PendingStep | None = None

    def model_state(self) -> dict[str, Any]:
        """See the base class."""
        return self._with_kept(MODEL, super().model_state())

    def _with_kept(self, owner: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a module's state with the values of that moment."""
        kept = {name: value for (each, name), value in self.kept.items() if each == owner}
        renamed = kept.keys() - state.keys()
        if renamed:
            raise CheckpointError(
                f"{_words(owner)}: {listed(sorted(renamed))} changes from step to step, and the state dict has it "
                "under another name, so the value between two steps is not known in the middle of one"
            )
        if self.point is None or self.beside is None or owner not in self.point.beside:
            return {**state, **kept}
        return {**state, **kept, **self.beside.state(owner, self.point.beside[owner])}

    def loader_state(self) -> dict[str, Any] | None:
        """See the base class."""
        return None if self.point is None or self.point.loader is None else self.point.loader.state()

    def scheduler_state(self) -> dict[str, Any] | None:
        """See the base class."""
        return None if self.point is None else self.point.scheduler

    def optimizer_state(self) -> dict[str, Any] | None:
        """See the base class."""
        return None if self.optimizer is None else self._state_of("optimizer", self.optimizer)

    def described(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See the base class."""
        groups = None if self.point is None else len(self.point.groups[self._number_of(optimizer)])
        return describe_optimizer(optimizer, groups=groups)

    def _number_of(self, optimizer: torch.optim.Optimizer) -> int:
        return next(number for number, each in enumerate(self.optimizers()) if each is optimizer)

    def extra_state(self, name: str) -> Mapping[str, Any]:
        """See the base class."""
        thing = self.extra[name]
        if isinstance(thing, torch.optim.Optimizer):
            return self._state_of(f"extra {name!r}", thing)
        if isinstance(thing, nn.Module):
            return self._with_kept(name, super().extra_state(name))
        if self.point is None or self.objects is None:
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
        number = self._number_of(optimizer)
        state = with_groups(name, optimizer, self.point.groups[number])
        return state if self.pending is None else self.pending.on_host[number].put_into(state)

    def generators(self, device: torch.device) -> Generators:
        """See the base class."""
        return super().generators(device) if self.point is None else self.point.generators

    def require_unchanged(self) -> None:
        """Refuse what was read if it may have changed meanwhile.

        Raises:
            CheckpointError: it may have.
        """
        if self.pending is not None:
            self.pending.require()


class Rest:
    """The points of rest of a run on this rank, as its main thread passes them. See Note [Points of rest].

    Args:
        run: the run.
        position: its place, as this rank counts it; made before, so that it has counted a step when this hears of it.
        device: this rank's.
    """

    def __init__(self, run: RunState, position: Position, device: torch.device) -> None:
        self._run, self._position, self._device = run, position, device
        #: Those since an optimizer's last step, in order, and how many there were before them of which what was copied
        #: has changed since.
        self.points: list[RestPoint] = []
        self.dropped = 0
        #: The last point of all.
        self._last: RestPoint | None = None
        #: The scheduler and the extra objects that are no modules, by their names; those that have changed in turns of
        #: the loop, and between them; and how many turns there were.
        self._things: dict[str, Stateful] = {} if run.scheduler is None else {_SCHEDULER: run.scheduler}
        self._things |= {name: thing for name, thing in run.extra.items() if not isinstance(thing, _TENSORS)}
        self._has_objects = len(self._things) > (run.scheduler is not None)
        self._in_turns: set[str] = set()
        self._elsewhere: set[str] = set()
        self._turns = 0
        #: Optimizers' steps that have begun.
        self.begun = 0
        self._is_stepping = False
        #: True if the model was in eval mode when an optimizer stepped last.
        self._steps_in_eval = False
        #: Called where an optimizer is about to step, and calls :meth:`steps` when it may; None: it may at once.
        self.gate: Callable[[], None] | None = None
        self._watch = Watch(run)
        self._optimizers = run.optimizers()
        self._objects = Objects(
            {name: thing for name, thing in self._things.items() if name != _SCHEDULER},
            lambda: [*run.model.parameters(), *run.model.buffers()],
            words=lambda name: f"{_words(name)} ({type(run.extra[name]).__name__})",
        )
        modules = {
            MODEL: bare(run.model),
            **{n: thing for n, thing in run.extra.items() if isinstance(thing, nn.Module)},
        }
        beside = {name: found for name, module in modules.items() if (found := BesideTensors(module))}
        #: What their state dicts have besides tensors, and whether they have any.
        self._has_beside = bool(beside)
        self._beside = Objects(
            beside,
            tuple,
            words=lambda name: f"{_words(name)}: what its state dict has besides tensors (get_extra_state(), hooks)",
        )
        #: The steps that had begun at the last point; -1: there was none.
        self._begun_then = -1
        #: The steps that the device may not have begun; None: there is no device, or the ranks train apart.
        self.pending: PendingSteps | None = None
        if device.type != "cpu" and self._optimizers and run.local_training is None:
            self.pending = PendingSteps(self._optimizers, device)
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
        has_stepped = self._begun_then != self.begun
        teaches = has_stepped or not self.knows_steps
        after = After.STEP if has_stepped and self._begun_then >= 0 else After.OTHER
        if self._watch.note(after, alone=not self.points, teaches=teaches):
            self.dropped += len(self.points)
            self.points.clear()
        self._begun_then = self.begun
        self.points.append(point := self._point(epoch_done))
        if self._last is not None:
            self._turns += after is After.STEP
            if self._things or self._watch.owners:
                self._learn_turns(self._last, point, after)
        self._last = point

    @property
    def last_generators(self) -> Generators | None:
        """The random numbers at the last point of all."""
        return None if self._last is None else self._last.generators

    def _learn_turns(self, last: RestPoint, point: RestPoint, after: After) -> None:
        """Note what has changed since the last point: in a turn of the loop, or between two."""
        changes = self._in_turns if after is After.STEP else self._elsewhere
        for name in self._things:
            if name not in changes and not self._is_as_in(last, name, point):
                changes.add(name)
        if after is After.STEP:
            changes |= self._watch.updated

    def _is_as_in(self, then: RestPoint, name: str, point: RestPoint | None = None) -> bool:
        """Return whether the scheduler, or an extra object that is no module, holds at a point, or now, what it held
        then."""
        if name == _SCHEDULER:
            return same(then.scheduler, self._scheduler_state() if point is None else point.scheduler)
        mark = then.extra[name].mark
        return mark is None or mark == (self._objects.mark(name) if point is None else point.extra[name].mark)

    def _scheduler_state(self) -> dict[str, Any] | None:
        return None if self._run.scheduler is None else copied(self._run.scheduler.state_dict())

    def missing_in_turn(self) -> str:
        """Return what is still to come in the turn of the loop in the middle of which the model is evaluated, and would
        be lost if the run was left there; empty: nothing, as far as is known. For another thread."""
        moved = self._watch.moved_since_step()
        if moved:
            return f"parameters ({listed(moved)}) are not what the optimizer's step has left"
        last = self._last
        if last is None:
            return ""
        for name, thing in self._things.items():
            waits = isinstance(thing, ReduceLROnPlateau) and name not in self._elsewhere
            is_new = name == _SCHEDULER and not self._turns
            if (waits or is_new or name in self._in_turns) and self._is_as_in(last, name):
                how = "mostly steps after an evaluation" if waits else "has changed in other turns of the loop"
                how = "may step in each turn of the loop" if is_new else how
                return f"{_thing(name)} ({type(thing).__name__}) {how}, and has not since the optimizer's step"
        late = sorted(self._in_turns & self._watch.owners - self._watch.updated_now())
        if late:
            return f"{_thing(late[0])} has changed in other turns of the loop, and has not since the optimizer's step"
        return ""

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since the last point."""
        return not self.points and self._begun_then != self.begun

    @property
    def knows_steps(self) -> bool:
        """Whether the run has an optimizer, by which it is known when the parameters change."""
        return bool(self._run.optimizers())

    @property
    def is_stepping(self) -> bool:
        """Whether an optimizer's step is under way, or has failed since the last point."""
        return self._is_stepping

    def least(self, step: int) -> int:
        """Return the least number of steps with which this rank can be saved, which has counted ``step``."""
        return step if self.pending is None else self.pending.least(step)

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

    def at(self, point: RestPoint, pending: PendingStep | None = None) -> RunAtRest:
        """Return the run as it was at ``point``, one of :attr:`points` or one of :meth:`evaluating`.

        Args:
            point: one of ``pending``'s, if that is given.
            pending: a step that this rank's host has taken since, and its device has not begun.

        Raises:
            CheckpointError: something has changed since that was not copied.
        """
        run, watch = self._run, self._watch
        kept: dict[Place, torch.Tensor] = {} if pending is None else pending.kept
        if pending is None and any(point is one for one in self.points):
            with accelerator.beside(self._device, after=point.queued):
                unknown = watch.unknown()
            if unknown:
                owner = unknown[0][0]
                names = [name for each, name in unknown if each == owner]
                have, they = ("has", "it") if len(names) == 1 else ("have", "they")
                raise CheckpointError(
                    f"{_words(owner)}: {listed(names)} {have} changed for the first time in the middle of a step or "
                    f"outside of steps, so what {they} held between the last two is not known"
                )
            kept = watch.known()
        objects = (run.model, run.optimizer, run.scheduler, run.loader, run.extra)
        return RunAtRest(*objects, point=point, objects=self._objects, beside=self._beside, kept=kept, pending=pending)

    def _point(self, epoch_done: bool | None) -> RestPoint:
        run, device = self._run, self._device
        loader, scale = run.loader, loss_scale.in_force()
        return RestPoint(
            self._position.now(),
            self.begun,
            epoch_done,
            None if loader is None else getattr(loader, "_position_now", partial(_position_of, loader))(),
            None if run.scheduler is None else self._scheduler_state(),
            [*map(OptionGroup.all_of, self._optimizers)],
            self._objects.note() if self._has_objects else {},
            self._beside.note() if self._has_beside else {},
            None if scale is None else scale.state_dict(),
            Generators.now(device),
            None if device.type == "cpu" else accelerator.mark(device),
        )

    def steps(self) -> None:
        """Note that an optimizer's step begins; for the gate."""
        self._is_stepping = True


def _thing(name: str) -> str:
    return "its scheduler" if name == _SCHEDULER else f"extra {name!r}"


def _words(owner: str) -> str:
    return f"extra {owner!r}" if owner else "model"


def _position_of(loader: Stateful) -> _Position:
    state = copy.deepcopy(loader.state_dict())
    return _Position(lambda: state, getattr(loader, "epoch", None), getattr(loader, "in_epoch", False))


@_torch.mark_untraced
def _before_step(weak: weakref.ref[Rest], optimizer: torch.optim.Optimizer, *_: object) -> None:
    rest = weak()
    if rest is None or (_torch.nesting[type(optimizer)] and _torch.is_inner_step(optimizer)):
        return
    # First said, then asked: who holds this rank sees it step, or is seen by it.
    rest._is_stepping = True
    gate = rest.gate
    if gate is not None:
        rest._is_stepping = False
        gate()
    if rest.pending is not None:
        rest.pending.begin(rest.points, rest.dropped, rest._watch.kept_alone)
    rest._watch.before_step()
    rest.begun += 1


@_torch.mark_untraced
def _after_step(weak: weakref.ref[Rest], optimizer: torch.optim.Optimizer, *_: object) -> None:
    rest = weak()
    if rest is not None and not (_torch.nesting[type(optimizer)] and _torch.is_inner_step(optimizer)):
        rest._is_stepping, rest._steps_in_eval = False, not rest._run.model.training
        rest.points.clear()
        rest.dropped = 0
        rest._watch.after_step()
