"""The random numbers of tests: a test that fails by those it has drawn has to fail again."""

from __future__ import annotations

import random
import sys


def seed() -> None:
    """Have the generators that all code shares begin anew: Python's, and those of libraries that are loaded."""
    random.seed(0)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)  # (that of GPUs costs a look at the stack)
