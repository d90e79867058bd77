"""SIGTERM and SIGHUP in every phase, and Ctrl-C twice: what is saved is whole, and goes on with the same bits.

Every run of the tests has single stops in ``tests/ranks/test_run_stops.py``.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from lockstep.job.files import EXIT_SAVED
from tests.faults import jobs
from tests.launching import gone_within, wait_for

_PHASES = ("started", "data", "forward", "backward", "reduce", "optimizer", "save", "commit", "epoch", "restore")


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stops", [30])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_in_every_phase(tmp_path: Path, calm: jobs.Calm, signum: signal.Signals, stops: int) -> None:
    """One run, stopped again and again and gone on with by the next job."""
    chance = random.Random(stops)
    count = 2 + stops // 2  # enough steps for all of them
    undisturbed, epochs = calm(count), ("--epochs", str(count))
    folder = tmp_path / "run"
    folder.mkdir()
    for life in range(stops):
        phase = _PHASES[life % len(_PHASES)]
        rank = 0 if phase == "commit" else life // len(_PHASES) % jobs.RANKS
        whom = chance.choice(("launcher", "rank", "peer"))  # a notice to the job, or one that reaches a single rank
        if signum == signal.SIGHUP and whom == "peer":
            whom = "group"  # all there are, loader workers too
        taken = 0 if phase in ("restore", "started") else chance.randrange(5)
        strike = {"life": life, "rank": rank, "point": phase, "taken": taken, "signal": signum, "whom": whom}
        workers = str(life % 2 * jobs.RANKS)
        begun = time.monotonic()
        done = jobs.run_job(folder, *epochs, "--life", str(life), "--workers", workers, plan=[strike])
        assert done.code == EXIT_SAVED, (phase, whom, done)
        step = max(line["step"] for line in jobs.lines(folder, 0) if "step" in line)
        assert f"saved at step {step} in " in done.err, (phase, whom, done)
        assert time.monotonic() - begun < 60
    done = jobs.run_job(folder, *epochs, "--life", str(stops))
    assert done.code == 0, done
    assert jobs.final(folder) == undisturbed
    assert jobs.check_audit(folder) == undisturbed[0]["step"]
    phases = min(stops, len(_PHASES))
    print(
        f"\n{stops} times {signum.name} in {phases} phases: each saved where it stopped, and the same bits in the end"
    )


@pytest.mark.campaign
@pytest.mark.parametrize("times", [10])
def test_ctrl_c_twice(tmp_path: Path, calm: jobs.Calm, times: int) -> None:
    """The second stops at once, in the middle of a step or of a save; what was saved before is there and good."""
    chance = random.Random(times)
    undisturbed, epochs = calm(3), ("--epochs", "3", "--save-every", "2")
    folder = tmp_path / "run"
    folder.mkdir()
    killed = 0
    for life in range(times):
        before = len(jobs.lines(folder, 0))
        options = (*epochs, "--life", str(life), "--workers", "2", "--slow", "1.5")
        with jobs.start_job(folder, *options, grace=60.0) as job:
            wait_for(lambda: len(jobs.lines(folder, 0)) > before + 2, "training")  # noqa: B023
            everyone = job.tree()
            os.killpg(job.pid, signal.SIGINT)
            time.sleep(chance.uniform(0.3, 1.0))  # closer together they would be one
            os.killpg(job.pid, signal.SIGINT)
            asked = time.monotonic()
            done = job.finish()
        assert time.monotonic() - asked < 3.0, "at once"
        assert gone_within(everyone, 1.0) == []
        assert done.code in (128 + signal.SIGINT, EXIT_SAVED), done
        killed += done.code != EXIT_SAVED
    done = jobs.run_job(folder, *epochs, "--life", str(times))
    assert done.code == 0, done
    assert jobs.final(folder) == undisturbed
    assert jobs.check_audit(folder) == undisturbed[0]["step"]
    assert killed > times // 2
    print(f"\n{times} times Ctrl-C twice: {killed} stopped at once; nothing left, the same bits in the end")
