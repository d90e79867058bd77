"""What the ranks of a shm group say when one of them dies, stops, is late, or is in another collective."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import knobs
from tests.harness import Outcome, collect_outcomes, run_ranks
from tests.ranks.collectives import MOVING, REDUCING, Case, issue

#: From the moment a mismatch or a death can be seen to the error on every rank; busy machines get a margin.
SOON = 0.2
MARGIN = 0.8


def _timed(action: Any) -> tuple[str, str, float]:
    """The type and message of the error that ``action`` raises, and after how many seconds."""
    begun = time.monotonic()
    try:
        action()
    except lockstep.LockstepError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    raise AssertionError("no error was raised")


# --- mismatches ------------------------------------------------------------------------------------------------------


def _wrong_operation(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), 0)


def _wrong_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32))


def _wrong_size(rank: int) -> None:
    dist.all_reduce(torch.ones(4 + rank))


def _wrong_order(rank: int) -> None:
    sizes = (3, 1000) if rank == 0 else (1000, 3)
    for size in sizes:
        dist.all_reduce(torch.ones(size))


def _wrong_label(rank: int) -> None:
    from lockstep.comm.shm.fingerprint import labelled

    for name in ("bucket 0", "bucket 1") if rank == 0 else ("bucket 1", "bucket 0"):
        with labelled(name):
            dist.all_reduce(torch.ones(3))


def _wrong_root(rank: int) -> None:
    dist.broadcast(torch.ones(4), rank % 2)


def _wrong_reduce_op(rank: int) -> None:
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM)


def _missing_call(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(2))
    dist.barrier()


def _wrong_splits(rank: int) -> None:
    size = dist.get_world_size()
    rows = [2 if rank == 0 else 1] * size
    dist.all_to_all_single(torch.zeros(size), torch.ones(sum(rows)), [1] * size, rows)


def _asynchronous(rank: int) -> None:
    dist.all_reduce(torch.ones(4 + rank), async_op=True).wait()


_MISMATCHES = {
    "operation": (_wrong_operation, ("all_reduce", "broadcast", "test_shm_faults.py")),
    "dtype": (_wrong_dtype, ("torch.int32", "torch.float32")),
    "size": (_wrong_size, ("4 elements", "5 elements")),
    "order": (_wrong_order, ("3 elements", "1000 elements")),
    "label": (_wrong_label, ("[bucket 0]", "[bucket 1]")),
    "root": (_wrong_root, ("root 0", "root 1")),
    "reduce op": (_wrong_reduce_op, ("MAX", "SUM")),
    "missing call": (_missing_call, ("barrier", "all_reduce")),
    "splits": (_wrong_splits, ("sends 2 elements", "expects 1")),
    "asynchronous": (_asynchronous, ("4 elements", "5 elements")),
}


def _mismatches() -> dict[str, tuple[str, str, float, str]]:
    """Every mismatch in a group of its own; what the rank was told, and what it is told afterwards."""
    world = lockstep.init("shm", timeout=20)
    rank = world.rank
    told = {}
    for name, (act, _) in _MISMATCHES.items():
        dist.barrier()  # (in the default group, which stays whole)
        group = dist.new_group(backend="shm")
        default, dist.distributed_c10d.GroupMember.WORLD = dist.group.WORLD, group
        try:
            kind, message, seconds = _timed(lambda act=act: act(rank))
            again = _timed(lambda: dist.barrier())
        finally:
            dist.distributed_c10d.GroupMember.WORLD = default
        told[name] = (kind, message, max(seconds, again[2]), again[1])
        dist.destroy_process_group(group)
    return told


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_mismatch_is_the_same_error_on_every_rank(world_size: int) -> None:
    told = run_ranks(_mismatches, world_size)
    for name, (_, words) in _MISMATCHES.items():
        for rank, by_name in enumerate(told):
            kind, message, seconds, again = by_name[name]
            assert kind == "CollectiveMismatch", (name, rank, message)
            for word in words:
                assert word in message, (name, rank, message)
            assert again == message, (name, rank)
            assert seconds < SOON + MARGIN, (name, rank, seconds)
            assert message == told[0][name][1]


# --- deaths ----------------------------------------------------------------------------------------------------------


def _die_inside(name: str, victim: int) -> tuple[str, str, float]:
    """Everyone is in ``name`` over many chunks when ``victim`` is killed in the middle of it."""
    os.environ[knobs.SHM_CHUNK] = "512"
    world = lockstep.init("shm", timeout=30)
    issue(Case(name, torch.float32, 50))()
    if world.rank == victim:
        from lockstep.comm.shm.rounds import Rounds

        sync, left = Rounds.sync, 2

        def die(self: Rounds) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(self)

        Rounds.sync = die  # type: ignore[method-assign]
    return _timed(lambda: issue(Case(name, torch.float32, 3000))())


@pytest.mark.parametrize("name", [*REDUCING, *MOVING])
def test_a_rank_killed_inside_a_collective_is_named(name: str) -> None:
    outcomes = collect_outcomes(_die_inside, 3, name, 1)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        kind, message, seconds = _value(outcomes[rank])
        assert kind == "PeerLost", message
        assert "rank 1 (process" in message
        assert "ended" in message
        assert seconds < SOON + MARGIN


def _die_before(how: str) -> tuple[str, str, float]:
    world = lockstep.init("shm", timeout=30)
    dist.barrier()
    if world.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            os._exit(3)
        dist.destroy_process_group()
        time.sleep(1.0)  # alive, but out of the group
        return "", "", 0.0
    return _timed(lambda: dist.barrier())


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


# --- time limits -----------------------------------------------------------------------------------------------------


def _late() -> tuple[str, str, float]:
    world = lockstep.init("shm", timeout=20)
    dist.all_reduce(torch.ones(7))
    if world.rank == 1:
        time.sleep(0.7)
        return _timed(lambda: dist.barrier())
    return _timed(lambda: dist.barrier(timeout=timedelta(seconds=0.3)))


def test_a_time_limit_names_the_late_rank_and_where_it_stands() -> None:
    told = run_ranks(_late, 3)
    for rank, (kind, message, seconds) in enumerate(told):
        assert kind == "CollectiveTimeout", (rank, message)
        assert "for rank 1" in message
        assert "barrier" in message
        assert "all_reduce" in message.split("rank 1 (process")[1]
        assert "test_shm_faults.py:" in message
        assert seconds < (0.3 if rank != 1 else 0.0) + SOON + MARGIN


def _stopped() -> tuple[str, str, float]:
    world = lockstep.init("shm", timeout=0.5)
    dist.barrier()
    if world.rank == 1:
        if os.fork() == 0:  # wakes the rank up again, long after
            time.sleep(1.5)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.wait()
    return _timed(lambda: dist.all_reduce(torch.ones(5)))


def test_a_stopped_rank_is_late_and_learns_of_it_when_it_goes_on() -> None:
    told = run_ranks(_stopped, 2)
    assert [kind for kind, _, _ in told] == ["CollectiveTimeout"] * 2
    assert "for rank 1" in told[0][1]
    assert told[1][2] < SOON + MARGIN


def _interrupted() -> str:
    world = lockstep.init("shm", timeout=20)
    dist.barrier()
    if world.rank == 1:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            dist.barrier()
        except KeyboardInterrupt:
            return "interrupted"
    if world.rank == 0:
        time.sleep(0.5)
    kind, message, _ = _timed(lambda: dist.barrier())
    return f"{kind}: {message}"


def test_ctrl_c_inside_a_collective_ends_it_everywhere() -> None:
    told = run_ranks(_interrupted, 3)
    assert told[1] == "interrupted"
    for rank in (0, 2):
        assert told[rank] == "LockstepError: rank 1 failed inside barrier: KeyboardInterrupt"


# --- forks, idle ranks, many groups ----------------------------------------------------------------------------------


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


def _idle() -> float:
    world = lockstep.init("shm", timeout=20)
    dist.barrier()
    before = time.process_time()
    if world.rank == 0:
        time.sleep(2.0)
    dist.barrier()
    return time.process_time() - before


def test_a_rank_that_waits_sleeps() -> None:
    spent = run_ranks(_idle, 3)
    assert max(spent) < 0.1, spent


def _cycles(count: int) -> tuple[int, int, int, int]:
    world = lockstep.init("shm", timeout=20)

    def cycle() -> None:
        group = dist.new_group(backend="shm")
        dist.all_reduce(torch.full((3,), float(world.rank)), group=group)
        dist.destroy_process_group(group)

    for _ in range(20):
        cycle()
    before = len(os.listdir("/proc/self/fd")), _mapped()
    for _ in range(count):
        cycle()
    return before[0], len(os.listdir("/proc/self/fd")), before[1], _mapped()


def _mapped() -> int:
    """Mappings of shared segments."""
    with open("/proc/self/maps") as file:
        return sum("memfd:lockstep" in line for line in file)


def test_groups_come_and_go_without_a_trace() -> None:
    for descriptors_before, descriptors, maps_before, maps in run_ranks(_cycles, 2, 300):
        assert descriptors == descriptors_before
        assert maps <= maps_before + 1


def _value(outcome: Outcome) -> Any:
    assert outcome.ok, outcome.traceback or outcome.exit_code
    return outcome.value
