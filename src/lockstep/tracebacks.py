"""Uncaught errors as users want to read them: their own frames, and every message once.

A frame of lockstep's or torch's says how the error came about, which is rarely the question, and what lies below it in
the user's own code is what to look at. ``LOCKSTEP_TRACEBACK=full`` leaves everything as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from lockstep import callsite, knobs
from lockstep.errors import LockstepError

#: Rooms that know more of an error that is not theirs append a function: it returns what is to be done, or None.
explainers: list[Callable[[BaseException], str | None]] = []


def explain(error: BaseException) -> None:
    """Add to the message of an uncaught error what a room above knows of it. The error is changed in place."""
    hints = [hint for each in explainers if (hint := each(error)) is not None]
    if hints and error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}: {'; '.join(hints)}", *error.args[1:])


def fold(error: BaseException) -> None:
    """Explain ``error``, and take from its traceback, and from those it came from, the frames that are not the user's.

    An error of lockstep's own repeats what it knows of its cause, so that cause goes, unless the user's code raised it.
    A traceback without any frame of the user's stays whole. The error is changed in place.
    """
    explain(error)
    if knobs.full_traceback():
        return
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        cause = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
        if isinstance(following, LockstepError) and cause is not None and not _is_users(cause.__traceback__):
            following.__cause__, following.__suppress_context__, cause = None, True, None
        following.__traceback__ = _users(following.__traceback__)
        following = cause


def _is_users(tb: TracebackType | None) -> bool:
    """Return whether the innermost frame is the user's."""
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and not callsite.is_library(tb.tb_frame.f_code.co_filename)


def _users(tb: TracebackType | None) -> TracebackType | None:
    frames = []
    each = tb
    while each is not None:
        if not callsite.is_library(each.tb_frame.f_code.co_filename):
            frames.append(each)
        each = each.tb_next
    folded: TracebackType | None = None
    for each in reversed(frames):
        folded = TracebackType(folded, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return folded or tb
