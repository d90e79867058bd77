"""S3 on this machine, as a program: moto's server, and in front of it whatever a test wants to go wrong.

It prints the port once it listens, and ends when its standard input does. The file that is named first says how it
answers from now on: nothing, as moto does; ``refuse``, nothing may be written; ``full``, there is no room; ``busy``,
every second request has to come again; ``slow SECONDS``, each takes so long.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message></Error>'
_BUSY = itertools.count()


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Write nothing down."""


class Server:
    """moto's application behind a file that says how to answer."""

    def __init__(self, how: Path) -> None:
        self._how = how
        self._moto = create_backend_app("s3")

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        word, _, number = self._how.read_text().partition(" ")
        writes = environ["REQUEST_METHOD"] in ("PUT", "POST")
        if word == "slow":
            time.sleep(float(number))
        if word == "refuse" and writes:
            return _refuse(environ, start_response, "403 Forbidden", "AccessDenied", "Access Denied")
        if word == "full" and writes:
            status = "507 Insufficient Storage"
            return _refuse(environ, start_response, status, "XMinioStorageFull", "Storage backend has no room left")
        if word == "busy" and next(_BUSY) % 2:
            return _refuse(environ, start_response, "503 Slow Down", "SlowDown", "Please reduce your request rate")
        answer: Iterable[bytes] = self._moto(environ, start_response)
        return answer


def _refuse(environ: dict[str, Any], start: Callable[..., Any], status: str, code: str, words: str) -> list[bytes]:
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if length:
        environ["wsgi.input"].read(length)
    start(status, [("Content-Type", "application/xml"), ("Connection", "close")])
    return [_ERROR.format(code, words).encode()]


def main() -> None:
    """Serve until standard input ends."""
    server = make_server("127.0.0.1", 0, Server(Path(sys.argv[1])), threaded=True, request_handler=_Quiet)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
