"""Pickle functions and classes that were typed at a prompt: by value, since no process can import them again.

cloudpickle does it, which the extra ``notebook`` brings. What it makes goes from a program to the ranks that it has
started itself and back, through memory that they inherit, as all that :func:`lockstep.spawn` sends.
"""

from __future__ import annotations

import pickle
from collections import ChainMap
from collections.abc import Callable
from importlib.util import find_spec
from typing import IO, Any


def is_available() -> bool:
    """Return whether cloudpickle is installed."""
    return find_spec("cloudpickle") is not None


def pickler(file: IO[bytes], *, first: Callable[[object], Any] | None = None, shares: bool = False) -> pickle.Pickler:
    """Return a pickler that sends by value what can't be imported.

    Args:
        file: what it writes to.
        shares: whether locks, queues and tensors are shared with the process that reads, as multiprocessing and torch
            do it; else tensors are copied.
        first: says how an object is pickled, before anything else does; ``NotImplemented``: as ever.
    """
    import cloudpickle

    table = cloudpickle.Pickler.dispatch_table
    if shares:
        from multiprocessing import reduction

        table = ChainMap({}, reduction.ForkingPickler(file).dispatch_table, table)

    class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table = table  # of the class: Python looks for it when a pickler is made

        def reducer_override(self, value: object) -> Any:
            said = NotImplemented if first is None else first(value)
            return super().reducer_override(value) if said is NotImplemented else said

    return ByValue(file, pickle.HIGHEST_PROTOCOL)
