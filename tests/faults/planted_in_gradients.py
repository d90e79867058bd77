"""Faults that somebody might make in what the ranks compute together."""

from __future__ import annotations

from tests.faults.planting import Fault

GRADIENT_FAULTS = [
    Fault(
        "collectives of different kinds are paired",
        "comm/shm/rounds.py",
        "            if theirs != key and peer in arrived:",
        "            if False:",
        ("tests/ranks/test_shm_mismatches.py",),
    ),
    Fault(
        "the mean is over ranks, not over samples",
        "ddp/backward.py",
        "self.factor, self._divisor, self._kept = factor, divisor, kept\n",
        "self.factor, self._divisor, self._kept = 1.0, divisor, kept\n",
        ("tests/ranks/test_ddp_weights.py",),
    ),
    Fault(
        "bad gradients are averaged all the same",
        "ddp/finite.py",
        "        flags[bad] = 1\n",
        "",
        ("tests/ranks/test_ddp_replica.py", "-k", "non_finite or skipped"),
    ),
    Fault(
        "a replica's digest says only which bits are 1",
        "ddp/drift.py",
        "[*ones, *[1 - one for one in ones], *votes]",
        "[*ones, *[0 for one in ones], *votes]",
        ("tests/ranks/test_ddp_drift.py", "-k", "next_step or steps_asked_for"),
    ),
    Fault(
        "what an optimizer keeps is not compared",
        "ddp/digest.py",
        "item for item in [*self._parameters(), *self._states(owners)] if",
        "item for item in self._parameters() if",
        ("tests/ranks/test_ddp_drift.py", "-k", "next_step or steps_asked_for"),
    ),
    Fault(
        "each rank compares as often as it likes",
        "ddp/drift.py",
        "            self._schedule.exponent = max(power for power, vote in enumerate(votes) if vote) + _LEAST",
        "            self._schedule.exponent = self._costs.wanted() or 0",
        ("tests/ranks/test_ddp_drift.py", "-k", "by_the_slowest"),
    ),
    Fault(
        "the conditions of a checkpoint are not compared",
        "checkpoint/restore.py",
        "    if others:\n",
        "    if False:\n",
        ("tests/ranks/test_resume_conditions.py",),
    ),
]
