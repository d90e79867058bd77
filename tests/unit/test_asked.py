"""Signals that come while a program waits for ranks leave a note, where the program has left them to Python."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator

import pytest

from lockstep.launch.asked import AskedMeanwhile

_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def asked() -> Iterator[AskedMeanwhile]:
    before = {signum: signal.getsignal(signum) for signum in _ALL}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    made = AskedMeanwhile()
    yield made
    made.close()
    for signum, handler in before.items():
        signal.signal(signum, handler)


def _is_ready(asked: AskedMeanwhile) -> bool:
    return bool(select.select([asked], [], [], 0.0)[0])


def test_signals_are_noted_and_the_first_is_passed_on(asked: AskedMeanwhile) -> None:
    assert (_is_ready(asked), asked.read()) == (False, [])
    with asked.noted():
        for signum in _ALL:
            os.kill(os.getpid(), signum)
        assert (_is_ready(asked), asked.read()) == (True, [*_ALL])
    assert (_is_ready(asked), asked.read()) == (False, [])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt):
        asked.pass_on()
    asked.pass_on()
    assert asked.first is None


def test_one_that_comes_when_there_is_nobody_left_to_ask_is_passed_on(asked: AskedMeanwhile) -> None:
    with asked.noted():
        asked.close()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.read() == [signal.SIGTERM, signal.SIGINT]
    assert asked.first == signal.SIGTERM


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_signals_of_which_the_program_disposes_are_its_own(asked: AskedMeanwhile, handler: signal.Handlers) -> None:
    for signum in _ALL:
        signal.signal(signum, handler)
    with asked.noted():
        for signum in _ALL:
            os.kill(os.getpid(), signum)
        assert (asked.first, asked.read()) == (None, [])
    assert all(signal.getsignal(signum) == handler for signum in _ALL)


def test_a_process_that_another_thread_forks_meanwhile_ends_as_ever(asked: AskedMeanwhile) -> None:
    with asked.noted():
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert asked.first is None


def test_other_threads_than_the_main_one_set_no_handlers(asked: AskedMeanwhile) -> None:
    found = []

    def wait() -> None:
        with asked.noted():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]
