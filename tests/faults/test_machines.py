"""Machines that are killed, cut off or slowed down at random moments, in networks of their own: one job goes on, and
only one. Unless a test says otherwise there are three machines of two ranks each."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lockstep._proc import children
from tests.faults import jobs
from tests.faults.machines import (
    Machines,
    client,
    deafen,
    kill_all,
    let_through,
    network,
    set_link,
    set_rate,
    silence,
    zygote,
)
from tests.launching import Running, gone_within, wait_for

pytestmark = pytest.mark.timeout(240)

_PORT = 29400
_MACHINES, _RANKS = 3, 2
#: Steps of the global batch in an epoch of 46 samples.
_BATCH, _STEPS = 8, 6
_EPOCHS = 5
#: Epochs of a training that is still under way when something has died, or has been cut off.
_LONGER = 20
#: What roundings in float64 grow to in 120 steps of AdamW, and more.
_ROUNDING = 1e-7

#: Seconds within which a machine that has gone silent is noticed, and, a little later, notices it itself.
_NOTICED = 5.0
#: Mbit/s of the links, before they are slowed down; a step of a gradient of _WIDTH then takes most of its time there.
_RATE, _WIDTH = 10.0, 512

#: Options of the script -> what each rank of a job ends with that nobody disturbs.
Undisturbed = Callable[..., list[dict[str, Any]]]


def _seeds(first: int) -> list[Any]:
    """One for every run of the tests, and twenty for the campaign."""
    return [first, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(first + 1, first + 21))]


#: Those of what only the campaign shows.
_CAMPAIGN = range(11, 31)


@pytest.fixture(scope="module")
def all_names() -> Iterator[tuple[str, ...]]:
    with network(_MACHINES + 1, f"ls{os.getpid() % 10_000}") as made:
        yield made


@pytest.fixture
def names(all_names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield all_names
    let_through(all_names)


@pytest.fixture(scope="module")
def undisturbed(all_names: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    @cache
    def run(*options: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("undisturbed")
        with Machines(folder, str(_MACHINES), endpoint=f"10.77.0.1:{_PORT}", network=all_names) as machines:
            _start(machines, _MACHINES, *options)
            done = [machine.finish() for machine in machines.running]
        assert [each.code for each in done] == [0] * _MACHINES, done
        return jobs.final(folder, _MACHINES * _RANKS)

    return run


def _start(machines: Machines, count: int, *options: str, place: int | None = None) -> None:
    """Start so many machines more."""
    for _ in range(count):
        given = ("--batch", str(_BATCH), "--epochs", str(_EPOCHS), "--keep", "1000", *options)  # the last one counts
        machines.start(*given, ranks=_RANKS, place=place, LOCKSTEP_BACKEND="hierarchical")


# What a job has done -------------------------------------------------------------------------------------------------


def _steps(folder: Path) -> int:
    """Steps that rank 0 has taken, in all its lives."""
    return sum("step" in line for line in jobs.lines(folder, 0))


def _worlds(folder: Path) -> list[int]:
    """How many ranks there were, in each life that has begun."""
    return [line["world"] for line in jobs.lines(folder, 0) if "resumed" in line]


def _counting(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Step -> what each of its ranks wrote down. What came after the checkpoint that a later life went on from is
    void."""
    everything = [line for rank in range(_MACHINES * _RANKS) for line in jobs.lines(folder, rank)]
    resumed = {line["life"]: line["resumed"] for line in everything if "resumed" in line}
    found: dict[int, list[dict[str, Any]]] = {}
    for line in everything:
        later = [step for life, step in resumed.items() if life > line["life"]]
        if "step" in line and all(line["step"] <= step for step in later):
            found.setdefault(line["step"], []).append(line)
    return found


def _one_job(folder: Path, epochs: int) -> None:
    """Each sample counts once an epoch, whatever ranks there were; nobody trained in an earlier round than others, and
    the rounds that wrote the checkpoints never go back."""
    lines = [line for step in _counting(folder).values() for line in step]
    used = [(line["epoch"], index) for line in lines for index in line["indices"]]
    assert sorted(used) == [(epoch, index) for epoch in range(epochs) for index in range(46)]
    for rank in range(_MACHINES * _RANKS):
        lives = [line["life"] for line in jobs.lines(folder, rank)]
        assert lives == sorted(lives), f"rank {rank} was there twice"
    manifests = [json.loads(path.read_text()) for path in sorted((folder / "run").glob("step-*/manifest.json"))]
    rounds = [manifest["round"] for manifest in sorted(manifests, key=lambda manifest: manifest["step"])]
    assert rounds == sorted(rounds), rounds


# Something dies ------------------------------------------------------------------------------------------------------


def _strike(tmp_path: Path, names: tuple[str, ...], undisturbed: Undisturbed, whom: str, seed: int) -> None:
    """Kill one process of a job, or all of a machine, at a random moment; a fourth machine takes the place of one that
    is lost."""
    longer = ("--epochs", str(_LONGER))
    draw, wanted = random.Random(seed), undisturbed(*longer)
    shared, slowly = tmp_path / "shared", tmp_path / "slowly"
    shared.mkdir()
    slowly.touch()
    with Machines(tmp_path, str(_MACHINES), endpoint=f"file:{shared}", network=names) as machines:
        _start(machines, _MACHINES + 1, *longer, "--slow", "0.15", "--while", str(slowly))
        _reach(tmp_path, draw, 1, 24)
        place = draw.choice([place for place, each in enumerate(machines.running) if len(_ranks(each)) == _RANKS])
        victim = machines.running[place]
        lost = whom in ("launcher", "zygote", "host")
        everyone = victim.tree()
        struck = time.monotonic()
        if whom == "host":  # nobody hears of it: no connection is closed
            set_link(names, place + 1, "down")
            kill_all(victim)
        else:
            os.kill(_victim(victim, whom, draw), signal.SIGKILL)
        if lost:
            victim.finish()
            assert gone_within(everyone, 2.0) == [], "nobody stays behind"
        wait_for(lambda: jobs.lives(tmp_path) > 1, "the next life")
        slowly.unlink()
        print(f"{whom}: {time.monotonic() - struck:.1f} s to the next life")
        done = [each.finish() for each in machines.running if not (lost and each is victim)]
        assert machines.left(lost=victim if whom == "host" else None) == []
    assert [each.code for each in done] == [0] * len(done), done
    assert jobs.final(tmp_path, _MACHINES * _RANKS) == wanted
    _one_job(tmp_path, _LONGER)
    assert not list(shared.iterdir()), "nothing is left of the rendezvous"


def _reach(folder: Path, draw: random.Random, first: int, last: int) -> None:
    """Wait for a random moment of some step."""
    step = draw.randrange(first, last)
    wait_for(lambda: _steps(folder) >= step, f"step {step}")
    time.sleep(draw.uniform(0.0, 0.1))  # the moment is what is random here


def _ranks(machine: Running) -> list[int]:
    return [pid for pid in children(zygote(machine)) if pid != client(machine)]


def _victim(machine: Running, whom: str, draw: random.Random) -> int:
    """A process of a machine that has started its ranks."""
    if whom == "launcher":
        return machine.pid
    if whom == "zygote":
        return zygote(machine)
    return client(machine) if whom == "client" else draw.choice(_ranks(machine))


@pytest.mark.parametrize("seed", _seeds(10))
def test_a_machine_is_lost_at_once(tmp_path: Path, names: tuple[str, ...], undisturbed: Undisturbed, seed: int) -> None:
    _strike(tmp_path, names, undisturbed, "host", seed)


@pytest.mark.campaign  # every run of the tests has those of tests/ranks/test_rendezvous.py
@pytest.mark.parametrize("seed", _CAMPAIGN)
@pytest.mark.parametrize("whom", ["rank", "launcher", "zygote", "client"])
def test_what_dies_at_random_moments(
    tmp_path: Path, names: tuple[str, ...], undisturbed: Undisturbed, whom: str, seed: int
) -> None:
    _strike(tmp_path, names, undisturbed, whom, seed)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", _CAMPAIGN)
@pytest.mark.parametrize("back", [False, True], ids=["for good", "comes back"])
def test_the_machine_with_the_store_is_lost(
    tmp_path: Path, names: tuple[str, ...], undisturbed: Undisturbed, back: bool, seed: int
) -> None:
    """The others wait for it: they go on when it is there again, else end with an error."""
    draw, wanted = random.Random(seed), undisturbed()
    wait = 60.0 if back else 6.0
    endpoint = f"10.77.0.1:{_PORT + seed}"
    limits = ("--join-timeout", f"{wait:g}")
    with Machines(tmp_path, str(_MACHINES), endpoint=endpoint, network=names, options=limits) as machines:
        _start(machines, _MACHINES, "--slow", "0.05")
        _reach(tmp_path, draw, 1, _EPOCHS * _STEPS - 6)
        first, *others = machines.running
        set_link(names, 1, "down")
        kill_all(first)
        first.finish()
        struck = time.monotonic()
        if back:
            if draw.random() < 0.5:  # else before they have noticed
                wait_for(lambda: not any(_ranks(each) for each in others), "the end of the others' ranks", limit=20)
            set_link(names, 1, "up")
            _start(machines, 1, "--slow", "0.05", place=0)
            others = machines.running[1:]
        done = [each.finish(limit=90) for each in others]
        passed = time.monotonic() - struck
        assert machines.left(lost=first) == []
    if back:
        assert [each.code for each in done] == [0] * _MACHINES, done
        assert jobs.final(tmp_path, _MACHINES * _RANKS) == wanted
        _one_job(tmp_path, _EPOCHS)
        return
    assert [each.code for each in done] == [1] * 2, done
    print(f"{passed:.1f} s to the end of the others")
    assert passed < _NOTICED + wait + 5, passed
    for each in done:
        assert "this machine has lost its connection to the others" in each.err, each.err
        assert f"the rendezvous at {endpoint} failed" in each.err


# The network ---------------------------------------------------------------------------------------------------------


def _cut(tmp_path: Path, names: tuple[str, ...], how: str, seed: int) -> float:
    """Take a machine off the network without a word at a random moment, and let it back when the job goes on. Returns
    the seconds from the cut to the next life."""
    draw = random.Random(seed)
    number, slowly = draw.randrange(1, _MACHINES + 1), tmp_path / "slowly"
    slowly.touch()
    endpoint = f"10.77.0.1:{_PORT + seed}"
    with Machines(tmp_path, f"1:{_MACHINES}", endpoint=endpoint, network=names) as machines:
        _start(machines, _MACHINES, "--epochs", str(_LONGER), "--slow", "0.3", "--while", str(slowly))
        wait_for(lambda: _worlds(tmp_path)[-1:] == [_MACHINES * _RANKS], "training of all")
        before, step = jobs.lives(tmp_path), _steps(tmp_path)
        _reach(tmp_path, draw, step + 1, step + 12)
        cut = time.monotonic()
        if how == "both ways":
            set_link(names, number, "down")
        else:
            (deafen if how == "to it" else silence)(names, number)
        wait_for(lambda: jobs.lives(tmp_path) > before, "the next life")
        passed = time.monotonic() - cut
        step = _steps(tmp_path)
        _reach(tmp_path, draw, step + 1, step + 6)
        assert _worlds(tmp_path)[-1] == (_RANKS if number == 1 else (_MACHINES - 1) * _RANKS)
        let_through(names)
        wait_for(lambda: _worlds(tmp_path)[-1] == _MACHINES * _RANKS, "all together again")
        slowly.unlink()
        done = [machine.finish() for machine in machines.running]
        assert machines.left() == []
    assert [each.code for each in done] == [0] * _MACHINES, done
    _one_job(tmp_path, _LONGER)
    print(f"{how}, machine {number}: {passed:.1f} s to the next life; {_worlds(tmp_path)}")
    # The job is where the store is: at the first machine.
    for place, each in enumerate(done):
        stays = place == 0 if number == 1 else place != number - 1
        said = "gave no sign of life for 4 s" if stays else "this machine has lost its connection to the others"
        assert said in each.err, (place, each.err)
    return passed


@pytest.mark.parametrize("seed", _seeds(10))
def test_a_machine_that_is_cut_off_stops_and_joins_again(tmp_path: Path, names: tuple[str, ...], seed: int) -> None:
    _cut(tmp_path, names, "both ways", seed)


@pytest.mark.campaign
@pytest.mark.timed
@pytest.mark.parametrize("how", ["both ways", "to it", "from it"])
def test_the_job_goes_on_within_seconds_of_a_cut(tmp_path: Path, names: tuple[str, ...], how: str) -> None:
    assert _cut(tmp_path, names, how, 10) < 12


@pytest.mark.campaign
@pytest.mark.parametrize("seed", _CAMPAIGN)
@pytest.mark.parametrize("how", ["to it", "from it"])
def test_a_machine_that_is_cut_off_one_way(tmp_path: Path, names: tuple[str, ...], how: str, seed: int) -> None:
    _cut(tmp_path, names, how, seed)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", _CAMPAIGN)
def test_a_wire_that_is_ten_times_slower_for_a_while(
    tmp_path: Path, names: tuple[str, ...], undisturbed: Undisturbed, seed: int
) -> None:
    """Longer than after which a machine that is silent counts as lost: nobody restarts."""
    width = ("--width", str(_WIDTH))
    draw, wanted = random.Random(seed), undisturbed(*width)
    set_rate(names, _RATE)
    with Machines(tmp_path, str(_MACHINES), endpoint=f"10.77.0.1:{_PORT + seed}", network=names) as machines:
        _start(machines, _MACHINES, *width)
        wait_for(lambda: _steps(tmp_path) >= 1, "the first step")
        fast = _pace(tmp_path, draw.randrange(3, 8))
        set_rate(names, _RATE / 10)
        began, slow = time.monotonic(), 0.0
        while time.monotonic() < began + 2 * _NOTICED:
            slow = max(slow, _pace(tmp_path, 2))
        set_rate(names, _RATE)
        done = [machine.finish(limit=90) for machine in machines.running]
        assert machines.left() == []
    print(f"{fast:.2f} s a step, and {slow:.2f} s while the wire was slow")
    assert [each.code for each in done] == [0] * _MACHINES, done
    assert slow > 3 * fast, "a step takes most of its time on the wire"
    assert jobs.lives(tmp_path) == 1, done
    assert jobs.final(tmp_path, _MACHINES * _RANKS) == wanted
    _one_job(tmp_path, _EPOCHS)


def _pace(folder: Path, count: int) -> float:
    """Wait for so many steps; seconds for each."""
    began, step = time.monotonic(), _steps(folder)
    wait_for(lambda: _steps(folder) >= step + count, f"{count} steps")
    return (time.monotonic() - began) / count


# Machines come and go ------------------------------------------------------------------------------------------------


@pytest.mark.campaign  # every run of the tests has a machine that joins, and one that dies, in test_rendezvous.py
@pytest.mark.parametrize("seed", range(10, 31))
def test_one_machine_three_two_and_three_again(tmp_path: Path, names: tuple[str, ...], seed: int) -> None:
    """In one run: the batches, the losses and the parameters are those of one process."""
    draw = random.Random(seed)
    folder, alone, slowly = tmp_path / "machines", tmp_path / "alone", tmp_path / "slowly"
    folder.mkdir()
    alone.mkdir()
    slowly.touch()
    epochs = 20
    options = ("--exact", "--batch", str(_BATCH), "--epochs", str(epochs))
    pace = ("--slow", "0.15", "--while", str(slowly))
    # So that those that come together also join together.
    together = ("--regroup-after", "4")
    endpoint = f"10.77.0.1:{_PORT + seed}"
    with Machines(folder, f"1:{_MACHINES}", endpoint=endpoint, network=names, options=together) as machines:

        def train(world: int) -> None:
            wait_for(lambda: _worlds(folder)[-1:] == [world], f"{world} ranks")
            step = _steps(folder)
            _reach(folder, draw, step + 1, step + 5)

        _start(machines, 1, *options, *pace)
        train(_RANKS)
        _start(machines, 2, *options, *pace)
        train(3 * _RANKS)
        leaves = machines.running[draw.choice([1, 2])]
        place = machines.running.index(leaves)
        leaves.process.kill()
        leaves.finish()
        train(2 * _RANKS)
        _start(machines, 1, *options, *pace, place=place)
        train(3 * _RANKS)
        slowly.unlink()
        done = [each.finish(limit=90) for each in machines.running if each is not leaves]
        assert machines.left() == []
    assert [each.code for each in done] == [0] * _MACHINES, done
    assert _worlds(folder) == [2, 6, 4, 6]
    _one_job(folder, epochs)
    assert jobs.run_job(alone, *options, ranks=1).code == 0
    one, many = _counting(alone), _counting(folder)
    assert sorted(many) == sorted(one) == list(range(1, epochs * _STEPS + 1))
    for step, (line,) in one.items():
        batch = sorted(index for each in many[step] for index in each["indices"])
        assert batch == sorted(line["indices"]), f"the global batch of step {step}"
        for each in many[step]:
            assert each["loss"] == pytest.approx(line["loss"], rel=_ROUNDING), f"the loss at step {step}"
    wanted = jobs.final(alone, 1)[0]["parameters"]
    for final in jobs.final(folder, _MACHINES * _RANKS):
        assert final["parameters"] == pytest.approx(wanted, rel=_ROUNDING, abs=_ROUNDING)
