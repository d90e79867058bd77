"""The relay: prefixes, unfinished lines, slow and vanished readers. Pipes, but no ranks."""

from __future__ import annotations

import errno
import os
import selectors
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launch.output import PATIENCE, Relay
from lockstep.launch.screen import _last_byte


class Stage:
    """A relay between pipes whose other ends the test holds."""

    def __init__(self, folder: Path) -> None:
        self.selector = selectors.PollSelector()
        self.relay = Relay(self.selector)
        self.terminal, self.sink = os.pipe()
        os.set_blocking(self.terminal, False)
        self.writers: dict[int, int] = {}
        self.logs = {rank: folder / f"rank{rank}.log" for rank in range(3)}
        self.now = 100.0
        for rank in range(3):
            reader, self.writers[rank] = os.pipe()
            log = os.open(self.logs[rank], os.O_WRONLY | os.O_CREAT, 0o600)
            prefix = f"[{rank}] ".encode() if rank else b""
            self.relay.add(reader, rank=rank, sink=self.sink, log=log, prefix=prefix)

    def write(self, rank: int, data: bytes) -> None:
        os.write(self.writers[rank], data)
        self.pump()

    def pump(self) -> None:
        ready = {key.fd for key, _ in self.selector.select(0)}
        self.relay.pump(ready, self.now)

    def shown(self) -> bytes:
        try:
            return os.read(self.terminal, 1 << 20)
        except BlockingIOError:
            return b""

    def end(self, rank: int) -> None:
        os.close(self.writers.pop(rank))
        self.pump()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for rank in list(stage.writers):
        stage.end(rank)
    stage.relay.close()
    stage.selector.close()
    os.close(stage.sink)
    if stage.terminal >= 0:
        os.close(stage.terminal)


def test_lines_have_their_rank_in_front_but_rank_0s(stage: Stage) -> None:
    stage.write(0, b"zero\n")
    stage.write(1, b"one\nmore\n")
    stage.write(2, b"two\n\n")
    assert stage.shown() == b"zero\n[1] one\n[1] more\n[2] two\n[2] \n"
    assert stage.logs[1].read_bytes() == b"one\nmore\n"


def test_a_line_in_pieces_is_shown_whole(stage: Stage) -> None:
    stage.write(1, b"half")
    stage.write(2, b"other\n")
    assert stage.shown() == b"[2] other\n"
    stage.write(1, b" done\n")
    assert stage.shown() == b"[1] half done\n"


def test_an_unfinished_line_is_shown_after_a_while_and_can_go_on(stage: Stage) -> None:
    stage.write(1, b"asking: ")
    assert stage.relay.due is not None
    stage.now += PATIENCE
    stage.pump()
    assert stage.shown() == b"[1] asking: "
    stage.write(1, b"yes\nnext\n")
    assert stage.shown() == b"yes\n[1] next\n"


def test_another_rank_ends_an_unfinished_line_first(stage: Stage) -> None:
    stage.write(0, b"epoch 1 \r")
    stage.write(1, b"hello\n")
    assert stage.shown() == b"epoch 1 \r"
    stage.now += PATIENCE
    stage.pump()
    assert stage.shown() == b"\n[1] hello\n"


def test_a_progress_bar_that_never_ends_its_line_starves_nobody(stage: Stage) -> None:
    stage.write(1, b"")
    stage.write(0, b"bar\r")
    stage.write(1, b"hello\n")
    for _ in range(5):
        stage.now += PATIENCE / 4
        stage.write(0, b"bar\r")
    assert b"\n[1] hello\n" in stage.shown()


def test_nothing_of_a_huge_line_is_lost(stage: Stage) -> None:
    data = bytes(range(1, 10)) * 30_000
    shown = b""
    for start in range(0, len(data), 30_000):
        stage.write(1, data[start : start + 30_000])
        shown += stage.shown()
    stage.end(1)
    while piece := stage.shown():
        shown += piece
        stage.pump()
    assert stage.logs[1].read_bytes() == data
    assert shown == b"[1] " + data


def test_who_writes_without_end_does_not_keep_the_next_start_waiting(stage: Stage) -> None:
    endless = os.open("/dev/zero", os.O_RDONLY)
    stage.relay.add(endless, rank=3, sink=stage.sink, log=None)
    os.write(stage.writers[0], b"last words\n")
    stage.relay.finish_sources()
    assert stage.logs[0].read_bytes() == b"last words\n"


def test_the_last_line_may_lack_its_end(stage: Stage) -> None:
    stage.write(1, b"a\nb")
    stage.end(1)
    stage.pump()
    assert stage.shown() == b"[1] a\n[1] b"


def test_a_slow_reader_makes_the_ranks_wait_and_gets_everything(stage: Stage) -> None:
    line = b"x" * 99 + b"\n"
    sent = 0
    os.set_blocking(stage.writers[1], False)
    for _ in range(100):  # 100 x 64 KiB are more than the pipe and the backlog hold together
        try:
            sent += os.write(stage.writers[1], line * 655)
        except BlockingIOError:
            break
        stage.pump()
    else:
        pytest.fail("the relay takes without end")
    stage.end(1)
    shown = b""
    while stage.relay.open and len(shown) < sent * 2:
        piece = stage.shown()
        shown += piece
        stage.pump()
        if not piece and stage.now > 200:
            break
        stage.now += PATIENCE
    assert len(stage.logs[1].read_bytes()) == sent
    assert shown.replace(b"[1] ", b"").replace(b"\n", b"").count(b"x") == stage.logs[1].read_bytes().count(b"x")


def test_a_reader_that_left_does_not_stop_the_logs(stage: Stage) -> None:
    os.close(stage.terminal)
    stage.terminal = -1
    stage.write(1, b"one\n")
    stage.write(1, b"two\n")
    stage.end(1)
    assert stage.logs[1].read_bytes() == b"one\ntwo\n"


def test_a_reader_that_has_no_room_for_a_moment_has_not_left(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program has made the terminal one that does not block, and it takes less than poll has promised."""
    with monkeypatch.context() as full:
        full.setattr(os, "write", _write_nothing)
        stage.relay.sink(stage.sink).push(0, b"", b"one\n")  # type: ignore[union-attr]
        stage.pump()
    stage.write(0, b"two\n")
    assert stage.shown() == b"one\ntwo\n"


def _write_nothing(*_: object) -> int:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_where_a_file_ends_is_not_known_if_it_can_not_be_read(tmp_path: Path) -> None:
    """Then the launcher's message is shown as on a terminal: where a line is begun is what its rank says."""
    path = tmp_path / "shown"
    with path.open("w+b", buffering=0) as shown:
        assert _last_byte(shown.fileno()) == b"\n"
        shown.write(b"a")
        assert _last_byte(shown.fileno()) == b"a"
    failing = os.open("/proc/self/mem", os.O_RDONLY)  # a file that fails where no memory is (EIO)
    try:
        os.lseek(failing, 1, os.SEEK_SET)
        assert _last_byte(failing) is None
    finally:
        os.close(failing)
