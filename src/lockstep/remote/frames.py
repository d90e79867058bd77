"""The data that another host sends over a connection: frames, each with its kind and its size."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from lockstep.version import __version__

#: Seconds between two signs of life; seconds without one after which the connection counts as gone.
BEAT, SILENT = 5.0, 30.0
#: The beginning of a guard's first line: output of the shell's start-up files comes before it.
_HERE = b"lockstep is here: "


class FrameKind(enum.Enum):
    """What a frame carries."""

    OUTPUT = "out"
    ERROR = "err"
    #: A message of the launcher's own: the arguments of :func:`~lockstep.launch.console.say`, as JSON.
    SAID = "said"
    #: The launcher has ended, with this exit code.
    ENDED = "ended"
    ALIVE = "alive"


@dataclass(frozen=True)
class Greeting:
    """What a host says of itself."""

    version: str
    #: A port that is free on that host.
    port: int


def frame(kind: FrameKind, data: bytes = b"") -> bytes:
    """Return one frame: a line with its kind and size, then the bytes."""
    return f"{kind.value} {len(data)}\n".encode() + data


class Frames:
    """Takes apart what comes from a guard."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        #: The host's description of itself; None: it has not come yet.
        self.greeting: Greeting | None = None

    def feed(self, data: bytes) -> Iterator[tuple[FrameKind, bytes]]:
        """Yield the frames that are now complete."""
        self._bytes += data
        while self.greeting is None and b"\n" in self._bytes:
            line, _, rest = self._bytes.partition(b"\n")
            self._bytes = rest
            if line.startswith(_HERE):
                self.greeting = Greeting(**json.loads(line[len(_HERE) :]))
        while self.greeting is not None:
            head, newline, _ = self._bytes[:40].partition(b"\n")
            if not newline:
                return
            kind, size = head.decode().split()
            end = len(head) + 1 + int(size)
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[len(head) + 1 : end])
            del self._bytes[:end]
            yield FrameKind(kind), body


def greet(port: int) -> None:
    """Say over standard output that lockstep is here, with a ``port`` that is free on this host."""
    os.write(1, b"\n" + _HERE + json.dumps(asdict(Greeting(__version__, port))).encode() + b"\n")
