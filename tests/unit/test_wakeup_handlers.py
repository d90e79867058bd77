"""Signals that a thread notices, and the handlers that Python calls for them on the main thread."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.job import stop, terminal, wakeup
from lockstep.job.stop import Action, Requests
from lockstep.job.wakeup import Wakeup
from tests.launching import LIMIT


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Puts the handlers and the descriptor back that a test may leave."""
    before = {
        signum: signal.getsignal(signum) for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)
    assert signal.set_wakeup_fd(-1) == -1


def _elsewhere(act: Callable[[], Any]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_it_hears_signals_beyond_a_thousand_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    signal.signal(signal.SIGUSR1, lambda *_: None)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while (fd := os.open("/dev/null", os.O_RDONLY)) <= 1100:
            stack.callback(os.close, fd)
        stack.callback(os.close, fd)
        with closing(Wakeup()) as heard:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard.wait(LIMIT) == [signal.SIGUSR1]


def test_a_descriptor_from_before_that_is_closed_is_not_put_back() -> None:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    signal.set_wakeup_fd(ends[1].fileno())
    heard = Wakeup()
    for end in ends:
        end.close()
    heard.close()
    assert signal.set_wakeup_fd(-1) == -1


def test_a_descriptor_that_was_set_meanwhile_stays() -> None:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    heard = Wakeup()
    signal.set_wakeup_fd(ends[1].fileno())
    heard.close()
    assert signal.set_wakeup_fd(-1) == ends[1].fileno()
    for end in ends:
        end.close()


def test_one_that_another_thread_closes_stays_open_until_the_next() -> None:
    heard = Wakeup()
    mine = heard._writes.fileno()
    _elsewhere(heard.close)
    assert heard._writes.fileno() == mine  # or a file opened next would get the signals
    following = Wakeup()
    assert heard._writes.fileno() == -1
    following.close()
    assert wakeup._left is None


def test_a_signal_whose_handler_the_program_has_replaced_is_no_request() -> None:
    requests = Requests()
    requests.listen()
    signal.signal(signal.SIGTERM, lambda *_: None)
    requests.noticed(signal.SIGTERM)
    assert requests.wanted is None
    requests.noticed(signal.SIGUSR1)
    assert requests.wanted is Action.SAVE
    requests.close()


@pytest.mark.parametrize("first", ["the thread", "the handler"])
def test_a_signal_is_one_request_in_whatever_order_it_is_heard_of(first: str) -> None:
    requests = Requests()
    requests.listen()
    hear: list[Callable[[], None]] = [
        lambda: requests.noticed(signal.SIGUSR1),
        lambda: requests._on_signal(signal.SIGUSR1, None),
    ]
    for turn in range(3):
        for number, each in enumerate(hear if first == "the thread" else hear[::-1]):
            each()
            assert requests.save is (number == 0), f"turn {turn}: {number}"
            requests.save = False
    requests.close()


@pytest.mark.parametrize(
    ("signums", "by", "is_second"),
    [
        ((signal.SIGHUP, signal.SIGTERM), signal.SIGTERM, False),
        ((signal.SIGHUP, signal.SIGTERM, signal.SIGHUP), signal.SIGTERM, False),
        ((signal.SIGTERM, signal.SIGHUP, signal.SIGHUP), signal.SIGTERM, False),
        ((signal.SIGHUP, signal.SIGTERM, signal.SIGTERM), signal.SIGTERM, True),
        ((signal.SIGTERM, signal.SIGTERM), signal.SIGTERM, True),
    ],
)
def test_what_ends_a_lost_session_is_one_request_without_a_launcher_too(
    monkeypatch: pytest.MonkeyPatch, signums: tuple[signal.Signals, ...], by: signal.Signals, is_second: bool
) -> None:
    """However long after each other its signals come."""
    clock, ended = itertools.count(), []
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(stop, "_as_by_default", lambda signum, _frame: ended.append(signum))
    requests = Requests()
    requests.listen()
    for signum in signums:
        assert ended == [], "the last one at most"
        os.kill(os.getpid(), signum)
    assert (requests.stop, ended) == (by, [signums[-1]] if is_second else [])
    requests.close()


@pytest.mark.parametrize("heard", ["by the thread", "by the handler"])
def test_a_terminal_that_has_gone_is_let_go_of_as_soon_as_sighup_is_heard(
    monkeypatch: pytest.MonkeyPatch, heard: str
) -> None:
    let_go: list[str] = []
    monkeypatch.setattr(terminal, "let_go", lambda: let_go.append("the terminal"))
    requests = Requests()
    requests.listen()
    if heard == "by the thread":
        requests.noticed(signal.SIGTERM)
        assert let_go == []
        requests.noticed(signal.SIGHUP)
    else:
        os.kill(os.getpid(), signal.SIGHUP)
    assert let_go == ["the terminal"]
    requests.close()


def test_signals_are_as_before_once_another_thread_has_closed_them() -> None:
    requests, following = Requests(), Requests()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    requests.listen()
    _elsewhere(requests.close)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    requests.listen()
    _elsewhere(requests.close)
    following.listen()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert following.wanted is Action.SAVE
    following.close()


def test_a_request_to_save_that_comes_when_the_loop_is_over_ends_no_process() -> None:
    """Whoever sent it has looked a moment earlier, and has seen a handler."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    for _ in range(2):
        requests = Requests()
        requests.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.wanted is Action.SAVE
        requests.close()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("moment", ["before the loop", "in the loop"])
def test_a_handler_of_the_programs_own_stays_after_the_loop(moment: str) -> None:
    requests, heard = Requests(), []
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    if moment == "in the loop":
        requests.listen()
    signal.signal(signal.SIGUSR1, lambda signum, _frame: heard.append(signum))
    requests.listen()
    os.kill(os.getpid(), signal.SIGUSR1)
    requests.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (requests.wanted, heard) == (None, [signal.SIGUSR1] * 2)
