"""Messages over shm: send and receive with tags, from anyone, both ways, in batches; and their errors."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import knobs
from tests.harness import run_ranks
from tests.launching import wait_for
from tests.ranks.standing import wait_until_seen, wait_until_they_wait

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


def _init(chunk: int | None = None, timeout: float = 20.0) -> tuple[int, int]:
    if chunk is not None:
        os.environ[knobs.SHM_CHUNK] = str(chunk)
    world = lockstep.init("shm", timeout=timeout)
    return world.rank, world.world_size


def _same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got, want), (got, want)


def _messages() -> None:
    rank, size = _init(chunk=512)
    big = torch.arange(5000.0)
    # Tags that are asked for in another order than they were sent, larger than the mailbox.
    if rank == 0:
        works = [dist.isend(big + tag, 1, tag=tag) for tag in (1, 2, 3)]
        for work in works:
            assert work is not None
            work.wait()
    elif rank == 1:
        for tag in (3, 1, 2):
            got = torch.zeros(5000)
            assert dist.recv(got, 0, tag=tag) == 0
            _same(got, big + tag)
    # Everyone sends to everyone, and receives from whoever comes first.
    works = [dist.isend(torch.full((3,), rank * 10 + to), to) for to in range(size) if to != rank]
    seen = {}
    for _ in range(size - 1):
        got = torch.zeros(3, dtype=torch.int64)
        source = dist.recv(got)
        seen[source] = got
    for source, got in seen.items():
        _same(got, torch.full((3,), source * 10 + rank))
    assert sorted(seen) == [r for r in range(size) if r != rank]
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()


def _both_ways() -> None:
    """Two ranks send to each other at once, more than the mailboxes hold, and wait for the sends first."""
    rank, _ = _init(chunk=512)
    got = torch.zeros(4000)
    receive = dist.irecv(got, 1 - rank)
    dist.send(torch.arange(4000.0) + rank, 1 - rank)
    assert receive is not None
    receive.wait()
    _same(got, torch.arange(4000.0) + 1 - rank)
    # A receive that nobody waits for completes while its rank is in a collective.
    late = torch.zeros(4000)
    if rank == 0:
        receive = dist.irecv(late, 1)
        dist.barrier()
        assert receive is not None
        receive.wait()
        _same(late, torch.arange(4000.0))
    else:
        dist.send(torch.arange(4000.0), 0)
        dist.barrier()
    # In a batch, a ring; and to itself.
    out, into, own = torch.arange(3000) + rank, torch.zeros(3000, dtype=torch.int64), torch.zeros(7)
    ops = [dist.P2POp(dist.irecv, into, 1 - rank), dist.P2POp(dist.isend, out, 1 - rank)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    _same(into, torch.arange(3000) + 1 - rank)
    send, receive = dist.isend(torch.arange(7.0), rank, tag=9), dist.irecv(own, rank, tag=9)
    assert send is not None
    assert receive is not None
    receive.wait()
    send.wait()
    assert receive.is_completed()
    _same(own, torch.arange(7.0))
    # No elements, a complex tensor, and one whose elements lie apart.
    for tensor in (torch.zeros(0), torch.arange(6).to(torch.complex64), torch.arange(12.0).view(3, 4)[:, ::2]):
        copy = torch.zeros_like(tensor)
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(copy, 0)
            _same(copy, tensor)
    future = torch.zeros(3)
    if rank == 0:
        work = dist.irecv(future, 1)
        assert work is not None
        _same(work.get_future().wait()[0], torch.ones(3))
    else:
        dist.send(torch.ones(3), 0)


def _unequal_message() -> str:
    rank, _ = _init()
    try:
        if rank == 0:
            dist.send(torch.ones(4), 1)
            dist.recv(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(5), 0)
    except lockstep.CollectiveMismatch as error:
        return str(error)
    return "no error"


def test_messages_with_tags_and_from_anyone() -> None:
    run_ranks(_messages, 3)


def test_messages_in_both_directions() -> None:
    run_ranks(_both_ways, 2)


def test_a_message_of_another_size_is_an_error_on_both_sides() -> None:
    told = run_ranks(_unequal_message, 2)
    assert told[0] == told[1]
    assert "rank 0 sent 16 bytes of torch.float32" in told[0]
    assert "5 elements" in told[0]


# --- several in flight -----------------------------------------------------------------------------------------------


def _beside_another() -> float:
    """Messages to and fro while a receive for a message that comes much later is in flight."""
    rank, _ = _init()
    other = 1 - rank
    late, ball = torch.zeros(1), torch.zeros(4)
    receive = dist.irecv(late, other, tag=99)
    assert receive is not None
    dist.barrier()
    time.sleep(0.02)  # (the group's own thread waits by now)
    begun = time.monotonic()
    for _ in range(20):
        for turn in (0, 1):
            if turn == rank:
                dist.send(ball, other)
            else:
                dist.recv(ball, other)
        time.sleep(0.004)  # (... and again)
    seconds = time.monotonic() - begun
    dist.send(torch.full((1,), 5.0), other, tag=99)
    receive.wait()
    assert late.item() == 5.0
    return seconds


def test_a_message_does_not_wait_for_another_that_a_thread_waits_for() -> None:
    # A slice of 50 ms for each message would be over a second, each time; on a busy machine most of them may be.
    assert any(max(run_ranks(_beside_another, 2)) < 0.4 for _ in range(10))


def _answered_by_a_callback() -> None:
    """Rank 1 answers from a callback, while its only thread waits for another message that follows the answer."""
    rank, _ = _init()
    if rank == 0:
        time.sleep(0.1)  # (rank 1's main thread waits by now, and works for its other messages too)
        dist.send(torch.full((3,), 2.0), 1, tag=1)
        answer = torch.zeros(3)
        dist.recv(answer, 1, tag=2)
        _same(answer, torch.full((3,), 4.0))
        dist.send(answer, 1, tag=3)
        return
    question, last = torch.zeros(3), torch.zeros(3)
    receive = dist.irecv(question, 0, tag=1)
    assert receive is not None
    receive.get_future().then(lambda _: dist.send(question * 2, 0, tag=2))
    dist.recv(last, 0, tag=3)
    _same(last, torch.full((3,), 4.0))


def test_callbacks_run_while_their_rank_waits_for_another_message() -> None:
    run_ranks(_answered_by_a_callback, 2)


def _in_inference_mode() -> None:
    """Receives of inference mode, for tensors of that mode and others, completed by the group's own thread."""
    rank, _ = _init(chunk=512)
    if rank == 0:
        dist.barrier()
        for tag in (1, 2):
            dist.send(torch.arange(500.0) + tag, 1, tag=tag)
        dist.barrier()
        return
    plain = torch.zeros(500)
    with torch.inference_mode():
        got = [plain, torch.zeros(500)]
        works = [dist.irecv(each, 0, tag=tag) for tag, each in enumerate(got, 1)]
    dist.barrier()
    dist.barrier()
    for tag, (work, tensor) in enumerate(zip(works, got, strict=True), 1):
        assert work is not None
        work.wait()
        _same(tensor, torch.arange(500.0) + tag)


def test_receives_of_inference_mode() -> None:
    run_ranks(_in_inference_mode, 2)


def _from_threads() -> None:
    """Four threads of each rank exchange messages of several fragments, told apart by their tags."""
    rank, _ = _init(chunk=512)
    wrong: list[str] = []
    together = threading.Barrier(4)

    def exchange(tag: int) -> None:
        together.wait(20)  # the first messages of the group come from all at once
        for step in range(10):
            got = torch.zeros(400 + tag)
            receive = dist.irecv(got, 1 - rank, tag=tag)
            dist.send(torch.arange(400.0 + tag) + 1000 * step + rank, 1 - rank, tag=tag)
            assert receive is not None
            receive.wait()
            if not torch.equal(got, torch.arange(400.0 + tag) + 1000 * step + 1 - rank):
                wrong.append(f"tag {tag}, step {step}")

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert wrong == []
    dist.barrier()


def test_messages_from_several_threads() -> None:
    run_ranks(_from_threads, 2)


def _half_a_message() -> bool:
    """A receive that times out in the middle of its message: the rest, sent later, goes nowhere."""
    rank, _ = _init(chunk=512, timeout=20)
    dist.barrier()
    if rank == 1:
        from lockstep.comm.shm.p2p import Box

        put, sent = Box.put, 0

        def some(self: Box, *arguments: Any) -> int | None:
            nonlocal sent
            sent += 1
            return put(self, *arguments) if sent <= 2 else None

        Box.put = some  # type: ignore[assignment,method-assign]
        work = dist.isend(torch.ones(300), 0)
        assert work is not None
        with pytest.raises(lockstep.CollectiveTimeout):
            work.wait()
        Box.put = put  # type: ignore[method-assign]
        work.is_completed()
        return True
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=0.2))
    got = torch.zeros(300)
    receive = dist.irecv(got, 1)
    assert receive is not None
    wait_for(lambda: receive.is_completed() or torch.count_nonzero(got) > 0, "a part of it")
    with pytest.raises(lockstep.CollectiveTimeout):
        receive.wait()
    before = got.clone()
    assert 0 < torch.count_nonzero(before) < 300
    box = group._shm_group.engine._messages._matching._inboxes[1]
    hand_over(box)
    receive.is_completed()
    return torch.equal(got, before)


def hand_over(box: Any) -> None:
    """As if the sender's next fragment had come."""
    from lockstep.comm.shm import semaphore

    semaphore.post(box._full)


def test_what_comes_after_the_error_is_not_written_to_the_tensor() -> None:
    assert run_ranks(_half_a_message, 2) == [True, True]


# --- ranks that have left --------------------------------------------------------------------------------------------


def _one_leaves() -> list[float]:
    """Rank 0 takes what comes from anyone; rank 2 has sent its last, and ends well before rank 1 sends."""
    rank, _ = _init()
    dist.barrier()
    if rank == 2:
        dist.send(torch.full((1,), 2.0), 0)
        return []
    group: Any = dist.group.WORLD
    if rank == 1:
        wait_for(lambda: group._shm_group.engine._health.gone() == {2}, "the end of rank 2")
        group.get_group_store().wait(["waits"])
        wait_until_seen(0, "last waited in recv from any rank")
        time.sleep(0.3)  # (rank 0 looks every 50 ms who is gone)
        dist.send(torch.full((1,), 1.0), 0)
        return []
    got = torch.zeros(1), torch.zeros(1)
    assert dist.recv(got[0]) == 2
    wait_for(lambda: group._shm_group.engine._health.gone() == {2}, "the end of rank 2")
    group.get_group_store().set("waits", "")
    assert dist.recv(got[1]) == 1
    return [each.item() for each in got]


def test_a_receive_from_anyone_goes_on_after_a_rank_has_left_and_ended() -> None:
    assert run_ranks(_one_leaves, 3)[0] == [2.0, 1.0]


def _all_leave() -> str:
    rank, _ = _init()
    if rank > 0:
        return ""
    with pytest.raises(lockstep.PeerLost) as caught:
        dist.recv(torch.zeros(1))
    return str(caught.value)


def test_a_receive_from_anyone_ends_once_all_ranks_have_left() -> None:
    assert "rank 0 waits in recv from any rank (tag 0)" in run_ranks(_all_leave, 3)[0]


def _destroy_with_sends() -> float:
    rank, _ = _init()
    dist.barrier()
    group: Any = dist.group.WORLD
    store = group.get_group_store()
    if rank == 1:
        store.wait(["closed"])
        return 0.0
    group.set_timeout(timedelta(seconds=1.5))
    works = [dist.isend(torch.zeros(10_000_000), 1, tag=tag) for tag in range(5)]
    begun = time.monotonic()
    dist.destroy_process_group()
    seconds = time.monotonic() - begun
    store.set("closed", "")
    assert all(work is not None and work.is_completed() for work in works)
    return seconds


def test_sends_that_nobody_receives_hold_up_the_end_of_a_group_once() -> None:
    assert 1.5 <= run_ranks(_destroy_with_sends, 2)[0] < 5.0, "and not once for each of the five"


def _at_a_path_of_any_bytes() -> float:
    """A script's path need not be UTF-8, as none has to be on Linux."""
    rank, _ = _init()
    tensor = torch.full((1,), rank + 1.0)
    lines = "dist.all_reduce(tensor)\ndist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)"
    code = compile(lines, os.fsdecode(b"/home/caf\xe9.py"), "exec")
    exec(code, {**globals(), "rank": rank, "tensor": tensor})
    return tensor.item()


def test_the_line_of_a_script_whose_path_is_no_text_is_told_all_the_same() -> None:
    assert run_ranks(_at_a_path_of_any_bytes, 2) == [3.0, 3.0]


# --- time limits -----------------------------------------------------------------------------------------------------


def _told(action: Callable[[], object]) -> str:
    with pytest.raises(lockstep.CollectiveTimeout) as caught:
        action()
    return str(caught.value)


def _nothing_comes(how: str) -> str:
    rank, _ = _init(timeout=20)
    dist.barrier()
    if rank > 0:
        # (Who waits for a message takes in others too, of any size; a rank in a collective leaves them in the mailbox.)
        return _told(lambda: dist.barrier() if how == "send" else dist.recv(torch.zeros(1), 3 - rank, tag=8))
    if how == "send":
        wait_until_they_wait([1, 2])
    else:
        for other in (1, 2):
            wait_until_seen(other, "last waited in recv")
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(timedelta(seconds=0.4))
    actions: dict[str, Callable[[], object]] = {
        "recv": lambda: dist.recv(torch.zeros(1), 2, tag=7),
        "recv from anyone": lambda: dist.recv(torch.zeros(1), tag=7),
        "send": lambda: dist.send(torch.zeros(10_000_000), 2, tag=7),
    }
    return _told(actions[how])


@pytest.mark.parametrize(
    ("how", "waits_in", "waits_for", "stands"),
    [
        ("recv", "recv from rank 2", "rank 2", "last waited in recv from rank 1 (tag 8) at"),
        ("recv from anyone", "recv from any rank", "ranks 1 and 2", "last waited in recv from rank 1 (tag 8) at"),
        ("send", "send to rank 2", "rank 2", "last seen at barrier #"),
    ],
)
def test_a_message_without_a_partner_is_an_error_that_says_where_the_ranks_stand(
    how: str, waits_in: str, waits_for: str, stands: str
) -> None:
    told = run_ranks(_nothing_comes, 3, how)
    message = told[0]
    assert told == [message] * 3
    assert message.startswith(f"{waits_for} did not come: rank 0 timed out after 0.4 s in {waits_in} (tag 7) at "), (
        message
    )
    for rank in (1, 2):
        line = next(each for each in message.splitlines() if each.startswith(f"  rank {rank} (process"))
        assert stands.replace("rank 1", f"rank {3 - rank}") in line
        assert "test_shm_messages.py:" in line


def _posted_early() -> None:
    """A receive that was posted long before its message counts its time from when somebody waits for it."""
    rank, _ = _init(timeout=60)
    dist.barrier()
    group = dist.group.WORLD
    assert group is not None
    got = torch.zeros(1)
    group.set_timeout(timedelta(seconds=0.4))
    receive = dist.irecv(got, 0) if rank == 1 else None
    group.set_timeout(timedelta(seconds=60))
    for _ in range(7):
        time.sleep(0.1)
        dist.barrier()
    if rank == 0:
        dist.send(torch.ones(1), 1)
    dist.barrier()
    if receive is not None:
        receive.wait()
        assert got.item() == 1.0


def test_a_receive_that_nobody_waits_for_has_time() -> None:
    run_ranks(_posted_early, 2)


def _wait_once() -> float:
    rank, _ = _init()
    seconds = 0.0
    if rank == 0:
        receive = dist.irecv(torch.zeros(1), 1)
        assert receive is not None
        begun = time.monotonic()
        with pytest.raises(lockstep.CollectiveTimeout, match=r"was not complete after 0\.2 s"):
            receive.wait(timedelta(seconds=0.2))
        seconds = time.monotonic() - begun
        dist.barrier()
        receive.wait()
    else:
        dist.barrier()
        dist.send(torch.ones(1), 0)
    return seconds


def test_a_wait_with_a_limit_of_its_own_leaves_the_message_in_flight() -> None:
    assert 0.2 <= run_ranks(_wait_once, 2)[0] < 10.0, "its own limit, and not the group's"
