"""Runs whose checkpoints are in an S3 store: saved by all ranks, resumed to the bit, and nothing lost by failures."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import knobs
from tests.harness import run_ranks
from tests.launching import run
from tests.stores import S3, Served, s3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[S3]:
    """A server for one test."""
    with s3(tmp_path) as running:
        yield running


@pytest.fixture
def store(server: Served) -> Iterator[Served]:
    """The server, which answers as it should when the test begins."""
    server.answer("")
    yield server
    server.answer("")


def _on_ranks(store: Served, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function on ranks that find their way to the store."""
    return run_ranks(_with_environment, ranks, store.environment, function, args)


def _with_environment(environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update(environment)
    return function(*args)


def _parts(width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    model = lockstep.replicate(nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.arange(160.0).reshape(40, 4)
    loader = lockstep.shard(DataLoader(TensorDataset(rows.sin(), rows.sum(1, keepdim=True).cos()), 8, shuffle=True))
    return model, optimizer, loader


def _train(folder: str, until: int, background: bool = False) -> tuple[int, list[float], list[str]]:
    """Train to the step ``until``, and save at every second one; the last step, the parameters, what was saved."""
    lockstep.init()
    model, optimizer, loader = _parts()
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader, keep=2)
    names = []
    with contextlib.suppress(StopIteration):
        for _ in saved.epochs(100):
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                if saved.step % 2 == 0 and background:
                    saved.async_save()
                elif saved.step % 2 == 0:
                    names.append(str(saved.save()))
                if saved.step >= until:
                    saved.wait()
                    raise StopIteration
    values = [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
    return saved.step, values, names


@pytest.mark.parametrize(("ranks", "background"), [(1, True), (2, False), (3, True)])
def test_a_run_resumes_from_a_store_with_the_same_bits(store: Served, ranks: int, *, background: bool) -> None:
    address = f"{store.address}-{ranks}-{background}"
    first = _on_ranks(store, ranks, _train, address, 8, background)
    assert not background or not first[0][2]
    resumed = _on_ranks(store, ranks, _train, address, 16, background)
    straight = _on_ranks(store, ranks, _train, f"{address}-straight", 16)
    assert [step for step, _, _ in resumed] == [16] * ranks
    assert resumed[0][1] == straight[0][1], "bit for bit"
    kept = {key.split("/")[1] for key in store.objects() if key.startswith(f"run-{ranks}-{background}/step-")}
    assert kept == {"step-00000014", "step-00000016"}
    assert straight[0][2][-1] == f"{address}-straight/step-00000016"


def _looks(address: str, folder: str) -> list[tuple[str, int, str]]:
    """What the commands say of a run in a store. In a process of its own: a store's threads stay."""
    from lockstep.cli import main

    commands = [
        f"checkpoint ls {address}", f"checkpoint verify {address}", f"checkpoint show {address} --step 4",
        f"checkpoint export {address} {folder}/model.safetensors", f"checkpoint prune {address} --last 1",
        f"checkpoint ls {address} --json", f"checkpoint ls {address}-nothing",
    ]  # fmt: skip
    done = [CliRunner().invoke(main, command.split()) for command in commands]
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    source = str(lockstep.load_weights(address, model).source)
    fresh = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    lockstep.load_weights(f"{folder}/model.safetensors", fresh)
    same = all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True))
    return [(source, int(same), ""), *((each.stdout, each.exit_code, each.stderr) for each in done)]


def test_commands_look_at_a_store_as_at_a_disk(store: Served, tmp_path: Path) -> None:
    address = f"{store.address}-looked-at"
    _on_ranks(store, 2, _train, address, 4)
    ((source, same, _), ls, verify, show, export, prune, as_json, nothing), *_ = _on_ranks(
        store, 1, _looks, address, str(tmp_path)
    )
    assert (source, same) == (f"{address}/step-00000004", 1)
    assert [each[1] for each in (ls, verify, show, export, prune, as_json)] == [0] * 6, (
        ls,
        verify,
        show,
        export,
        prune,
    )
    assert "step-00000004" in ls[0]
    assert "belongs to" not in ls[0], "it was released"
    assert verify[0].splitlines() == ["step-00000004: complete", "step-00000002: complete"]
    assert f"{address}/step-00000004" in show[0]
    assert "tensors of step-00000004" in export[0]
    assert "removed step-00000002" in prune[0]
    assert f'"folder": "{address}"' in as_json[0]
    assert nothing[1] == 2
    assert "no such folder" in nothing[2]


def _two_at_once(address: str) -> str:
    lockstep.init()
    model, optimizer, loader = _parts()
    with pytest.raises(lockstep.CheckpointError) as caught:
        lockstep.Checkpointer(address, model=model, optimizer=optimizer, loader=loader)
    return str(caught.value)


def _hold(address: str, other: str) -> list[str]:
    """Hold a run, and let another process ask for it."""
    lockstep.init()
    model, optimizer, loader = _parts()
    saved = lockstep.Checkpointer(address, model=model, optimizer=optimizer, loader=loader)
    deadline = time.monotonic() + 120
    Path(other, "held").touch()
    while not Path(other, "asked").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return [str(saved.save())]


def test_a_run_in_a_store_has_one_owner(store: Served, tmp_path: Path) -> None:
    address = f"{store.address}-owned"
    held: list[list[str]] = []
    owner = threading.Thread(target=lambda: held.extend(_on_ranks(store, 1, _hold, address, str(tmp_path))))
    owner.start()
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "held").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        refused = _on_ranks(store, 2, _two_at_once, address)
    finally:
        (tmp_path / "asked").touch()
        owner.join()
    assert f"{address} belongs to another job, process " in refused[0]
    assert refused[1].endswith(refused[0].split("rank 0: ")[-1]), "the same on every rank"
    assert held == [[f"{address}/step-00000000"]]


def _race(scheme: str) -> list[bool]:
    """Each rank creates the same objects at the same moments."""
    from lockstep.checkpoint.object_store import ObjectStore

    world = lockstep.init()
    store, made = ObjectStore.opened(scheme), []
    for number in range(20):
        world.barrier()
        made.append(store.create(f"bucket/race/{number}", f"rank {world.rank}".encode()))
    return made


def test_of_ranks_that_create_one_object_one_does(store: Served) -> None:
    by_rank = _on_ranks(store, 3, _race, store.scheme)
    assert [sum(made) for made in zip(*by_rank, strict=True)] == [1] * 20


def _own_memory() -> str:
    lockstep.init()
    model, optimizer, loader = _parts()
    with pytest.raises(lockstep.CheckpointError) as caught:
        lockstep.Checkpointer("memory://run", model=model, optimizer=optimizer, loader=loader)
    return str(caught.value)


def test_ranks_that_see_different_stores_are_told() -> None:
    said = run_ranks(_own_memory, 2)
    assert all("this rank does not see what rank 0 has just written there" in each for each in said)
    assert len(set(said)) == 1


def _log_beside(address: str, path: str) -> str:
    lockstep.init()
    model, optimizer, loader = _parts()
    saved = lockstep.Checkpointer(address, model=model, optimizer=optimizer, loader=loader)
    with pytest.raises(ValueError, match=r"a log is a file of this machine: give lockstep\.Log a path") as caught:
        lockstep.Log(saved)
    with lockstep.Log(path, every=1) as log:
        log(loss=1.0)
        saved.save()
    return str(caught.value)


def test_a_log_stays_on_this_machine(tmp_path: Path) -> None:
    said = run_ranks(_log_beside, 1, "memory://bucket/logged", str(tmp_path))
    assert "memory://bucket/logged" in said[0]
    assert (tmp_path / "metrics.jsonl").exists()


# A store that fails.


def _save_while(address: str, how: str, folder: str) -> tuple[str, str, list[str]]:
    """Save, then save again while the store answers as ``how`` says; the error, and what is there."""
    from lockstep.checkpoint.read import find_damage
    from lockstep.checkpoint.run_folder import run_folder

    os.environ[knobs.TIMES] = "0.1,lease=300,outage=2,request=5"
    world = lockstep.init()
    model, optimizer, loader = _parts()
    saved = lockstep.Checkpointer(address, model=model, optimizer=optimizer, loader=loader)
    saved.save()
    saved.step += 1
    world.barrier()
    if world.is_main:
        new = Path(folder, "how.new")
        new.write_text(how)
        new.rename(Path(folder, "how"))
    world.barrier()
    error = ""
    try:
        saved.save()
    except lockstep.CheckpointError as failure:
        error = str(failure)
    world.barrier()
    if world.is_main:
        Path(folder, "how").write_text("")
    world.barrier()
    saved.step += 1
    last = saved.save()
    there = run_folder(saved.folder).checkpoints()
    damaged = [str(each) for each in there if find_damage(each)]
    return error, last.name, [*damaged, *(each.name for each in there)]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("refuse", "the store refuses it: .*Access Denied"),
        ("full", "the store did not do it, .* attempts in .*no room left"),
        ("busy", ""),
        ("slow 0.2", ""),
        ("slow 12", r"the store did not do it, .* attempts? in .*TimeoutError: no answer within 5.00 s"),
    ],
)
def test_a_store_that_refuses_is_full_or_slow_is_an_error_on_every_rank_or_none(
    store: Served, how: str, words: str
) -> None:
    address = f"{store.address}-{how.replace(' ', '-')}"
    found = _on_ranks(store, 2, _save_while, address, how, str(store.folder))
    errors = [error for error, _, _ in found]
    assert errors[0] == errors[1]
    if words:
        assert re.search(words, errors[0]), errors[0]
        assert found[0][1:] == ("step-00000002", ["step-00000002", "step-00000000"])
    else:
        assert found[0] == ("", "step-00000002", ["step-00000002", "step-00000001", "step-00000000"])


# A server that is killed.


def _save_under_fire(address: str, folder: str, rounds: int, width: int) -> list[str]:
    """Save once in each round, during which the way to the store is killed; what became of each save."""
    from lockstep.checkpoint.read import find_damage
    from lockstep.checkpoint.run_folder import run_folder

    os.environ[knobs.TIMES] = "0.1,lease=300,outage=1,request=20"
    world = lockstep.init()
    model, optimizer, loader = _parts(width)
    for inputs, targets in loader:
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = lockstep.Checkpointer(address, model=model, optimizer=optimizer, loader=loader, keep=2)
    saved.save()
    last, outcomes = saved.step, []
    for number in range(rounds):
        saved.step += 1
        _meet(world, folder, f"killing-{number}")
        try:
            saved.save()
            outcomes.append("saved")
            last = saved.step
        except lockstep.CheckpointError as error:
            outcomes.append("said" if "the store did not do it" in str(error) else str(error))
        _meet(world, folder, f"mended-{number}")
        there = run_folder(saved.folder).checkpoints()
        assert [find_damage(each) for each in there] == [[]] * len(there)
        assert f"step-{last:08d}" in [each.name for each in there], "what was saved is there"
        assert there[0].name in (f"step-{last:08d}", f"step-{saved.step:08d}")
        source = lockstep.load_weights(address, nn.Sequential(*_parts(width)[0].children())).source
        assert source == there[0]
    saved.save()
    return outcomes


def _meet(world: lockstep.World, folder: str, name: str) -> None:
    """Ask the test to do something, and wait until it is done."""
    world.barrier()
    if world.is_main:
        Path(folder, f"please-{name}").touch()
    deadline = time.monotonic() + 120
    while not Path(folder, f"done-{name}").exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)


def _answer(folder: Path, name: str, act: Callable[[], None], alive: threading.Thread) -> None:
    deadline = time.monotonic() + 120
    while not (folder / f"please-{name}").exists():
        assert alive.is_alive(), f"the ranks have ended before {name}"
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
    act()
    (folder / f"done-{name}").touch()


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.campaign)])
def test_a_server_that_is_killed_in_the_middle_of_a_save_loses_nothing(
    fresh: Served, tmp_path: Path, rounds: int
) -> None:
    made = _kill_at_each(fresh, tmp_path, rounds)
    assert made[0] == made[1], "the same on every rank"
    assert set(made[0]) == {"said"}, made[0]


def _kill_at_each(store: Served, tmp_path: Path, rounds: int) -> list[list[str]]:
    """Kill the way to the store after more and more bytes of a save; what each rank says of each."""
    width = 20_000
    made: list[list[str]] = []
    failed: list[BaseException] = []

    def run_all() -> None:
        try:
            made.extend(
                _on_ranks(store, 2, _save_under_fire, f"{store.address}-killed-{rounds}", str(tmp_path), rounds, width)
            )
        except BaseException as error:  # noqa: BLE001  (raised in the test's thread)
            failed.append(error)

    ranks = threading.Thread(target=run_all)
    ranks.start()
    whole = 3 * 4 * width * 9  # about the bytes of a save: parameters and two moments
    try:
        for number in range(rounds):
            after = (number + 1) * whole // (rounds + 1)
            _answer(tmp_path, f"killing-{number}", partial(store.kill_after, after), ranks)
            _answer(tmp_path, f"mended-{number}", store.revive, ranks)
    finally:
        ranks.join()
    if failed:
        raise failed[0]
    return made


# Jobs.

_ENDS = """
import sys
import lockstep
from torch import nn

world = lockstep.init()
saved = lockstep.Checkpointer(sys.argv[1], model=nn.Linear(3, 3))
saved.async_save()
print("trained", flush=True)
"""

_DIES = """
import os, signal, sys
import lockstep
from torch import nn

world = lockstep.init()
saved = lockstep.Checkpointer(sys.argv[1], model=nn.Linear(3, 3))
found = saved.restore()
if found is None:
    saved.save()
    if world.is_main:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()
print("resumed from", found.folder, flush=True)
"""


def test_a_process_that_ends_waits_for_its_save_to_a_store_and_lets_go(store: Served, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_ENDS)
    store.answer("slow 0.3")
    done = run(
        ["lockstep", "run", "-n", "2", "train.py", f"{store.address}-ended"], tmp_path, torch=True, **store.environment
    )
    assert done.code == 0, done
    assert "run-ended/step-00000000/manifest.json" in store.objects()
    assert '"released": true' in store.read("run-ended/owner-00000001.json")


def test_a_job_goes_on_at_once_after_its_owner_was_killed(store: Served, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_DIES)
    environment = store.environment | {knobs.TIMES: "1,lease=3000"}
    command = ["lockstep", "run", "-n", "2", "--max-restarts", "1", "train.py", f"{store.address}-died"]
    done = run(command, tmp_path, torch=True, **environment)
    assert done.code == 0, done
    assert f"resumed from {store.address}-died/step-00000000" in done.out
    assert '"released": true' in store.read("run-died/owner-00000002.json")
