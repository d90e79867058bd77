"""How the machines find out by which address they reach each other, and what is at the port where they meet."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from lockstep.launch.ports import free_port
from lockstep.rendezvous import endpoint
from lockstep.rendezvous.addresses import is_only_here
from lockstep.rendezvous.endpoint import Knock, check_file, split
from tests.launching import LIMIT, closed_port


@pytest.mark.parametrize(
    ("host", "found", "expected"),
    [
        ("box-1", ["127.0.1.1"], True),
        ("box-1", ["127.0.1.1", "10.0.0.7"], False),
        ("box-1", ["10.0.0.7"], False),
        ("localhost", ["127.0.0.1"], False),
        ("127.0.0.1", ["127.0.0.1"], False),
        ("::1", ["::1"], False),
    ],
)
def test_a_name_that_leads_back_to_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch, host: str, found: list[str], expected: bool
) -> None:
    """Unless it was asked for, as in tests on one machine."""
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 29400)) for address in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: answers)
    assert is_only_here(host, 29400) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("box", ("box", 29400)),
        ("box:7", ("box", 7)),
        ("10.0.0.1:7", ("10.0.0.1", 7)),
        ("[::1]", ("::1", 29400)),
        ("[::1]:7", ("::1", 7)),
    ],
)
def test_host_and_port(text: str, expected: tuple[str, int]) -> None:
    assert split(text) == expected


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint is on another machine, as far as this one knows."""
    monkeypatch.setattr(endpoint, "_listen", lambda *_: None)


def _knock(where: str) -> Knock:
    knock = Knock(where, None, doubtful=True)
    knock.start()
    knock.join(LIMIT)
    assert not knock.is_alive()
    assert knock.error is None
    assert knock.store is None
    return knock


@pytest.mark.usefixtures("elsewhere")
def test_nothing_listens_there() -> None:
    with closed_port() as port:
        where = f"127.0.0.1:{port}"
        assert f"nothing answers at {where} (the connection is refused)" in _knock(where).why


@pytest.mark.usefixtures("elsewhere")
def test_another_program_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_CONNECT", LIMIT)
    monkeypatch.setattr(endpoint, "_GREETING", LIMIT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        knock = Knock(where, None, doubtful=True)
        knock.start()
        connection, _ = server.accept()
        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        knock.join(LIMIT)
        connection.close()
    assert f"another program uses the port: at {where} it begins with 'SSH-2.0-OpenSSH_9.2'" in knock.why


def _names(monkeypatch: pytest.MonkeyPatch, *, unknown_at: int = 0) -> None:
    """Have box-1 lead to this machine, and as others see it elsewhere; one look, from 1 on, finds nothing."""
    real, looks = socket.getaddrinfo, 0

    def answer(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        nonlocal looks
        if host != "box-1":
            return real(host, port, *args, **options)
        looks += 1
        if looks == unknown_at:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [real(address, port, *args, **options)[0] for address in ("127.0.0.1", "192.0.2.1")]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


@pytest.mark.parametrize("unknown_at", [1, 2, 3])
def test_whichever_look_finds_no_name_another_try_may(monkeypatch: pytest.MonkeyPatch, unknown_at: int) -> None:
    """As where some of the name's servers have not heard of it yet."""
    _names(monkeypatch, unknown_at=unknown_at)
    assert _knock(f"box-1:{free_port()}").why == "the name box-1 can't be resolved: Name or service not known"


@pytest.fixture(scope="module")
def stores() -> None:
    """libuv, with which torch serves stores, keeps a pipe from a process's first one on: no leak of a test."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.usefixtures("stores")
def test_who_serves_the_store_reaches_it_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch, which does not know this name, would look for it for minutes."""
    _names(monkeypatch)
    knock = Knock(f"box-1:{free_port()}", None, doubtful=False)
    knock.start()
    knock.join(LIMIT)
    assert (knock.error, knock.why, knock.serves) == (None, "", True)
    assert knock.store is not None
    knock.store.set("key", "value")
    assert knock.store.get("key") == b"value"


def _cut_off(path: Path) -> None:
    lengths = [length.to_bytes(4, sys.byteorder) for length in (3, 7)]
    path.write_bytes(lengths[0] + b"key" + lengths[1] + b"a va")  # (a store that is open would wait for the rest)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_bytes(b"a list of someone else's\n"), "holds something else from byte 0 of 25 on"),
        (lambda path: path.write_bytes(b"x"), "holds something else from byte 0 of 1 on"),
        (lambda path: path.write_bytes(bytes(64)), "holds something else from byte 0 of 64 on"),
        (_cut_off, "holds something else from byte "),
        (Path.mkdir, "is a folder: another folder"),
        (lambda path: path.symlink_to(path.parent / "none" / "file"), "can't be read and written (No such file"),
        (os.mkfifo, "is no regular file"),
    ],
    ids=["foreign", "short", "zeros", "cut off", "folder", "dangling link", "fifo"],
)
def test_a_file_that_is_no_store(tmp_path: Path, make: Callable[[Path], object], said: str) -> None:
    make(tmp_path / "store")
    knock = Knock(f"file:{tmp_path / 'store'}", None, doubtful=False)
    knock.start()
    knock.join(LIMIT)
    assert not knock.is_alive()
    assert isinstance(knock.error, ValueError), knock.error
    assert f"{tmp_path / 'store'}, " in str(knock.error)
    assert said in str(knock.error)


@pytest.mark.parametrize("exists", [False, True])
def test_an_empty_file_becomes_a_store(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "store").touch()
    knock = Knock(f"file:{tmp_path / 'store'}", None, doubtful=False)
    knock.run()
    assert (knock.error, knock.why) == (None, "")
    assert knock.store is not None
    knock.store.set("key", "value")
    assert check_file(str(tmp_path / "store")) == ""


def test_a_file_that_another_process_has_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_LOCKED", 0.1)
    with open(tmp_path / "store", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert check_file(str(tmp_path / "store")) == f"another process keeps {tmp_path / 'store'} locked"


def test_a_name_that_nobody_knows() -> None:
    assert "the name box-0.invalid can't be resolved" in _knock("box-0.invalid:7").why
