"""Stacks of all threads of a rank: each writes its own, and none of them costs the rank its life."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lockstep import _proc
from lockstep.job.files import JobFiles
from lockstep.job.page import STACK_SIGNAL
from lockstep.launch import thread_stacks
from lockstep.launch.evidence import STACK, parse_stack, stack_size
from lockstep.launch.processes import ask_for_stack, signal_thread
from lockstep.launch.thread_stacks import whole_stacks
from tests.launching import python, wait_for

_BEGINS = """
import ctypes, os, signal, sys, threading, time
from lockstep.job import flight
from lockstep.job.page import STACK_SIGNAL
flight.take(sys.argv[1], rank=0, world_size=1)

def deep(left):
    return deep(left - 1) if left else [each for each in range(3)]

def busy():
    while True:
        sum(deep(left)[0] for left in range(30))

def executes():
    while True:
        exec("def inner(left): return inner(left - 1) if left else 0\\ninner(20)", {})

def sleeps():
    threading.Event().wait(600)

def deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, [STACK_SIGNAL])
    is_deaf.set()
    threading.Event().wait(600)

def main(wait):
    print("ready", flush=True)
    wait()
"""
_MANY = f"""{_BEGINS}
is_deaf = threading.Event()
for what in (busy, sleeps, deaf):
    threading.Thread(target=what, daemon=True).start()
is_deaf.wait()
c, native, semaphore = ctypes.CDLL(None), ctypes.c_ulong(), ctypes.create_string_buffer(64)
assert c.pthread_create(ctypes.byref(native), None, c.sem_wait, semaphore) == 0
main(sleeps)
"""


def _lives(pid: int) -> bool:
    stat = _proc.stat(pid)
    return stat is not None and not stat.is_dead


def _ask(pid: int, files: JobFiles) -> int:
    """Ask the main thread; return where its answer begins, once it is there."""
    begin = stack_size(files.folder, 0)
    signal_thread(pid, pid, STACK_SIGNAL)
    wait_for(lambda: "in <module>" in files.stack(0).read_text()[begin:] or not _lives(pid), "the main thread's stack")
    assert _lives(pid)
    return begin


def test_each_thread_with_python_writes_its_own_stack_below_its_name(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    with python(_MANY, str(tmp_path)) as pid:
        begin = _ask(pid, files)
        found = whole_stacks(files, {0: begin, 1: 0}, {0: pid, 1: pid}, limit=60.0)
        assert len(_proc.threads(pid)) >= 5
        threads = {str(each) for each in _proc.threads(pid)} - {str(pid)}
    assert found[1] == "", "a rank that has not answered"
    first, *others = found[0].split("\n\n")
    assert re.fullmatch(r'Main thread \(most recent call first\):(\n  File ".*", line \d+ in .*)+', first), first
    main = parse_stack(files.stack(0).read_text())
    assert main is not None
    assert [frame.name for frame in main.frames][-2:] == ["main", "<module>"]
    heads = [re.fullmatch(r"Thread (\d+), (\S+) \(most recent call first\):", each.splitlines()[0]) for each in others]
    assert all(head is not None and head[1] in threads for head in heads), heads
    assert len(others) == 2, "the deaf one is not asked, and the native one has none"
    assert sum(" in sleeps\n" in each for each in others) == sum(" in busy\n" in each for each in others) == 1, others
    assert all(each.splitlines()[-1].endswith(" in _bootstrap") for each in others), others


@pytest.mark.parametrize("is_stopped", [False, True], ids=["as it runs", "as it goes on"])
@pytest.mark.parametrize("wait", ["busy", "sleeps"])
def test_a_rank_whose_threads_are_busy_survives_a_thousand_questions(
    tmp_path: Path, wait: str, is_stopped: bool
) -> None:
    """In one handler for all threads, each of the four ended it with SIGSEGV before the hundredth."""
    files = JobFiles(tmp_path)
    program = f"{_BEGINS}\nfor _ in range(3):\n    threading.Thread(target=executes, daemon=True).start()\nmain({wait})"
    with python(program, str(tmp_path)) as pid:
        for asked in range(1000):
            if is_stopped:
                os.kill(pid, signal.SIGSTOP)
            signal_thread(pid, pid, STACK_SIGNAL)
            if is_stopped:
                os.kill(pid, signal.SIGCONT)
            while "SigPnd" in _proc.signal_sets(pid, STACK_SIGNAL):
                assert _lives(pid), f"ended after {asked} questions"
                time.sleep(0.0005)
        _ask(pid, files)


def test_a_thread_that_has_ended_is_none() -> None:
    with pytest.raises(ProcessLookupError):
        signal_thread(os.getpid(), 2**22 + 1, 0)
    signal_thread(os.getpid(), os.getpid(), 0)


def test_a_main_thread_that_blocks_the_signal_is_told_and_the_others_are_asked(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    program = (
        f"{_BEGINS}\nthreading.Thread(target=sleeps, daemon=True).start()\nis_deaf = threading.Event()\nmain(deaf)"
    )
    with python(program, str(tmp_path)) as pid:
        wait_for(lambda: thread_stacks.blocks(pid), "the main thread's deafness")
        assert not ask_for_stack(pid)
        assert "SigPnd" not in _proc.signal_sets(pid, STACK_SIGNAL), "it would write as often when it blocks no more"
        (found,) = whole_stacks(files, {0: 0}, {0: pid}, limit=60.0).values()
    first, other = found.split("\n\n")
    assert first == "Main thread: it blocks the signal that asks for stacks"
    assert " in sleeps\n" in other


def test_a_rank_that_is_stopped_meanwhile_costs_the_time_of_one_thread(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    program = f"{_BEGINS}\nfor _ in range(20):\n    threading.Thread(target=sleeps, daemon=True).start()\nmain(sleeps)"
    with python(program, str(tmp_path)) as pid:
        begin = _ask(pid, files)
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: (stat := _proc.stat(pid)) is not None and stat.state == "T", "the stop")
        (found,) = whole_stacks(files, {0: begin}, {0: pid}, limit=60.0).values()
        sets = [_proc.signal_sets(pid, STACK_SIGNAL, thread=thread) for thread in _proc.threads(pid)]
        (none,) = whole_stacks(files, {0: begin}, {0: pid}, limit=0.0).values()
    assert found.endswith("\n\n(20 more threads: no answer in time)")
    assert found.count("(most recent call first):") == 1
    assert sum("SigPnd" in each for each in sets) == 1
    assert none == found


def test_a_process_without_a_handler_is_not_asked() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            assert not ask_for_stack(process.pid)
            assert _lives(process.pid)
        finally:
            process.kill()


def test_the_main_threads_stack_is_found_among_those_of_others() -> None:
    other = f'{STACK}\n  File "a.py", line 1 in f\n  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n'
    main = f'{STACK}\n  File "train.py", line 3 in <module>\n'
    found = parse_stack(other + main + other)
    assert found is not None
    assert [frame.file for frame in found.frames] == ["train.py"]
    assert parse_stack(other) is None


def test_a_rank_for_which_no_more_signals_may_wait_is_not_asked(tmp_path: Path) -> None:
    """A real-time signal to a thread is refused where the limit on waiting signals (ulimit -i) is reached."""
    program = f"{_BEGINS}\nimport resource\nresource.setrlimit(resource.RLIMIT_SIGPENDING, (0, 0))\nmain(sleeps)"
    with python(program, str(tmp_path)) as pid:
        with pytest.raises(BlockingIOError):
            signal_thread(pid, pid, STACK_SIGNAL)
        assert not ask_for_stack(pid)
        assert _lives(pid)
