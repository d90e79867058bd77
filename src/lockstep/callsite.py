"""The line of the user's own program that is running: the innermost frame outside Python, torch and lockstep.

Warnings point there, however many of lockstep's and torch's frames lie in between.
"""

from __future__ import annotations

import os
import sys
import warnings
from types import CodeType, FrameType

#: Characters of a path that are shown: its end is what a reader needs.
_PATH = 120
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
#: Whether a file is none of the user's. (By name: a code object's hash takes a microsecond.)
_ours: dict[str, bool] = {}


def _library() -> tuple[str, ...]:
    """Frames of files that begin so are not the user's program."""
    found = [_HERE, "<frozen", "<string>"]
    for name in ("torch", "typing_extensions", "contextlib", "multiprocessing", "threading"):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is not None:
            is_package = hasattr(module, "__path__")
            found.append(os.path.dirname(file) + os.sep if is_package else file)
    return tuple(found)


def is_library(path: str) -> bool:
    """Return whether code in this file is Python's, torch's or lockstep's own."""
    if path not in _ours:
        _ours[path] = path.startswith(_library())
    return _ours[path]


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost of ``frame`` and its callers that is the user's, or None."""
    return user_frame_and_depth(frame)[0]


def user_frame_and_depth(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """Return what :func:`user_frame` returns, and how many callers it is away."""
    depth = 0
    while frame is not None:
        path = frame.f_code.co_filename
        if not (_ours[path] if path in _ours else is_library(path)):
            return frame, depth
        frame, depth = frame.f_back, depth + 1
    return None, depth


def words(code: CodeType, line: int) -> str:
    """Say where a line is: ``train.py:30 in step``."""
    path = code.co_filename
    short = path if len(path) <= _PATH else "…" + path[1 - _PATH :]
    return f"{short}:{line} in {code.co_name}"


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's own program.

    A thread of autograd's or of our own has none: then it is our caller's; under ``python -c`` it is that program's.
    """
    caller = sys._getframe(1)
    frame, away = user_frame_and_depth(caller)
    if frame is None:
        away, outermost = 0, caller
        while outermost.f_back is not None:
            away, outermost = away + 1, outermost.f_back
        if outermost.f_code.co_filename != "<string>":
            away = 0
    warnings.warn(text, category, stacklevel=2 + away)
