"""Report on a port: the verdict, the diff, and the remarks line by line, in words and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.text import counted, wrapped
from lockstep.tools.port.port import Port
from lockstep.tools.port.remarks import PortVerdict, Remark, RemarkKind
from lockstep.tools.port.verification import Verified

#: What the first line of a remark begins with, and what the others do.
_INDENTS = "  ", "      "
#: Kinds of remarks in the order in which they are told, each with its heading. What was changed is in the diff.
_TOLD = {
    RemarkKind.REFUSED: "Not ported, because of:",
    RemarkKind.LEFT: "Left as it is, for you to look at:",
    RemarkKind.DIFFERS: "Not the same as before, by design:",
}


def describe(port: Port, verified: Sequence[Verified], *, every_line: bool = False) -> str:
    """Return the report.

    Args:
        port: the ported script.
        verified: the verdicts of ``lockstep verify``; empty if it was not run.
        every_line: list the changed lines as well.
    """
    lines = [_head(port)]
    if port.diff:
        lines += ["", port.diff.rstrip("\n")]
    told = dict(_TOLD) | ({RemarkKind.CHANGED: "Changed, and the same:"} if every_line else {})
    for kind, heading in told.items():
        remarks = [each for each in port.remarks if each.kind is kind]
        if remarks:
            lines += ["", heading, *(line for each in remarks for line in _remark(each))]
    if verified:
        lines += ["", *(line for each in verified for line in wrapped(f"{each.which}: {each.words}", *_INDENTS))]
    return "\n".join(lines)


def _head(port: Port) -> str:
    text = f"{port.path}: {port.verdict.value}"
    if port.verdict in (PortVerdict.REFUSED, PortVerdict.ALREADY):
        return text
    counts = [f"{counted(port.count(RemarkKind.CHANGED), 'place')} changed"]
    counts += [f"{number} left"] if (number := port.count(RemarkKind.LEFT)) else []
    return f"{text}: {', '.join(counts)}"


def _remark(remark: Remark) -> Iterator[str]:
    where = f"line {remark.line}" if remark.line else "the script"
    text = f"`{remark.what}`: {remark.why}" + (f". Do: {remark.advice}" if remark.advice else "")
    yield from wrapped(f"{where}: {text}", *_INDENTS)


def as_json(port: Port, verified: Sequence[Verified]) -> Mapping[str, Any]:
    """Return the result; the keys are those of docs/json.md."""
    return {
        "program": str(port.path),
        "verdict": port.verdict.value,
        "code": port.verdict.code,
        "diff": port.diff,
        "remarks": [
            {
                "line": each.line or None,
                "kind": each.kind.value,
                "code": each.kind.code,
                "what": each.what,
                "why": each.why,
                "advice": each.advice or None,
            }
            for each in port.remarks
        ],
        "verified": [{"which": each.which, "code": each.code, "words": each.words} for each in verified],
    }
