"""Faults that somebody might make in starting, watching and stopping jobs."""

from __future__ import annotations

from tests.faults.planting import Fault

JOB_FAULTS = [
    Fault(
        "ranks outlive the process that started them",
        "launch/processes.py",
        "    _prctl(_PR_SET_PDEATHSIG, by)\n",
        "",
        ("tests/ranks/test_run_orphans.py",),
    ),
    Fault(
        "a killed job's folder stays behind",
        "launch/zygote.py",
        "        shutil.rmtree(self._folder, ignore_errors=True)\n",
        "        pass\n",
        ("tests/ranks/test_run_orphans.py", "-k", "nobody_outlives"),
    ),
    Fault(
        "a failure that repeats is tried again",
        "launch/policy.py",
        "        if last is not None and failure.repeats(last):",
        "        if False:",
        ("tests/unit/test_restarts.py",),
    ),
    Fault(
        "each rank stops at a step of its own",
        "job/stop.py",
        "LEAD = 2",
        "LEAD = 0",
        ("tests/unit/test_job_stop.py",),
    ),
    Fault(
        "those who wait are called late",
        "job/hang.py",
        "    late = [seen for seen in ranks if seen.rank not in waits]",
        "    late = [seen for seen in ranks if seen.rank in waits]",
        ("tests/unit/test_job_hang.py",),
    ),
]
