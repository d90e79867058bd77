"""What ranks run in tests of processes alone. This module imports no torch, so that neither do they."""

from __future__ import annotations

import os
import signal
import sys


def write(rank: int, folder: str, text: str) -> None:
    with open(f"{folder}/rank{rank}", "w") as file:
        file.write(f"{text} {os.environ['RANK']} {os.environ['WORLD_SIZE']} {sys.stdin.read()!r}")


def fail(rank: int, how: str) -> None:
    if rank == 1:
        if how == "raise":
            raise KeyError("no such sample")
        if how == "exit":
            sys.exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def wait(rank: int, fifo: str) -> None:
    if rank == 0:
        with open(fifo) as file:
            file.read()


def give(rank: int, what: str, fifo: str = "") -> object:
    """Return something, on rank 0 where ``fifo`` is one once somebody writes to it."""
    if rank == 0 and fifo:
        wait(rank, fifo)
    if what == "fails" and rank == 0:
        raise KeyError("no such sample")
    if what == "leaves":
        sys.exit(0)
    if what == "much":
        return {"rank": rank, "bytes": bytes([rank]) * (8 << 20)}
    if what == "a file" and rank == 1:
        return open(os.devnull)
    if what == "unreadable" and rank == 1:
        return Unreadable()
    return rank, what


class Unreadable:
    """Pickled as a call that fails where it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return (int, ("no number",))
