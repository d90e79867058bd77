"""Do something before a module is imported for the first time."""

from __future__ import annotations

import sys
from collections.abc import Callable


class BeforeImports:
    """Sees the first import of some modules, does what is to be done before, and leaves it to Python's own finders."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        action = self._actions.pop(name, None)
        if action is not None:
            action()


def install(actions: BeforeImports) -> None:
    """Have Python ask it before all others."""
    sys.meta_path.insert(0, actions)
