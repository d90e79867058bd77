"""Machines that are killed or cut off at random moments, in networks of their own: one job goes on, and only one."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep._proc import children
from tests.faults import jobs
from tests.faults.machines import Machines, client, network, set_link, zygote
from tests.launching import Running, gone_within, wait_for

pytestmark = pytest.mark.timeout(240)

_PORT = 29400


@pytest.fixture(scope="module")
def names() -> Iterator[tuple[str, ...]]:
    with network(3, f"ls{os.getpid() % 10_000}") as made:
        yield made


def _used_once(folder: Path, epochs: int) -> None:
    """Each sample counts once an epoch, whatever ranks there were: what came after the checkpoint that a later life
    went on from is void."""
    resumed: dict[int, int] = {}
    for rank in range(8):
        for line in jobs.lines(folder, rank):
            if "resumed" in line:
                resumed[line["life"]] = line["resumed"]
    used = []
    for rank in range(8):
        for line in jobs.lines(folder, rank):
            later = [step for life, step in resumed.items() if life > line["life"]]
            if "step" in line and all(line["step"] <= step for step in later):
                used += [(line["epoch"], index) for index in line["indices"]]
    assert sorted(used) == [(epoch, index) for epoch in range(epochs) for index in range(46)]


def _checkpoints_of_one_writer(folder: Path) -> None:
    """The rounds that wrote the checkpoints never go back."""
    manifests = [json.loads(path.read_text()) for path in sorted((folder / "run").glob("step-*/manifest.json"))]
    rounds = [manifest["round"] for manifest in sorted(manifests, key=lambda manifest: manifest["step"])]
    assert rounds == sorted(rounds), rounds


def _victim(machine: Running, whom: str) -> int:
    """A process of a machine that has started its rank."""
    if whom == "launcher":
        return machine.pid
    if whom == "zygote":
        return zygote(machine)
    return client(machine) if whom == "client" else max(children(zygote(machine)))


def _strike(tmp_path: Path, names: tuple[str, ...], calm: jobs.Calm, whom: str, seed: int) -> None:
    """Kill one process of a job of two machines at a random moment; a third one takes over where a machine is lost."""
    draw = random.Random(seed)
    number = draw.randrange(2)
    (tmp_path / "shared").mkdir()
    with Machines(tmp_path, "2", endpoint=f"file:{tmp_path / 'shared'}", network=names) as machines:
        for _ in range(3):  # one of them waits until another is gone
            machines.start("--slow", "0.05")
        moment = draw.randrange(2, 30)
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > moment, "training")
        started = [each for each in machines.running if max(children(zygote(each))) != client(each)]
        victim = started[number]
        everyone = victim.tree()
        os.kill(_victim(victim, whom), signal.SIGKILL)
        struck = time.monotonic()
        lost = whom in ("launcher", "zygote")
        if lost:
            victim.finish()
            assert gone_within(everyone, 2.0) == [], "nobody stays behind"
        wait_for(lambda: jobs.lives(tmp_path) > 1, "the next life", limit=20)
        print(f"{whom}: {time.monotonic() - struck:.1f} s to the next life")
        done = [each.finish(limit=90) for each in machines.running if not (lost and each is victim)]
    assert [each.code for each in done] == [0] * len(done), done
    assert jobs.final(tmp_path) == calm(jobs.EPOCHS)
    _used_once(tmp_path, jobs.EPOCHS)
    _checkpoints_of_one_writer(tmp_path)


def _cut(tmp_path: Path, names: tuple[str, ...], seed: int) -> tuple[float, list[str]]:
    """Take a machine off the network without a word at a random moment, and let it back when the others go on."""
    draw = random.Random(seed)
    with Machines(tmp_path, "1:2", endpoint=f"10.77.0.1:{_PORT + seed}", network=names) as machines:
        for _ in range(2):
            machines.start("--slow", "0.1", "--epochs", "4")
        moment = draw.randrange(3, 12)
        wait_for(lambda: len(jobs.lines(tmp_path, 1)) > moment, "training of both")
        set_link(names, 2, "down")
        cut = time.monotonic()
        wait_for(lambda: jobs.lives(tmp_path) == 2, "the next life", limit=20)
        passed = time.monotonic() - cut
        set_link(names, 2, "up")
        done = [machine.finish(limit=120) for machine in machines.running]
    assert [each.code for each in done] == [0, 0], done
    _used_once(tmp_path, 4)
    _checkpoints_of_one_writer(tmp_path)
    return passed, [each.err for each in done]


def test_a_machine_that_is_cut_off_stops_and_joins_again(tmp_path: Path, names: tuple[str, ...]) -> None:
    passed, said = _cut(tmp_path, names, seed=1)
    assert passed < 12, passed
    assert "gave no sign of life for 4 s" in said[0]
    assert "this machine has lost its connection to the others" in said[1]


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(10, 30))
def test_machines_that_are_cut_off_at_random_moments(tmp_path: Path, names: tuple[str, ...], seed: int) -> None:
    _cut(tmp_path, names, seed)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(30, 50))
@pytest.mark.parametrize("whom", ["rank", "launcher", "zygote", "client"])
def test_what_dies_at_random_moments(
    tmp_path: Path, names: tuple[str, ...], calm: jobs.Calm, whom: str, seed: int
) -> None:
    _strike(tmp_path, names, calm, whom, seed)
