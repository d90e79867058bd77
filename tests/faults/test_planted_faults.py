"""Faults planted in a copy of the package, one at a time: some test must notice each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.planting import Fault, plant, run_tests

_LIMIT = 100.0

FAULTS = [
    Fault(
        "ranks outlive the process that started them",
        "launch/processes.py",
        "    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)\n",
        "",
        ("tests/ranks/test_run_orphans.py",),
    ),
    Fault(
        "bad gradients are averaged all the same",
        "ddp/finite.py",
        "        bucket.bad[bad] = 1\n",
        "",
        ("tests/ranks/test_ddp_replica.py", "-k", "non_finite or skipped"),
    ),
    Fault(
        "a reader does not look whether its checkpoint is still there",
        "checkpoint/guard.py",
        "if not _lock(fd, fcntl.LOCK_SH) or not _still_there(fd, folder):",
        "if not _lock(fd, fcntl.LOCK_SH):",
        ("tests/unit/test_pruning.py",),
    ),
    Fault(
        "two jobs have one folder",
        "checkpoint/lock.py",
        "if _is_named(fd, path):",
        "if True:",
        ("tests/unit/test_run_lock.py",),
    ),
    Fault(
        "the newest good checkpoint is pruned",
        "checkpoint/retention.py",
        "kept = {newest.name, *_wanted(candidates, rule)}",
        "kept = _wanted(candidates, rule)",
        ("tests/unit/test_retention.py",),
    ),
    Fault(
        "a save beside training writes the state as it is later",
        "checkpoint/background.py",
        "copied = self._copy(share)",
        "copied = share",
        ("tests/ranks/test_async_save.py", "-k", "training_goes_on"),
    ),
    Fault(
        "a failure in the background is lost",
        "checkpoint/background.py",
        "if error is not None:",
        "if False:",
        ("tests/ranks/test_async_save.py", "-k", "failure"),
    ),
    Fault(
        "Python's random numbers do not come back",
        "checkpoint/rng.py",
        "    random.setstate((",
        "    ((",
        ("tests/ranks/test_resume_anywhere.py", "-k", "any_step"),
    ),
]
QUICK = {"bad gradients are averaged all the same"}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, id=f.name, marks=() if f.name in QUICK else pytest.mark.campaign) for f in FAULTS],
)
def test_somebody_notices(fault: Fault, tmp_path: Path) -> None:
    outcome = run_tests(plant(fault, tmp_path), fault.noticed_by, limit=_LIMIT)
    assert outcome.failed, outcome.text


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_without_a_fault_they_all_pass() -> None:
    """Or a test that fails anyhow would be said to have noticed."""
    for tests in sorted({fault.noticed_by for fault in FAULTS}):
        outcome = run_tests(None, tests, limit=_LIMIT)
        assert outcome.passed
        assert not outcome.failed, outcome.text
