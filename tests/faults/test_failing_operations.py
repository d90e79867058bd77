"""Any operation on the file system may fail, on any rank: the checkpoints before it are as they were."""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoint import folders
from lockstep.checkpoint.read import find_damage
from lockstep.checkpoint.state import Moment
from lockstep.checkpoint.storage import POSIX, Storage
from tests.checkpoints import State, save, some_tensors, verify
from tests.faults.disks import Failing
from tests.harness import run_ranks
from tests.launching import own_mount, python_path, run

_ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS)
_WORLD_SIZE = 2
_ROOT = Path(__file__).parents[2]


def _states(step: int) -> list[State]:
    state = State(some_tensors(step, (500, 3, 40)), parts={"optimizer": {"m": [torch.ones(500) * step]}})
    return [state] * _WORLD_SIZE


def _save(root: Path, step: int, on: list[Storage] | None = None) -> list[Path | BaseException]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an old checkpoint that could not be removed is one
        return save(root, _states(step), place=Moment(step, 0, False), on=on, keep=2, in_turn=True)


def _number_of_operations(root: Path, rank: int) -> list[str]:
    counting = Failing()
    for step in (1, 2, 3):  # the last one prunes
        counting.calls.clear()
        _save(root, step, [counting if other == rank else POSIX for other in range(_WORLD_SIZE)])
    return list(counting.calls)


def _fails_at(root: Path, rank: int, number: int, error: int, *, lasting: bool) -> str:
    """Let one operation fail; what became of the save."""
    root.mkdir()
    for step in (1, 2):
        _save(root, step)
    broken = Failing(at=number, error=error, lasting=lasting)
    made = _save(root, 3, [broken if other == rank else POSIX for other in range(_WORLD_SIZE)])
    assert broken.failed
    failed = [isinstance(outcome, lockstep.CheckpointError) for outcome in made]
    assert all(failed) or not any(failed), f"the ranks do not agree: {made}"
    steps = {folders.step_of(folder) for folder in folders.checkpoints(root)}
    if all(failed):
        assert steps in ({1, 2}, {1, 2, 3}), "a save that fails changes nothing"
        text = str(made[0])
        assert os.strerror(error) in text
        assert f"rank {rank}: " in text
    else:
        assert steps in ({2, 3}, {1, 2, 3}), "only the removal of an old one may fail"
    for folder in folders.checkpoints(root):
        assert find_damage(folder) == []
    assert _save(root, 4) == [root / "step-00000004"] * _WORLD_SIZE
    left = {path.name for path in root.iterdir()}
    assert left >= {"step-00000004"}
    assert not any(".tmp-" in name for name in left), "the next save clears what was left"
    return "an error on all ranks" if all(failed) else "saved, an old one left"


def _campaign(tmp_path: Path, cases: Callable[[int], list[tuple[int, int, bool]]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for rank in range(_WORLD_SIZE):
        first = tmp_path / f"count-{rank}"
        first.mkdir()
        calls = _number_of_operations(first, rank)
        for number, error, lasting in cases(len(calls)):
            name = f"{rank}-{number}-{error}-{lasting}"
            outcome = _fails_at(tmp_path / name, rank, number, error, lasting=lasting)
            found[outcome] = found.get(outcome, 0) + 1
    return found


def test_some_operations_fail(tmp_path: Path) -> None:
    found = _campaign(tmp_path, lambda count: [(number, _ERRORS[number % 4], False) for number in range(0, count, 8)])
    assert set(found) == {"an error on all ranks", "saved, an old one left"}


@pytest.mark.campaign
def test_every_operation_fails_in_every_way(tmp_path: Path) -> None:
    found = _campaign(
        tmp_path,
        lambda count: [(n, error, lasting) for n in range(count) for error in _ERRORS for lasting in (False, True)],
    )
    print(f"\noperations that failed: {found}")
    assert set(found) == {"an error on all ranks", "saved, an old one left"}


def _bench(folder: str) -> tuple[nn.Module, torch.optim.Optimizer, lockstep.Checkpointer]:
    torch.manual_seed(1)
    model = nn.Linear(300, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, lockstep.Checkpointer(folder, model=model, optimizer=optimizer, keep=1)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 300)).square().sum().backward()
    optimizer.step()


def _save_somehow(saved: lockstep.Checkpointer, *, background: bool) -> None:
    if background:
        saved.async_save()
        saved.wait()
    else:
        saved.save()


def _train_while_it_fails(folder: str, numbers: list[int], bad_rank: int, background: bool) -> list[str]:
    world = lockstep.init()
    model, optimizer, saved = _bench(folder)
    _step(model, optimizer)
    saved.save()
    said = []
    for count, number in enumerate(numbers):
        _step(model, optimizer)
        before = Path(saved.folder) / f"step-{saved.step - 1:08d}"  # of the save before this step
        if world.rank == bad_rank:
            saved._storage = Failing(at=number, error=_ERRORS[count % 4], lasting=True)
        with pytest.raises(lockstep.CheckpointError, match=f"rank {bad_rank}: ") as caught:
            _save_somehow(saved, background=background)
        said.append(str(caught.value))
        verify(before)  # the one before it is as it was
        saved._storage = POSIX
        _step(model, optimizer)  # training goes on
        saved.save()
    other, _, again = _bench(folder)
    again.restore(strict=True)
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    return said


@pytest.mark.parametrize(("bad_rank", "background"), [(0, False), (1, True)])
def test_training_goes_on_where_a_save_fails(tmp_path: Path, bad_rank: int, background: bool) -> None:
    # Rank 1 only writes its part: it opens the draft and a file in it, writes, syncs.
    numbers = [0, 3, 8, 12, 14] if bad_rank == 0 else [0, 1, 2, 3]
    said = run_ranks(_train_while_it_fails, 2, str(tmp_path), numbers, bad_rank, background)
    assert said[0] == said[1]
    assert {os.strerror(error) for error in _ERRORS} == {words for text in said[0] for words in _named(text)}


def _named(text: str) -> list[str]:
    return [os.strerror(error) for error in _ERRORS if os.strerror(error) in text]


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    argv = ["lockstep", "run", "-n", "2", "-m", "tests.faults.small_disk", str(disk), str(tmp_path)]
    done = run(argv, tmp_path, torch=True, before=own_mount(disk, "size=16m"), PYTHONPATH=python_path(_ROOT))
    assert done.code == 0, done
    for number in range(2):
        rank = json.loads((tmp_path / f"rank-{number}.json").read_text())
        assert len(rank["errors"]) == 2
        assert all("No space left on device; the disk is full: free space" in text for text in rank["errors"])
        names = [f"step-{step:08d}" for step in (1, 2, 2, 2, 5)]
        assert rank["there"] == [[name] for name in names], "the one before it stays until there is a new one"
        assert rank["same"]
        assert rank["step"] == 5
