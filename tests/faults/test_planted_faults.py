"""Faults planted in a copy of the package, one at a time: some test must notice each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.planted_in_checkpoints import CHECKPOINT_FAULTS
from tests.faults.planted_in_recorder import RECORDER_FAULTS
from tests.faults.planting import Fault, plant, run_tests

_LIMIT = 110.0

_COMMIT = """        self.write(MANIFEST, content)
        with named(self.path):
            self._on.sync(self._folder)
        whole = self._root / self._name
        self._on.rename(self.path, whole)
"""
_RENAMED_EARLY = """        whole = self._root / self._name
        self._on.rename(self.path, whole)
        self.write(MANIFEST, content)
        with named(self.path):
            self._on.sync(self._folder)
"""

_DRAFT, _CRASHES = "checkpoint/draft.py", ("tests/faults/test_crash_states.py",)
FAULTS = [
    Fault(
        "a checkpoint's files are not synced",
        _DRAFT,
        "    if file >= 0:\n        on.sync(file)\n        on.close(file)\n    return -1",
        "    if file >= 0:\n        on.close(file)\n    return -1",
        _CRASHES,
    ),
    Fault(
        "a checkpoint's folder is not synced",
        _DRAFT,
        "        with named(self.path):\n            self._on.sync(self._folder)\n",
        "",
        _CRASHES,
    ),
    Fault(
        "the run's folder is not synced",
        _DRAFT,
        "                folders.sync_folder(self._root, on=self._on)\n",
        "                pass\n",
        _CRASHES,
    ),
    Fault(
        "a checkpoint gets its name before it has a manifest",
        _DRAFT,
        _COMMIT,
        _RENAMED_EARLY,
        _CRASHES,
    ),
    Fault(
        "older checkpoints go before the new one is there",
        "checkpoint/write.py",
        "        path = self._draft.commit(",
        "        for old in folders.checkpoints(self._root, on=self._on):\n"
        "            folders.remove(old, on=self._on)\n"
        "        path = self._draft.commit(",
        _CRASHES,
    ),
    Fault(
        "blocks are written where others belong",
        _DRAFT,
        "on.write(file, piece, offset + start)",
        "on.write(file, piece, start)",
        ("tests/ranks/test_checkpointer.py",),
    ),
    Fault(
        "the digest of a tensor is not compared",
        "checkpoint/load.py",
        "        if digest.hexdigest() != expected:",
        "        if False:",
        ("tests/faults/test_damage.py",),
    ),
    Fault(
        "random number generators are not restored",
        "checkpoint/api.py",
        """            rng.restore(parts["rng"][self._world.rank], self._world.device)""",
        "            pass",
        ("tests/ranks/test_resume.py",),
    ),
    Fault(
        "what is saved in the background is not copied",
        "checkpoint/background.py",
        "            copied = self._copy(share)",
        "            copied = share",
        ("tests/ranks/test_async_save.py",),
    ),
    Fault(
        "the last good checkpoint is pruned",
        "checkpoint/retention.py",
        "    kept = {newest.name, *_wanted(candidates, rule)}",
        "    kept = _wanted(candidates[:-1], rule)\n    older = [*older, newest]",
        ("tests/unit/test_retention.py",),
    ),
    Fault(
        "two jobs share a run's folder",
        "checkpoint/lock.py",
        "            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "            pass",
        ("tests/unit/test_run_lock.py",),
    ),
    Fault(
        "each rank stops at a step of its own",
        "agreement/agree.py",
        "LEAD = 2",
        "LEAD = 0",
        ("tests/unit/test_agreement.py",),
    ),
    Fault(
        "a failure that repeats is tried again",
        "launch/restarts.py",
        "        if last is not None and _same(last, failure):",
        "        if False:",
        ("tests/unit/test_restarts.py",),
    ),
    Fault(
        "those who wait are called late",
        "recorder/compare.py",
        "    late = [seen for seen in ranks if seen.rank not in waits]",
        "    late = [seen for seen in ranks if seen.rank in waits]",
        ("tests/unit/test_recorder_compare.py",),
    ),
    Fault(
        "a job's folder stays behind",
        "launch/supervisor.py",
        "        undo.callback(shutil.rmtree, folder, ignore_errors=True)\n",
        "",
        ("tests/ranks/test_run_orphans.py", "tests/ranks/test_run.py"),
    ),
    Fault(
        "ranks outlive the process that started them",
        "launch/processes.py",
        "    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)\n",
        "",
        ("tests/ranks/test_run_orphans.py",),
    ),
    Fault(
        "collectives of different kinds are paired",
        "comm/shm/rounds.py",
        "            if view[offset : offset + fingerprint.KEY] != key and peer in arrived:",
        "            if False:",
        ("tests/ranks/test_shm_mismatches.py",),
    ),
    Fault(
        "the mean is over ranks, not over samples",
        "ddp/reducer.py",
        "        factor = cycle.weight if self._comm_hook is not None else cycle.weight / cycle.divisor",
        "        factor = 1.0 if self._comm_hook is not None else 1 / cycle.divisor",
        ("tests/ranks/test_ddp_weights.py",),
    ),
    Fault(
        "bad gradients are averaged all the same",
        "ddp/finite.py",
        "        bucket.bad[bad] = 1\n",
        "",
        ("tests/ranks/test_ddp_replica.py", "-k", "non_finite or skipped"),
    ),
    *CHECKPOINT_FAULTS,
    *RECORDER_FAULTS,
]
QUICK = {"the digest of a tensor is not compared", "each rank stops at a step of its own"}


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
