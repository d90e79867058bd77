"""Ask NCCL how its ranks are: a client of the service that NCCL calls RAS, for the report of a rank that is late.

Since NCCL 2.24 a thread in every process answers at a port of the machine, and has asked those of all other ranks
before it does. It tells which processes do not answer, and which ranks of a communicator have launched fewer
collectives than others, also of ranks on other machines. The protocol is lines of text: NCCL's user guide, chapter
"RAS", and src/ras/client.cc have it.

The launcher must not wait for it, so a thread asks, under a time limit. Only addresses of this machine are asked.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep import machine
from lockstep.launch.ports import free_port
from lockstep.text import counted

#: The variables by which NCCL is told where to answer, and whether.
_ADDRESS, _ENABLED = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
#: Seconds that NCCL may wait for ranks that do not answer, and that the whole exchange may take.
_OF_NCCL, LIMIT = 3, 10.0
#: Bytes of an answer that are read, and lines of it that are shown.
_MOST_BYTES, _MOST_LINES = 1 << 18, 24
#: The parts of an answer that say what is wrong, under their underlined titles.
_PARTS = ("Errors", "Warnings")
_TITLE = re.compile(r"^(\w[^\n]*)\n=+[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class RasAddress:
    """Where the ranks of this machine answer."""

    host: str
    port: int

    @classmethod
    def of_job(cls, env: Mapping[str, str] = os.environ) -> RasAddress | None:
        """Return where the ranks of a job that starts now are to answer: as the user says, or at a free port if this
        machine has GPUs. None: they do not answer, or not on this machine alone.

        NCCL's own port would be the same for all jobs of a machine, and any of them might answer.
        """
        if env.get(_ENABLED, "1").strip() == "0":
            return None
        given = env.get(_ADDRESS)
        if given is None:
            return cls("localhost", free_port()) if machine.gpus(env) else None
        host, _, port = given.strip().rpartition(":")
        host = host.strip("[]")
        return cls(host, int(port)) if port.isdecimal() and machine.is_loopback(host) else None

    def variables(self) -> dict[str, str]:
        """Return the variables by which NCCL answers here."""
        return {_ADDRESS: f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"}


class RasQuestion:
    """A question that is asked in a thread of its own.

    Args:
        address: where.
        limit: seconds that the whole exchange may take.
    """

    def __init__(self, address: RasAddress, *, limit: float = LIMIT) -> None:
        self._address, self._until = address, time.monotonic() + limit
        self._lock = threading.Lock()
        self._open: socket.socket | None = None
        self._closed = False
        self._heard = ""
        self._thread = threading.Thread(target=self._ask, name="lockstep-ras", daemon=True)
        self._thread.start()

    def answer(self) -> str | None:
        """Return what NCCL finds, in some lines; empty: NCCL has not answered; None: the answer is still to come."""
        return None if self._thread.is_alive() else self._heard

    def close(self) -> None:
        """Ask no longer. Waits for the thread, which ends at once."""
        with self._lock:
            self._closed = True
            if self._open is not None:
                with contextlib.suppress(OSError):  # it is not connected yet, or not any more
                    self._open.shutdown(socket.SHUT_RDWR)
        self._thread.join(max(0.0, self._until - time.monotonic()))

    def _ask(self) -> None:
        try:
            with socket.create_connection((self._address.host, self._address.port), timeout=1.0) as server:
                with self._lock:
                    if self._closed:
                        return
                    self._open = server
                self._heard = in_words(self._exchange(server))
        except (OSError, EOFError):
            pass  # no NCCL answers here: it is older than 2.24, was told not to, or has not begun
        finally:
            with self._lock:
                self._open = None

    def _exchange(self, server: socket.socket) -> str:
        """Return the whole status that NCCL sends."""
        unread = bytearray()
        for command, expected in (("client protocol 2", "SERVER PROTOCOL"), (f"timeout {_OF_NCCL}", "OK")):
            server.sendall(f"{command}\n".encode())
            while b"\n" not in unread:
                self._read(server, unread)
            line, _, rest = bytes(unread).partition(b"\n")
            unread = bytearray(rest)
            if not line.decode(errors="replace").upper().startswith(expected):
                raise EOFError("another program answers")
        server.sendall(b"status\n")
        with contextlib.suppress(EOFError):  # it closes after its answer
            while len(unread) < _MOST_BYTES:
                self._read(server, unread)
        return unread.decode(errors="replace")

    def _read(self, server: socket.socket, into: bytearray) -> None:
        server.settimeout(max(0.01, self._until - time.monotonic()))
        data = server.recv(_MOST_BYTES)
        if not data:
            raise EOFError("it has closed the connection")
        into += data


def in_words(status: str) -> str:
    """Return what a status of NCCL says is wrong, in some lines; empty if it is none."""
    titles = [*_TITLE.finditer(status)]
    ends = [*(title.start() for title in titles), len(status)][1:]
    parts = {title[1].strip(): status[title.end() : end] for title, end in zip(titles, ends, strict=True)}
    if not any(name in parts for name in _PARTS):
        return ""
    lines = [line.rstrip() for name in _PARTS for line in parts.get(name, "").splitlines() if line.strip()]
    if not lines:
        return "NCCL itself (its RAS) finds nothing wrong: all ranks answer, and have launched the same collectives"
    left = len(lines) - _MOST_LINES
    more = [f"… and {counted(left, 'line')} more"] if left > 0 else []
    return "\n".join(["NCCL itself (its RAS) says:", *(f"  {line}" for line in [*lines[:_MOST_LINES], *more])])
