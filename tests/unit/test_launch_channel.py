"""Messages and descriptors between two ends of a socket."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LaunchError
from lockstep.job.messages import Channel
from lockstep.launch import channel
from lockstep.launch.channel import (
    Answer,
    Broken,
    Clear,
    Cleared,
    Exited,
    Finish,
    Fork,
    Ready,
    Request,
    Signal,
    Started,
    ZygoteHandle,
)


@dataclass
class _Note:
    n: int
    text: str = ""


_Ends = tuple[Channel[Any], Channel[Any]]


@pytest.fixture
def ends() -> Iterator[_Ends]:
    one, other = (Channel(end, [_Note, *Request.__args__, *Answer.__args__]) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def _receive(channel: Channel[Any], count: int) -> list[tuple[Any, list[int]]]:
    got: list[tuple[Any, list[int]]] = []
    while len(got) < count:
        got += channel.receive()
    return got


def test_messages_arrive_in_order_and_whole(ends: _Ends) -> None:
    sent = [_Note(n, "ü\udcff\n" * n) for n in (0, 1, 50_000, 2)]
    thread = threading.Thread(target=lambda: deque(map(ends[0].send, sent)))
    thread.start()
    assert [message for message, _ in _receive(ends[1], 4)] == sent
    thread.join()


def test_every_kind_of_message_is_found_again(ends: _Ends) -> None:
    fork = Fork(3, {"RANK": "3", "GONE": None}, {"kind": "script", "target": "train.py", "args": ["--lr", "1"]})
    sent: list[Request | Answer] = [
        fork, Signal([0, 2], 15), Clear([7]), Finish(), Ready(), Broken("…"), Started(1, 7),
        Exited(1, -9, 1.5, 1 << 30), Cleared(),
    ]  # fmt: skip
    for message in sent:
        ends[0].send(message, [0] if message is fork else [])
    got = _receive(ends[1], len(sent))
    assert [message for message, _ in got] == sent
    assert [len(fds) for _, fds in got] == [1, *[0] * 8]
    os.close(got[0][1][0])


def test_each_message_has_its_own_descriptors(ends: _Ends) -> None:
    reader, writer = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    ends[0].send(_Note(1), [null])
    ends[0].send(_Note(2))
    ends[0].send(_Note(3), [writer, null])
    (_, one), (_, none), (_, two) = _receive(ends[1], 3)
    assert (len(one), len(none), len(two)) == (1, 0, 2)
    os.write(two[0], b"through")
    assert os.read(reader, 100) == b"through"
    for fd in (reader, writer, null, *one, *two):
        os.close(fd)


def test_more_descriptors_than_the_kernel_takes_at_once(ends: _Ends) -> None:
    memory = [os.memfd_create(f"{n}") for n in range(300)]
    for n, fd in enumerate(memory):
        os.write(fd, f"{n}".encode())
    ends[0].send(_Note(1), memory)
    ((message, fds),) = _receive(ends[1], 1)
    assert message.n == 1
    assert [int(os.pread(fd, 10, 0)) for fd in fds] == list(range(300))
    for fd in (*memory, *fds):
        os.close(fd)


def test_the_end_is_an_error(ends: _Ends) -> None:
    ends[0].send(_Note(9))
    ends[0].close()
    assert _receive(ends[1], 1) == [(_Note(9), [])]
    with pytest.raises(EOFError):
        ends[1].receive()


def test_descriptors_that_nobody_claimed_are_closed() -> None:
    before = set(os.listdir("/proc/self/fd"))
    left, right = (Channel(end, [_Note]) for end in socket.socketpair())
    null = os.open(os.devnull, os.O_RDONLY)
    socket.send_fds(left._socket, [b"half a message"], [null])
    assert right.receive() == []
    for closing in (left, right):
        closing.close()
    os.close(null)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_machine_without_room_for_the_process_that_forks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(channel, "start_zygote", none)
    with pytest.raises(LaunchError, match=r"the process that forks the ranks can't be started: Resource .*ulimit -u"):
        ZygoteHandle(str(tmp_path), ranks=1, threads=1)
