"""The output of ranks while they run cells: read from their pipes, decoded, and kept."""

from __future__ import annotations

import array
import codecs
import fcntl
import os
import termios
from collections import deque
from dataclasses import dataclass, field

#: Bytes read at once, and the most characters that are kept of one rank's output in a cell.
_CHUNK, _KEPT = 65536, 1 << 20


@dataclass(frozen=True)
class CellText:
    """Something that a rank has written."""

    rank: int
    #: The descriptor: 1 for standard output, 2 for standard error.
    stream: int
    text: str


@dataclass(frozen=True)
class CellFigure:
    """A figure that a rank has drawn."""

    rank: int
    #: A PNG, in base 64.
    png: str


class RankPipe:
    """The reading end of a rank's standard output or error.

    Args:
        rank: the rank.
        stream: 1 or 2.
    """

    def __init__(self, rank: int, stream: int) -> None:
        self.rank, self.stream = rank, stream
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._reading

    def hand_over(self) -> None:
        """Close the writing end, which the rank has by now."""
        os.close(self.writing)
        self.writing = -1

    def read(self, most: int = _CHUNK) -> tuple[list[CellText], bool]:
        """Return the output that has come, at most a chunk of it, and whether more may come."""
        try:
            data = os.read(self._reading, most)
        except BlockingIOError:
            return [], True
        text = self._decoder.decode(data, final=not data)
        return ([CellText(self.rank, self.stream, text)] if text else []), bool(data)

    def drain(self) -> list[CellText]:
        """Return all that has been written so far. (A thread of the rank may go on writing without end.)"""
        size = array.array("i", [0])
        fcntl.ioctl(self._reading, termios.FIONREAD, size)
        return self.read(size[0])[0] if size[0] else []

    def close(self) -> None:
        """Close what is open."""
        os.close(self._reading)
        if self.writing >= 0:
            self.hand_over()


@dataclass
class KeptOutput:
    """The output of one rank in one cell, in the order in which it came; of a very long output, the end."""

    parts: deque[CellText] = field(default_factory=deque)
    _length: int = 0
    #: The characters that were left out at the beginning.
    left_out: int = 0

    def add(self, written: CellText) -> None:
        """Keep a piece of output."""
        self.parts.append(written)
        self._length += len(written.text)
        while self._length > _KEPT and len(self.parts) > 1:
            gone = len(self.parts.popleft().text)
            self._length -= gone
            self.left_out += gone

    @property
    def text(self) -> str:
        """All that was written, as a terminal would show it: of a line that was written over, the last state."""
        whole = "".join(part.text for part in self.parts).replace("\r\n", "\n")
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in whole.split("\n")]
        start = f"… {self.left_out} characters left out …\n" if self.left_out else ""
        return start + "\n".join(lines)
