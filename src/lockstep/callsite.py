"""The line of the user's own program that is running: the innermost frame outside Python, torch and lockstep.

Warnings point there, however many frames of lockstep and torch lie in between.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import CodeType, FrameType

#: The most characters of a path that are shown, from its end.
_PATH = 120
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: File name -> True if it belongs to a library. (By name: a code object's hash takes a microsecond.)
_ours: dict[str, bool] = {}
#: A warning that is held back: its text and its category.
HeldWarning = tuple[str, type[Warning]]
#: Those that this thread holds back; None: it warns at once.
_held: ContextVar[list[HeldWarning] | None] = ContextVar("held", default=None)


def _library() -> tuple[str, ...]:
    """Return the path prefixes of files that do not belong to the user's program."""
    found = [_HERE, "<frozen", "<string>"]
    for name in ("torch", "typing_extensions", "contextlib", "multiprocessing", "threading"):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is not None:
            is_package = hasattr(module, "__path__")
            found.append(os.path.dirname(file) + os.sep if is_package else file)
    return tuple(found)


def is_library(path: str) -> bool:
    """Return whether a file belongs to Python, torch or lockstep."""
    if path not in _ours:
        _ours[path] = path.startswith(_library())
    return _ours[path]


def is_standard(path: str) -> bool:
    """Return whether a file is of Python's own library."""
    return path.startswith("<frozen") or (path.startswith(_STANDARD) and not is_installed(path))


def is_installed(path: str) -> bool:
    """Return whether a file is in a folder of installed packages."""
    return any(folder in path for folder in _INSTALLED)


def inside(path: str, package: str) -> str:
    """Return where in an installed package a file is, as in ``distributed/rpc.py``; empty: it is not in that package,
    though it may be in a folder of the user's that is named like it.

    The package is looked for, and not imported. This also holds for files of another process: its package may come
    from another folder of installed packages.
    """
    home = _home(package)
    if home and path.startswith(home):
        return path[len(home) :]
    places = [path.partition(f"{folder}{package}{os.sep}")[2] for folder in _INSTALLED]
    return next(filter(None, places), "")


@functools.cache
def _home(package: str) -> str:
    with contextlib.suppress(ValueError):  # the program has put something else in its place
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            return os.path.dirname(spec.origin) + os.sep
    return ""


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's code among ``frame`` and its callers, or None."""
    return user_frame_and_depth(frame)[0]


def user_frame_and_depth(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """Return the result of :func:`user_frame`, and its distance from ``frame`` in callers."""
    depth = 0
    while frame is not None:
        path = frame.f_code.co_filename
        if not (_ours[path] if path in _ours else is_library(path)):
            return frame, depth
        frame, depth = frame.f_back, depth + 1
    return None, depth


def frame_of(code: CodeType, frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that runs ``code`` among ``frame`` and its callers, or None."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def words(code: CodeType, line: int) -> str:
    """Return the place of a line in words: ``train.py:30 in step``."""
    path = code.co_filename
    short = path if len(path) <= _PATH else "…" + path[1 - _PATH :]
    return f"{short}:{line} in {code.co_name}"


@contextlib.contextmanager
def holding_warnings() -> Iterator[list[HeldWarning]]:
    """Keep what :func:`warn` is given within the block, in the list that is yielded, to be issued by :func:`warn_all`.

    A filter may make an error of a warning. Where other ranks wait for this one, or what it warns of is already done,
    such an error would be taken for a failure of what is done.
    """
    held: list[HeldWarning] = []
    token = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(token)


def warn_all(held: Iterable[HeldWarning]) -> None:
    """Warn of what was held back, in order."""
    for text, category in held:
        warn(text, category)


def tell_all(held: Iterable[HeldWarning]) -> None:
    """Do as :func:`warn_all` in a thread, where nobody gets an error: what a filter makes one of is printed."""
    for text, category in held:
        try:
            warn(text, category)
        except Warning:
            print(f"lockstep: {text}", file=sys.stderr, flush=True)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's own program.

    Without such a line (threads of autograd or lockstep) it points to the caller; under ``python -c``, to that program.
    Within :func:`holding_warnings` it is kept.
    """
    held = _held.get()
    if held is not None:
        held.append((text, category))
        return
    caller = sys._getframe(1)
    frame, away = user_frame_and_depth(caller)
    if frame is None:
        away, outermost = 0, caller
        while outermost.f_back is not None:
            away, outermost = away + 1, outermost.f_back
        if outermost.f_code.co_filename != "<string>":
            away = 0
    warnings.warn(text, category, stacklevel=2 + away)
