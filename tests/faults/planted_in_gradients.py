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
        "        factor = self._weight if self._all.comm_hook is not None else self._weight / self._divisor",
        "        factor = 1.0 if self._all.comm_hook is not None else 1 / self._divisor",
        ("tests/ranks/test_ddp_weights.py",),
    ),
    Fault(
        "bad gradients are averaged all the same",
        "ddp/finite.py",
        "        bucket.bad[bad] = 1\n",
        "",
        ("tests/ranks/test_ddp_replica.py", "-k", "non_finite or skipped"),
    ),
]
