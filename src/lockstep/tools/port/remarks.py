"""The messages about a port: remarks on lines, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.codes import CodedEnum
from lockstep.errors import LockstepError


class CannotPort(LockstepError):
    """The script can't be read: it is not Python that this version knows, or not UTF-8."""

    code = "cannot-port"


class RemarkKind(CodedEnum):
    """The outcome for a line."""

    CHANGED = "changed", "line-changed"
    DIFFERS = "differs by design", "line-differs"
    LEFT = "left", "line-left"
    REFUSED = "refused", "line-refused"


class PortVerdict(CodedEnum):
    """The outcome for a script."""

    FULLY = "ported fully", "ported-fully"
    PARTLY = "ported in part", "ported-partly"
    REFUSED = "refused", "port-refused"
    ALREADY = "uses lockstep already", "ported-already"


@dataclass(frozen=True)
class Remark:
    """A sentence about a line of the script as it was.

    Args:
        line: its number, from 1; 0: the script as a whole.
        kind: the outcome for it.
        what: the code that it is about.
        why: why it was changed, left or refused.
        advice: what to do; empty if there is nothing to do.
    """

    line: int
    kind: RemarkKind
    what: str
    why: str
    advice: str = ""


def verdict_of(remarks: Sequence[Remark]) -> PortVerdict:
    """Return the verdict on a script that did not use lockstep before."""
    kinds = {each.kind for each in remarks}
    if RemarkKind.REFUSED in kinds:
        return PortVerdict.REFUSED
    return PortVerdict.PARTLY if RemarkKind.LEFT in kinds else PortVerdict.FULLY
