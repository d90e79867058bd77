"""Removing old checkpoints: by the rule, and never under a reader."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import _proc
from lockstep.checkpoint import disk_folder, folders, locks
from lockstep.checkpoint.folders import MANIFEST
from lockstep.checkpoint.locks import CheckpointGone, reading, taken
from lockstep.checkpoint.retention import Pruned, Retention, entries, prune, remove, superfluous
from lockstep.checkpoint.state import Moment
from lockstep.checkpoint.storage import Storage
from tests.checkpoints import State, remove_one, save, verify


def _save(root: Path, step: int, metric: float | None = None) -> Path:
    (made,) = save(root, [State({"weight": torch.full((5,), float(step))})], place=Moment(step, 0, False, metric))
    assert isinstance(made, Path)
    return made


def _steps(root: Path) -> list[int]:
    return sorted(folders.age(folder)[0] for folder in folders.checkpoints(root))


def test_a_run_is_pruned_by_the_rule_and_the_metrics_in_its_manifests(tmp_path: Path) -> None:
    for step, metric in enumerate([0.9, 0.2, 0.5, None, 0.4, 0.8]):
        newest = _save(tmp_path, step, metric)
    prune(tmp_path, newest, Retention(last=1, every=4, best=1))
    assert _steps(tmp_path) == [0, 1, 4, 5]
    assert {path.name for path in tmp_path.iterdir()} == {f"step-0000000{step}" for step in (0, 1, 4, 5)}
    assert [entry.metric for entry in entries(tmp_path)] == [0.8, 0.4, 0.2, 0.9]


def test_a_checkpoint_without_a_manifest_counts_as_damaged(tmp_path: Path) -> None:
    folders = [_save(tmp_path, step) for step in range(4)]
    (folders[2] / MANIFEST).unlink()
    (folders[0] / MANIFEST).write_text("{}")
    assert [entry.good for entry in entries(tmp_path, good=["step-00000003"])] == [True, False, None, False]
    prune(tmp_path, folders[3], Retention(last=2))
    assert _steps(tmp_path) == [1, 2, 3], "two good ones stay, and the damaged one between them"
    prune(tmp_path, folders[3], Retention(last=1))
    assert _steps(tmp_path) == [3]


def test_one_that_is_being_read_stays_for_the_next_pruning(tmp_path: Path) -> None:
    folders = [_save(tmp_path, step) for step in range(3)]
    with reading(folders[0]), reading(folders[0]):
        done = remove(tmp_path, superfluous(entries(tmp_path, good=[folders[2].name]), Retention(last=1)))
        assert done.removed == (folders[1],)
        assert done.being_read == (folders[0],)
        verify(folders[0])
    prune(tmp_path, folders[2], Retention(last=1))
    assert _steps(tmp_path) == [2]


def test_a_reader_that_comes_too_late_is_told(tmp_path: Path) -> None:
    folder = _save(tmp_path, 1)
    with taken(folder) as free:
        assert free
        with pytest.raises(CheckpointGone, match="has just been removed; look for a newer one"), reading(folder):
            pass
        remove_one(folder)
    for late in (folder, tmp_path / "step-00000009"):
        with pytest.raises(CheckpointGone), reading(late):
            pass
    assert not folder.exists()


@pytest.mark.parametrize("moment", ["open", "lock"])
def test_a_checkpoint_removed_between_opening_and_locking_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The reader has the file, but the name is gone when it gets the lock."""
    folder = _save(tmp_path, 1)
    name = {"open": "try_flock", "lock": "_is_named"}[moment]
    before: Callable[..., bool] = getattr(locks, name)

    def remove_first(*arguments: Any) -> bool:
        monkeypatch.setattr(locks, name, before)
        remove_one(folder)
        return before(*arguments)

    monkeypatch.setattr(locks, name, remove_first)
    with pytest.raises(CheckpointGone), reading(folder):
        pass


def test_a_damaged_one_is_left_to_its_reader_to_find_out(tmp_path: Path) -> None:
    folder = _save(tmp_path, 1)
    (folder / MANIFEST).unlink()
    with reading(folder), taken(folder) as free:
        assert free, "nothing to hold, and nothing to read"
    (folder / MANIFEST).symlink_to("/dev/null")
    with reading(folder), pytest.raises(lockstep.CheckpointCorrupt, match="a link"):
        verify(folder)


class _Meanwhile(Storage):
    """The file system, on which something happens before, and right after, the first operation of a kind."""

    def __init__(
        self, operation: str, *, before: Callable[[], object] = bool, after: Callable[[], object] = bool
    ) -> None:
        whole = getattr(self, operation)

        def once(*arguments: Any) -> Any:
            delattr(self, operation)
            before()
            done = whole(*arguments)
            after()
            return done

        setattr(self, operation, once)


@pytest.mark.parametrize("operation", ["rename", "names", "remove"])
def test_a_job_saves_while_another_process_prunes(tmp_path: Path, operation: str) -> None:
    """Its save begins by removing the leftovers of dead processes, and the other process lives."""
    old, newest = (_save(tmp_path, step) for step in (1, 2))
    meanwhile = _Meanwhile(operation, after=lambda: _save(tmp_path, 3))
    done = remove(tmp_path, superfluous(entries(tmp_path, good=[newest.name]), Retention(last=1)), on=meanwhile)
    assert done == Pruned(removed=(old,))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("operation", ["open_folder", "lock", "names", "remove", "remove_folder"])
def test_a_leftover_that_another_host_removes_as_well_is_gone(tmp_path: Path, operation: str) -> None:
    """Over NFS its lock is not seen from here."""
    leftover = tmp_path / folders.draft_name("step-00000001")
    (leftover / "inner").mkdir(parents=True)
    for file in (leftover / "model", leftover / "inner" / "part"):
        file.touch()
    folders.sweep(tmp_path, on=_Meanwhile(operation, before=lambda: shutil.rmtree(leftover)))
    assert list(tmp_path.iterdir()) == []


def test_no_file_of_a_checkpoint_is_open_when_it_is_removed(tmp_path: Path) -> None:
    """Over NFS a file that its host has open stays under another name, and the folder with it."""
    old = _save(tmp_path, 1)

    def all_closed() -> None:
        assert not [
            path for path in _proc.open_files(os.getpid()) if f"{old.name}." in path and path.endswith(MANIFEST)
        ]

    on = _Meanwhile("remove", before=all_closed)
    assert disk_folder.DiskFolder(tmp_path, on).remove(old.name)
    assert not old.exists()


def test_one_that_another_process_has_removed_is_not_being_read(tmp_path: Path) -> None:
    old, newest = (_save(tmp_path, step) for step in (1, 2))
    chosen = superfluous(entries(tmp_path, good=[newest.name]), Retention(last=1))
    remove_one(old)
    assert remove(tmp_path, chosen) == Pruned()


_READER = """
import sys
from pathlib import Path
from lockstep.checkpoint.locks import reading
with reading(Path(sys.argv[1])):
    print("reading", flush=True)
    sys.stdin.read()
"""


def test_a_reader_in_another_process_is_respected_until_it_dies(tmp_path: Path) -> None:
    folders = [_save(tmp_path, step) for step in range(2)]
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, str(folders[0])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    try:
        assert reader.stdout.readline() == "reading\n"
        prune(tmp_path, folders[1], Retention(last=1))
        assert _steps(tmp_path) == [0, 1]
    finally:
        os.kill(reader.pid, signal.SIGKILL)
        reader.wait()
        reader.stdin.close()
        reader.stdout.close()
    prune(tmp_path, folders[1], Retention(last=1))
    assert _steps(tmp_path) == [1]


def test_weights_load_while_a_run_saves_and_prunes_as_fast_as_it_can(tmp_path: Path) -> None:
    stop, saved = threading.Event(), []

    def train() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            prune(tmp_path, _save(tmp_path, step), Retention(last=1))
            saved.append(step)

    _save(tmp_path, 0)
    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        seen: list[int] = []
        while len(set(seen)) < 8:
            model = nn.ParameterDict({"weight": torch.zeros(5)})
            loaded = lockstep.load_weights(tmp_path, model)
            assert folders.age(loaded.source)[0] == model["weight"][0] == model["weight"][4]
            seen.append(folders.age(loaded.source)[0])
    finally:
        stop.set()
        trainer.join()
    assert seen == sorted(seen)


def test_a_listing_that_is_out_of_date_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, hold = _save(tmp_path, 1), locks.reading

    def prune_first(folder: Path) -> Any:
        monkeypatch.setattr(disk_folder, "reading", hold)
        prune(tmp_path, _save(tmp_path, 2), Retention(last=1))
        return hold(folder)

    monkeypatch.setattr(disk_folder, "reading", prune_first)
    loaded = lockstep.load_weights(tmp_path, nn.ParameterDict({"weight": torch.zeros(5)}))
    assert not old.exists()
    assert folders.age(loaded.source)[0] == 2


def test_one_that_cannot_be_removed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = [_save(tmp_path, step) for step in range(2)]

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folders, "renamed", refuse)
    with pytest.warns(RuntimeWarning, match="could not remove the old checkpoint .*step-00000000: Permission denied"):
        prune(tmp_path, saved[1], Retention(last=1))
    assert _steps(tmp_path) == [0, 1]
