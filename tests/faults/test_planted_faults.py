"""Faults planted in a copy of the package, one at a time: some test must notice each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.planting import Fault, plant, run_tests

_LIMIT = 100.0

FAULTS = [
    Fault(
        "a rank is late as soon as the first of the others waits for it",
        "recorder/compare.py",
        "    since = max(waits.values())\n",
        "    since = min(waits.values())\n",
        ("tests/unit/test_recorder_compare.py",),
    ),
    Fault(
        "a wait that fails counts as one that ended",
        "recorder/writer.py",
        "            if not failed:\n                self._write()\n",
        "            self._write()\n",
        ("tests/unit/test_recorder_pages.py",),
    ),
    Fault(
        "a loader's worker writes into its rank's page",
        "recorder/writer.py",
        "        _own.detach()\n",
        "        _own.publish()\n",
        ("tests/unit/test_recorder_pages.py",),
    ),
    Fault(
        "a process without a handler is sent the signal that asks for its stack",
        "launch/kernel.py",
        "            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)\n",
        "            return True\n",
        ("tests/unit/test_launch_lateness.py",),
    ),
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
