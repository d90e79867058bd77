"""NCCL's RAS is asked by its own protocol, within a time limit, on this machine alone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lockstep import machine
from lockstep.launch.ras import RasAddress, RasQuestion, in_words
from tests.launching import LIMIT, closed_port

#: As NCCL's user guide shows it.
HEAD = """\
Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  {errors}

"""
INCOMPLETE = """\
Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

"""
MISMATCH = """\
Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  6 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
"""


def test_what_is_wrong_is_told_and_nothing_else() -> None:
    said = in_words(HEAD.format(errors="INCOMPLETE") + INCOMPLETE + MISMATCH)
    assert said.splitlines() == [
        "NCCL itself (its RAS) says:",
        "  INCOMPLETE",
        "    Missing communicator data from 1 job process",
        "    Process 3487984 on node 172.16.64.213 managing GPU 5",
        "  #0-0 (cf264af53edbe986) INCOMPLETE",
        "    Missing communicator data from 1 rank",
        "    The missing rank: 21",
        "  #0-0 (27a079b828ff1a75) MISMATCH",
        "    Communicator ranks have different collective operation counts",
        "    26 ranks have launched up to operation 6650",
        "    6 ranks have launched up to operation 6649",
        "    Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210",
    ]


def test_a_job_without_errors_is_told_as_one() -> None:
    assert "finds nothing wrong" in in_words(HEAD.format(errors="OK") + "Errors\n======\n\n\nWarnings\n========\n")


@pytest.mark.parametrize("text", ["", "Job summary\n===========\n\n  1 2 3\n", "HTTP/1.1 400 Bad Request\n"])
def test_what_is_no_status_is_not_told(text: str) -> None:
    assert in_words(text) == ""


def test_a_long_answer_is_cut() -> None:
    lines = "\n".join(f"  Rank {rank} -- GPU 0" for rank in range(100))
    said = in_words(f"Warnings\n========\n\n{lines}\n").splitlines()
    assert said[-1] == "  … and 76 lines more"
    assert len(said) == 26


# Where it is asked ----------------------------------------------------------------------------------------------------


def test_a_job_with_gpus_answers_at_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda _env: 2)
    address, other = RasAddress.of_job({}), RasAddress.of_job({})
    assert address is not None
    assert other is not None
    assert address.variables() == {"NCCL_RAS_ADDR": f"localhost:{address.port}"}
    assert address.port != other.port
    monkeypatch.setattr(machine, "gpus", lambda _env: 0)
    assert RasAddress.of_job({}) is None


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"NCCL_RAS_ADDR": "localhost:28028"}, RasAddress("localhost", 28028)),
        ({"NCCL_RAS_ADDR": "[::1]:5"}, RasAddress("::1", 5)),
        ({"NCCL_RAS_ADDR": "127.0.0.1:28028", "NCCL_RAS_ENABLE": "0"}, None),
        ({"NCCL_RAS_ADDR": "10.0.0.7:28028"}, None),
        ({"NCCL_RAS_ADDR": "localhost"}, None),
    ],
)
def test_what_the_user_says_holds_and_only_this_machine_is_asked(
    env: dict[str, str], expected: RasAddress | None
) -> None:
    found = RasAddress.of_job(env)
    assert found == expected
    if found is not None:
        assert found.variables() == {"NCCL_RAS_ADDR": env["NCCL_RAS_ADDR"]}


# How ------------------------------------------------------------------------------------------------------------------


@contextmanager
def _serving(behave: Callable[[socket.socket], None]) -> Iterator[RasAddress]:
    """A server at which one client is served as ``behave`` does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                behave(client)

        thread = threading.Thread(target=serve)
        thread.start()
        yield RasAddress("127.0.0.1", server.getsockname()[1])
        thread.join()


def _line(client: socket.socket) -> str:
    text = b""
    while not text.endswith(b"\n"):
        text += client.recv(1)
    return text.decode()


def _as_nccl(client: socket.socket) -> None:
    assert _line(client).startswith("client protocol ")
    client.sendall(b"SERVER PRO")
    client.sendall(b"TOCOL 2\n")
    assert _line(client).startswith("timeout ")
    client.sendall(b"OK\n")
    assert _line(client) == "status\n"
    answer = (HEAD.format(errors="MISMATCH") + MISMATCH).encode()
    for start in range(0, len(answer), 100):
        client.sendall(answer[start : start + 100])


def _answer(question: RasQuestion) -> str:
    deadline = time.monotonic() + 2 * LIMIT
    while (said := question.answer()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return said


def test_nccl_is_asked_by_its_protocol() -> None:
    with _serving(_as_nccl) as address:
        assert "6 ranks have launched up to operation 6649" in _answer(RasQuestion(address, limit=LIMIT))


def test_where_nobody_answers_nothing_is_said() -> None:
    with closed_port() as port:
        assert _answer(RasQuestion(RasAddress("127.0.0.1", port))) == ""


def test_another_program_is_not_taken_for_nccl() -> None:
    with _serving(lambda client: client.sendall(b"220 mail.example ESMTP\n")) as address:
        assert _answer(RasQuestion(address, limit=LIMIT)) == ""


def _silent(client: socket.socket) -> None:
    client.recv(1 << 16)
    client.recv(1)  # until the other end closes


def test_one_that_says_nothing_is_left_after_the_time_limit() -> None:
    with _serving(_silent) as address:
        begun = time.monotonic()
        assert _answer(RasQuestion(address, limit=1.0)) == ""
        assert time.monotonic() - begun < LIMIT


def test_a_question_that_nobody_wants_to_know_any_more_ends_at_once() -> None:
    arrived = threading.Event()

    def silent(client: socket.socket) -> None:
        client.recv(1 << 16)
        arrived.set()
        client.recv(1)

    with _serving(silent) as address:
        question = RasQuestion(address, limit=600.0)
        assert arrived.wait(LIMIT)
        question.close()
        assert question.answer() == ""
