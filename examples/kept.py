"""The options that a run must keep when it is resumed, saved with its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lockstep


class Kept:
    """The options of a run, saved with it, so that it is resumed as it was begun and not as something in between.

    Args:
        options: the command line, as attributes.
        names: those of them that decide which steps a run takes.
        facts: what else decides it, by name, in JSON types: a digest of the data, say.
    """

    def __init__(self, options: object, names: Sequence[str], **facts: Any) -> None:
        self._options = {name: getattr(options, name) for name in names}
        self._facts = facts

    def state_dict(self) -> dict[str, Any]:
        """Return options and facts by name."""
        return {**self._options, **self._facts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare with the options of the run that is resumed.

        Raises:
            lockstep.CheckpointMismatch: one differs.
        """
        differing = [
            f"{self._title(name)} {value} instead of {state.get(name)}"
            for name, value in self.state_dict().items()
            if state.get(name) != value
        ]
        if differing:
            raise lockstep.CheckpointMismatch(
                f"a run is resumed with the options that it was begun with, and here is {', '.join(differing)}"
            )

    def _title(self, name: str) -> str:
        return f"--{name.replace('_', '-')}" if name in self._options else name
