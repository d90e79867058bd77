"""Hold a task file of the guides to the classes that read it: ``check_tasks.py skypilot``, or ``dstack``."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

_PROGRAMS = Path(__file__).parents[1] / "docs" / "guides" / "programs"
#: Keys that the task's author chooses.
_CHOSEN = {"RUNS", "RDZV_PORT", "/runs"}
#: Keys that SkyPilot takes under any name; docs/guides/skypilot.md says so.
_UNNOTICED = {"skypilot": ["recover_on_exit_codes"], "dstack": []}


def _reader(name: str) -> tuple[str, Callable[[dict[str, Any]], object]]:
    """Return the file and what reads its content and raises where it is wrong."""
    if name == "skypilot":
        import sky

        return "digits.sky.yaml", sky.Task.from_yaml_config
    from dstack._internal.core.models.configurations import parse_apply_configuration

    return "digits.dstack.yml", parse_apply_configuration


def _places(node: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every mapping with each of its keys but those that the author chooses."""
    if isinstance(node, list):
        for each in node:
            yield from _places(each)
    if isinstance(node, dict):
        for key, value in node.items():
            if key not in _CHOSEN:
                yield node, key
            yield from _places(value)


def main() -> None:
    """Read the file as it is, then with a typo in each of its words, and fail if one that should be found is not."""
    (name,) = sys.argv[1:]
    file, read = _reader(name)
    task = yaml.safe_load((_PROGRAMS / file).read_text())
    read(copy.deepcopy(task))
    unnoticed = []
    words = len(list(_places(task)))
    for index in range(words):
        broken = copy.deepcopy(task)
        node, key = list(_places(broken))[index]
        node[f"{key}z"] = node.pop(key)
        try:
            read(broken)
        except Exception:  # noqa: BLE001  (each of them raises its own)
            continue
        unnoticed.append(key)
    if unnoticed != _UNNOTICED[name]:
        sys.exit(f"{file}: {name} does not notice a typo in {unnoticed}, expected {_UNNOTICED[name]}")
    print(f"{file}: {name} reads it, and finds a typo in {words - len(unnoticed)} of its {words} keys")


if __name__ == "__main__":
    main()
