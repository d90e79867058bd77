"""Faults that somebody might make in how a run is kept and gone on from."""

from __future__ import annotations

from tests.faults.planting import Fault

RUN_FAULTS = [
    Fault(
        "a reader does not look whether its checkpoint is still there",
        "checkpoint/locks.py",
        "if try_flock(fd, fcntl.LOCK_SH) is False or not _is_named(fd, folder / MANIFEST):",
        "if try_flock(fd, fcntl.LOCK_SH) is False:",
        ("tests/unit/test_pruning.py",),
    ),
    Fault(
        "two jobs have one folder",
        "checkpoint/locks.py",
        "if _is_named(fd, path):",
        "if True:",
        ("tests/unit/test_run_lock.py",),
    ),
    Fault(
        "the newest good checkpoint is pruned",
        "checkpoint/retention.py",
        "older, newest = oldest_first[: good[-1]], ",
        "older, newest = oldest_first[: good[-1] + 1], ",
        ("tests/unit/test_retention.py",),
    ),
    Fault(
        "checkpoints of NaN take the places of sound ones",
        "checkpoint/retention.py",
        "if entry.sound or entry.good is False]",
        "if True]",
        ("tests/unit/test_finite_checkpoints.py", "-k", "kept or outlive"),
    ),
    Fault(
        "a run resumes from a checkpoint of NaN",
        "checkpoint/read.py",
        "if not self.manifest.is_sound:",
        "if False:",
        ("tests/unit/test_finite_checkpoints.py", "-k", "load_weights or export"),
    ),
    Fault(
        "a run resumes from a checkpoint in which the ranks differed",
        "checkpoint/manifest.py",
        "return self.not_finite is None and self.apart is None",
        "return self.not_finite is None",
        ("tests/ranks/test_shared_writing.py", "-k", "differed"),
    ),
    Fault(
        "a negative NaN counts as finite",
        "checkpoint/finite.py",
        " and int(bits.max()) <= self.largest + sign",
        "",
        ("tests/unit/test_finite_checkpoints.py", "-k", "dtype"),
    ),
    Fault(
        "a save beside training writes the state as it is later",
        "checkpoint/background.py",
        "copied = plan.copied(self._chunks)",
        "copied = plan",
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
        "    random.setstate(_python(state))\n",
        "    _python(state)\n",
        ("tests/ranks/test_resume_anywhere.py", "-k", "any_step"),
    ),
    Fault(
        "random number generators are not restored",
        "checkpoint/restore.py",
        """        rng.restore_rng(states[world.rank], world.device)\n""",
        "        pass\n",
        ("tests/ranks/test_resume.py",),
    ),
]
