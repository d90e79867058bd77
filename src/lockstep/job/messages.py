"""Messages between two processes of a job on one machine: dataclasses as lines of JSON over a stream socket."""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

#: The kernel passes at most 253 descriptors in one message (SCM_MAX_FD).
_DESCRIPTORS_PER_MESSAGE = 250
_CHUNK = 65536


def encode(message: object) -> dict[str, Any]:
    """Return a message as a JSON object: the fields of a dataclass, and its kind under ``"is"``."""
    return {"is": type(message).__name__, **vars(message)}


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
        """Return the descriptor to wait on."""
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
