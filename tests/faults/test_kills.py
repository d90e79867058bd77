"""Ranks killed at any moment and at chosen places: what comes of the run is bit for bit what nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults import jobs
from tests.launching import Running, gone_within, wait_for

#: Steps take a hundredth of a second more, so that a kill finds the run somewhere on its way.
_SLOW = ("--slow", "0.01", "--epochs")
_CHOSEN = ("forward", "backward", "reduce", "optimizer", "save", "commit", "restore")


class _Assassin:
    """Kills a rank of a running job at a random moment of each of its starts."""

    def __init__(self, job: Running, folder: Path, chance: random.Random) -> None:
        self._job = job
        self._folder = folder
        self._chance = chance
        #: The start before this one: ranks and what they had started.
        self._last: set[int] = set()
        self.kills = 0

    def strike(self) -> bool:
        """Wait for the next start of the ranks and kill one: every other time at a moment of its start, else in
        training; False if the job has ended."""
        ranks: list[int] = []
        done_before = self._steps()

        def started() -> bool:
            ranks[:] = [pid for pid in self._below_zygote() if pid not in self._last]
            return len(ranks) == jobs.RANKS or self._ended()

        wait_for(started, "the next start")
        if self.kills % 2:
            wait_for(lambda: self._steps() > done_before or self._ended(), "training")
        time.sleep(self._chance.uniform(0.0, 0.5))  # the moment is what is random here
        self._last = set(self._job.tree())
        if self._ended() or not set(ranks) <= self._last:
            return False  # it had finished
        try:
            os.kill(self._chance.choice(ranks), signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.kills += 1
        assert gone_within(ranks, 30.0) == [], "within --grace"
        return True

    def _below_zygote(self) -> list[int]:
        tree = self._job.tree()
        own = Path(f"/proc/{tree[0]}/task/{tree[0]}/children") if tree else None
        children = own.read_text().split() if own is not None and own.exists() else []
        return [pid for pid in tree if str(pid) in children]

    def _ended(self) -> bool:
        return self._job.process.poll() is not None

    def _steps(self) -> int:
        """Lines of rank 0's audit: a step taken is a line more."""
        file = self._folder / "audit-0.jsonl"
        return sum('"step"' in line for line in file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kills", "epochs"), [(1, 3), pytest.param(200, 20, marks=pytest.mark.campaign)])
def test_kills_at_random_moments(tmp_path: Path, calm: jobs.Calm, kills: int, epochs: int) -> None:
    chance = random.Random(kills)
    undisturbed, options = calm(epochs), (*_SLOW, str(epochs))
    done = runs = 0
    while done < kills:
        folder = tmp_path / f"run-{runs}"
        folder.mkdir()
        with jobs.start_job(folder, *options, "--workers", str(runs % 2 * jobs.RANKS), restarts=1000) as job:
            assassin = _Assassin(job, folder, chance)
            # (More reports than some sixty would fill the pipe that nobody reads before the end.)
            while assassin.kills < min(60, kills - done) and assassin.strike():
                pass
            finished = job.finish(limit=300)
        assert finished.code == 0, finished
        assert jobs.final(folder) == undisturbed
        assert jobs.check_audit(folder) == undisturbed[0]["step"]
        done, runs = done + assassin.kills, runs + 1
    print(f"\n{done} kills at random moments in {runs} runs: all ended with the bits of the undisturbed run")


def _plan(kills: int, *, seed: int) -> list[dict[str, Any]]:
    """Each place on each rank in turn; the first life has nothing to restore."""
    chance = random.Random(seed)
    plan = []
    for life in range(kills):
        point = _CHOSEN[life % len(_CHOSEN)]
        victim = (life + life // len(_CHOSEN)) % jobs.RANKS
        taken = 0 if point == "restore" else chance.randrange(4)
        # Only rank 0 commits, so it is there that the other one is killed at that moment.
        rank, whom = (0, "rank" if victim == 0 else "peer") if point == "commit" else (victim, "rank")
        plan.append({"life": life, "rank": rank, "point": point, "taken": taken, "signal": 9, "whom": whom})
    return plan


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [3, pytest.param(60, marks=pytest.mark.campaign)])
def test_kills_at_chosen_places(tmp_path: Path, calm: jobs.Calm, kills: int) -> None:
    count = max(3, 2 + kills // 5)
    undisturbed, epochs = calm(count), ("--epochs", str(count))
    folder = tmp_path / "run"
    folder.mkdir()
    done = jobs.run_job(folder, *epochs, restarts=kills, plan=_plan(kills, seed=kills), limit=800)
    assert done.code == 0, done
    assert done.err.count("killed by signal 9 (SIGKILL)") == kills
    assert jobs.final(folder) == undisturbed
    assert jobs.check_audit(folder) == undisturbed[0]["step"]
    print(f"\n{kills} kills at {len(_CHOSEN)} places on {jobs.RANKS} ranks: the bits of the undisturbed run")
