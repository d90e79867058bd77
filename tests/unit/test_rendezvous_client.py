"""How the machines find out by which address they reach each other, and what is at the port where they meet."""

from __future__ import annotations

import socket

import pytest

from lockstep.launch.ports import free_port
from lockstep.rendezvous import endpoint
from lockstep.rendezvous.addresses import is_only_here
from lockstep.rendezvous.endpoint import Knock, split


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
    knock.join(20.0)
    assert not knock.is_alive()
    assert knock.error is None
    assert knock.store is None
    return knock


@pytest.mark.usefixtures("elsewhere")
def test_nothing_listens_there() -> None:
    where = f"127.0.0.1:{free_port()}"
    assert f"nothing answers at {where} (the connection is refused)" in _knock(where).why


@pytest.mark.usefixtures("elsewhere")
def test_another_program_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        knock = Knock(where, None, doubtful=True)
        knock.start()
        connection, _ = server.accept()
        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        knock.join(20.0)
        connection.close()
    assert f"another program uses the port: at {where} it begins with 'SSH-2.0-OpenSSH_9.2'" in knock.why


def test_a_name_that_nobody_knows() -> None:
    assert "the name box-0.invalid can't be resolved" in _knock("box-0.invalid:7").why
