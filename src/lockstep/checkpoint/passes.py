"""The end of a pass over the training data, to which a run returns if it is stopped in the evaluation after it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.checkpoint.state import Position, RunState, capture_rng, restore_rng


@dataclass(frozen=True)
class EndOfPass:
    """The state that may change between the end of a pass and the next step; models and optimizers' states do not."""

    epoch: int
    step: int
    loader: dict[str, Any]
    scheduler: dict[str, Any] | None
    #: The options of each parameter group, which a scheduler may set.
    groups: list[dict[str, Any]]
    generators: dict[str, Any]

    @classmethod
    def note(cls, run: RunState, position: Position, device: torch.device) -> EndOfPass:
        """Return a copy of the state; called when the loader has given its last batch and is still in the pass."""
        assert run.loader is not None, "it has called this"
        groups = [] if run.optimizer is None else run.optimizer.param_groups
        return cls(
            position.epoch,
            position.step,
            run.loader.state_dict(),
            None if run.scheduler is None else copy.deepcopy(run.scheduler.state_dict()),
            [{name: copy.deepcopy(value) for name, value in group.items() if name != "params"} for group in groups],
            capture_rng(device),
        )

    def is_current(self, position: Position) -> bool:
        """Return whether no step was taken since the end of the pass."""
        return (self.epoch, self.step) == (position.epoch, position.step)

    def go_back(self, run: RunState, device: torch.device) -> None:
        """**Collective.** Restore the state."""
        assert run.loader is not None
        run.loader.load_state_dict(self.loader)
        if run.scheduler is not None and self.scheduler is not None:
            run.scheduler.load_state_dict(self.scheduler)
        if run.optimizer is not None:
            for group, before in zip(run.optimizer.param_groups, self.groups, strict=True):
                group.update(before)
        restore_rng(self.generators, device)
