"""On a host that is checked: take orders from standard input, and write the findings to standard output.

Orders are lines of JSON, answers are the frames of ``remote/frames.py``. One thread carries out the orders, one after
the other; the main thread reads, so that this process ends at once when the other end is gone, with its child
processes, its listeners, and the file that it has made for other hosts to see.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import shutil
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from lockstep import machine
from lockstep.launch.ports import free_port
from lockstep.launch.spec import parse_ranks
from lockstep.remote.frames import SILENT, FrameKind, frame, greet
from lockstep.rendezvous.addresses import own_address
from lockstep.tools.doctor import child, facts
from lockstep.tools.doctor.checks import (
    Check,
    CheckTask,
    check_cores,
    check_limits,
    check_memory,
    check_names,
    check_ports,
    check_shared_memory,
    check_temporary,
    check_versions,
)
from lockstep.tools.doctor.disk import check_folder, nearest
from lockstep.tools.doctor.findings import Finding, Problem, wrong
from lockstep.tools.doctor.trials import check_job, check_torch
from lockstep.tools.doctor.variables import check_variables

#: Seconds that a connection may take.
CONNECT = 3.0
#: Seconds at the end for the order that is being carried out.
_PATIENCE = 3.0
_TOKEN = 32
_SAFE = re.compile("[0-9a-f]{32}")


def _variables(task: CheckTask) -> Iterator[Finding]:
    del task
    return check_variables()


#: The checks, in their order.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("versions", check_versions),
    ("torch and the GPUs", check_torch),
    ("cores", check_cores),
    ("memory", check_memory),
    ("shared memory", check_shared_memory),
    ("limits", check_limits),
    ("variables", _variables),
    ("names", check_names),
    ("ports", check_ports),
    ("temporary files", check_temporary),
    ("the folder", check_folder),
    ("a job of two ranks", check_job),
)


def serve() -> NoReturn:
    """Greet, then carry out orders until the connection ends or falls silent."""
    greet(free_port())
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    host = _Host()
    threading.Thread(target=host.obey, args=(orders,), daemon=True).start()
    buffer, heard = b"", time.monotonic()
    while True:
        now = time.monotonic()  # before the look: signs of life may come while this process stands still
        if select.select([0], [], [], 1.0)[0]:
            data = os.read(0, 65536)
            if not data:
                break
            heard = time.monotonic()
            *lines, buffer = (buffer + data).split(b"\n")
            for line in filter(None, lines):  # an empty one is a sign of life
                orders.put(json.loads(line))
        elif now - heard >= SILENT:
            break
    host.close()
    os._exit(0)  # the thread may be in the middle of something


class _Host:
    """Carries out orders on this host."""

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []
        #: Paths that were made for other hosts to see, and are removed at the end.
        self._made: list[Path] = []
        self._ends = threading.Event()
        #: Held while an order is carried out.
        self._busy = threading.Lock()

    def obey(self, orders: queue.SimpleQueue[dict[str, Any]]) -> None:
        """Carry out orders, one after the other; never returns."""
        verbs: dict[str, Callable[[dict[str, Any]], Any]] = {
            "look": self._look,
            "clock": lambda _order: time.time(),
            "listen": self._listen,
            "ways": self._ways,
            "connect": self._connect,
            "deafen": self._deafen,
            "mark": self._mark,
            "see": lambda order: _mark(Path(order["folder"]), order["token"]).exists(),
            "logs": self._logs,
        }
        while True:
            order = orders.get()
            try:
                with self._busy:
                    answer = {"to": order["do"], "is": verbs[order["do"]](order)}
            except Exception:  # noqa: BLE001  (whatever it is, the user has to know, and other questions go on)
                answer = {"to": order["do"], "error": traceback.format_exc().strip().splitlines()[-1]}
            _say(answer)

    def close(self) -> None:
        """Leave nothing behind."""
        self._ends.set()
        child.end_all()
        self._busy.acquire(timeout=_PATIENCE)  # the order under way removes what it has made for itself
        self._deafen({})
        for path in self._made:
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _look(self, order: dict[str, Any]) -> dict[str, Any]:
        found = facts.collect()
        try:
            ranks = parse_ranks(order["ranks"] or "auto", cores=machine.cores(), gpus=machine.gpus())
        except ValueError as error:
            ranks = 1
            _say(
                {
                    "found": wrong(
                        Problem.RANKS_INVALID, "ranks", str(error), "give another number for this host: HOST:N"
                    ).to_json()
                }
            )
        task = CheckTask(
            ranks=ranks,
            folder=Path(order["folder"]),
            several=order["several"],
            quick=order["quick"],
        )
        for name, check in CHECKS:
            if self._ends.is_set():
                break
            _say({"at": name})
            try:
                for finding in check(task):
                    _say({"found": finding.to_json()})
            except Exception as error:  # noqa: BLE001  (the other checks go on)
                what = f"this check failed: {type(error).__name__}: {error}"
                _say(
                    {
                        "found": wrong(
                            Problem.CHECK_FAILED, name, what, "report an issue with the output of lockstep doctor --env"
                        ).to_json()
                    }
                )
        return {**found, "ranks": task.ranks}

    # For the others ---------------------------------------------------------------------------------------------------

    def _listen(self, order: dict[str, Any]) -> dict[str, Any]:
        """Listen at ports (0: any) on all addresses; a port in use is left out. Whatever connects gets the token."""
        ports: list[int] = []
        for port in order["ports"]:
            try:
                family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
                server = socket.create_server(
                    ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024
                )
            except OSError:
                continue  # the check of ports tells of it
            self._listeners.append(server)
            ports.append(server.getsockname()[1])
            threading.Thread(target=_hand_out, args=(server, order["token"].encode()), daemon=True).start()
        return {"ports": ports}

    def _ways(self, order: dict[str, Any]) -> list[str | None]:
        """Return this host's own address on the route to each of the others; None: there is no route."""
        return [_own_address(str(address)) for address in order["to"]]

    def _connect(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Connect to other hosts, all at once, and return how each connection went."""
        with ThreadPoolExecutor(64) as pool:
            return list(pool.map(_try, order["targets"]))

    def _deafen(self, _order: dict[str, Any]) -> None:
        """Close all listening sockets."""
        for server in self._listeners:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            server.close()
        self._listeners.clear()

    def _mark(self, order: dict[str, Any]) -> str | None:
        """Make a file that other hosts see if the folder is theirs as well, and return where: in the folder, or in the
        one in which it would be made. None: nothing can be written there, which the check of the folder tells."""
        folder = nearest(Path(order["folder"]))
        path = _mark(folder, order["token"])
        self._made.append(path)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except OSError:
            return None
        return str(folder)

    def _logs(self, order: dict[str, Any]) -> None:
        """Make a folder for a job's logs."""
        if not _SAFE.fullmatch(order["path"].rpartition("-")[2]):
            raise ValueError(order["path"])
        path = Path(order["path"])
        with contextlib.suppress(FileExistsError):  # by another host of the same machine
            path.mkdir(mode=0o700)
        self._made.append(path)


def logs_of(token: str) -> str:
    """Return the folder that ``logs`` makes: the same on all hosts."""
    return os.path.join(tempfile.gettempdir(), f"lockstep-doctor-{token}")


def _mark(folder: Path, token: str) -> Path:
    if not _SAFE.fullmatch(token):
        raise ValueError(token)
    return folder / f".lockstep-doctor-{token}"


def _hand_out(server: socket.socket, token: bytes) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return  # it was closed
        with connection, contextlib.suppress(OSError):
            connection.sendall(token)


def _own_address(address: str) -> str | None:
    try:
        return own_address((address, 9))
    except OSError:
        return None


def _try(target: dict[str, Any]) -> dict[str, Any]:
    """Connect, and check that the intended host answers. ``how``: ok, unknown (the name), refused, silent, other."""
    try:
        found = socket.getaddrinfo(target["address"], target["port"], type=socket.SOCK_STREAM)
    except OSError as error:
        return {**target, "how": "unknown", "why": error.strerror, "resolved": "", "seconds": 0.0}
    family, kind, protocol, _, address = found[0]
    result = {**target, "resolved": str(address[0]), "seconds": 0.0, "why": ""}
    with socket.socket(family, kind, protocol) as probe:
        probe.settimeout(CONNECT)
        start = time.monotonic()
        try:
            probe.connect(address)
            result["seconds"] = time.monotonic() - start
            given = b""
            while len(given) < _TOKEN and (data := probe.recv(_TOKEN)):
                given += data
        except TimeoutError:
            return {**result, "how": "silent"}
        except OSError as error:
            return {**result, "how": "refused", "why": error.strerror or str(error)}
    return {**result, "how": "ok" if given.decode(errors="replace") == target["token"] else "other"}


_voice = threading.Lock()


def _say(message: dict[str, Any]) -> None:
    data = frame(FrameKind.SAID, json.dumps(message).encode())
    with _voice, contextlib.suppress(BrokenPipeError):  # the asking process is gone; the main thread notices
        while data:
            data = data[os.write(1, data) :]
