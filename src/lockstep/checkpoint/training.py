"""What a run consists of, as far as it is saved: taken apart, compared with a checkpoint, put together again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.checkpoint.load import Contents
from lockstep.checkpoint.match import compare, describe_optimizer, refuse_other_optimizer
from lockstep.checkpoint.names import aligned, bare, under_plain_names
from lockstep.checkpoint.supported import refuse_unsavable
from lockstep.errors import CheckpointMismatch


class Stateful(Protocol):
    """Anything with a state to save: a scheduler, a loader, a GradScaler, an average of weights."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class Training:
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
        """**Local.** Before a run begins, and not when it is saved for the first time.

        Raises:
            CheckpointError: an object is of a kind that a Checkpointer can't save; it names what can.
        """
        refuse_unsavable({"model": self.model, "optimizer": self.optimizer, **self.extra})

    def common_trees(self) -> dict[str, Any]:
        """**Local.** What every rank holds alike besides the model, by the name of its part."""
        if self.optimizer is None:
            return {}
        return {"optimizer": {**describe_optimizer(self.optimizer), "state": self.optimizer.state_dict()}}

    def trees(self) -> dict[str, Any]:
        """**Local.** Everything but the model and the loader, by the name of its part."""
        parts = self.common_trees()
        if self.scheduler is not None:
            parts["scheduler"] = {"class": type(self.scheduler).__name__, "state": self.scheduler.state_dict()}
        if self.extra:
            parts["extra"] = {name: _state_of(thing) for name, thing in self.extra.items()}
        return parts

    def refuse_other(self, contents: Contents, *, world_size: int) -> None:
        """**Local.** Compare a checkpoint with these objects, changing nothing.

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
        if self.scheduler is not None and parts["scheduler"]["class"] != type(self.scheduler).__name__:
            saved, own = parts["scheduler"]["class"], type(self.scheduler).__name__
            raise CheckpointMismatch(f"{folder} is of the scheduler {saved}, this one is {own}")
        if self.loader is not None and len(parts["loader"]) not in (1, world_size):
            raise CheckpointMismatch(
                f"{folder}: its {len(parts['loader'])} ranks had loaders in different states, which {world_size} "
                "ranks can't go on from; lockstep.shard resumes at any world size"
            )

    def unused(self, contents: Contents) -> list[str]:
        """**Local.** What the checkpoint holds and this run has no use for."""
        given = self._given()
        unused = [name for name in ("optimizer", "scheduler", "loader") if name in contents.parts and name not in given]
        return unused + [f"extra {name!r}" for name in contents.parts.get("extra", {}) if name not in self.extra]

    def load_small(self, parts: dict[str, Any], undo: list[tuple[Stateful, Any]]) -> None:
        """**Local.** Load the objects that alone know whether they can take a state; ``undo`` receives each with its
        state from before."""
        wanted: list[tuple[Stateful, Any]] = [(thing, parts["extra"][name]) for name, thing in self.extra.items()]
        if self.scheduler is not None:
            wanted.append((self.scheduler, parts["scheduler"]["state"]))
        for thing, state in wanted:
            undo.append((thing, copy.deepcopy(thing.state_dict())))
            thing.load_state_dict(_under_names_of(thing, state))

    def load_loader(self, parts: dict[str, Any], rank: int) -> None:
        """**Collective** if the loader's is."""
        if self.loader is not None:
            states = parts["loader"]
            self.loader.load_state_dict(states[rank if len(states) > 1 else 0])

    def load_tensors(self, contents: Contents) -> None:
        """**Local.** Load the model and the optimizer."""
        model = bare(self.model)
        model.load_state_dict(compare(model, contents.model, exact=True).loadable)
        if self.optimizer is not None:
            _load_optimizer(self.optimizer, contents.parts["optimizer"]["state"])

    def _given(self) -> list[str]:
        things = {"optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader}
        return [name for name, thing in things.items() if thing is not None]


def _state_of(thing: Stateful) -> Mapping[str, Any]:
    state = thing.state_dict()
    return under_plain_names(thing, state) if isinstance(thing, nn.Module) else state


def _under_names_of(thing: Stateful, state: dict[str, Any]) -> dict[str, Any]:
    """A module's saved state under the names that it has; see Note [Names and wrappers] in ``names.py``."""
    if not isinstance(thing, nn.Module):
        return state
    names = aligned(thing.state_dict(), state)
    return {names[name]: value for name, value in state.items()}


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state with its own dtypes.

    torch casts every tensor of it to the dtype of its parameter, which rounds what the optimizers keep in float32 for
    parameters in bfloat16 (ASGD, NAdam), and makes floats of 8-bit states. A class that loads in a way of its own
    knows better.
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
    """``loaded``, with the dtypes that its tensors have in ``saved``."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if type(loaded) is not type(saved):
        return loaded
    if type(loaded) is dict:
        return {key: _as_saved(value, saved[key]) if key in saved else value for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and len(loaded) == len(saved):
        return type(loaded)(_as_saved(one, other) for one, other in zip(loaded, saved, strict=True))
    return loaded
