"""How the machines find out by which address they reach each other."""

from __future__ import annotations

import socket

import pytest

from lockstep.rendezvous.addresses import is_only_here


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
