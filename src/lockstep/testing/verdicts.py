"""The outcome of a test, by the outcome of each rank: passed, skipped, expected to fail or failed, in words."""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.launch.processes import name
from lockstep.testing.on_rank import RankReport
from lockstep.testing.team import FOLLOWING, EndedFor, RankEnd, TeamResult
from lockstep.text import listed, which_ranks

#: Addresses of objects, which differ from rank to rank.
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


class TestFate(enum.Enum):
    """The outcome of a test."""

    #: (pytest takes classes of this name for tests where a test module imports one.)
    __test__ = False

    PASSED = "passed"
    SKIPPED = "skipped"
    #: It failed as ``xfail`` said.
    EXPECTED = "expected to fail"
    FAILED = "failed"


@dataclass(frozen=True)
class Told:
    """The report on a failure that some ranks have in common."""

    heading: str
    #: The report of the first of them, if pytest made one there.
    report: RankReport | None
    #: The report in words, if pytest made none.
    text: str = ""


@dataclass(frozen=True)
class RanksVerdict:
    """The outcome of a test, and the words for it."""

    fate: TestFate
    #: The reason why it was skipped or was expected to fail; of a failure one line: the first rank that failed.
    reason: str = ""
    told: tuple[Told, ...] = ()


def judge(result: TeamResult, *, limit: float) -> RanksVerdict:
    """Return the outcome of a test.

    Args:
        result: the outcomes of its ranks, each of which returned a :class:`RankReport`, or nothing.
        limit: the test's time limit, in seconds.
    """
    ranks, count = result.ranks, len(result.ranks)
    reports = {end.rank: end.value for end in ranks if isinstance(end.value, RankReport)}
    by_themselves = [end for end in ranks if _has_failed(end) and end.stopped is None]
    causes = [end for end in by_themselves if not _is_echo(end)]
    expected = [report for report in reports.values() if report.kind == "expected"]
    if result.stopped is EndedFor.LIMIT or result.stopped is EndedFor.HANG:
        return _failed([*by_themselves, *(end for end in ranks if end.stopped)], result, limit=limit)
    if causes or (by_themselves and not expected):
        rest = [end for end in ranks if (_has_failed(end) or end.stopped) and end not in causes]
        return _failed([*(causes or by_themselves), *(rest if causes else [])], result, limit=limit)
    if expected:
        return RanksVerdict(TestFate.EXPECTED, expected[0].reason)
    skipped = [rank for rank, report in reports.items() if report.kind == "skipped"]
    if skipped and len(skipped) < count:
        text = (
            f"{which_ranks(skipped)} of {count} skipped the test ({reports[skipped[0]].reason}), and the others did not"
        )
        return RanksVerdict(TestFate.FAILED, text, (Told(text, None),))
    if result.left:
        text = f"the test has left running what it started: {listed(result.left, most=4)}"
        return RanksVerdict(TestFate.FAILED, text, (Told(text, None, "it was ended"),))
    if skipped:
        return RanksVerdict(TestFate.SKIPPED, reports[skipped[0]].reason)
    return RanksVerdict(TestFate.PASSED)


def _has_failed(end: RankEnd) -> bool:
    return end.exit_code != 0 or not isinstance(end.value, RankReport) or end.value.failed


def _is_echo(end: RankEnd) -> bool:
    return isinstance(end.value, RankReport) and end.value.echo


def _failed(ends: Sequence[RankEnd], result: TeamResult, *, limit: float) -> RanksVerdict:
    """Put the failures into words: ranks with the same report together, the first failure at the top."""
    count = len(result.ranks)
    groups: dict[str, list[RankEnd]] = {}
    ends = sorted(ends, key=lambda end: (end.stopped is not None, _is_echo(end), _when(end)))
    for end in ends:
        groups.setdefault(_sameness(end), []).append(end)
    alone = all(_is_echo(end) for end in ends)
    told = [_tell(group, count, alone=alone) for group in groups.values()]
    if result.stopped is EndedFor.LIMIT:
        text = f"the ranks had not ended after {limit:g} s, the test's limit"
        told.insert(0, Told(text, None, result.finding))
    elif result.stopped is EndedFor.HANG:
        text = result.finding.splitlines()[0]
        told.insert(0, Told("the ranks could make no more progress, and were ended", None, result.finding))
    else:
        text = told[0].heading
        first = ends[0].value
        if isinstance(first, RankReport):
            text = f"{text}: {_in_a_line(first)}"
    if result.left:
        told.append(Told("what the ranks have left running, and was ended", None, "\n".join(result.left)))
    return RanksVerdict(TestFate.FAILED, text, tuple(told))


def _when(end: RankEnd) -> float:
    if end.stopped is not None:
        return end.rank  # all at once
    return end.value.at if isinstance(end.value, RankReport) else end.at


def _sameness(end: RankEnd) -> str:
    """Return the key that is equal for ranks with the same report."""
    report = end.value
    if end.stopped is not None or not isinstance(report, RankReport) or not report.failed:
        return f"rank {end.rank}"
    crash = _crash(report)
    same = report.text or str(crash if crash is not None else (report.report or {}).get("longrepr"))
    return _ADDRESS.sub("0x…", f"{report.phase} {same}")


def _crash(report: RankReport) -> dict[str, Any] | None:
    """Return where an exception was raised (path, lineno) and its words (message), by pytest's report."""
    longrepr = (report.report or {}).get("longrepr")
    crash: dict[str, Any] | None = longrepr.get("reprcrash") if isinstance(longrepr, dict) else None
    return crash


def _in_a_line(report: RankReport) -> str:
    """Return an error in one line."""
    crash = _crash(report)
    if crash is not None:
        return str(crash["message"]).strip().partition("\n")[0]
    text = report.text or str((report.report or {}).get("longrepr"))
    return text.strip().rpartition("\n")[2]


def _in_words(report: RankReport) -> str:
    """Return an error and the line that raised it, without a traceback."""
    crash = _crash(report)
    return report.text if crash is None else f"{crash['path']}:{crash['lineno']}: {crash['message']}"


def _tell(group: Sequence[RankEnd], count: int, *, alone: bool) -> Told:
    """Put into words the outcome of ranks with the same report.

    Args:
        group: these ranks.
        count: of all ranks.
        alone: no other rank shows more of the cause.
    """
    who, end = f"{which_ranks(end.rank for end in group)} of {count}", group[0]
    report = end.value if isinstance(end.value, RankReport) else None
    if end.stopped is EndedFor.FAILURE:
        return Told(f"{who} was still there {FOLLOWING:g} s after that, and was ended", None, end.where)
    if end.stopped is not None:
        return Told(f"{who} was ended", None, end.where)
    if report is not None and report.failed:
        where = "" if report.phase == "call" else f", in {report.phase}"
        if report.echo and not alone:
            return Told(f"{who}{where}, as a consequence", None, _in_words(report))
        return Told(f"{who}{where}", report if report.report is not None else None, report.text)
    if end.record is not None:
        return Told(f"{who}", None, end.record.traceback or end.record.summary)
    code = end.exit_code or 0
    how = f"was killed by signal {-code} ({name(-code)})" if code < 0 else f"ended with exit code {code}"
    doubt = ", which lockstep did not send: did memory run out?" if code == -signal.SIGKILL else ""
    return Told(f"{who} {how} in the test{doubt}", None, end.problem)
