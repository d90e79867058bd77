"""Every disk that a crash within a save can leave behind has the old checkpoint or the new one, whole."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.checkpoint import blocks, folders, plan
from lockstep.checkpoint.read import read
from lockstep.checkpoint.state import Moment
from tests.checkpoints import State, save, some_tensors
from tests.faults.disks import Op, Recording, Tree, crashes, lay_down

_SIZES = (2000, 3, 700)
_SEED = 20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of kilobytes are written as those of gigabytes are: in many writes, which ranks share."""
    monkeypatch.setattr(plan, "PIECE", 1024)
    monkeypatch.setattr(blocks, "BLOCK", 2048)


class Net(torch.nn.Module):
    """Parameters with the names of ``some_tensors``."""

    def __init__(self) -> None:
        super().__init__()
        for number, size in enumerate(_SIZES):
            self.add_module(f"layer{number}", torch.nn.Module())
            self.get_submodule(f"layer{number}").weight = torch.nn.Parameter(torch.zeros(size))


@dataclass(frozen=True)
class Story:
    """A save as it was recorded: checkpoints of the steps 1 and 2 are there, 3 is written, 1 is removed."""

    before: Tree
    ops: list[Op]
    #: The number of operations after which the save may say that it is done.
    done: int


def _state(step: int) -> State:
    return State(
        some_tensors(step, _SIZES), parts={"optimizer": {"moments": list(some_tensors(-step, _SIZES).values())}}
    )


def _record(root: Path, *, world_size: int, forget: str = "") -> Story:
    root.mkdir()
    for step in (1, 2):
        save(root, [_state(step)], place=Moment(step, 0, False))
    disk = Recording(root, forget=forget)
    made = save(root, [_state(3)] * world_size, place=Moment(3, 0, False), on=[disk] * world_size, keep=2, in_turn=True)
    assert made == [root / "step-00000003"] * world_size
    assert {path.name for path in root.iterdir()} == {"step-00000002", "step-00000003"}
    pruning = [number for number, op in enumerate(disk.ops) if op.kind == "rename"][1]
    assert disk.ops[pruning].name == "step-00000001"
    return Story(disk.before, disk.ops, done=pruning)


def _tensors(model: Mapping[str, Any], parts: Mapping[str, Any]) -> list[torch.Tensor]:
    return [*(model[name] for name in sorted(model)), *parts["optimizer"]["moments"]]


def _what_is_wrong(root: Path, *, done: bool) -> str | None:
    """None if a run finds on this disk what it must."""
    for folder in folders.checkpoints(root):  # the tests make warnings errors, so none may be skipped either
        step = folders.step_of(folder)
        try:
            contents = read(folder)
        except lockstep.CheckpointCorrupt as error:
            return f"an error: {error}"
        saved, expected = _tensors(contents.model, contents.parts), _tensors(_state(step).model, _state(step).parts)
        if contents.manifest.step != step or not all(map(torch.equal, saved, expected)):
            return f"a mix in {folder.name}"
    model = Net()
    try:
        source = lockstep.load_weights(root, model).source.name
    except lockstep.CheckpointError as error:
        return f"an error: {error}"
    allowed = {"step-00000003"} if done else {"step-00000002", "step-00000003"}
    if source not in allowed:
        return f"{source} is loaded, expected one of {sorted(allowed)}"
    return None


def _distinct(story: Story, *, samples: int) -> Iterator[tuple[int, Tree]]:
    """Each disk once, with what the save had said then: the latest moment at which it is possible counts."""
    seen: dict[str, tuple[int, Tree]] = {}
    for count, disk in crashes(story.before, story.ops, samples=samples, seed=_SEED):
        listing = sorted(disk.listing().items(), key=lambda item: item[0])
        seen[hashlib.blake2b(repr(listing).encode()).hexdigest()] = (count, disk)
    yield from seen.values()


def _replay(story: Story, tmp_path: Path, *, samples: int, limit: int | None = None) -> tuple[Counter[str], list[str]]:
    """How many disks had which newest checkpoint, and what was wrong on others."""
    found: Counter[str] = Counter()
    wrong = []
    disks = list(_distinct(story, samples=samples))
    for count, disk in disks if limit is None else disks[:: max(1, len(disks) // limit)]:
        root = tmp_path / "disk"
        root.mkdir()
        lay_down(disk, root)
        problem = _what_is_wrong(root, done=count >= story.done)
        if problem is not None:
            wrong.append(f"after {count} of {len(story.ops)} operations: {problem}")
        else:
            found[folders.checkpoints(root)[0].name] += 1
        shutil.rmtree(root)
    return found, wrong


def test_some_crashes_leave_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    found, wrong = _replay(_record(tmp_path / "run", world_size=2), tmp_path, samples=4, limit=60)
    assert not wrong, wrong[:3]
    assert set(found) == {"step-00000002", "step-00000003"}


@pytest.mark.campaign
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_crash_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, world_size: int) -> None:
    story = _record(tmp_path / "run", world_size=world_size)
    found, wrong = _replay(story, tmp_path, samples=70)
    print(f"\nworld size {world_size}, {len(story.ops)} operations: {found.total()} distinct disks, {dict(found)}")
    assert not wrong, wrong[:3]
    assert found.total() >= 700, "distinct disks"


@pytest.mark.parametrize(
    "forget", ["folder", *[pytest.param(other, marks=pytest.mark.campaign) for other in ("file", "root")]]
)
def test_the_replay_notices_an_fsync_that_is_left_out(tmp_path: Path, forget: str) -> None:
    _, wrong = _replay(_record(tmp_path / "run", world_size=2, forget=forget), tmp_path, samples=4, limit=100)
    assert wrong


def test_the_next_save_clears_what_a_crash_left(tmp_path: Path) -> None:
    story = _record(tmp_path / "run", world_size=2)
    disks = list(_distinct(story, samples=1))
    for _, disk in disks[:: len(disks) // 12]:
        root = tmp_path / "disk"
        root.mkdir()
        lay_down(disk, root)
        save(root, [_state(4)] * 2, place=Moment(4, 0, False), keep=1)
        assert [path.name for path in root.iterdir()] == ["step-00000004"]
        shutil.rmtree(root)
