"""One job on two hosts, started from here by a real ssh: output, failures, restarts, signals and ends as for one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep._proc import descendants, read
from lockstep.job.files import EXIT_SAVED
from tests import warm
from tests.faults import jobs
from tests.launching import Running, environment, gone_within, killed_afterwards, python_path, wait_for
from tests.sshd import Sshd, sshd

pytestmark = pytest.mark.timeout(240)

#: Seconds for a job to end: each host imports torch for itself.
LIMIT = 120.0
#: Options of a training that does not end by itself.
_EPOCHS = 10_000
_LASTS = ("--slow", "0.05", "--epochs", str(_EPOCHS))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


def _start(server: Sshd, folder: Path, *words: str, hosts: str = "one,two", **env: str) -> Running:
    env = {
        "LOCKSTEP_SSH": server.client,
        "LOCKSTEP_BACKEND": "gloo",
        "PYTHONPATH": python_path(jobs.SCRIPT.parents[2]),
        **env,
    }
    command = ["lockstep", "run", "--hosts", hosts, *words]
    return Running(command, cwd=folder, env=environment(folder, torch=True, **env))


def _train(server: Sshd, folder: Path, *options: str, cold: bool = False) -> Running:
    """Start training; all that a host runs is below sshd only where it starts cold."""
    run = ["-n", "1", "--max-restarts", "2", "--log-dir", "logs"]
    return _start(server, folder, *run, str(jobs.SCRIPT), str(folder), *options, **(warm.COLD_HOSTS if cold else {}))


_SAYS = """
import os, sys
print("out", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], sys.stdin.read())
print("err", os.environ["RANK"], file=sys.stderr)
sys.exit(int(os.environ["RANK"] == os.environ.get("FAILING", "")))
"""


@pytest.fixture
def says(tmp_path: Path) -> Path:
    script = tmp_path / "says it.py"
    script.write_text(_SAYS)
    return script


def test_rank_0_has_the_terminal(server: Sshd, tmp_path: Path, says: Path) -> None:
    with _start(
        server, tmp_path, "-n", "1", str(says), "a b", "$HOME 'x'", "--", hosts="one,two:2", LOCKSTEP_PRELOAD=""
    ) as job:
        done = job.finish(LIMIT)
    assert done.code == 0, done
    assert done.out == """out 0 of 3 ['a b', "$HOME 'x'", '--'] \n"""
    lines = done.err.splitlines()
    assert lines[0].startswith("lockstep: 2 machines, 3 ranks: rank"), done.err
    assert lines[1] == "err 0"
    wrote = {line.partition(" wrote is in ")[0] for line in lines[2:]}
    assert wrote in (  # which host is which machine, the launchers agree on by themselves
        {"lockstep: on two: what ranks 1 and 2"},
        {"lockstep: on one: what rank 2", "lockstep: on two: what rank 1"},
    ), done.err


def test_all_output_of_all_hosts(server: Sshd, tmp_path: Path, says: Path) -> None:
    with _start(server, tmp_path, "-n", "2", "--all-output", str(says), LOCKSTEP_PRELOAD="") as job:
        done = job.finish(LIMIT)
    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == sorted(
        f"{f'[{rank}] ' if rank else ''}out {rank} of 4 [] " for rank in range(4)
    )
    machines, *lines = done.err.splitlines()
    assert machines.startswith("lockstep: 2 machines, 4 ranks: ranks 0 and 1 on "), done.err
    assert sorted(lines) == sorted(f"{f'[{rank}] ' if rank else ''}err {rank}" for rank in range(4))


_RAISING = """
import lockstep
world = lockstep.init()
if world.rank == 1:
    raise RuntimeError("the wrong path")
world.mean(1.0)
"""


def test_a_failure_is_told_once(server: Sshd, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_RAISING)
    with _start(server, tmp_path, "-n", "1", "--max-restarts", "1", str(script)) as job:
        done = job.finish(LIMIT)
    assert done.code == 1, done
    assert done.err.count("rank 1 of 2 failed: exit code 1") == 1, done.err
    assert done.err.count("lockstep: on machine 1 (") == 1
    assert done.err.count("RuntimeError: the wrong path") == 1
    assert done.err.count("not restarted: it failed before its first step") == 1


def test_a_rank_dies_and_all_restart_with_the_same_bits(server: Sshd, tmp_path: Path, calm: jobs.Calm) -> None:
    plan = [{"life": 0, "rank": 1, "point": "optimizer", "taken": 4, "signal": int(signal.SIGKILL)}]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with _train(server, tmp_path, "--plan", str(tmp_path / "plan.json")) as job:
        done = job.finish(LIMIT)
    assert done.code == 0, done
    assert jobs.final(tmp_path) == calm(jobs.EPOCHS)
    jobs.check_audit(tmp_path)
    assert jobs.lives(tmp_path) == 2
    assert done.err.count("rank 1 of 2 failed: killed by signal 9 (SIGKILL)") == 1, done.err
    assert done.err.count("restart 1 of 2: all ranks start again") == 1


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.campaign), signal.SIGTERM])
def test_a_signal_stops_all_hosts(server: Sshd, tmp_path: Path, signum: signal.Signals) -> None:
    with _train(server, tmp_path, *_LASTS, cold=True) as job:
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 3, "training", limit=LIMIT)
        there = descendants(server.pid)
        assert len(there) >= 8, "a guard, a launcher, a zygote and a rank on each host"
        os.kill(job.pid, signum)
        done = job.finish(LIMIT)
    assert done.code == EXIT_SAVED, done
    assert done.err.count(f"stopped by {signum.name}; saved at step") == 1, done.err
    assert done.err.count("the ranks finish a step, save and leave") == 1, done.err
    assert gone_within(there, 10) == []


def test_nothing_is_left_when_the_command_is_killed(server: Sshd, tmp_path: Path) -> None:
    with _train(server, tmp_path, *_LASTS, cold=True) as job:
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 3, "training", limit=LIMIT)
        there = descendants(server.pid)
        job.process.kill()
        with killed_afterwards(there):
            assert gone_within(there, 30) == []
    assert jobs.lines(tmp_path, 0)[-1]["step"] < 12 * _EPOCHS, "it was stopped"
    assert any((tmp_path / "run").glob("step-*")), "and has saved"


def test_the_end_of_a_hosts_connection_ends_the_job(server: Sshd, tmp_path: Path) -> None:
    """The ranks save, since those of the other host are there."""
    with _train(server, tmp_path, *_LASTS, cold=True) as job:
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 3, "training", limit=LIMIT)
        there = descendants(server.pid)
        clients = [pid for pid in descendants(job.pid) if read(pid, "cmdline").startswith("ssh")]
        assert len(clients) == 2
        os.kill(clients[0], signal.SIGKILL)
        done = job.finish(LIMIT)
    assert done.code == EXIT_SAVED, done
    assert "lockstep: lost the connection to one: " in done.err
    assert gone_within(there, 10) == []


def test_a_host_that_can_not_be_reached_is_named(server: Sshd, tmp_path: Path, says: Path) -> None:
    before = set(descendants(server.pid))
    with _start(server, tmp_path, str(says), hosts="one,nobody") as job:
        done = job.finish(LIMIT)
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("lockstep run: nobody can't be reached: ssh: connect to host 127.0.0.1 port "), done.err
    assert done.err.rstrip().endswith("Connection refused")
    assert gone_within(list(set(descendants(server.pid)) - before), 10) == []


def test_a_program_that_is_not_there(server: Sshd, tmp_path: Path) -> None:
    with _start(server, tmp_path, "-n", "1", "nothing.py") as job:
        done = job.finish(LIMIT)
    assert done.code == 2, done
    assert done.err == f"lockstep: script not found: nothing.py (looked in {tmp_path})\n"
