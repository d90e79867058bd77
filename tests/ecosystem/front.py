"""A server of Google's or Azure's protocol, and in front of it whatever a test wants to go wrong, as a program.

It prints the port once it listens, and ends with the server when its standard input does. The file that is named first
says how it answers from now on: nothing, as the server does; ``refuse``, nothing may be written; ``full``, there is no
room; ``busy``, every second write has to come again; ``nobody``, the request says not whose it is; ``slow SECONDS``,
each takes so long. The second argument is whose errors it speaks, ``google`` or ``azure``, and what follows is the
server's command, which takes any free port.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from lockstep.launch.processes import die_with_parent

_XML = '<?xml version="1.0" encoding="utf-8"?><Error><Code>{}</Code><Message>{}</Message></Error>'
_BUSY = itertools.count()
#: Headers that are of a connection and not of a request.
_OF_CONNECTION = ("connection", "keep-alive", "transfer-encoding")
#: Seconds that the server has to listen.
_STARTING = 60.0


class Front(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    how: ClassVar[Path]
    dialect: ClassVar[str]
    port: ClassVar[int]

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing down."""

    def _handle(self) -> None:
        content = self._content()
        word, _, number = self.how.read_text().partition(" ")
        writes = self.command in ("PUT", "POST")
        if word == "slow":
            time.sleep(float(number))
        if word == "refuse" and writes:
            self._fail(403, "AuthorizationPermissionMismatch", "Access Denied")
        elif word == "full" and writes:
            self._fail(507, "InsufficientStorage", "The store has no room left")
        elif word == "busy" and writes and next(_BUSY) % 2:
            self._fail(503, "ServerBusy", "The server is busy")
        elif word == "nobody":
            self._fail(401, "NoAuthenticationInformation", "Anonymous caller does not have access")
        else:
            self._hand_on(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _content(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _hand_on(self, content: bytes) -> None:
        behind = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_CONNECTION}
            if content or self.command in ("PUT", "POST"):
                headers["Content-Length"] = str(len(content))
            behind.request(self.command, self.path, content or None, headers)
            answer = behind.getresponse()
            self._answer(answer.status, answer.read(), dict(answer.getheaders()))
        finally:
            behind.close()

    def _fail(self, status: int, code: str, words: str) -> None:
        if self.dialect == "google":
            error = {"code": status, "message": words, "errors": [{"message": words, "domain": "global"}]}
            self._answer(status, json.dumps({"error": error}).encode(), {"Content-Type": "application/json"})
        else:
            headers = {"Content-Type": "application/xml", "x-ms-error-code": code}
            self._answer(status, _XML.format(code, words).encode(), headers)

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        length = str(len(content))
        for name, value in headers.items():
            if name.lower() == "content-length":
                length = value if self.command == "HEAD" else length
            elif name.lower() not in _OF_CONNECTION:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Write nothing down: tests cut connections off."""


def _port_of(server: subprocess.Popen[bytes]) -> int:
    """Return the port at which a process listens, once it does."""
    deadline = time.monotonic() + _STARTING
    while time.monotonic() < deadline and server.poll() is None:
        links = [_link(each) for each in Path(f"/proc/{server.pid}/fd").iterdir()]
        sockets = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
        for line in Path(f"/proc/{server.pid}/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:
                return int(local.split(":")[1], 16)
        time.sleep(0.02)
    raise SystemExit(f"{server.args!r} does not listen (exit code {server.poll()})")


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""  # it was closed meanwhile


def main() -> None:
    """Serve until standard input ends."""
    Front.how, Front.dialect = Path(sys.argv[1]), sys.argv[2]
    with_this = partial(die_with_parent, os.getpid())
    behind = subprocess.Popen(sys.argv[3:], stdin=subprocess.DEVNULL, stdout=2, preexec_fn=with_this)
    try:
        Front.port = _port_of(behind)
        server = _Server(("127.0.0.1", 0), Front)
        print(server.server_port, flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.read()
    finally:
        behind.kill()
        behind.wait()


if __name__ == "__main__":
    main()
