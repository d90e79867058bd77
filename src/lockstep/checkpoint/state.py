"""The state of a run that is saved: its objects, its position, and its random number generators.

Each is taken apart here, compared with a checkpoint, and put together again. An object that can't be saved is refused
before the first step, with an error that says what can be.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from lockstep import _torch
from lockstep.checkpoint import finite
from lockstep.checkpoint.encoding import digest_of
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.match import (
    aligned,
    bare,
    compare,
    describe_optimizer,
    layers,
    plain_names,
    refuse_other_optimizer,
    under_plain_names,
)
from lockstep.checkpoint.plan import judge_optimizers
from lockstep.checkpoint.read import Contents
from lockstep.checkpoint.rng import Generators
from lockstep.checkpoint.safetensors import USE_DCP, unsavable
from lockstep.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from lockstep.job import flight
from lockstep.step import gradient_order, loss_scale
from lockstep.step.local_training import LocalTraining, local_training_of

# The objects.


class Stateful(Protocol):
    """Anything with a state to save: a scheduler, a loader, a GradScaler, an average of weights."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class RunState:
    """The objects of a run. Their states change; which objects they are does not."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Stateful | None = None
    loader: Stateful | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"model={type(self.model).__name__}: expected a torch.nn.Module")
        if self.optimizer is not None and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer={type(self.optimizer).__name__}: expected a torch.optim.Optimizer; give others as extra="
            )
        for name, thing in {"scheduler": self.scheduler, "loader": self.loader, **self.extra}.items():
            if thing is not None and not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TypeError(
                    f"{name}={type(thing).__name__}: expected an object with state_dict() and load_state_dict(); a "
                    "DataLoader becomes one by lockstep.shard(loader)"
                )

    def refuse_unsavable(self) -> None:
        """Refuse what can't be saved, before a run begins and not when it is saved for the first time.

        Raises:
            CheckpointError: an object is of a kind that a Checkpointer can't save, or each rank holds a part of it; it
                names the first, and what to use.
        """
        for name, thing in {"model": self.model, "optimizer": self.optimizer, **self.extra}.items():
            if isinstance(thing, nn.Module):
                refuse_unreplicated(thing, name)
                _refuse_tensors(thing, name)
                if thing is not self.model and _local_training_in(thing) is not None:
                    raise CheckpointError(
                        f"{name} is trained by LocalSteps, and a Checkpointer ends and resumes the rounds of model= "
                        "alone: replicate and save both as one module, such as a torch.nn.ModuleDict"
                    )
            elif _is_a(thing, "ZeroRedundancyOptimizer"):
                raise CheckpointError(
                    f"{name} is a ZeroRedundancyOptimizer, whose state is divided among the ranks, and a Checkpointer "
                    "saves what each rank holds: use its optimizer_class itself, or save its state with torch: "
                    "optimizer.consolidate_state_dict(to=0) on all ranks, then torch.save(optimizer.state_dict(), …) "
                    "on rank 0"
                )

    def model_state(self) -> dict[str, Any]:
        """Return the model's state under the names of the bare model."""
        model = bare(self.model)
        return dict(under_plain_names(model, model.state_dict()))

    def loader_state(self) -> dict[str, Any] | None:
        """Return the loader's position; None: there is no loader."""
        return None if self.loader is None else self.loader.state_dict()

    def scheduler_state(self) -> dict[str, Any] | None:
        """Return the scheduler's state; None: there is no scheduler."""
        return None if self.scheduler is None else self.scheduler.state_dict()

    def optimizer_state(self) -> dict[str, Any] | None:
        """Return the optimizer's state; None: there is no optimizer."""
        return None if self.optimizer is None else self.optimizer.state_dict()

    def described(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the class of one of the run's optimizers, and the shapes of the groups that are saved."""
        return describe_optimizer(optimizer)

    def extra_state(self, name: str) -> Mapping[str, Any]:
        """Return the state of an extra object; a module's under the names of the bare module."""
        return _state_of(self.extra[name])

    def loss_scale_state(self) -> dict[str, Any] | None:
        """Return the state of the model's loss scale; None: its losses are not scaled."""
        scale = loss_scale.scale_of(self.model)
        return None if scale is None else scale.state_dict()

    def generators(self, device: torch.device) -> Generators:
        """Return the states of this rank's random number generators."""
        return Generators.now(device)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """List the optimizer and those among the extra objects."""
        others = [*self._extra_optimizers().values()]
        return others if self.optimizer is None else [self.optimizer, *others]

    @property
    def local_training(self) -> LocalTraining | None:
        """The training of the ranks apart between rounds; None if they average every gradient."""
        return _local_training_in(self.model)

    def common_trees(self) -> dict[str, Any]:
        """Return what every rank holds alike besides the model, by the name of its part."""
        training = self.local_training
        if training is not None:
            outer = {**describe_optimizer(training.outer), "state": training.outer.state_dict()}
            return {"local_steps": {"outer": outer, **training.common_state()}}
        return self._optimizer_tree()

    def own_tree(self) -> dict[str, Any] | None:
        """Return what each rank holds alone, if the ranks train apart; of the same names and shapes on all."""
        training = self.local_training
        if training is None:
            return None
        state = self.optimizer_state()
        return {"optimizer": None if state is None else state["state"], "rounds": training.own_state()}

    def _optimizer_tree(self) -> dict[str, Any]:
        if self.optimizer is None:
            return {}
        return {"optimizer": {**self.described(self.optimizer), "state": self.optimizer_state()}}

    def _extra_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {name: thing for name, thing in self.extra.items() if isinstance(thing, torch.optim.Optimizer)}

    def trees(self) -> dict[str, Any]:
        """Return everything but the model and the loader, by the name of its part."""
        parts = {**self.common_trees(), **self._optimizer_tree()}
        if self.scheduler is not None:
            parts["scheduler"] = {"class": type(self.scheduler).__name__, "state": self.scheduler_state()}
        if self.extra:
            parts["extra"] = {name: self.extra_state(name) for name in self.extra}
        others = self._extra_optimizers()
        if others:  # beside their states, which earlier versions read as they are
            parts["extra_optimizers"] = {name: self.described(thing) for name, thing in others.items()}
        orders = gradient_order.orders_in(bare(self.model))
        if orders:
            parts["gradients"] = {"orders": orders}
        scale = self.loss_scale_state()
        if scale is not None:
            parts["precision"] = {"loss_scale": scale}
        return parts

    def judged_in_model(self) -> dict[str, bool]:
        """Return the tensors in the model's file that should be finite -> whether infinities are meant in tensors of
        their kind. See Note [Finite] in ``finite.py``."""
        return {name: _may_be_infinite(name, tensor) for name, tensor in _tensors_of(bare(self.model))}

    def judge_of_parts(self) -> finite.Judge:
        """Return the judge of the tensors in the other files."""
        begins = tuple(f"extra.{name}." for name in self._extra_optimizers())
        of_modules = {name: _may_be_infinite(name, tensor) for name, tensor in self._tensors_in_extra()}
        return lambda name: False if name.startswith(begins) else of_modules.get(name, judge_optimizers(name))

    def meant(self, since: finite.Meant | None = None) -> finite.Meant:
        """Name the tensors of modules that are not finite now, by their names in their files.

        Args:
            since: the result from before training began; NaN that came later is not meant. None: it begins now.
        """
        named = self._named_tensors()
        infinite = finite.infinite(named)
        if since is None:
            return finite.Meant(infinite, finite.frozen_nan(named))
        return finite.Meant(since.infinite | infinite, since.nan)

    def without_trained(self, meant: finite.Meant) -> finite.Meant:
        """Return ``meant`` without the parameters that were frozen and are trained now: their NaN counts."""
        if not meant.nan:
            return meant
        trained = {name for name, tensor in self._named_tensors() if tensor.requires_grad}
        return finite.Meant(meant.infinite, meant.nan - trained)

    def _named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [*_tensors_of(bare(self.model)), *self._tensors_in_extra()]

    def _tensors_in_extra(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, thing in self.extra.items():
            if isinstance(thing, nn.Module):
                yield from ((f"extra.{name}.{path}", tensor) for path, tensor in _tensors_of(thing))

    def refuse_other(self, contents: Contents, *, world_size: int) -> None:
        """Compare a checkpoint with these objects, changing nothing.

        Raises:
            CheckpointMismatch: it is of another model, optimizer or scheduler, or lacks something that is here.
        """
        folder, parts = contents.folder, contents.parts
        self.refuse_unsavable()
        compare(bare(self.model), contents.model, exact=True).refuse_differences(folder)
        for name in self._given():
            if name not in parts:
                raise CheckpointMismatch(f"{folder} was saved without {name}=, but there is one now")
        lacking = [name for name in self.extra if name not in parts.get("extra", {})]
        if lacking:
            raise CheckpointMismatch(f"{folder} was saved without extra objects named {', '.join(lacking)}")
        if self.optimizer is not None:
            refuse_other_optimizer(parts["optimizer"], self.optimizer, folder)
        described = parts.get("extra_optimizers", {})  # those of earlier versions are compared by torch alone
        for name, optimizer in self._extra_optimizers().items():
            if name in described:
                refuse_other_optimizer(described[name], optimizer, f"{folder}: extra {name!r}")
        training = self.local_training
        if training is not None and "local_steps" in parts:  # otherwise its rounds begin with the saved model
            refuse_other_optimizer(parts["local_steps"]["outer"], training.outer, folder)
        if self.scheduler is not None and parts["scheduler"]["class"] != type(self.scheduler).__name__:
            saved, own = parts["scheduler"]["class"], type(self.scheduler).__name__
            raise CheckpointMismatch(f"{folder} is of the scheduler {saved}, this one is {own}")
        if self.loader is not None and len(parts["loader"]) not in (1, world_size):
            raise CheckpointMismatch(
                f"{folder}: its {len(parts['loader'])} ranks had loaders in different states, which {world_size} "
                "ranks can't resume from; lockstep.shard resumes at any world size"
            )

    def unused(self, contents: Contents) -> list[str]:
        """List the parts of the checkpoint for which this run has no object."""
        given = self._given()
        unused: list[str] = [
            name for name in ("optimizer", "scheduler", "loader") if name in contents.parts and name not in given
        ]
        if "local_steps" in contents.parts and self.local_training is None:
            unused.append("the state of LocalSteps")
        if "precision" in contents.parts and loss_scale.scale_of(self.model) is None:
            unused.append("the loss scale of precision='fp16'")
        return unused + [f"extra {name!r}" for name in contents.parts.get("extra", {}) if name not in self.extra]

    def small_states(self) -> list[tuple[Stateful, Any]]:
        """Copy the states of the objects that :meth:`load_small` loads."""
        return [(thing, copy.deepcopy(thing.state_dict())) for thing in self._small()]

    def load_small(self, parts: dict[str, Any]) -> None:
        """Load the scheduler and the extra objects, which alone know whether they can take a state."""
        states = [parts["extra"][name] for name in self.extra]
        if self.scheduler is not None:
            states.append(parts["scheduler"]["state"])
        for thing, state in zip(self._small(), states, strict=True):
            _load(thing, _under_names_of(thing, state))

    @staticmethod
    def put_back(states: Sequence[tuple[Stateful, Any]]) -> None:
        """Load what :meth:`small_states` has returned."""
        for thing, state in states:
            _load(thing, state)

    def _small(self) -> list[Stateful]:
        return [*self.extra.values(), *([] if self.scheduler is None else [self.scheduler])]

    def load_loader(self, parts: dict[str, Any], rank: int) -> None:
        """Load the loader; **Collective** if its own method is."""
        if self.loader is not None:
            states = parts["loader"]
            self.loader.load_state_dict(states[rank if len(states) > 1 else 0])

    def is_in_slices(self, contents: Contents) -> bool:
        """Return whether the run cuts its batches into slices, and did so when it was saved."""
        cut_before = all(isinstance(each, dict) and each.get("slices") for each in contents.parts.get("loader") or [{}])
        return bool(getattr(self.loader, "slices", None)) and cut_before

    def load_tensors(self, contents: Contents, rank: int) -> None:
        """Load the model and the optimizer; where ranks train apart, each rank loads its own state."""
        model, parts, training = bare(self.model), contents.parts, self.local_training
        model.load_state_dict(compare(model, contents.model, exact=True).loadable)
        owns = [] if training is None else parts.get("ranks", [])
        if self.optimizer is not None:
            saved = parts["optimizer"]["state"]
            if rank < len(owns):
                saved = {**saved, "state": owns[rank]["optimizer"]}
            _load_optimizer(self.optimizer, saved)
        gradient_order.take_orders(model, parts["gradients"]["orders"] if "gradients" in parts else {})
        scale = loss_scale.scale_of(self.model)
        if scale is not None and "precision" in parts:  # otherwise it begins anew
            scale.load_state_dict(parts["precision"]["loss_scale"])
        if training is not None:
            common = parts.get("local_steps", {})
            if common:
                _load_optimizer(training.outer, common["outer"]["state"])
            training.load_state(common, [own["rounds"] for own in owns])

    def _given(self) -> list[str]:
        things = {"optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader}
        return [name for name, thing in things.items() if thing is not None]


def _local_training_in(model: nn.Module) -> LocalTraining | None:
    """Return the local training of ``model``, or of what it wraps; None if every gradient is averaged."""
    return local_training_of(*layers(model))


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's parameters and buffers, each under all its names as they are saved."""
    plain = plain_names(module)
    for tensors in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        yield from ((plain(name), tensor) for name, tensor in tensors)


def _may_be_infinite(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a module's tensor is of a kind in which infinities are meant: a buffer, but for statistics."""
    return not isinstance(tensor, nn.Parameter) and not finite.is_statistic(name)


def _state_of(thing: Stateful) -> Mapping[str, Any]:
    state = thing.state_dict()
    return under_plain_names(thing, state) if isinstance(thing, nn.Module) else state


def _under_names_of(thing: Stateful, state: dict[str, Any]) -> dict[str, Any]:
    """Put a module's saved state under the names that it has; see Note [Names and wrappers] in ``match.py``."""
    if not isinstance(thing, nn.Module):
        return state
    names = aligned(thing.state_dict(), state)
    return {names[name]: value for name, value in state.items()}


def _load(thing: Stateful, state: dict[str, Any]) -> None:
    if isinstance(thing, torch.optim.Optimizer):
        _load_optimizer(thing, state)
    else:
        thing.load_state_dict(state)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state with its own dtypes.

    torch casts every tensor of the state to the dtype of its parameter, which rounds what optimizers keep in float32
    for parameters in bfloat16 (ASGD, NAdam), and makes floats of 8-bit states. A class with its own
    ``load_state_dict`` is left to load in its own way.
    """
    optimizer.load_state_dict(saved)
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in saved["state"]:
            optimizer.state[parameter] = _as_saved(optimizer.state[parameter], saved["state"][number])


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Return ``loaded`` with the dtypes that its tensors have in ``saved``."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if type(loaded) is not type(saved):
        return loaded
    if type(loaded) is dict:
        return {key: _as_saved(value, saved[key]) if key in saved else value for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and len(loaded) == len(saved):
        return type(loaded)(_as_saved(one, other) for one, other in zip(loaded, saved, strict=True))
    return loaded


# Refusing objects that can't be saved.


def refuse_unreplicated(model: nn.Module, name: str, advice: str = USE_DCP) -> None:
    """Refuse a model of which each rank holds a part.

    Raises:
        CheckpointError: each rank holds a part of it; the message ends with ``advice``.
    """
    for path, module in model.named_modules():
        if _is_a(module, "FullyShardedDataParallel"):
            where = f"{name}.{path}" if path else name
            raise CheckpointError(f"{where} is a FullyShardedDataParallel, of which each rank holds a part: {advice}")
    for path, parameter in model.named_parameters():
        if _is_a(parameter, "DTensor"):
            raise CheckpointError(f"{name}: {path} is a DTensor, of which each rank holds a part: {advice}")


def parameters_in_short(model: nn.Module) -> tuple[str, str]:
    """Return a digest of all names and shapes, for :func:`refuse_parts` to compare, and its words on them."""
    listed = [
        [name, None if nn.parameter.is_lazy(param) else list(param.shape)]
        for name, param in bare(model).named_parameters()
    ]
    words = f"{len(listed)} ('{listed[0][0]}' first)" if listed else "none"
    return digest_of(json.dumps(listed).encode()), words


def refuse_parts(shorts: Sequence[tuple[str, str]]) -> None:
    """Refuse models of which the ranks hold different parts, such as the stages of a pipeline.

    Args:
        shorts: the :func:`parameters_in_short` of each rank, in order of rank.

    Raises:
        CheckpointError: they differ; the same on every rank.
    """
    digest, words = shorts[0]
    for rank, (other, other_words) in enumerate(shorts):
        if other != digest:
            raise CheckpointError(
                f"model: rank {rank} holds other parameters than rank 0, or of other shapes: {other_words} there and "
                f"{words} on rank 0; {USE_DCP}"
            )


def _refuse_tensors(module: nn.Module, name: str) -> None:
    for path, value in bare(module).state_dict().items():
        if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value):
            continue  # the first forward materialises a lazy one
        reason = unsavable(value)
        if reason is not None:
            raise CheckpointError(f"{name}: {path} {reason}")


def _is_a(thing: object, name: str) -> bool:
    """Return whether ``thing`` is of torch's class ``name``, whose module is slow to import or may be missing."""
    return any(cls.__name__ == name and cls.__module__.startswith("torch.") for cls in type(thing).__mro__)


# The position of a run.


@dataclass(frozen=True)
class Moment:
    """The place in a run at which a checkpoint is made."""

    #: Optimizer steps taken.
    step: int
    #: The epoch to resume in, and whether a part of it is done.
    epoch: int
    in_epoch: bool
    #: The metric by which the best checkpoints are kept.
    metric: float | None = None
    #: The ranks of each host (World.hosts).
    hosts: list[list[int]] | None = None
    #: The conditions on rank 0 on which the bits depend; see step/conditions.py.
    conditions: Mapping[str, str] = field(default_factory=dict)
    #: The optimizers' steps that had begun in this process; not saved.
    begun: int = -1


class Tally(NamedTuple):
    """What a rank has counted at one moment."""

    step: int
    epoch: int
    in_body: bool

    def moment(self, loader: object, *, epoch_done: bool | None, metric: float | None) -> Moment:
        """Return the place at which a run resumes that is saved as it was at that moment.

        Args:
            loader: the training loader at that moment, which may know its epoch.
            epoch_done: whether the epoch is done, by the user's word; None: the user did not say.
            metric: the metric that the checkpoint is saved with.
        """
        in_epoch = bool(getattr(loader, "in_epoch", False)) if epoch_done is None else not epoch_done
        if self.in_body:
            return Moment(self.step, self.epoch if in_epoch else self.epoch + 1, in_epoch, metric)
        epoch = getattr(loader, "epoch", None)  # the user counts epochs; a sharded loader knows which one it is in
        return Moment(self.step, epoch if isinstance(epoch, int) else self.epoch, in_epoch, metric)


class Position:
    """A run's place in its training, as this rank counts it."""

    def __init__(self) -> None:
        #: Optimizer steps taken.
        self.step = 0
        #: The step of the newest checkpoint that this run has written or resumed from.
        self.last_saved: int | None = None
        #: The epoch to resume in, between epochs; within the body of epochs(), the one under way.
        self.epoch = 0
        #: True if the body of epochs() is running.
        self.in_body = False

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the optimizer's steps, for as long as this object lives."""
        weak = weakref.ref(self)

        def took_step(stepped: torch.optim.Optimizer, *_: object) -> None:
            alive = weak()
            if alive is not None and not (_torch.nesting[type(stepped)] and _torch.is_inner_step(stepped)):
                alive.step += 1
                alive._tell()

        optimizer.register_step_post_hook(took_step)

    def now(self) -> Tally:
        """Return the present counts."""
        return Tally(self.step, self.epoch, self.in_body)

    def resume_from(self, manifest: Manifest) -> None:
        """Take over the position at which a checkpoint was made."""
        self.step = self.last_saved = manifest.step
        self.epoch = manifest.epoch
        self._tell()

    def _tell(self) -> None:
        """Tell the launcher, which compares failures by their steps; steps that a user counts may be saves."""
        flight.current.at_step(self.step)


class LastMetric:
    """The metric of the last checkpoint, which another one of the same parameters has as well.

    A run that is stopped right after ``save(metric=…)`` saves the same step again, and that checkpoint replaces the
    one with the metric: without it, what was the best would be measured by nobody any more.
    """

    def __init__(self) -> None:
        self._step = self._begun = -1
        self._metric: float | None = None

    def note(self, step: int, begun: int, metric: float | None) -> None:
        """Note the metric of a checkpoint.

        Args:
            step: the checkpoint's.
            begun: the optimizers' steps that had begun in this process.
            metric: None: it has none, or is not sound.
        """
        self._step, self._begun, self._metric = step, begun, metric

    def of(self, step: int, begun: int) -> float | None:
        """Return the metric of a checkpoint at ``step``; None: optimizers have stepped since, or there was none."""
        return self._metric if (step, begun) == (self._step, self._begun) else None


# Parts that are read before they are taken.


def refuse_malformed_orders(part: Any, *, where: str) -> None:
    """Refuse what is not what :meth:`RunState.trees` keeps of the orders in which gradients come.

    Raises:
        CheckpointCorrupt: it is not.
    """
    orders = part.get("orders") if isinstance(part, dict) else None
    lists = [*orders.values()] if isinstance(orders, dict) else [None]
    if not all(isinstance(each, list) and all(isinstance(name, str) for name in each) for each in lists):
        raise CheckpointCorrupt(f"{where}: not the orders in which gradients come")


def refuse_malformed_precision(part: Any, *, where: str) -> None:
    """Refuse what is not what :meth:`RunState.trees` keeps of a loss scale.

    Raises:
        CheckpointCorrupt: it is not.
    """
    if not isinstance(part, dict) or not loss_scale.is_state(part.get("loss_scale")):
        raise CheckpointCorrupt(f"{where}: not the state of a loss scale")
