"""Pickle functions and classes that were typed at a prompt: by value, since no process can import them again.

cloudpickle does it, which the extra ``notebook`` brings. What it makes goes from a program to the ranks that it has
started itself and back, through memory that they inherit, as all that :func:`lockstep.spawn` sends.
"""

from __future__ import annotations

import pickle
from collections import ChainMap
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import reduction
from typing import IO, Any


def is_available() -> bool:
    """Return whether cloudpickle is installed."""
    return find_spec("cloudpickle") is not None


def pickler(file: IO[bytes], *, first: Callable[[object], Any] | None = None) -> pickle.Pickler:
    """Return a pickler that sends by value what can't be imported, and all else as multiprocessing does.

    Args:
        file: what it writes to.
        first: says how an object is pickled, before anything else does; ``NotImplemented``: as ever.
    """
    import cloudpickle

    class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: object) -> Any:
            said = NotImplemented if first is None else first(value)
            return super().reducer_override(value) if said is NotImplemented else said

    made = ByValue(file, pickle.HIGHEST_PROTOCOL)
    # What multiprocessing and torch have registered: locks, queues, tensors in shared memory.
    made.dispatch_table = ChainMap({}, reduction.ForkingPickler(file).dispatch_table, made.dispatch_table)
    return made
