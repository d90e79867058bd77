"""Whether a program can be run at all, and what it says: found out without running a line of it."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lockstep.launch.spec import Program

#: Files around a program that are looked through, and folders: beside a program there may be its data.
_MOST_FILES, _MOST_FOLDERS = 300, 100


def check(program: Program) -> None:
    """**Local.** Refuse a program that is not there.

    Raises:
        ValueError: the script is missing, a folder or not readable, or there is no such module.
    """
    if program.is_module:
        _check_module(program.target)
    else:
        _check_script(program.target)


def sources(program: Program) -> Iterator[str]:
    """**Local.** The text of a program's own file, then of the Python files in its folder and below.

    Files that can't be read are left out, and after some hundred files or folders it ends: it serves to guess what a
    program knows.
    """
    path = _find_module(program.target) if program.is_module else program.target
    if path is None:
        return
    yield from _texts([path])
    yield from _texts(itertools.islice(_beside(path), _MOST_FILES))


def _beside(path: str) -> Iterator[str]:
    walk = os.walk(os.path.dirname(path) or ".")
    for folder, folders, files in itertools.islice(walk, _MOST_FOLDERS):
        folders[:] = sorted(
            name for name in folders if name[0] != "." and name not in ("site-packages", "node_modules")
        )
        yield from (os.path.join(folder, name) for name in sorted(files) if name.endswith(".py"))


def _texts(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        with contextlib.suppress(OSError):
            yield Path(path).read_text(errors="replace")


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
    _find_module(name)


def _find_module(name: str) -> str | None:
    """The file that ``-m name`` runs; None: only the ranks can tell.

    Follows the packages down without importing them: importing runs the user's code, and often torch.
    """
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
            return None  # a namespace package inside one knows its place only once imported; the ranks will tell
    if search:
        spec = importlib.machinery.PathFinder.find_spec(f"{name}.__main__", search)
        if spec is None:
            raise ValueError(f"-m {name}: a package without a __main__ module can't be run")
    return spec.origin if spec is not None and spec.has_location else None
