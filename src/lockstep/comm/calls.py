"""Calls that all ranks must make together, and the names by which errors and the launcher know them.

The usual mistake with them is ``if world.is_main: checkpointer.save()``: one rank waits in a call that the others never
make. What fails then is a collective far below; its error is to name the call that the script made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from lockstep.errors import CollectiveMismatch, CollectiveTimeout, LockstepError, PeerLost
from lockstep.job import fates, flight
from lockstep.step import slicing, threaded

Given = ParamSpec("Given")
Result = TypeVar("Result")


def of_all_ranks(name: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Decorate a public function that is collective; ``name`` is what a script calls, as ``World.mean()``.

    It is refused where the ranks do not come alike: see :func:`refuse_apart`.
    """

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @functools.wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            with calling(name):
                return function(*args, **kwargs)

        return call

    return decorate


def refuse_apart(name: str) -> None:
    """Raise where the ranks do not come alike: in a slice, and in a forward whose replicas are threads.

    Raises:
        LockstepError: ``name``, which needs all ranks, is called in such a place.
    """
    slicing.refuse_in_slice(name)
    threaded.refuse_in_replicas(name)


class calling:  # (used as a verb, like contextlib.suppress)
    """Return a context: this rank is in ``name``, which all ranks must call. Within another one it does nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._outermost = False

    def __enter__(self) -> None:
        refuse_apart(self._name)
        self._outermost = flight.begin_call(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._outermost:
            return
        flight.end_call()
        if isinstance(error, LockstepError) and _may_be_alone(error):
            text, *rest = error.args
            error.args = (f"{text}\n{fates.advice(self._name)}", *rest)


def _may_be_alone(error: LockstepError) -> bool:
    """Return whether the error may come from other ranks not making the call, rather than from a rank's failure."""
    if isinstance(error, PeerLost):
        return fates.WITHOUT_ERROR in str(error)
    return isinstance(error, (CollectiveMismatch, CollectiveTimeout))
