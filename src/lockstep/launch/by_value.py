"""Pickle functions and classes that were typed at a prompt: by value, since no process can import them again.

cloudpickle does it, which the extra ``notebook`` brings. What it makes goes from a program to the ranks that it has
started itself and back, through memory that they inherit, as all that :func:`lockstep.spawn` sends.

Note [Classes that come back]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
cloudpickle numbers the classes that it sends, and who receives a number that it knows gets the class that it has, after
all that was sent of it was set there. For a class that a rank sends back this would write over the program's own: class
attributes as they are on that rank, and methods that see a copy of the notebook's globals from then on. So a class that
came from the program goes back as its number alone.
"""

from __future__ import annotations

import pickle
from collections import ChainMap
from collections.abc import Callable, MutableMapping
from importlib.util import find_spec
from typing import IO, Any
from weakref import WeakKeyDictionary

#: The classes that the program has sent to this rank, with cloudpickle's numbers.
_received: MutableMapping[type, str] = WeakKeyDictionary()


def is_available() -> bool:
    """Return whether cloudpickle is installed."""
    return find_spec("cloudpickle") is not None


def pickler(file: IO[bytes], *, first: Callable[[object], Any] | None = None, shares: bool = False) -> pickle.Pickler:
    """Return a pickler that sends by value what can't be imported.

    Args:
        file: what it writes to.
        shares: for a call, and not for what it returns: locks, queues and tensors are shared with the process that
            reads, as multiprocessing and torch do it. Else tensors are copied.
        first: decides first how an object is pickled; ``NotImplemented``: as pickle itself would.
    """
    import cloudpickle

    table = cloudpickle.Pickler.dispatch_table
    if shares:
        from multiprocessing import reduction

        table = ChainMap({}, reduction.ForkingPickler(file).dispatch_table, table)

    class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table = table  # of the class: Python looks for it when a pickler is made

        def reducer_override(self, value: object) -> Any:
            if not shares and isinstance(value, type) and value in _received:
                return own_class, (_received[value],)
            said = NotImplemented if first is None else first(value)
            return super().reducer_override(value) if said is NotImplemented else said

    return ByValue(file, pickle.HIGHEST_PROTOCOL)


def note_received() -> None:
    """Note the classes that the program has sent to this rank: see Note [Classes that come back]."""
    from cloudpickle import cloudpickle

    # Private, and the only place that tells the classes that came by value from others. There since cloudpickle 1.2.
    _received.update(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)


def own_class(number: str) -> type:
    """Return the class of this program that was sent under a number of cloudpickle's.

    Raises:
        LookupError: the program has it no longer.
    """
    from cloudpickle import cloudpickle

    found: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(number)
    if found is None:
        raise LookupError("its class is the one that was sent to the rank, which this program has defined anew since")
    return found
