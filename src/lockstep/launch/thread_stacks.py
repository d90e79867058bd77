"""Ask the threads of a rank for their Python stacks, each by a signal of its own.

Note [Each thread for itself]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Python's faulthandler can write the stacks of all threads in one signal's handler, but it reads the frames of the others
while these may run, and so what is no longer there. That ended ranks by SIGSEGV: one with three busy threads after 5 to
55 signals, and one that trained on a GPU after 8, which came as it went on after a SIGSTOP (the kernel then gives a
signal to whichever thread wakes up first). So a rank's handler writes the stack of the thread that it runs on, which
can't change meanwhile, and a signal is sent to a thread instead of the process: to the main one for a report, and to
the others, one after another, where somebody wants to see all. A thread without Python writes nothing (but poll(),
select() and sleep() may end early in it, as at any signal), and one that blocks the signal is not asked.

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
from lockstep.launch.processes import ask_for_stack
from lockstep.text import counted

#: Seconds for one thread to get the signal and to write.
_ANSWER = 0.5
#: Seconds between two looks at it.
_BETWEEN = 0.0005


def whole_stacks(
    files: JobFiles, begins: Mapping[int, int], pids: Mapping[int, int | None], *, limit: float
) -> dict[int, str]:
    """Return the stacks of all threads of ranks whose main threads have been asked.

    Args:
        files: of the ranks' start.
        begins: rank -> the byte in its file at which the main thread's answer begins.
        pids: rank -> its process.
        limit: the seconds after which no other thread is asked.

    Returns:
        rank -> the stacks, the main thread's first, each below a line that names its thread; empty: the rank has not
        answered, and its other threads were not asked.
    """
    end = time.monotonic() + limit
    ranks = {rank: _WholeAnswer(files, rank, pids.get(rank), begin) for rank, begin in begins.items()}
    asked = [*ranks.values()]
    while asked := [each for each in asked if each.threads]:
        if time.monotonic() >= end:
            break
        for each in asked:
            each.ask()
        until = min(end, time.monotonic() + _ANSWER)
        while any(each.is_writing() for each in asked) and time.monotonic() < until:
            time.sleep(_BETWEEN)
        # What a thread still writes would be taken for the next one's.
        asked = [each for each in asked if each.hear()]
    return {rank: each.text() for rank, each in ranks.items()}


def blocks(pid: int) -> bool:
    """Return whether a process's main thread blocks the signal."""
    return {"SigBlk", "SigCgt"} <= _proc.signal_sets(pid, STACK_SIGNAL)


class _WholeAnswer:
    """What one rank has answered, and which of its threads are still to be asked."""

    def __init__(self, files: JobFiles, rank: int, pid: int | None, begin: int) -> None:
        self._files, self._rank, self._pid, self._begin = files, rank, pid or 0, begin
        self._texts = [self._read("Main thread")]
        if not self._texts[0] and pid is not None and blocks(pid):
            self._texts = ["Main thread: it blocks the signal that asks for stacks"]
        #: The threads that are still to be asked.
        self.threads = [thread for thread in _proc.threads(self._pid) if thread != pid] if self._texts[0] else []
        self._thread: int | None = None

    def ask(self) -> None:
        """Ask the next thread."""
        self._begin, thread = stack_size(self._files.folder, self._rank), self.threads[0]
        self._thread = thread if ask_for_stack(self._pid, thread) else None

    def is_writing(self) -> bool:
        """Return whether the thread has not got the signal yet, which then waits, or is in its handler, which blocks
        it."""
        thread = self._thread
        return thread is not None and bool(
            {"SigPnd", "SigBlk"} & _proc.signal_sets(self._pid, STACK_SIGNAL, thread=thread)
        )

    def hear(self) -> bool:
        """Read what the thread has written; return whether that is all."""
        if self.is_writing():
            return False
        thread = self.threads.pop(0)
        name = _proc.read(self._pid, f"task/{thread}/comm").strip()
        self._texts.append(self._read(f"Thread {thread}, {name}"))
        return True

    def text(self) -> str:
        """Return all that was written."""
        missing = f"({counted(len(self.threads), 'more thread')}: no answer in time)" if self.threads else ""
        return "\n\n".join(filter(None, [*self._texts, missing]))

    def _read(self, who: str) -> str:
        try:
            with self._files.stack(self._rank).open("rb") as stacks:
                stacks.seek(self._begin)
                text = stacks.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return ""
        return text.replace(STACK, f"{who} (most recent call first):", 1)
