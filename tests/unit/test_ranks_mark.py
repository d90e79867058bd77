"""What the mark ranks asks for, and what a test comes to by what became of its ranks."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from lockstep.testing.marks import RankCase, RanksMark, seconds
from lockstep.testing.on_rank import RankReport
from lockstep.testing.team import EndedFor, RankEnd, TeamResult
from lockstep.testing.verdicts import RanksVerdict, TestFate, judge


def test_a_test_has_a_run_for_each_world_size_and_backend() -> None:
    mark = RanksMark.read((1, 2), {"backends": ("shm", "gloo"), "limit": 5, "shared": ["corpus"]})
    assert mark.cases() == {
        "1ranks-shm": RankCase(1, "shm"),
        "1ranks-gloo": RankCase(1, "gloo"),
        "2ranks-shm": RankCase(2, "shm"),
        "2ranks-gloo": RankCase(2, "gloo"),
    }
    assert (mark.limit, mark.shared) == (5.0, ("corpus",))
    assert RanksMark.read((2, 3), {}).cases() == {"2ranks": RankCase(2), "3ranks": RankCase(3)}
    assert RanksMark.read((2,), {"backends": ("gloo",)}).cases() == {"gloo": RankCase(2, "gloo")}
    assert RanksMark.read((2,), {}).cases() == {"": RankCase(2)}


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"ranks\(\): expected world sizes, whole numbers of at least 1"),
        ((0,), {}, r"ranks\(0\): expected world sizes"),
        ((True,), {}, r"ranks\(True\): expected world sizes"),
        (("2",), {}, r"ranks\('2'\): expected world sizes"),
        ((2, 2), {}, r"ranks\(2, 2\): .*each once"),
        ((2,), {"backend": "shm"}, r"backend=…\): expected backends, limit or shared"),
        ((2,), {"backends": "shm"}, r"backends='shm'\): expected names, such as backends=\('shm',\)"),
        ((2,), {"shared": ("a", "a")}, "expected each name once"),
        ((2,), {"limit": 0}, "limit=0: expected a positive number of seconds"),
        ((2,), {"limit": "soon"}, "limit='soon': expected a positive number"),
    ],
)
def test_what_makes_no_sense_is_refused(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RanksMark.read(args, kwargs)


def test_a_limit_may_be_written_in_a_file() -> None:
    assert seconds("2.5", "ranks_limit") == 2.5


def _failed(message: str, *, at: float = 1.0, line: int = 7, echo: bool = False, phase: str = "call") -> RankReport:
    crash = {"path": "test_it.py", "lineno": line, "message": message}
    return RankReport("failed", report={"longrepr": {"reprcrash": crash}}, at=at, echo=echo, phase=phase)


def _end(rank: int, value: RankReport | None = None, *, code: int = 0, **more: Any) -> RankEnd:
    report = RankReport() if value is None and not code else value
    return RankEnd(rank, 100 + rank, code, 9.0, value=report, **more)


def _judge(
    *ends: RankEnd, stopped: EndedFor | None = None, finding: str = "", left: tuple[str, ...] = ()
) -> RanksVerdict:
    return judge(TeamResult(ends, stopped, finding, left), limit=60.0)


def _headings(verdict: RanksVerdict) -> list[str]:
    assert verdict.fate is TestFate.FAILED
    return [told.heading for told in verdict.told]


def test_a_test_has_passed_where_every_rank_has() -> None:
    assert _judge(_end(0), _end(1)) == RanksVerdict(TestFate.PASSED)


def test_ranks_that_fail_alike_are_told_once_and_what_failed_first_comes_first() -> None:
    verdict = _judge(
        _end(0, _failed("assert 0 == 7 at 0x7f00aa11", at=2.0)),
        _end(1, _failed("assert 1 == 7", at=1.0)),
        _end(2, _failed("assert 0 == 7 at 0x7f00bb22", at=3.0)),
        _end(3),
    )
    assert _headings(verdict) == ["rank 1 of 4", "ranks 0 and 2 of 4"]
    assert verdict.reason == "rank 1 of 4: assert 1 == 7"
    elsewhere = _judge(_end(0, _failed("assert 0")), _end(1, _failed("assert 0", line=8)))
    assert _headings(elsewhere) == ["rank 0 of 2", "rank 1 of 2"], "the same words of another line"


def test_a_consequence_comes_after_its_cause_and_without_a_traceback() -> None:
    verdict = _judge(
        _end(0, _failed("PeerLost: rank 1\nmore", at=1.0, echo=True)), _end(1, _failed("assert x", at=2.0))
    )
    assert _headings(verdict) == ["rank 1 of 2", "rank 0 of 2, as a consequence"]
    assert verdict.told[1].report is None
    assert verdict.told[1].text == "test_it.py:7: PeerLost: rank 1\nmore"
    alone = _judge(_end(0, _failed("PeerLost: rank 1", echo=True)), _end(1))
    assert _headings(alone) == ["rank 0 of 2"], "nobody tells more of the cause"
    assert alone.told[0].report is not None


def test_a_rank_that_dies_is_told_by_its_exit_code_or_signal() -> None:
    assert _headings(_judge(_end(0), _end(1, code=7))) == ["rank 1 of 2 ended with exit code 7 in the test"]
    (heading,) = _headings(_judge(_end(0), _end(1, code=-signal.SIGSEGV)))
    assert heading == "rank 1 of 2 was killed by signal 11 (SIGSEGV) in the test"
    (heading,) = _headings(_judge(_end(0, code=-signal.SIGKILL)))
    assert (
        heading
        == "rank 0 of 1 was killed by signal 9 (SIGKILL) in the test, which lockstep did not send: did memory run out?"
    )


def test_a_rank_that_stays_behind_a_failure_is_told_with_where_it_was() -> None:
    verdict = _judge(
        _end(0, code=-9, stopped=EndedFor.FAILURE, where="in time.sleep"),
        _end(1, _failed("assert x")),
        stopped=EndedFor.FAILURE,
    )
    assert _headings(verdict) == ["rank 1 of 2", "rank 0 of 2 was still there 5 s after that, and was ended"]
    assert verdict.told[1].text == "in time.sleep"


@pytest.mark.parametrize(
    ("stopped", "heading", "reason"),
    [
        (EndedFor.HANG, "the ranks could make no more progress, and were ended", "rank 1 has held up the others"),
        (EndedFor.LIMIT, "the ranks had not ended after 60 s, the test's limit", "the ranks had not ended after 60 s"),
    ],
)
def test_ranks_that_do_not_end_are_told_with_where_they_were(stopped: EndedFor, heading: str, reason: str) -> None:
    finding = "rank 1 has held up the others\n  for long"
    verdict = _judge(_end(0, code=-9, stopped=stopped, where="in barrier"), _end(1), stopped=stopped, finding=finding)
    assert _headings(verdict) == [heading, "rank 0 of 2 was ended"]
    assert [told.text for told in verdict.told] == [finding, "in barrier"]
    assert verdict.reason.startswith(reason)


def test_a_test_is_skipped_only_if_every_rank_skips_it() -> None:
    skipped = RankReport("skipped", reason="no GPU")
    assert _judge(_end(0, skipped), _end(1, skipped)) == RanksVerdict(TestFate.SKIPPED, "no GPU")
    (heading,) = _headings(_judge(_end(0), _end(1, skipped)))
    assert heading == "rank 1 of 2 skipped the test (no GPU), and the others did not"


def test_a_failure_that_is_expected_excuses_its_consequences_alone() -> None:
    expected = RankReport("expected", reason="known")
    assert _judge(_end(0), _end(1, expected)) == RanksVerdict(TestFate.EXPECTED, "known")
    excused = _judge(_end(0, _failed("PeerLost", echo=True)), _end(1, expected))
    assert excused == RanksVerdict(TestFate.EXPECTED, "known")
    assert _headings(_judge(_end(0, _failed("assert x")), _end(1, expected))) == ["rank 0 of 2"]


def test_processes_that_are_left_fail_a_test_that_has_passed() -> None:
    (heading,) = _headings(_judge(_end(0), _end(1), left=("process 7: sleep 100",)))
    assert heading == "the test has left running what it started: process 7: sleep 100"
    headings = _headings(_judge(_end(0, _failed("assert x")), left=("process 7: sleep 100",)))
    assert headings == ["rank 0 of 1", "what the ranks have left running, and was ended"]
