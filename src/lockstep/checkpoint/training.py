"""What a run consists of, as far as it is saved: taken apart, compared with a checkpoint, put together again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.checkpoint.load import Contents
from lockstep.checkpoint.match import bare, compare, describe_optimizer, refuse_other_optimizer
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
            parts["extra"] = {name: thing.state_dict() for name, thing in self.extra.items()}
        return parts

    def refuse_other(self, contents: Contents, *, world_size: int) -> None:
        """**Local.** Compare a checkpoint with these objects, changing nothing.

        Raises:
            CheckpointMismatch: it is of another model, optimizer or scheduler, or lacks something that is here.
        """
        folder, parts = contents.folder, contents.parts
        compare(bare(self.model), contents.model, same_dtype=True).refuse_differences(folder)
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
            thing.load_state_dict(state)

    def load_loader(self, parts: dict[str, Any], rank: int) -> None:
        """**Collective** if the loader's is."""
        if self.loader is not None:
            states = parts["loader"]
            self.loader.load_state_dict(states[rank if len(states) > 1 else 0])

    def load_tensors(self, contents: Contents) -> None:
        """**Local.** Load the model and the optimizer."""
        bare(self.model).load_state_dict(contents.model)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(contents.parts["optimizer"]["state"])

    def _given(self) -> list[str]:
        things = {"optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader}
        return [name for name, thing in things.items() if thing is not None]
