"""Messages between two processes of a job on one machine: dataclasses as lines of JSON over a stream socket."""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

#: The kernel passes at most 253 descriptors in one message (SCM_MAX_FD).
_DESCRIPTORS_PER_MESSAGE = 250
_CHUNK = 65536


Received = TypeVar("Received")


class Channel(Generic[Received]):
    """One end of a stream socket between two processes of a job.

    A line has the fields of a message and its kind (``"is"``). A message that carries descriptors says how many
    (``"fds"``). They travel ahead of it, so they are all there when its line is complete; the stream keeps their order.

    Args:
        endpoint: the socket.
        kinds: the dataclasses of which messages may come.
    """

    def __init__(self, endpoint: socket.socket, kinds: Iterable[type[Received]]) -> None:
        self._socket = endpoint
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._bytes = bytearray()
        self._fds: deque[int] = deque()
        #: What was posted and found no room yet.
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send one dataclass; the descriptors stay open here. Raises OSError if the other end is gone."""
        for start in range(0, len(fds), _DESCRIPTORS_PER_MESSAGE):
            socket.send_fds(self._socket, [b" "], fds[start : start + _DESCRIPTORS_PER_MESSAGE])
        self._socket.sendall(_line(message, {"fds": len(fds)} if fds else {}))

    def post(self, message: object) -> None:
        """Send one dataclass without waiting: what finds no room is left for :meth:`push`, and so is what is posted
        later. Where one end posts, the other may send much and read nothing meanwhile. Raises OSError as :meth:`send`,
        which must not be mixed with this."""
        self._unsent += _line(message, {})
        self.push()

    def push(self) -> bool:
        """Send what was posted, as far as there is room, and return whether all has gone."""
        while self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                return False
        return True

    def receive(self) -> list[tuple[Received, list[int]]]:
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
        return [self._decode(json.loads(line)) for line in lines]

    def _decode(self, fields: dict[str, Any]) -> tuple[Received, list[int]]:
        kind, count = self._kinds[fields.pop("is")], fields.pop("fds", 0)
        return kind(**fields), [self._fds.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close this end and descriptors that came but were never claimed."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.popleft())


def _line(message: object, more: dict[str, int]) -> bytes:
    return json.dumps({"is": type(message).__name__, **vars(message), **more}).encode() + b"\n"
