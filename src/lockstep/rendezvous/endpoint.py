"""The way to the store that the machines meet at: its name, its port, and what is wrong with them, by evidence."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import threading
from datetime import timedelta

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from lockstep import knobs
from lockstep.rendezvous.addresses import is_only_here, own_address
from lockstep.rendezvous.messages import DEFAULT_PORT

#: Seconds that a connection may take.
_CONNECT = 5.0
#: Seconds in which a program that is no store may say what it is, and bytes of it that are repeated.
_GREETING, _WORDS = 0.3, 60


class Knock(threading.Thread):
    """One try to reach the store, or to open it. A name server or a program at the port may keep it waiting for long,
    so it is a thread, which whoever waits for it can abandon.

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
        #: The store, once it was reached; this machine's address for the others; and whether this process serves it.
        self.store: Store | None = None
        self.address = ""
        self.serves = False
        #: Why it was not reached; another try may be luckier. Empty: it is not known yet.
        self.why = ""
        #: Whether something took the connection.
        self.connected = False
        #: What no other try would mend.
        self.error: Exception | None = None

    def run(self) -> None:
        """Try once."""
        try:
            self._try()
        except Exception as error:  # noqa: BLE001  (handed to who waits for it, whatever it is)
            self.error = error

    def _try(self) -> None:
        kind, _, path = self._endpoint.partition(":")
        if kind == "file":
            self.address = self._local_addr or own_address(None)
            self.store = FileStore(path)
            return
        host, port = split(self._endpoint)
        try:
            if is_only_here(host, port):
                host = self._local_addr or own_address(None)
            self.address = self._local_addr or own_address((host, port))
        except socket.gaierror as error:
            self.why = f"the name {host} can't be resolved: {error.strerror}"
            return
        except OSError as error:
            self.why = str(error)
            return
        listener = _listen(host, port)
        if listener is not None:
            self.serves = True
            self.store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
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
            f"a program takes connections at {where}, but does not answer as a launcher's store does: it is another "
            "program, or a launcher that stands still"
        )
        with contextlib.suppress(RuntimeError, OSError):  # torch's words name addresses that it was never given
            self.store = TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=knobs.times().answer), wait_for_workers=False
            )


def _greeting(probe: socket.socket) -> str:
    """Return what the other end does before it is asked anything; empty: nothing."""
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


def _listen(host: str, port: int) -> socket.socket | None:
    """Listen at ``host``, on that address only, if it is one of this machine and nothing does so yet."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
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
