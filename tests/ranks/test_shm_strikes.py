"""A rank killed or stopped inside each operation of a shm group: the others are told who, soon, and nothing is left."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from tests.harness import collect_outcomes
from tests.launching import gone_within
from tests.ranks.striking import OPERATIONS, Strike, Told, pair, suffer

#: Seconds from a death to the error on every other rank ...
SOON = 0.2
#: ... and what a busy machine may add to a single one.
MARGIN = 8.0
#: Seconds after which a stopped rank is late, from its stop on.
PATIENCE = 0.4


def _strike(strike: Strike) -> list[Told]:
    """What the others were told, in order of rank; checked as far as it is the same for every operation."""
    killed = strike.number == signal.SIGKILL
    outcomes = collect_outcomes(suffer, 3, strike, PATIENCE)
    for outcome in outcomes:
        if killed and outcome.rank == strike.victim:
            assert outcome.exit_code == -signal.SIGKILL
        else:
            assert outcome.ok, outcome.traceback
    told: list[Told] = [outcome.value for outcome in outcomes if outcome.value is not None]
    survivors = [outcome.value for outcome in outcomes if outcome.rank != strike.victim and outcome.value is not None]
    assert survivors
    for each in survivors:
        assert each.kind == ("PeerLost" if killed else "CollectiveTimeout"), each.message
        assert each.message == survivors[0].message
        name = strike.victim
        if strike.operation == "all_reduce in a sub-group":  # it has numbers of its own, and says so
            members = pair(strike.victim, 3)
            name = members.index(strike.victim)
            translation = f"ranks 0 to 1 are the ranks {members[0]}, {members[1]}."
            assert translation in each.message or members == [0, 1], each.message
        assert f"\n  rank {name} (process " in each.message, each.message
        assert f"{name}, which ended:" in each.message or not killed, each.message
        assert each.seconds < SOON + MARGIN + (0 if killed else PATIENCE)
    assert len({each.message for each in told}) == 1  # a stopped rank that goes on is told what the others were
    return survivors


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_killed_inside_an_operation_is_named(operation: str) -> None:
    victim = 2 * (list(OPERATIONS).index(operation) % 2)  # the first, the last
    if "sub-group" in operation:
        victim = 2  # a member of a group with numbers of its own
    _strike(Strike(operation, victim, signal.SIGKILL, 0.6))


@pytest.mark.parametrize(
    ("operation", "victim"), [("all_reduce", 0), ("all_to_all_uneven", 2), ("recv from anyone", 0)]
)
def test_a_rank_stopped_inside_an_operation_is_late(operation: str, victim: int) -> None:
    _strike(Strike(operation, victim, signal.SIGSTOP, 0.4))


@pytest.mark.campaign
@pytest.mark.timed
def test_a_death_is_known_everywhere_within_200_ms() -> None:
    seconds = [each.seconds for _ in range(5) for each in _strike(Strike("all_reduce", 1, signal.SIGKILL, 0.5))]
    assert median(seconds) < SOON, seconds


@pytest.mark.campaign
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_every_rank_struck_all_over_every_operation(operation: str, number: int) -> None:
    moments = (0.02, 0.2, 0.35, 0.5, 0.65, 0.8, 0.98) if number == signal.SIGKILL else (0.1, 0.5, 0.9)
    for victim in range(3):
        for moment in moments:
            _strike(Strike(operation, victim, number, moment))


def _die(folder: str, victims: tuple[int, ...]) -> list[str]:
    """With collectives, messages and shared tensors in use; the survivors say what they hold then."""
    world = lockstep.init("shm", timeout=30)
    group: Any = dist.group.WORLD
    bucket = group.allocate_tensor(100_000)
    receive = dist.irecv(torch.zeros(10), (world.rank + 1) % world.world_size, tag=5)
    assert receive is not None
    dist.all_reduce(bucket)
    Path(folder, f"{world.rank}").write_text(str(os.getpid()))
    if world.rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(lockstep.PeerLost):
        dist.barrier()
    return listening()


def listening() -> list[str]:
    """The ports this process listens on, as /proc/net/tcp writes them."""
    mine = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # (the listing's own)
            mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


@pytest.mark.parametrize("victims", [(0,), (2,), (0, 1, 2)], ids=["the first", "the last", "all"])
def test_nothing_is_left_when_ranks_are_killed(tmp_path: Path, victims: tuple[int, ...]) -> None:
    """No process, no port, and (conftest looks after each test) nothing in /dev/shm."""
    outcomes = collect_outcomes(_die, 3, str(tmp_path), victims)
    assert {outcome.rank for outcome in outcomes if outcome.exit_code == -signal.SIGKILL} == set(victims)
    assert all(outcome.value == [] for outcome in outcomes if outcome.rank not in victims), outcomes
    assert not gone_within([int(file.read_text()) for file in tmp_path.iterdir()], 5)
