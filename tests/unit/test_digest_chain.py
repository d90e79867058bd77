"""After which steps digests of a replica are taken, what that costs, and which of them a record keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from lockstep import knobs
from lockstep.cli import main
from lockstep.ddp import digest_chain
from lockstep.ddp.digest import watch_optimizers
from lockstep.ddp.digest_chain import DigestChain, DigestedReplica
from lockstep.job import flight
from lockstep.job.notes import Notes
from lockstep.job.page import PAGE, Cell
from lockstep.runs import digests, history
from lockstep.runs.digests import Held, add_digests, digests_of
from lockstep.tools.again.bisect import Parting, bisect
from tests.recorded import write_record
from tests.schemas import holds


@pytest.fixture
def page() -> Iterator[flight.Flight]:
    before = flight.current
    taken = flight.use(flight.Flight(memoryview(bytearray(PAGE))))
    taken.count()
    yield taken
    flight.use(before)


def test_a_function_is_called_after_the_steps_that_it_names_and_no_step_is_miscounted(page: flight.Flight) -> None:
    page.took_step()
    called: list[int] = []

    def act(taken: int) -> int:
        called.append(taken)
        return taken + (1 if taken < 4 else 5)

    flight.at_steps(act)
    counted = []
    for _ in range(2, 16):
        page.took_step()
        counted.append(page.cells[Cell.STEPS])
    assert called == [2, 3, 4, 9, 14]
    assert counted == [*range(3, 17)]


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class _Slow(DigestedReplica):
    """Digests that take a millisecond."""

    clock: _Clock

    def digests(self) -> tuple[list[Any], list[Any]]:
        self.clock.now += 1e-3
        return [1], [2]


@pytest.fixture
def taken(page: flight.Flight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[DigestChain, _Clock, Notes]:
    del page
    monkeypatch.setenv(knobs.JOB_DIR, str(tmp_path))
    chain, clock = DigestChain(), _Clock()
    monkeypatch.setattr(digest_chain, "_chain", chain)
    monkeypatch.setattr(digest_chain, "time", clock)
    return chain, clock, Notes(tmp_path)


@pytest.mark.parametrize("step", [0.002, 0.05, 3.0])
def test_digests_take_no_more_than_their_part_of_the_time(
    taken: tuple[DigestChain, _Clock, Notes], step: float
) -> None:
    _, clock, notes = taken
    _Slow.clock = clock
    replica = _Slow([("weight", nn.Parameter(torch.ones(2)))])
    for _ in range(8192):
        clock.now += step
        flight.current.took_step()
    steps = [note["step"] for note in notes.take()]
    spent, powers = len(steps) * 1e-3, 13
    assert (spent - powers * 1e-3) / clock.now <= digest_chain.TARGET * 1.01
    assert {2**power for power in range(1, 14)} <= {*steps}, "which all runs have in common"
    gaps = [second - first for first, second in zip(steps[-20:-1], steps[-19:], strict=True)]
    assert len({*gaps}) == 1
    assert all(each % gaps[0] == 0 for each in steps[-20:]), "and so are multiples of a power of two"
    assert gaps[0] & (gaps[0] - 1) == 0
    del replica
    flight.current.took_step()
    clock.now += 10 * step
    for _ in range(gaps[0] + 1):
        flight.current.took_step()
    assert notes.take() == [], "a replica that is gone has no digests"


def test_the_step_of_a_resumed_run_counts_and_each_is_taken_once(
    taken: tuple[DigestChain, _Clock, Notes],
) -> None:
    _, clock, notes = taken
    _Slow.clock = clock
    replica = _Slow([("weight", nn.Parameter(torch.ones(2)))])
    flight.current.at_step(300)
    for step in range(301, 400):
        for _ in range(2):  # two optimizers, and the Checkpointer counts the second one's steps
            clock.now += 0.5
            flight.current.took_step()
            flight.current.at_step(step)
    steps = [note["step"] for note in notes.take()]
    assert steps == sorted({*steps})
    assert steps[0] in (301, 302)
    assert steps[-1] in range(390, 400)
    del replica


def test_digests_depend_on_bits_of_parameters_and_of_state_and_on_nothing_else(
    taken: tuple[DigestChain, _Clock, Notes],
) -> None:
    del taken

    def digests_after(*, lr: float = 0.1, nudge: float = 0.0) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        replica = DigestedReplica([*model.named_parameters()])
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        watch_optimizers()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        if nudge:
            optimizer.state[model.weight]["momentum_buffer"][0, 0] += nudge
        return replica.digests()

    base = digests_after()
    assert digests_after() == base
    assert digests_after(lr=0.2)[0] != base[0]
    assert digests_after(lr=0.2)[1] == base[1]
    assert digests_after(nudge=1.0)[0] == base[0]
    assert digests_after(nudge=1.0)[1] != base[1]


def test_a_record_keeps_the_steps_that_runs_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MOST", 20)
    starts: list[dict[str, Any]] = [{}, {}]
    for start, every in zip(starts, (1, 4), strict=True):
        for step in range(every, 400, every):
            add_digests(start, {"step": step, "parameters": f"{step:08x}", "state": ""})
    one, other = (digests_of([start]) for start in starts)
    assert len(one) <= 20
    assert {*range(32, 400, 32)} <= one.keys() & other.keys()
    assert {2**power for power in range(2, 9)} <= one.keys() & other.keys()
    assert digests_of([starts[0], {"digests": {"8": ["x", "y"]}}])[8] == Held("x", "y")


def _recorded(folder: Path, found: dict[int, tuple[str, str]], *, seed: int = 0) -> Path:
    passes = [{"step": 1, "epoch": 0, "batch": 0, "samples": 0, "steps": 40, "batches": 40}]
    loader = {
        "loader": 0,
        "order": "shuffled",
        "length": 160,
        "batch_size": 4,
        "drop_last": False,
        "seed": seed,
        **dict.fromkeys(("shares", "costs", "slices", "runs", "drawn_by")),
        "dataset": "Numbers",
        "passes": passes,
    }
    digests = {str(step): [*both] for step, both in found.items()}
    return write_record(folder, starts=[{"loaders": [loader], "digests": digests, "steps": 40, "before": None}])


def test_where_two_records_part(tmp_path: Path) -> None:
    equal = {2: ("a", "b"), 4: ("c", "d"), 8: ("e", "f")}
    one = history.read(_recorded(tmp_path / "one", equal))
    state = history.read(_recorded(tmp_path / "state", {**equal, 8: ("e", "x"), 3: ("q", "q")}))
    found = bisect(one, state)
    assert (found.kind, found.equal_at, found.differ_at, found.differing) == (
        Parting.STATE,
        4,
        8,
        ["the optimizer's state"],
    )
    assert "the samples of steps 5 to 8 were the same" in found.describe()
    data = history.read(_recorded(tmp_path / "data", {**equal, 4: ("x", "x"), 8: ("y", "y")}, seed=1))
    found = bisect(one, data)
    assert (found.kind, found.equal_at, found.other_samples, found.unknown_samples) == (Parting.DATA, 2, 3, 0)


def test_what_the_command_prints(tmp_path: Path) -> None:
    one = _recorded(tmp_path / "one", {2: ("a", "b"), 4: ("c", "d")})
    other = _recorded(tmp_path / "other", {2: ("a", "b"), 4: ("x", "d")})
    none = _recorded(tmp_path / "none", {})
    far = _recorded(tmp_path / "far", {8: ("a", "b")})

    def told(*folders: Path, code: int) -> str:
        done = CliRunner().invoke(main, ["runs", "bisect", *map(str, folders), "--json"])
        assert done.exit_code == code, done.output
        return done.stdout

    assert holds(told(one, one, code=0), "lockstep.runs.bisect/1")["code"] == "runs-equal"
    parted = holds(told(one, other, code=1), "lockstep.runs.bisect/1")
    assert (parted["code"], parted["equal_at"], parted["differ_at"]) == ("runs-part-parameters", 2, 4)
    for second, why in ((none, "none has no digests"), (far, "and of none both")):
        error = holds(told(one, second, code=2), "lockstep.error/1")
        assert error["code"] == "nothing-in-common"
        assert why in error["message"]
