"""Warnings that point at the caller's line, however many frames of this package and of torch lie in between."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

_NOT_THE_CALLERS = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))


def warn(text: str) -> None:
    """**Local.** A UserWarning at the nearest frame of the caller's own code."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)
