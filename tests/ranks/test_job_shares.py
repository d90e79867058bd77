"""What ranks spend their time on, as it is seen from outside: real processes, whose steps have known parts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.job.hang import Looker
from lockstep.job.page import Cell, Pages, Phase

_RANK = """
import sys, time
from lockstep.job import flight
from lockstep.job.page import Phase

rank = int(sys.argv[2])
flight.take(sys.argv[1], rank=rank, world_size=2)
known = {Phase.DATA: 0.03, Phase.FORWARD: 0.01, Phase.BACKWARD: 0.02, Phase.OWN: 0.02, Phase.WAIT: 0.02}
known[Phase.DATA] *= 1 + rank
spent = dict.fromkeys(known, 0.0)
end = time.monotonic() + 6.0
while time.monotonic() < end:
    for phase, seconds in known.items():
        begun = time.monotonic()
        if phase is Phase.WAIT:
            with flight.waiting("the others"):
                time.sleep(seconds)
        else:
            flight.current.enter(phase)
            time.sleep(seconds)
        spent[phase] += time.monotonic() - begun
flight.current.enter(Phase.LEAVING)
print(*(f"{phase.name}={seconds / sum(spent.values())}" for phase, seconds in spent.items()))
"""


@pytest.mark.timed
@pytest.mark.campaign  # a machine with other work looks late, and its sleeps are longer
def test_the_share_of_each_phase_is_right_to_three_points(tmp_path: Path) -> None:
    pages = Pages(tmp_path, 2)
    ranks = [
        subprocess.Popen([sys.executable, "-c", _RANK, str(tmp_path), str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    looker = Looker(2, time.monotonic())
    worked, begun = time.thread_time(), time.monotonic()
    while any(rank.poll() is None for rank in ranks):
        time.sleep(max(0.0, looker.due - time.monotonic()))
        looker.look(pages.all(Cell.MARK), time.monotonic())
    worked, passed = time.thread_time() - worked, time.monotonic() - begun
    pages.close()
    for rank, process in enumerate(ranks):
        said = process.communicate()[0].split()
        truth = {Phase[name]: float(share) for name, _, share in (word.partition("=") for word in said)}
        assert len(truth) == 5
        shares = looker.shares.of(rank, truth)
        errors = {phase.name: round(shares[phase] - part, 4) for phase, part in truth.items()}
        print(f"rank {rank}: {errors}, {worked / passed:.2%} of a core")
        assert max(map(abs, errors.values())) < 0.03, errors
    assert worked / passed < 0.02, "under 0.01 where nothing else wakes the processors from their sleep"
