"""Kill or stop a rank in the middle of an operation, without knowing how the operation works.

A profile function sees every call and return of a Python function, on every thread. A first run counts them; in a later
one the signal is sent after a given part of that count. So the moments lie all over the operation, whatever its code.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from lockstep import knobs
from lockstep.comm.group.group import open_groups
from tests.launching import wait_for
from tests.ranks.collectives import MOVING, REDUCING, Case, issue

Action = Callable[[], object]

#: Bytes of a stage, and elements (float32) that take two dozen of them.
_CHUNK = 512
_COUNT = 3000


@dataclass(frozen=True)
class Strike:
    """What is done to whom, and when."""

    operation: str
    victim: int
    #: SIGKILL or SIGSTOP.
    number: int
    #: Where in the operation: 0 is its begin, 1 its end.
    moment: float


@dataclass(frozen=True)
class Told:
    """What a rank was told: the error's type and message, and how long after the strike."""

    kind: str
    message: str
    seconds: float


def suffer(strike: Strike, patience: float) -> Told | None:
    """Take part in the operation again and again until an error ends it. None: this rank is not in it.

    ``patience`` is how many seconds a victim that has been stopped may be late.
    """
    os.environ[knobs.SHM_CHUNK] = str(_CHUNK)
    rank = lockstep.init("shm", timeout=60).rank
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    action = OPERATIONS[strike.operation](rank, strike.victim)
    if action is None:
        dist.barrier()
        return None
    calls = _count(action)
    dist.barrier()
    when = Path(os.environ[knobs.STORE]).with_name("struck")
    if rank == strike.victim:
        _install(when, max(1, int(calls * strike.moment)), strike.number)
        return Told(*_repeat(action), 0.0)
    over = threading.Event()
    losing = threading.Thread(target=_lose_patience, args=(pids[strike.victim], patience, over))
    if strike.number == signal.SIGSTOP:
        losing.start()
    told, now = _repeat(action), time.monotonic()
    if strike.number == signal.SIGSTOP:
        over.set()
        losing.join()
        with suppress(FileExistsError):
            when.with_name("let go on").touch(exist_ok=False)  # the first survivor does it
            let_go_on(pids[strike.victim])
    return Told(*told, now - float(when.read_text()))


def _repeat(action: Action) -> tuple[str, str]:
    """Until an error comes: an operation whose victim had done its part is complete on the others."""
    for _ in range(100_000):  # the calls that were counted may have been those of a long wait, on a busy machine
        try:
            action()
        except lockstep.LockstepError as error:
            return type(error).__name__, str(error)
    raise AssertionError("no error was raised")


def _count(action: Action) -> int:
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:  # noqa: ARG001
        nonlocal calls
        calls += 1

    _profile(count)
    action()
    _profile(None)
    return calls


def _install(when: Path, left: int, number: int) -> None:
    def strike(frame: FrameType, event: str, argument: object) -> None:  # noqa: ARG001
        nonlocal left
        left -= 1
        if left == 0:
            _profile(None)
            when.with_suffix(".new").write_text(str(time.monotonic()))
            when.with_suffix(".new").rename(when)
            os.kill(os.getpid(), number)

    _profile(strike)


def _profile(function: Any) -> None:
    threading.setprofile(function)  # (threads that start from now on)
    sys.setprofile(function)


def _lose_patience(pid: int, patience: float, over: threading.Event) -> None:
    """Once the victim is stopped, have it be late after ``patience`` seconds: a rank that is only slow never is.

    What is under way has a limit of its own, and the next one may just be about to begin with the old one.
    """
    wait_for(lambda: over.is_set() or _is_stopped(pid), "the victim's stop")
    while not over.wait(patience / 4):
        for group in open_groups():
            engine: Any = group.engine
            group.timeout = patience
            engine.allow(patience)
            if engine._messages is not None:
                _limit(engine._messages, patience)


def _limit(messages: Any, seconds: float) -> None:
    """Give all messages in flight so many seconds, or what they have left if it is less."""
    with messages._condition:
        for work in messages._matching.pending():
            work.shm_limit = seconds
            if work.shm_deadline is not None:
                work.shm_deadline = min(work.shm_deadline, time.monotonic() + seconds)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def let_go_on(pid: int) -> None:
    """Have a process that stops itself go on, once it stands still."""
    wait_for(lambda: _is_stopped(pid), "its stop")
    os.kill(pid, signal.SIGCONT)


# --- the operations --------------------------------------------------------------------------------------------------


def _case(name: str, *, asynchronous: bool = False) -> Callable[[int, int], Action]:
    case = Case(name, torch.float32, _COUNT, asynchronous=asynchronous)
    return lambda rank, victim: lambda: issue(case)()  # noqa: ARG005


def _group() -> Any:
    return dist.group.WORLD


def _coalesced(rank: int, victim: int) -> Action:  # noqa: ARG001
    tensors = [torch.ones(_COUNT), torch.ones(7)]
    return lambda: _group().allreduce_coalesced(tensors).wait()


def _sparse(rank: int, victim: int) -> Action:  # noqa: ARG001
    def reduce() -> None:
        dist.all_reduce(torch.ones(40, 9).to_sparse())

    return reduce


def _allocate(rank: int, victim: int) -> Action:  # noqa: ARG001
    return lambda: _group().allocate_tensor(1000)


def _allocated(rank: int, victim: int) -> Action:  # noqa: ARG001
    bucket = _group().allocate_tensor(_COUNT)
    return lambda: dist.all_reduce(bucket)


def pair(victim: int, size: int) -> list[int]:
    """The members of the sub-group: the victim and the rank after it."""
    return sorted([victim, (victim + 1) % size])


def _sub_group(rank: int, victim: int) -> Action | None:
    members = pair(victim, dist.get_world_size())
    limit = timedelta(seconds=lockstep.world().timeout)
    group = dist.new_group(members, backend="shm", timeout=limit)  # (torch's default is half an hour)
    tensor = torch.ones(_COUNT)
    return (lambda: dist.all_reduce(tensor, group=group)) if rank in members else None


def _objects(rank: int, victim: int) -> Action:
    found: list[Any] = [None] * dist.get_world_size()
    return lambda: dist.all_gather_object(found, (rank, victim, "x" * 1000))


def _others(rank: int) -> list[int]:
    return [peer for peer in range(dist.get_world_size()) if peer != rank]


def _send(rank: int, victim: int) -> Action:
    tensor = torch.ones(_COUNT)
    if rank == victim:
        return lambda: [dist.send(tensor, peer) for peer in _others(victim)]
    return lambda: dist.recv(tensor, victim)


def _send_to_anyone(rank: int, victim: int) -> Action:
    tensor = torch.ones(_COUNT)
    if rank == victim:
        return lambda: [dist.send(tensor, peer) for peer in _others(victim)]
    return lambda: dist.recv(tensor)


def _recv(rank: int, victim: int) -> Action:
    tensor = torch.ones(_COUNT)
    if rank == victim:
        return lambda: [dist.recv(tensor, peer) for peer in _others(victim)]
    return lambda: dist.send(tensor, victim)


def _recv_from_anyone(rank: int, victim: int) -> Action:
    tensor = torch.ones(_COUNT)
    if rank == victim:
        return lambda: [dist.recv(tensor) for _ in _others(victim)]
    return lambda: dist.send(tensor, victim)


def _batch(rank: int, victim: int) -> Action:  # noqa: ARG001
    size = dist.get_world_size()
    out, into = torch.ones(_COUNT), torch.zeros(_COUNT)

    def ring() -> None:
        # To and from every other rank: a ring would leave some rank waiting for another than the victim.
        ops = [dist.P2POp(dist.isend, out, peer) for peer in range(size) if peer != rank]
        ops += [dist.P2POp(dist.irecv, into, peer) for peer in range(size) if peer != rank]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return ring


#: By name: what a rank does, given its number and the victim's.
OPERATIONS: dict[str, Callable[[int, int], Action | None]] = {
    **{name: _case(name) for name in (*REDUCING, *MOVING, "barrier")},
    "all_reduce, asynchronous": _case("all_reduce", asynchronous=True),
    "all_reduce_coalesced": _coalesced,
    "all_reduce of a sparse tensor": _sparse,
    "all_reduce of an allocated tensor": _allocated,
    "all_reduce in a sub-group": _sub_group,
    "allocate_tensor": _allocate,
    "all_gather_object": _objects,
    "send": _send,
    "send to who takes from anyone": _send_to_anyone,
    "recv": _recv,
    "recv from anyone": _recv_from_anyone,
    "batch_isend_irecv": _batch,
}
