"""Who may use a group's engine, without ranks: what is issued as a group is destroyed, and after a fork."""

from __future__ import annotations

import os
import threading
import time

import pytest

import lockstep
from lockstep.comm.group import work as works
from lockstep.comm.group.work import GroupWork, Turns


def _work(run: object = lambda: None) -> GroupWork:
    assert callable(run)
    return GroupWork("barrier", [], run)


def test_what_is_issued_while_another_thread_destroys_the_group_is_refused() -> None:
    turns, goes_on = Turns("some"), threading.Event()
    first = _work(lambda: goes_on.wait(30))
    turns.put(first)
    closing = threading.Thread(target=turns.close)
    closing.start()
    while not turns._closing:
        time.sleep(0.001)
    with pytest.raises(lockstep.LockstepError, match="barrier: another thread of this rank is destroying"):
        turns.put(_work())
    goes_on.set()
    closing.join(30)
    assert not closing.is_alive()
    assert first.is_completed()


def test_turns_settle_when_the_last_thread_has_left() -> None:
    turns, goes_on, began = Turns("some"), threading.Event(), threading.Event()

    def at_once() -> None:
        with turns.lock:
            turns.in_use = True
            began.set()
            goes_on.wait(30)
            turns.in_use = False

    user = threading.Thread(target=at_once)
    user.start()
    began.wait(30)
    assert not turns.settle(0.05)
    assert turns.is_busy
    turns.close(0.05)  # (comes back, too)
    goes_on.set()
    assert turns.settle(30)
    user.join(30)


def test_turns_are_not_settled_while_callbacks_run() -> None:
    turns, goes_on, began = Turns("some"), threading.Event(), threading.Event()

    def callback(_: object) -> bool:
        began.set()
        return turns.settle(30) and goes_on.wait(30)  # (its own thread does not wait for itself)

    ready = threading.Event()
    work = _work(lambda: ready.wait(30))
    turns.put(work)
    done = work.get_future().then(callback)
    ready.set()
    began.wait(30)
    assert not turns.settle(0.05)
    goes_on.set()
    assert turns.settle(30)
    assert done.wait() is True
    turns.close()


def test_a_forked_child_has_a_lock_of_its_own() -> None:
    taken, free = threading.Event(), threading.Event()

    def hold() -> None:
        with works._lock:
            taken.set()
            free.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if works._lock.acquire(timeout=1.0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    free.set()
    holder.join(30)
