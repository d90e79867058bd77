"""A real browser without a window, driven over a pipe by the DevTools protocol: what a page does for its readers."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
#: Seconds for an answer, and for the browser to end.
_LIMIT, _ENDING = 200.0, 60.0
#: Nothing that looks for a network, and nothing in /dev/shm, which other tests watch.
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--disable-extensions",
    "--disable-breakpad", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip

needs_browser = pytest.mark.skipif(_PROGRAM is None, reason="there is no chromium on this machine")


class Page:
    """A page in the browser.

    Args:
        send: the pipe to the browser.
        receive: the pipe from it.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._rest, self._number = b"", 0
        self._session: str | None = None
        #: What it has complained of, and the addresses that it has asked for.
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol and return what it answers."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._send, data) :]
        deadline = time.monotonic() + _LIMIT
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, *, query: str = "", width: int = 1180, height: int = 900) -> None:
        """Show a file, and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=path.as_uri() + (query and f"?{query}"))
        self.until("document.readyState == 'complete' && location.protocol == 'file:'")

    def ask(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, (expression, answer)
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression holds."""
        deadline = time.monotonic() + _LIMIT
        while not self.ask(expression):
            assert time.monotonic() < deadline, f"not in {_LIMIT:g} s: {expression}"

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move or press the pointer."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag from a place to another."""
        self.mouse("mouseMoved", *begin)
        self.mouse("mousePressed", *begin, button="left", buttons=1, clickCount=1)
        self.mouse("mouseMoved", *end, button="left", buttons=1)
        self.mouse("mouseReleased", *end, button="left", clickCount=1)

    def press(self, key: str, **more: Any) -> None:
        """Press a key and let it go."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **more)

    def picture(self, path: Path, *, height: int) -> None:
        """Save what the page looks like from its top, so many pixels high."""
        width = self.ask("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        told = self.call(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=height > self.ask("innerHeight")
        )
        path.write_bytes(base64.b64decode(told["data"]))

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            assert left > 0, f"no answer in {_LIMIT:g} s"
            assert select.select([self._receive], [], [], left)[0], f"no answer in {_LIMIT:g} s"
            data = os.read(self._receive, 2**20)
            assert data, "the browser has ended"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        told = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(told["exceptionDetails"]))
            case "Log.entryAdded":
                self.errors.append(str(told["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
        return message


@contextmanager
def browser() -> Iterator[Page]:
    """Start a browser of its own, with nothing of a user's, and give its page."""
    assert _PROGRAM is not None
    (theirs, send), (receive, ours) = os.pipe(), os.pipe()
    theirs, ours = _moved(theirs), _moved(ours)
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as folder:
        words = [_PROGRAM, *_OPTIONS, f"--user-data-dir={folder}"]
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{ours}', "bash", *words],  # it reads 3 and writes 4
            pass_fds=(theirs, ours),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": folder, "TMPDIR": folder},
        )
        os.close(theirs)
        os.close(ours)
        try:
            yield Page(send, receive)
        finally:
            os.close(send)
            os.close(receive)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING)  # it leaves when its pipe is closed
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_ENDING)


def _moved(fd: int) -> int:
    """Move a descriptor out of the way of those that the browser has its pipes at."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved
