"""The Python stacks of a rank, as faulthandler writes them into the job's folder when asked by a signal."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.recorder.writer import STACK

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
#: Frames of the launcher, in which every rank's program runs, and the start of the zygote.
_RUNNERS = tuple(f"/lockstep/launch/{name}.py" for name in ("rank", "zygote", "spawned"))
#: Where a rank waits for others, if the frames of its stack end there. (The engine runs a backward, which is mostly
#: work; a rank that sleeps in it waits for what its hooks have asked of other ranks.)
_COLLECTIVES = ("/torch/distributed/", "/lockstep/comm/")
_ENGINE = "/torch/autograd/"


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


@dataclass(frozen=True)
class Stack:
    """The main thread's frames, the innermost first, without the launcher's own."""

    frames: tuple[Frame, ...]

    @property
    def in_collective(self) -> bool:
        """Whether the innermost frame is one that waits for other ranks."""
        return bool(self.frames) and any(part in self.frames[0].file for part in _COLLECTIVES)

    @property
    def in_engine(self) -> bool:
        """Whether the innermost frame runs a backward."""
        return bool(self.frames) and _ENGINE in self.frames[0].file

    @property
    def in_model(self) -> bool:
        """Whether the innermost frame is torch's own, called from a module."""
        return (
            bool(self.frames)
            and "/torch/" in self.frames[0].file
            and any("/torch/nn/modules/" in frame.file for frame in self.frames)
        )

    @property
    def in_debugger(self) -> bool:
        """Whether somebody looks at the program with Python's debugger, or one that is built on it."""
        return any(frame.file.endswith(("/pdb.py", "/bdb.py")) for frame in self.frames)

    @property
    def users(self) -> Frame | None:
        """The innermost line outside torch, lockstep and Python's own files."""
        library = ("/torch/", "/lockstep/", f"{os.sep}lib{os.sep}python", "<frozen", "<string>")
        return next((frame for frame in self.frames if not any(part in frame.file for part in library)), None)


def size(folder: Path, rank: int) -> int:
    """**Local.** Bytes in the file of a rank's stacks; what is asked for now comes behind them."""
    try:
        return (folder / STACK.format(rank=rank)).stat().st_size
    except FileNotFoundError:
        return 0


def read(folder: Path, rank: int, *, start: int) -> Stack | None:
    """**Local.** The stack that a rank has written behind byte ``start``, or None if it has written none."""
    try:
        with (folder / STACK.format(rank=rank)).open(errors="replace") as file:
            file.seek(start)
            text = file.read()
    except FileNotFoundError:
        return None
    return parse(text)


def parse(text: str) -> Stack | None:
    """**Local.** The thread that got the signal (the main one, unless the program blocks it there), or None."""
    _, found, behind = text.partition("Current thread")
    if not found:
        _, found, behind = text.partition("Thread")
    if not found:
        return None
    frames = []
    for line in behind.splitlines()[1:]:
        match = _FRAME.match(line)
        if match is None:
            break
        frames.append(Frame(match["file"], match["line"], match["name"]))
    inner = [i for i, frame in enumerate(frames) if frame.file.endswith(_RUNNERS)]
    return Stack(tuple(frames[: inner[0]] if inner else frames))
