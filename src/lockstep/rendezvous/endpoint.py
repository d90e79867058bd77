"""Reach the store at which the machines meet, or open it, and find out what is wrong with its name, port or file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from lockstep import knobs
from lockstep.rendezvous.addresses import is_only_here, own_address
from lockstep.rendezvous.messages import DEFAULT_PORT

#: Seconds that a connection may take.
_CONNECT = 5.0
#: Seconds in which a program that is not a store may identify itself, and bytes of its words that are repeated.
_GREETING, _WORDS = 0.3, 60
#: Seconds that another launcher may keep the file of the store to itself.
_LOCKED = 2.0
#: The advice about a file that is not the launchers'.
_ANOTHER = "another folder (--rdzv file:FOLDER) or another name (--rdzv-id) leaves it as it is"


class Knock(threading.Thread):
    """One try to reach the store, or to open it. A name server or a program at the port may keep it waiting for long,
    so it is a thread, which its caller can abandon.

    Args:
        endpoint: as in :class:`~lockstep.rendezvous.messages.Options`.
        local_addr: see there.
        doubtful: an earlier try got a connection but no answer, so see first whether it is another program.
    """

    def __init__(self, endpoint: str, local_addr: str | None, *, doubtful: bool) -> None:
        super().__init__(name="lockstep-knock", daemon=True)
        self._endpoint = endpoint
        self._local_addr = local_addr
        self._doubtful = doubtful
        #: The store, once it was reached; this machine's address for the others; True if this process serves the store.
        self.store: Store | None = None
        self.address = ""
        self.serves = False
        #: The reason why it was not reached, though another try may succeed; empty: not known yet.
        self.why = ""
        #: True if a program accepted the connection.
        self.connected = False
        #: An error that another try would not cure; None if there is none.
        self.error: Exception | None = None

    def run(self) -> None:
        """Try once."""
        try:
            self._try()
        except Exception as error:  # noqa: BLE001  (handed to the caller, whatever it is)
            self.error = error

    def _try(self) -> None:
        kind, _, path = self._endpoint.partition(":")
        if kind == "file":
            self.address = self._local_addr or own_address(None)
            self.why = check_file(path)
            if not self.why:
                self.store = FileStore(path)
            return
        host, port = split(self._endpoint)
        try:
            if is_only_here(host, port):
                host = self._local_addr or own_address(None)
            self.address = self._local_addr or own_address((host, port))
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            self.why = f"the name {host} can't be resolved: {error.strerror}"
            return
        except OSError as error:
            self.why = str(error)
            return
        listener = _listen(found)
        if listener is not None:
            self.serves = True
            # By its number: torch connects to its own store, and would look for the name once more, for minutes.
            own, _ = socket.getnameinfo(listener.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
            self.store = TCPStore(own, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
            return
        self._reach(host, port)

    def _reach(self, host: str, port: int) -> None:
        """Connect to the store on another machine, or in another process of this one."""
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            with socket.create_connection((host, port), timeout=_CONNECT) as probe:
                probe.settimeout(_GREETING)
                said = _greeting(probe) if self._doubtful else ""
        except OSError as error:
            reason = "the connection is refused" if error.errno == errno.ECONNREFUSED else error.strerror or str(error)
            self.why = f"nothing answers at {where} ({reason}): the launcher there may not have started yet"
            return
        self.connected = True
        if said:
            self.why = f"another program uses the port: at {where} {said}, which a launcher's store never does"
            return
        self.why = (
            f"a program accepts connections at {where}, but does not answer like a launcher's store: it is another "
            "program, or a launcher that hangs"
        )
        with contextlib.suppress(RuntimeError, OSError):  # torch's words name addresses that it was never given
            self.store = TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=knobs.times().answer), wait_for_workers=False
            )


def check_file(path: str) -> str:
    """Check that torch's ``FileStore`` can use a file: with one of another form, torch would look for the missing part
    until its time is over. An absent file is made (0600). Return why this can't be told yet; empty: the file can be
    used.

    Raises:
        ValueError: the file can't be used; the message says why, and what to do.
    """
    try:
        found = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        what = "is a folder" if error.errno == errno.EISDIR else f"can't be read and written ({error.strerror})"
        raise ValueError(f"{path}, the file in which the launchers meet, {what}: {_ANOTHER}") from error
    with open(found, "rb") as file:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise ValueError(f"{path}, in which the launchers are to meet, is no regular file: {_ANOTHER}")
        until = time.monotonic() + _LOCKED
        while True:
            try:
                fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as the store does, so that no half value is read
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    return f"another process keeps {path} locked"
                time.sleep(0.01)
        content = file.read()
    place = _first_misfit(content)
    if place is not None:
        raise ValueError(
            f"{path}, the file in which the launchers meet, holds something else from byte {place} of {len(content)} "
            "on: another program has written it, or what a launcher wrote was cut off (its machine died, the disk was "
            f"full). Where no launcher of this job runs any more, remove the file and start again; {_ANOTHER}"
        )
    return ""


def _first_misfit(content: bytes) -> int | None:
    """Return the byte at which the first invalid record begins; None: all are keys and values after their lengths."""
    place = end = 0
    while end < len(content):
        place = end
        for least in (1, 0):  # a key, which is not empty, and its value
            if end + 4 > len(content):
                return place
            length = int.from_bytes(content[end : end + 4], sys.byteorder)
            end += 4 + length
            if length < least or end > len(content):
                return place
    return None


def _greeting(probe: socket.socket) -> str:
    """Return what the other end does before anything was sent to it; empty: nothing."""
    try:
        data = probe.recv(_WORDS)
    except TimeoutError:
        return ""
    except ConnectionResetError:
        data = b""
    if not data:
        return "the connection is closed at once"
    return f"it begins with {data.decode(errors='backslashreplace').splitlines()[0]!r}"


def split(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``HOST``, and of either with an address in brackets."""
    host, _, port = endpoint.rpartition(":") if re.search(r":\d+$", endpoint) else (endpoint, "", str(DEFAULT_PORT))
    return host.strip("[]"), int(port)


def _listen(found: Sequence[tuple[int, int, int, str, Any]]) -> socket.socket | None:
    """Listen at the first of these addresses, as ``getaddrinfo`` returns them, that is one of this machine and at which
    nothing does so yet, and at no other."""
    for family, kind, protocol, _, address in found:
        server = socket.socket(family, kind, protocol)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(address)
            server.listen(1024)
        except OSError as error:
            server.close()
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                raise
        else:
            return server
    return None
