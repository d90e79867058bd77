"""Ask the threads of a rank for their Python stacks, each by a signal of its own.

Note [Each thread for itself]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Python's faulthandler can write the stacks of all threads in one signal's handler, but it reads the frames of the others
while these may run, and so what is no longer there. That ended ranks by SIGSEGV: one with three busy threads after 5 to
55 signals, and one that trained on a GPU after 8, which came as it went on after a SIGSTOP (the kernel then gives a
signal to whichever thread wakes up first). So a rank's handler writes the stack of the thread that it runs on, which
can't change meanwhile, and a signal is sent to a thread instead of the process: to the main one for a report, and to
the others, one after another, where somebody wants to see all. A thread that runs no Python writes nothing (a C
library's sleep() in it may end early, as at any signal), and one that blocks the signal is not asked.

Python before 3.12 drops a function's code before it leaves the function's frame. If nothing else holds that code, as
with code that exec() runs once, and the signal comes in between, this ends the rank as well: once in some 50,000
questions to a thread that did nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from lockstep import _proc
from lockstep.job.files import JobFiles
from lockstep.job.page import STACK_SIGNAL
from lockstep.launch.evidence import STACK, stack_size
from lockstep.launch.processes import signal_thread

#: Seconds for a thread other than the main one to get the signal and to write.
_ANSWER = 0.5
#: Seconds between two looks at them.
_BETWEEN = 0.0005


def whole_stacks(files: JobFiles, begins: Mapping[int, int], pids: Mapping[int, int | None]) -> dict[int, str]:
    """Return the stacks of all threads of ranks whose main threads have been asked.

    Args:
        files: of the ranks' start.
        begins: rank -> the byte in its file at which the main thread's answer begins.
        pids: rank -> its process.

    Returns:
        rank -> the stacks, the main thread's first, each below a line that names its thread; empty: the rank has not
        answered, and its other threads were not asked.
    """
    found = {rank: [_written(files, rank, begin)] for rank, begin in begins.items()}
    answered = {rank: pid for rank, pid in pids.items() if pid is not None and any(found.get(rank, ()))}
    waiting = {rank: [each for each in _proc.threads(pid) if each != pid] for rank, pid in answered.items()}
    while any(waiting.values()):
        asked = {rank: threads.pop(0) for rank, threads in waiting.items() if threads}
        sizes = {rank: stack_size(files.folder, rank) for rank in asked}
        _ask_and_wait({thread: answered[rank] for rank, thread in asked.items()})
        for rank, thread in asked.items():
            text = _written(files, rank, sizes[rank])
            name = _proc.read(answered[rank], f"task/{thread}/comm").strip()
            found[rank].append(text.replace(STACK, f"Thread {thread}, {name} (most recent call first):", 1))
    return {
        rank: "\n\n".join(filter(None, texts)).replace(STACK, "Main thread (most recent call first):", 1)
        for rank, texts in found.items()
    }


def _ask_and_wait(threads: Mapping[int, int]) -> None:
    """Ask threads, each of another process, and wait until they have written what they write.

    Args:
        threads: thread -> its process.
    """
    asked = []
    for thread, pid in threads.items():
        if _is_asked(pid, thread) or not _proc.catches(pid, STACK_SIGNAL):
            continue  # it blocks the signal, is asked by somebody else, or leaves
        try:
            signal_thread(pid, thread, STACK_SIGNAL)
        except ProcessLookupError:
            continue
        asked.append((pid, thread))
    end = time.monotonic() + _ANSWER
    while any(_is_asked(*each) for each in asked) and time.monotonic() < end:
        time.sleep(_BETWEEN)


def _is_asked(pid: int, thread: int) -> bool:
    """Return whether the signal still waits for a thread, or is blocked by it, as it is in its own handler."""
    return any(_proc.has_signal(pid, mask, STACK_SIGNAL, thread=thread) for mask in ("SigPnd:", "SigBlk:"))


def _written(files: JobFiles, rank: int, start: int) -> str:
    """Return what a rank has written after byte ``start``; empty: nothing."""
    try:
        with files.stack(rank).open("rb") as stacks:
            stacks.seek(start)
            return stacks.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
