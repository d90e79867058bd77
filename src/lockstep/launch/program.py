"""Whether a program can be run at all, found out before anything is started and without running a line of it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence

from lockstep.launch.spec import Program


def check(program: Program) -> None:
    """**Local.** Refuse a program that is not there.

    Raises:
        ValueError: the script is missing, a folder or not readable, or there is no such module.
    """
    if program.is_module:
        _check_module(program.target)
    else:
        _check_script(program.target)


def _check_script(path: str) -> None:
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder: name a Python script, or a module with -m")
    if not os.path.exists(path):
        hint = f"; to run the module {path}, say -m {path}" if _looks_like_module(path) else ""
        raise ValueError(f"script not found: {path} (looked in {os.getcwd()}){hint}")
    if not os.access(path, os.R_OK):
        raise ValueError(f"script not readable: {path}")


def _looks_like_module(name: str) -> bool:
    return "/" not in name and not name.endswith(".py") and all(part.isidentifier() for part in name.split("."))


def _check_module(name: str) -> None:
    """Follow the packages down without importing them: importing runs the user's code, and often torch."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ValueError(f"-m {name}: not a module's name (for a script, leave -m away)")
    search: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec: importlib.machinery.ModuleSpec | None = None
    for depth, part in enumerate(parts):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        if spec is None and depth == 0:
            spec = importlib.util.find_spec(part)  # built in, frozen, or an editable install's own finder
        if spec is None:
            raise ValueError(f"module not found: {name} (no {part} in {parts[depth - 1] if depth else 'sys.path'})")
        if spec.submodule_search_locations is None:
            search = []
            continue
        try:
            search = list(spec.submodule_search_locations)
        except KeyError:
            return  # a namespace package inside one knows its place only once imported; the ranks will tell
    if search and importlib.machinery.PathFinder.find_spec(f"{name}.__main__", search) is None:
        raise ValueError(f"-m {name}: a package without a __main__ module can't be run")
