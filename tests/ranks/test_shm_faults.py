"""What the ranks of a shm group say when one of them dies, stops, is late, or is in another collective."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from tests.harness import Outcome, collect_outcomes, run_ranks
from tests.launching import wait_for
from tests.ranks.standing import wait_until_it_is_over, wait_until_seen, wait_until_they_wait
from tests.ranks.striking import let_go_on

#: From the moment a mismatch or a death can be seen to the error on every rank; busy machines get a margin.
SOON = 0.2
MARGIN = 8.0


def _timed(action: Any) -> tuple[str, str, float]:
    """The type and message of the error that ``action`` raises, and after how many seconds."""
    begun = time.monotonic()
    try:
        action()
    except lockstep.LockstepError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    raise AssertionError("no error was raised")


# --- deaths ----------------------------------------------------------------------------------------------------------


def _die_before(how: str) -> tuple[str, str, float]:
    world = lockstep.init("shm", timeout=30)
    dist.barrier()
    if world.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            os._exit(3)
        group: Any = dist.group.WORLD
        store = group.get_group_store()
        dist.destroy_process_group()
        store.wait(["told/0", "told/2"], timedelta(seconds=60))  # alive, but out of the group
        return "", "", 0.0
    told = _timed(lambda: dist.barrier())
    if how == "destroy":
        group = dist.group.WORLD
        group.get_group_store().set(f"told/{world.rank}", "")
    return told


@pytest.mark.parametrize("how", ["kill", "exit", "destroy"])
def test_a_rank_that_is_gone_before_a_collective_is_named(how: str) -> None:
    outcomes = collect_outcomes(_die_before, 3, how)
    for rank in (0, 2):
        kind, message, seconds = _value(outcomes[rank])
        assert kind == "PeerLost", message
        assert "rank 1 (process" in message
        assert ("destroyed the group" if how == "destroy" else "ended") in message
        assert seconds < SOON + MARGIN


def _finish_then_die() -> float:
    """A rank's last collective counts, also if the rank ends right after it."""
    world = lockstep.init("shm", timeout=30)
    tensor = torch.full((3,), float(world.rank))
    if world.rank == 0:
        time.sleep(0.3)  # rank 1 is gone by the time rank 0 arrives at the second round
    dist.all_reduce(tensor)
    if world.rank == 1:
        os._exit(0)
    return float(tensor[0])


def test_the_last_collective_of_a_rank_that_ends_counts() -> None:
    assert _value(collect_outcomes(_finish_then_die, 2)[0]) == 1.0


def _two_errors(folder: str, dies: bool) -> str:
    """Rank 0 finds an error first, and while it writes it down rank 1 finds another."""
    world = lockstep.init("shm", timeout=20)
    dist.barrier()
    group: Any = dist.group.WORLD
    health = group._shm_group.engine._health
    write, claimed, returned = health._write, Path(folder, "claimed"), Path(folder, "returned")

    def write_late(error: lockstep.LockstepError) -> None:
        claimed.touch()
        if dies:
            os._exit(3)
        with suppress(AssertionError):  # then rank 1 waits, as it is to
            wait_for(returned.exists, "the other error", 0.5)
        write(error)

    if world.rank == 0:
        health._write = write_late
    else:
        wait_for(claimed.exists, "the claim")
    told = str(health.end(lockstep.LockstepError(f"of rank {world.rank}")))
    returned.touch()
    return told


def test_every_rank_raises_the_first_error_however_long_it_takes_to_be_written(tmp_path: Path) -> None:
    assert run_ranks(_two_errors, 2, str(tmp_path), False) == ["of rank 0"] * 2


def test_a_rank_that_dies_as_it_writes_its_error_leaves_the_others_theirs(tmp_path: Path) -> None:
    assert _value(collect_outcomes(_two_errors, 2, str(tmp_path), True)[1]) == "of rank 1"


# --- time limits -----------------------------------------------------------------------------------------------------


def _two_missing() -> tuple[str, str, float]:
    """Ranks 1 and 3 of four do not come: one is in a receive, the other in no collective."""
    world = lockstep.init("shm", timeout=20)
    dist.barrier()
    if world.rank == 1:
        return _timed(lambda: dist.recv(torch.zeros(1), 3, tag=4))
    if world.rank == 3:
        wait_until_it_is_over()  # (at work of its own)
    if world.rank != 0:
        return _timed(lambda: dist.barrier())
    wait_until_seen(1, "last waited in recv")
    wait_until_they_wait([2])
    return _timed(lambda: dist.barrier(timeout=timedelta(seconds=0.4)))


def test_a_barrier_names_all_missing_ranks_and_where_each_rank_stands() -> None:
    told = run_ranks(_two_missing, 4)
    message = told[0][1]
    assert {kind for kind, _, _ in told} == {"CollectiveTimeout"}
    assert {each for _, each, _ in told} == {message}
    begin = re.match(r"ranks 1 and 3 did not come: rank ([02]) timed out after 0\.4 s in barrier #(\d+) at ", message)
    assert begin is not None, message
    waiting, number = map(int, begin.groups())
    lines = {int(line.split()[1]): line for line in message.splitlines() if line.startswith("  rank ")}
    assert sorted(lines) == sorted({0, 1, 2, 3} - {waiting})
    assert f"last seen at barrier #{number} at" in lines[2 - waiting]
    for rank in (1, 3):
        assert f"last seen at barrier #{number - 1} at" in lines[rank]
    assert "; last waited in recv from rank 3 (tag 4) at" in lines[1]
    assert "last waited" not in lines[3]
    assert lines[1].count("test_shm_faults.py:") == 2


def _late() -> tuple[str, str, float]:
    world = lockstep.init("shm", timeout=20)
    dist.all_reduce(torch.ones(7))
    if world.rank == 1:
        wait_until_it_is_over()
    if world.rank != 0:
        return _timed(lambda: dist.barrier())
    wait_until_they_wait([2])
    return _timed(lambda: dist.barrier(timeout=timedelta(seconds=0.3)))


def test_a_time_limit_names_the_late_rank_and_where_it_stands() -> None:
    told = run_ranks(_late, 3)
    for rank, (kind, message, seconds) in enumerate(told):
        assert kind == "CollectiveTimeout", (rank, message)
        assert "rank 1 did not come" in message
        assert "barrier" in message
        assert "all_reduce" in message.split("rank 1 (process")[1]
        assert "test_shm_faults.py:" in message
        assert seconds < (0.3 if rank != 1 else 0.0) + SOON + MARGIN


def _stopped() -> tuple[str, str, float]:
    world = lockstep.init("shm", timeout=60)
    pids: list[Any] = [None] * 2
    dist.all_gather_object(pids, os.getpid())
    group: Any = dist.group.WORLD
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        group.set_timeout(timedelta(seconds=0.5))
    told = _timed(lambda: dist.all_reduce(torch.ones(5)))
    if world.rank == 0:
        let_go_on(pids[1])
    return told


def test_a_stopped_rank_is_late_and_learns_of_it_when_it_goes_on() -> None:
    told = run_ranks(_stopped, 2)
    assert [kind for kind, _, _ in told] == ["CollectiveTimeout"] * 2
    assert told[0][1].startswith("rank 1 did not come: rank 0 timed out")
    assert told[1][2] < SOON + MARGIN


def _interrupted() -> str:
    world = lockstep.init("shm", timeout=60)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    if world.rank == 1:
        try:
            dist.barrier()
        except KeyboardInterrupt:
            return "interrupted"
    if world.rank == 0:
        wait_until_they_wait([1])
        os.kill(pids[1], signal.SIGALRM)
        wait_until_it_is_over()
    kind, message, _ = _timed(lambda: dist.barrier())
    return f"{kind}: {message}"


def test_ctrl_c_inside_a_collective_ends_it_everywhere() -> None:
    told = run_ranks(_interrupted, 3)
    assert told[1] == "interrupted"
    for rank in (0, 2):
        assert told[rank] == "LockstepError: rank 1 failed inside barrier: KeyboardInterrupt"


# --- forks ----------------------------------------------------------------------------------------------------------


def _forked() -> tuple[str, float]:
    world = lockstep.init("shm", timeout=20)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(2))
        except lockstep.LockstepError as error:
            os.write(writing, str(error).encode())
        dist.destroy_process_group()
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, "rb") as pipe:
        message = pipe.read().decode()
    tensor = torch.full((2,), float(world.rank))
    dist.all_reduce(tensor)
    return message, float(tensor[0])


def test_a_forked_child_is_refused_and_does_no_harm() -> None:
    for rank, (message, total) in enumerate(run_ranks(_forked, 2)):
        assert f"was forked from rank {rank}" in message
        assert total == 1.0


def _value(outcome: Outcome) -> Any:
    assert outcome.ok, outcome.traceback or outcome.exit_code
    return outcome.value
