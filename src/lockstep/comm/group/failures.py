"""The errors that end a group, as its ranks tell them to each other."""

from __future__ import annotations

import json

from lockstep.errors import CollectiveMismatch, CollectiveTimeout, LockstepError, PeerLost, named, said

#: The classes as which errors are told to other ranks: for each error the first that matches.
KINDS: tuple[type[LockstepError], ...] = (CollectiveMismatch, CollectiveTimeout, PeerLost, LockstepError)


def again(error: LockstepError) -> LockstepError:
    """Return a new exception that says the same: one object must not be raised twice, its traceback would grow."""
    copy: LockstepError = type(error)(*error.args)
    return copy


def in_words(error: BaseException) -> str:
    """Return an error that came from elsewhere, for the message of the one that ends the group because of it."""
    return named(error) if said(error) else type(error).__name__


def dumps(error: LockstepError) -> str:
    """Write down what has ended a group, for the ranks of other hosts; :func:`loads` reads it."""
    kind = next(each for each in KINDS if isinstance(error, each))
    return json.dumps([KINDS.index(kind), str(error)])


def loads(text: str | bytes) -> LockstepError:
    """Return the error that :func:`dumps` wrote down."""
    code, said = json.loads(text)
    kind: type[LockstepError] = KINDS[code]
    return kind(said)
