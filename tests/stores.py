"""Object stores for tests: in this process's memory, or S3 by moto's server in a process of its own."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from lockstep._files import StorePath
from lockstep.checkpoint.object_store import ObjectStore
from lockstep.launch.ports import free_port

#: Operations that a checkpoint's requests come to.
_OPERATIONS = ("pipe_file", "cat_file", "find", "rm_file")


class Clock:
    """In the place of ``time``: time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """The seconds that were slept."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let some time pass."""
        self.now += seconds


class Died(OSError):
    """An operation did not return, or none does any more."""


class FragileFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store in memory of which one operation fails: before it does anything, or with its answer lost after it did.

    ``lasting``: none works after it, as for a process that has died or a server that is gone.
    """

    protocol = "fragile"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    #: The operations that were carried out, in order.
    calls: ClassVar[list[str]] = []
    fails_at: ClassVar[int | None] = None
    after: ClassVar[bool] = False
    lasting: ClassVar[bool] = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("fragile://")))

    @classmethod
    def mend(cls) -> None:
        """Let everything work from here on, and count anew."""
        cls.calls.clear()
        cls.fails_at, cls.after, cls.lasting = None, False, False


def _fragile(operation: str) -> Callable[..., Any]:
    sound = getattr(MemoryFileSystem, operation)

    def act(self: FragileFileSystem, *args: Any, **options: Any) -> Any:
        cls = FragileFileSystem
        number = len(cls.calls)
        cls.calls.append(f"{operation} {args[0]}")
        if cls.fails_at is not None and (number == cls.fails_at or (cls.lasting and number > cls.fails_at)):
            if cls.after and number == cls.fails_at:
                sound(self, *args, **options)
            raise Died(5, f"operation {number} failed")
        return sound(self, *args, **options)

    return act


for _operation in _OPERATIONS:
    setattr(FragileFileSystem, _operation, _fragile(_operation))
fsspec.register_implementation("fragile", FragileFileSystem, clobber=True)


@contextmanager
def in_memory(scheme: str = "memory") -> Iterator[StorePath]:
    """An address in an empty store of this process, which is emptied after it."""
    kind = fsspec.get_filesystem_class(scheme)

    def empty() -> None:
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
        ObjectStore._opened.clear()
        FragileFileSystem.mend()

    empty()
    try:
        yield StorePath(f"{scheme}://bucket/run")
    finally:
        empty()


class Served:
    """A store that a server has, with one bucket, and a way to it that can be killed.

    Args:
        folder: where the file "how" is to be, which says how it answers.
        port: that at which requests are answered.
        servers: the processes that do it.
    """

    #: The kind of store.
    scheme: ClassVar[str]

    def __init__(self, folder: Path, port: int, servers: list[subprocess.Popen[str]]) -> None:
        self.folder = folder
        self._to, self._servers = port, servers
        # The kernel gives it to no other socket while the way is away.
        self._way = start("tests.s3_way", str(free_port()), str(port))
        self._port = port_of(self._way)

    @property
    def address(self) -> str:
        """That of a run in the bucket."""
        return f"{self.scheme}://bucket/run"

    @property
    def environment(self) -> dict[str, str]:
        """What processes need in theirs to get there."""
        raise NotImplementedError

    def answer(self, how: str) -> None:
        """Answer so from now on: see tests/s3_server.py."""
        new = self.folder / "how.new"
        new.write_text(how)
        new.rename(self.folder / "how")

    def kill(self) -> None:
        """Cut off every connection, and take no more."""
        self._way.kill()
        self._way.wait()

    def kill_after(self, count: int) -> None:
        """Cut off every connection once so many bytes have gone to the server from here on, and take no more."""
        self._replace_way(str(count))

    def revive(self) -> None:
        """Take connections again, at the same port."""
        self._replace_way()

    def _replace_way(self, *more: str) -> None:
        self.kill()
        _close(self._way)
        self._way = start("tests.s3_way", str(self._port), str(self._to), *more)
        port_of(self._way)

    def objects(self) -> list[str]:
        """The keys of all objects."""
        raise NotImplementedError

    def read(self, key: str) -> str:
        """The content of an object."""
        raise NotImplementedError

    def close(self) -> None:
        """End all processes."""
        for process in (self._way, *self._servers):
            process.kill()
            process.wait()
            _close(process)


class S3(Served):
    """A server of S3's protocol in a process of its own."""

    scheme = "s3"

    def __init__(self, folder: Path) -> None:
        (folder / "how").write_text("")
        server = start("tests.s3_server", str(folder / "how"))
        super().__init__(folder, port_of(server), [server])
        self._request("PUT", "/bucket")

    @property
    def environment(self) -> dict[str, str]:
        """What processes need in theirs to get there."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def objects(self) -> list[str]:
        """The keys of all objects."""
        return re.findall(r"<Key>(.*?)</Key>", self._request("GET", "/bucket?list-type=2"))

    def read(self, key: str) -> str:
        """The content of an object."""
        return self._request("GET", f"/bucket/{key}")

    def _request(self, method: str, path: str) -> str:
        headers = {"Authorization": "AWS tests:tests"}
        return request(self._to, method, path, headers=headers).decode()


@contextmanager
def s3(folder: Path) -> Iterator[S3]:
    """A server with an empty bucket named "bucket"."""
    server = S3(folder)
    try:
        yield server
    finally:
        server.close()


def request(port: int, method: str, path: str, content: bytes = b"", *, headers: dict[str, str] | None = None) -> bytes:
    """Send a request to a server of this machine, and return what it answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, content, headers or {})
        return connection.getresponse().read()
    finally:
        connection.close()


def start(module: str, *args: str) -> subprocess.Popen[str]:
    """Start a program of the tests that ends when its standard input does."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", module, *args]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def port_of(process: subprocess.Popen[str]) -> int:
    """Read the port at which a program listens."""
    assert process.stdout is not None
    return int(process.stdout.readline())


def _close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
