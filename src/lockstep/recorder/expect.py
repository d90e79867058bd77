"""expect_slow(): say that what follows takes its time."""

from __future__ import annotations

from contextlib import ContextDecorator

from lockstep.recorder import writer

#: The reasons that are in force, the innermost last.
_reasons: list[str] = []


class expect_slow(ContextDecorator):  # (used as a verb, like contextlib.suppress)
    """**Local.** Say that this rank may keep the others waiting in here: ``with lockstep.expect_slow("evaluation"):``

    ``lockstep run`` reports a rank that has held up the others for a while (see the guide, "A rank that is late").
    In here it reports nothing of this rank, however long it takes. The time limit of the collective that the others
    wait in holds all the same: ``lockstep.init(timeout=…)``. Also a decorator of functions.

    Args:
        reason: what takes long, for people.

    Raises:
        TypeError: ``reason`` is not a text.
        ValueError: ``reason`` is empty.
    """

    def __init__(self, reason: str) -> None:
        if not isinstance(reason, str):
            raise TypeError(f"expect_slow takes a reason in words, not {type(reason).__name__}")
        if not reason.strip():
            raise ValueError('expect_slow takes a reason in words, e.g. expect_slow("evaluation")')
        self._reason = reason

    def __enter__(self) -> None:
        _reasons.append(self._reason)
        writer.current.expect(_reasons[-1])

    def __exit__(self, *_: object) -> None:
        _reasons.pop()
        writer.current.expect(_reasons[-1] if _reasons else "")
