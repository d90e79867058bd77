"""Uncaught errors as users want to read them: their own frames, and every message once.

The frames of lockstep and torch rarely matter to a user: the error mostly lies in the user's own code.
``LOCKSTEP_TRACEBACK=full`` leaves everything as it is.
"""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from lockstep import callsite, knobs
from lockstep.errors import LockstepError, named

#: Functions of rooms that can explain an error of another room: each returns the remedy, or None.
explainers: list[Callable[[BaseException], str | None]] = []


def explain(error: BaseException) -> None:
    """Add the hints of :data:`explainers` to the message of an uncaught error. The error is changed in place."""
    hints = [hint for each in explainers if (hint := each(error)) is not None and hint not in str(error)]
    if hints and error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}: {'; '.join(hints)}", *error.args[1:])


def fold(error: BaseException) -> None:
    """Explain ``error``, and remove all frames but the user's from its traceback and from those of its causes.

    An error of lockstep's own says all that matters about its cause, so the cause goes, unless the user's code raised
    it. A traceback without any of the user's frames stays whole. The error is changed in place.
    """
    explain(error)
    if knobs.full_traceback():
        return
    seen: set[int] = set()
    left = [error]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        # (Not "or": an exception may have a length, and be empty.)
        cause = each.__cause__ if each.__cause__ is not None else each.__context__
        if each.__cause__ is None and each.__suppress_context__:
            cause = None
        if isinstance(each, LockstepError) and cause is not None and not _is_users(cause.__traceback__):
            each.__cause__, each.__suppress_context__, cause = None, True, None
        each.__traceback__ = _users(each.__traceback__)
        left += _members(each) if cause is None else [cause, *_members(each)]


def users_text(error: BaseException) -> str:
    """Return the text of an error that is told to another process, with the user's frames alone, as :func:`fold` would
    leave them; the error itself stays as it is."""
    try:
        told = traceback.TracebackException.from_exception(error)
    except BaseException as trouble:  # noqa: BLE001  (formatting runs code of the user's; see text())
        return f"{named(error)}\n(Python can't show all of it: {named(trouble)})\n"
    if not knobs.full_traceback():
        _leave_users_frames(told)
    return "".join(told.format())


def _leave_users_frames(told: traceback.TracebackException) -> None:
    frames = [frame for frame in told.stack if not callsite.is_library(frame.filename)]
    told.stack = traceback.StackSummary.from_list(frames or told.stack)
    for each in (told.__cause__, told.__context__):
        if each is not None:
            _leave_users_frames(each)


def text(error: BaseException, *, in_memory: bool = False) -> str:
    """Return the text that Python prints for an uncaught error, or as much of it as can be formatted.

    Formatting runs code of the user's program: an exception's ``__str__``, its notes, a SyntaxError's fields.

    Args:
        error: the error.
        in_memory: whether lines of its frames are in no file, but in :mod:`linecache`, as a notebook's cells are.
    """
    try:
        return _formatted(error, in_memory=in_memory)
    except BaseException as trouble:  # noqa: BLE001  (nothing may hide the error that is to be told)
        lines = ["Traceback (most recent call last):\n"]
        with contextlib.suppress(Exception):
            lines += traceback.format_tb(error.__traceback__)
        return "".join([*lines, f"{named(error)}\n(Python can't show all of it: {named(trouble)})\n"])


def _formatted(error: BaseException, *, in_memory: bool) -> str:
    if sys.version_info >= (3, 12) or in_memory:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    # Before 3.12 only the interpreter's own display has "Did you mean". It writes to stderr, and reads files alone.
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        sys.__excepthook__(type(error), error, error.__traceback__)
    return written.getvalue()


def _members(error: BaseException) -> list[BaseException]:
    """Return the errors of an exception group; Python 3.10 has no such class, and libraries bring their own."""
    members = getattr(error, "exceptions", ())
    if not isinstance(members, (tuple, list)):
        return []
    return [each for each in members if isinstance(each, BaseException)]


def _is_users(tb: TracebackType | None) -> bool:
    """Return whether the innermost frame belongs to the user's code."""
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
        # A generated instruction may have no line; -1 makes Python look it up again.
        line = -1 if each.tb_lineno is None else each.tb_lineno
        folded = TracebackType(folded, each.tb_frame, each.tb_lasti, line)
    return folded or tb
