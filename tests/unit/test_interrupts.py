"""Interrupts of a cell, on its rank."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from lockstep.interactive.interrupt import CellInterrupts


@pytest.fixture
def armed() -> Iterator[CellInterrupts]:
    before = signal.getsignal(signal.SIGINT)
    interrupts = CellInterrupts()
    interrupts._armed, interrupts._number = True, 1
    yield interrupts
    interrupts._armed = False
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_at_once(armed: CellInterrupts) -> None:
    with pytest.raises(KeyboardInterrupt):
        armed.ask(1, at_once=True)


def test_an_interrupt_waits_for_a_message_that_is_half_sent(armed: CellInterrupts) -> None:
    sent = []

    def send() -> None:
        with armed.held():
            sent.append("first half")
            with armed.held():
                armed.ask(1, at_once=True)
            sent.append("second half")

    with pytest.raises(KeyboardInterrupt):
        send()
    assert sent == ["first half", "second half"]
    with armed.held():
        sent.append("the next one")
