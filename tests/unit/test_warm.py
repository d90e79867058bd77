"""The process that forks the programs of tests goes on, whatever becomes of those that ask it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from lockstep._proc import descendants
from lockstep.job.messages import Channel
from tests import warm
from tests.launching import LIMIT, wait_for


@pytest.mark.parametrize("asks", [False, True], ids=["before it has asked", "before it is answered"])
def test_who_is_killed_while_it_asks_for_a_program_takes_nobody_along(tmp_path: Path, asks: bool) -> None:
    server = warm.server()
    before = set(descendants(server.pid))
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(1000)")
    (tmp_path / "ends.py").write_text("print('there')")
    request = {"argv": ["sleeps.py"], "cwd": str(tmp_path), "env": dict(os.environ), "before": ""}
    connection = socket.socket(socket.AF_UNIX)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with connection:
            connection.connect(server.path)
            if asks:
                Channel(connection, []).send(warm._Asked(request), [sys.__stdin__.fileno(), 1, 2])  # type: ignore[union-attr]
    finally:
        os.kill(server.pid, signal.SIGCONT)
    with warm.Process(["ends.py"], cwd=tmp_path, env=os.environ) as process:
        assert process.communicate(LIMIT) == ("there\n", "")
    wait_for(lambda: set(descendants(server.pid)) <= before, "the end of the program that nobody knows")
