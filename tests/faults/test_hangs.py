"""A rank that gets stuck is named with its place within 10 s, and one that is only slow raises no alarm."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.hanging import line_of
from tests.faults.hangs import SCRIPT, Case, cases, frozen_disk, hear, why_no_disk, wrong
from tests.launching import Finished, Running, environment

KINDS = ("stop", "lock", "loop", "read", "miss", "leave", "disk")
EACH = 10
#: Jobs at a time: most of a case's time is waiting.
AT_ONCE = 2


def _play(chosen: list[Case], tmp_path: Path) -> list[float]:
    """Run all cases; seconds from stuck to named, of each. Fails with everything that was wrong."""

    def one(numbered: tuple[int, Case]) -> tuple[float, str]:
        number, case = numbered
        folder = tmp_path / f"{case.kind}-{number}"
        folder.mkdir()
        with ExitStack() as stack:
            if case.kind == "disk":
                stack.enter_context(frozen_disk(folder))
            heard = hear(case, folder)
        return heard.seconds, wrong(case, heard)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(one, enumerate(chosen)))
    problems = [problem for _, problem in outcomes if problem]
    assert not problems, f"{len(problems)} of {len(chosen)}:\n" + "\n\n".join(problems)
    return [seconds for seconds, _ in outcomes]


def _skip_without_disk(kind: str) -> None:
    if kind == "disk":
        reason = why_no_disk()
        if reason:
            pytest.skip(reason)


@pytest.mark.campaign
@pytest.mark.timed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_hang_is_named(kind: str, tmp_path: Path) -> None:
    _skip_without_disk(kind)
    seconds = _play(cases(kind, EACH), tmp_path)
    print(f"{kind}: {len(seconds)} of {EACH} named, after {min(seconds):.1f} to {max(seconds):.1f} s")


@pytest.mark.campaign  # every run of the tests has those of tests/ranks/test_run_late.py
def test_a_selection_of_hangs_is_named(tmp_path: Path) -> None:
    _play([Case("stop", 0, 9, "backward"), Case("read", 1, 10, "own", torch=True)], tmp_path)


def _straggle(tmp_path: Path, *, seconds: float) -> Finished:
    """Train with a rank whose own code takes three times as long as the other's."""
    env = environment(tmp_path, torch=True, LOCKSTEP_QUIET="")
    options = ["--seconds", str(seconds), "--work", "0.01", "--slow", "3"]
    with Running(["lockstep", "run", "-n", "2", str(SCRIPT), str(tmp_path), *options], cwd=tmp_path, env=env) as job:
        return job.finish(seconds + 60)


def _check_straggler(done: Finished) -> None:
    assert done.code == 0, done
    assert "held up" not in done.err, done.err
    assert "compute straggler: rank 1, in your code: " in done.err
    assert "rank 0 took" in done.out


@pytest.mark.campaign
def test_a_straggler_is_named_at_the_end_and_raises_no_alarm(tmp_path: Path) -> None:
    _check_straggler(_straggle(tmp_path, seconds=17))


@pytest.mark.campaign
@pytest.mark.timeout(420)
def test_a_straggler_raises_no_alarm_in_five_minutes(tmp_path: Path) -> None:
    _check_straggler(_straggle(tmp_path, seconds=300))


def test_the_marked_lines_are_found() -> None:
    assert len({line_of(f"stuck: {kind}") for kind in ("stop", "lock", "loop", "read", "disk")}) == 5
