"""What launcher and zygote say to each other: small records, as JSON lines over a socket, and descriptors with them."""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: The kernel passes at most 253 descriptors in one message (SCM_MAX_FD).
_DESCRIPTORS_PER_MESSAGE = 250
_CHUNK = 65536


@dataclass(frozen=True)
class Fork:
    """Fork a rank. Three descriptors for its standard streams may come along, and more for its job."""

    rank: int
    #: Changes to the environment; None unsets.
    env: dict[str, str | None]
    #: What the rank is to run; see rank.py.
    job: dict[str, Any]


@dataclass(frozen=True)
class Signal:
    """Pass a signal on to some ranks."""

    ranks: list[int]
    signum: int


@dataclass(frozen=True)
class Clear:
    """End what is left below the zygote; the answer is :class:`Cleared`."""


@dataclass(frozen=True)
class Finish:
    """End what is left below the zygote, and leave."""


@dataclass(frozen=True)
class Ready:
    """The imports are done."""


@dataclass(frozen=True)
class Broken:
    """The imports failed: a traceback."""

    error: str


@dataclass(frozen=True)
class Started:
    """A rank runs."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """A rank ended."""

    rank: int
    #: Negative for a signal.
    code: int
    #: When, on the monotonic clock.
    at: float
    #: The most memory it had, in bytes.
    peak: int


@dataclass(frozen=True)
class Cleared:
    """Nothing of the job is left below the zygote."""


Request = Fork | Signal | Clear | Finish
Answer = Ready | Broken | Started | Exited | Cleared
Message = Request | Answer
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in Message.__args__}


def encode(message: Message) -> dict[str, Any]:
    """A message as a JSON object: its fields, and its kind under ``"is"``."""
    return {"is": type(message).__name__, **vars(message)}


def decode(fields: dict[str, Any]) -> Message:
    """The message that :func:`encode` was given."""
    kind: Message = _KINDS[fields.pop("is")](**{name: value for name, value in fields.items() if name != "fds"})
    return kind


class Channel:
    """One end of a stream socket between two processes of a job.

    A message that carries descriptors says how many (``"fds"``). They travel ahead of it, so they are all there when
    its line is complete; the stream keeps their order.
    """

    def __init__(self, endpoint: socket.socket) -> None:
        self._socket = endpoint
        self._bytes = bytearray()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one message; the descriptors stay open here. Raises OSError if the other end is gone."""
        if fds:
            message = {**message, "fds": len(fds)}
        for start in range(0, len(fds), _DESCRIPTORS_PER_MESSAGE):
            socket.send_fds(self._socket, [b" "], fds[start : start + _DESCRIPTORS_PER_MESSAGE])
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Wait for bytes, and return the messages that are now complete with their descriptors.

        Raises:
            EOFError: the other end is closed, or its process is gone.
        """
        try:
            data, fds, flags, _ = socket.recv_fds(self._socket, _CHUNK, _DESCRIPTORS_PER_MESSAGE)
        except ConnectionResetError:
            data, fds, flags = b"", [], 0
        self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise OSError("too many open files: the descriptors that came with a message do not fit (see ulimit -n)")
        if not data:
            raise EOFError
        self._bytes += data
        *lines, rest = self._bytes.split(b"\n")
        self._bytes = bytearray(rest)
        messages = [json.loads(line) for line in lines]
        return [(message, [self._fds.popleft() for _ in range(message.get("fds", 0))]) for message in messages]

    def close(self) -> None:
        """Close this end and descriptors that came but were never claimed."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.popleft())
