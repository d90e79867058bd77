"""Signal handlers and errors in the middle of what a group over shared memory does: no wrong numbers, and no hang."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import knobs
from tests.harness import run_ranks
from tests.launching import wait_for
from tests.ranks.standing import wait_until_it_is_over, wait_until_seen, wait_until_they_wait

#: From what goes wrong to the error, on a busy machine; none of the limits of these groups is so short.
SOON = 15.0

_SIGNAL = signal.SIGUSR1

_run = partial(run_ranks, timeout=100.0)


def _init(chunk: int | None = None, timeout: float = 60.0) -> tuple[int, list[int]]:
    """Open the world; return this rank and the processes of all."""
    if chunk is not None:
        os.environ[knobs.SHM_CHUNK] = str(chunk)
    world = lockstep.init("shm", timeout=timeout)
    pids: list[Any] = [None] * world.world_size
    dist.all_gather_object(pids, os.getpid())
    return world.rank, pids


def _told(action: Callable[[], object]) -> str:
    begun = time.monotonic()
    with pytest.raises(lockstep.LockstepError) as caught:
        action()
    assert time.monotonic() - begun < SOON
    return str(caught.value)


def _on_signal(action: Callable[[], object]) -> None:
    def handler(_number: int, _frame: FrameType | None) -> None:
        action()

    signal.signal(_SIGNAL, handler)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _in_the_middle(name: str, number: int) -> None:
    """Have this process get the signal in the call ``number`` of a method that messages are moved by."""
    from lockstep.comm.shm.p2p import Box

    method, calls = getattr(Box, name), 0

    def interrupted(self: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            signal.raise_signal(_SIGNAL)
        return method(self)

    setattr(Box, name, interrupted)


# --- messages --------------------------------------------------------------------------------------------------------


def _interrupted_message(interrupted: int) -> str:
    """The sender is interrupted between a fragment's count and its hand-over, or the receiver before it gives it back;
    what follows must not go on from there."""
    rank, _ = _init(chunk=512)
    dist.barrier()
    _on_signal(_interrupt)
    if rank == interrupted:
        _in_the_middle("_next", 2)
    content = torch.arange(2000.0) if rank == 0 else torch.zeros(2000)
    action = (lambda: dist.send(content, 1)) if rank == 0 else (lambda: dist.recv(content, 0))
    if rank != interrupted:
        return _told(action)
    with pytest.raises(KeyboardInterrupt):
        action()
    dist.destroy_process_group()
    return "interrupted"


@pytest.mark.parametrize("interrupted", [0, 1])
def test_ctrl_c_in_the_middle_of_a_message_is_an_error_on_both_ranks(interrupted: int) -> None:
    told = _run(_interrupted_message, 2, interrupted)
    assert told[interrupted] == "interrupted"
    assert told[1 - interrupted] == f"rank {interrupted} failed while it moved messages: KeyboardInterrupt"


def _counted_apart() -> str:
    rank, _ = _init(chunk=512)
    dist.barrier()
    if rank == 0:
        group: Any = dist.group.WORLD
        group.send([torch.zeros(1)], 1, 0).wait()
        group._shm_group.engine._messages._matching._outboxes[
            1
        ]._count += 2  # (as after two that were never handed over)
        return _told(lambda: (dist.send(torch.ones(1), 1), dist.recv(torch.ones(1), 1)))
    return _told(lambda: (dist.recv(torch.zeros(1), 0), dist.recv(torch.zeros(1), 0)))


def test_a_fragment_that_is_not_the_next_is_never_taken_for_it() -> None:
    for told in _run(_counted_apart, 2):
        assert "rank 1 expected fragment 2 of the messages from rank 0, and got fragment 4" in told


def _sent_from_the_middle() -> list[str]:
    """A handler uses messages in the middle of one: each call is refused, and the message comes whole."""
    rank, _ = _init(chunk=512)
    dist.barrier()
    refused: list[str] = []

    def handler() -> None:
        group: Any = dist.group.WORLD
        assert pending is not None
        assert not pending.is_completed()
        for action in (lambda: group.send([torch.ones(1)], 1, 5), lambda: group.recv([torch.ones(1)], 1, 5)):
            refused.append(_told(action))

    pending = dist.irecv(torch.zeros(1), 1 - rank, tag=7)
    _on_signal(handler)
    if rank == 0:
        _in_the_middle("_next", 2)
        dist.send(torch.arange(2000.0), 1)
    else:
        got = torch.zeros(2000)
        dist.recv(got, 0)
        assert torch.equal(got, torch.arange(2000.0))
    dist.send(torch.ones(1), 1 - rank, tag=7)
    assert pending is not None
    pending.wait()
    return refused


def test_a_handler_in_the_middle_of_a_message_is_refused_another() -> None:
    refused, none = _run(_sent_from_the_middle, 2)
    assert none == []
    assert [each.split(" at ")[0] for each in refused] == ["send to rank 1 (tag 5)", "recv from rank 1 (tag 5)"]
    for each in refused:
        assert "called while the same thread was moving messages" in each


def _destroyed_in_a_message(leaves: bool) -> str:
    rank, _ = _init(chunk=512)
    dist.barrier()

    def handler() -> None:
        dist.destroy_process_group()
        if leaves:
            sys.exit(0)

    if rank == 1:
        return _told(lambda: dist.recv(torch.zeros(2000), 0))
    _on_signal(handler)
    _in_the_middle("_next", 2)
    if leaves:
        with pytest.raises(SystemExit):
            dist.send(torch.arange(2000.0), 1)
        return ""
    return _told(lambda: dist.send(torch.arange(2000.0), 1))


@pytest.mark.parametrize("leaves", [True, False])
def test_a_handler_may_destroy_the_group_in_the_middle_of_a_message(leaves: bool) -> None:
    sender, receiver = _run(_destroyed_in_a_message, 2, leaves)
    assert sender == ("" if leaves else "rank 0 destroyed the process group")
    assert "rank 0" in receiver


def _answered_by_a_handler() -> None:
    """The main thread waits for a message when its handler sends and receives others, and then goes on to wait."""
    rank, pids = _init()
    question, answer, last = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    if rank == 0:
        wait_until_seen(1, "last waited in recv from rank 0 (tag 1)")
        os.kill(pids[1], _SIGNAL)
        dist.recv(question, 1, tag=2)
        dist.send(question * 2, 1, tag=3)
        dist.send(question * 3, 1, tag=1)
        return

    def handler() -> None:
        dist.send(torch.ones(3), 0, tag=2)
        dist.recv(answer, 0, tag=3)

    _on_signal(handler)
    dist.recv(last, 0, tag=1)
    assert (answer.tolist(), last.tolist()) == ([2.0] * 3, [3.0] * 3)


def test_a_handler_may_wait_for_messages_while_its_thread_waits_for_another() -> None:
    _run(_answered_by_a_handler, 2)


def _unwritable(waits_at_once: bool) -> str:
    """A message comes for a tensor all of whose elements are one: it can't be written."""
    rank, _ = _init()
    tensor = torch.zeros(1).expand(4)
    if rank == 1 and waits_at_once:
        with pytest.raises((RuntimeError, lockstep.LockstepError)) as caught:
            dist.recv(tensor, 0)
        return str(caught.value)
    work = dist.irecv(tensor, 0) if rank == 1 else None
    if not waits_at_once:
        dist.barrier()
    if work is None:
        dist.send(torch.arange(4.0), 1)
        return _told(lambda: dist.recv(torch.zeros(1), 1))
    wait_until_it_is_over()  # (the group's own thread takes the message)
    return _told(work.wait)


@pytest.mark.parametrize("waits_at_once", [True, False])
def test_a_message_that_can_not_be_written_down_ends_the_group(waits_at_once: bool) -> None:
    sender, receiver = _run(_unwritable, 2, waits_at_once)
    assert sender.startswith("rank 1 failed while it moved messages: RuntimeError: unsupported operation"), sender
    assert "unsupported operation" in receiver


# --- collectives -----------------------------------------------------------------------------------------------------


def _stopped_in_a_collective(count: int) -> str:
    """What scripts do about a request to stop: their handler destroys the group, and leaves."""
    rank, pids = _init()
    begun = time.monotonic()

    def handler() -> None:
        dist.destroy_process_group()
        sys.exit(0)

    if rank == 1:
        _on_signal(handler)
        with pytest.raises(SystemExit):
            dist.all_reduce(torch.ones(count))
        assert time.monotonic() - begun < SOON
        return "left"
    wait_until_they_wait([1])
    os.kill(pids[1], _SIGNAL)
    wait_until_it_is_over()
    return _told(lambda: dist.all_reduce(torch.ones(count)))


@pytest.mark.parametrize("count", [3, 1_000_000])
def test_a_handler_may_destroy_the_group_in_the_middle_of_a_collective(count: int) -> None:
    assert _run(_stopped_in_a_collective, 2, count) == [
        "rank 1 destroyed the group in the middle of a collective, as a signal handler does",
        "left",
    ]


def _reduced_by_a_handler(asynchronous: bool) -> tuple[str, float]:
    rank, pids = _init()
    refused: list[str] = []
    _on_signal(lambda: refused.append(_told(lambda: dist.all_reduce(torch.ones(1), async_op=asynchronous))))
    tensor = torch.full((3,), rank + 1.0)
    if rank == 0:
        wait_until_they_wait([1])
        os.kill(pids[1], _SIGNAL)
        wait_until_seen(1, "")
        store: Any = dist.group.WORLD
        store.get_group_store().wait(["refused"])
    else:
        watch = threading.Thread(target=lambda: _say_when(refused))
        watch.start()
    dist.all_reduce(tensor)
    if rank == 1:
        watch.join()
    dist.all_reduce(tensor)
    return "".join(refused), float(tensor[0])


def _say_when(refused: list[str]) -> None:
    wait_for(lambda: bool(refused), "the handler")
    group: Any = dist.group.WORLD
    group.get_group_store().set("refused", "")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_handler_in_the_middle_of_a_collective_is_refused_another(asynchronous: bool) -> None:
    (none, first), (refused, second) = _run(_reduced_by_a_handler, 2, asynchronous)
    assert none == ""
    assert "all_reduce: called in the middle of another collective of the same process group" in refused
    assert first == second == 6.0


def _as_the_turn_is_taken() -> list[float]:
    """The signal comes as soon as the thread has its turn, before anything has noted so."""
    rank, _ = _init()
    group: Any = dist.group.WORLD
    tensor = torch.full((3,), rank + 1.0)

    def profile(_frame: FrameType, event: str, what: object) -> None:
        if event == "c_return" and getattr(what, "__self__", None) is group._shm_group._turns.lock:
            sys.setprofile(None)
            signal.raise_signal(_SIGNAL)

    def interrupted() -> None:
        sys.setprofile(profile)
        try:
            dist.all_reduce(tensor)
        finally:
            sys.setprofile(None)

    _on_signal(lambda: dist.all_reduce(tensor))  # one before the other
    interrupted()
    _on_signal(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    work = dist.all_reduce(tensor, async_op=True)  # the group's own thread finds its turn
    assert work is not None
    work.wait()
    return tensor.tolist()


def test_a_signal_as_a_collective_takes_its_turn_leaves_the_turn_to_the_next() -> None:
    assert _run(_as_the_turn_is_taken, 2) == [[12.0] * 3] * 2


# --- no room for a thread --------------------------------------------------------------------------------------------


def _without_threads(kind: str) -> float:
    rank, _ = _init(timeout=5)
    tensor = torch.full((3,), rank + 1.0)

    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def issue() -> Any:
        if kind == "collective":
            return dist.all_reduce(tensor, async_op=True)
        return dist.isend(tensor.clone(), 1) if rank == 0 else dist.irecv(tensor, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            issue()
    issue().wait()
    begun = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begun < SOON
    return float(tensor[0])


@pytest.mark.parametrize(("kind", "expected"), [("collective", [3.0, 3.0]), ("message", [1.0, 1.0])])
def test_what_finds_no_room_for_a_thread_is_not_issued(kind: str, expected: list[float]) -> None:
    assert _run(_without_threads, 2, kind) == expected
