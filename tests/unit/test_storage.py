"""Checkpoint folders: complete or absent, verified, and safe against what someone else put there."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.checkpoint import folders
from lockstep.checkpoint.blocks import TensorPart
from lockstep.checkpoint.disk_folder import Draft, write_blocks
from lockstep.checkpoint.encoding import digest_of
from lockstep.checkpoint.folders import MANIFEST
from lockstep.checkpoint.manifest import MODEL, FileEntry, Manifest
from lockstep.checkpoint.plan import Block
from lockstep.checkpoint.read import find_damage
from tests.checkpoints import remove_one, verify


def _manifest(files: dict[str, FileEntry], **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "step": 3, "epoch": 1, "in_epoch": False, "world_size": 2, "written": "now", "versions": {}, "files": files,
    }  # fmt: skip
    return Manifest(**{**fields, **changes})


def _entry(size: int) -> FileEntry:
    return FileEntry.of([TensorPart("", 0, size, (digest_of(bytes(size)),))])


def _commit(root: Path, step: int = 3) -> Path:
    draft = Draft(root, step)
    files = {
        MODEL: _write(draft, MODEL, b"onetwo"),
        "rng.json": _write(draft, "rng.json", b"[]"),
    }
    return draft.commit(_manifest(files, step=step))


def _write(draft: Draft, name: str, content: bytes) -> FileEntry:
    draft.create(name)
    written = write_blocks(draft.path, [Block(name, 0, memoryview(content))])
    return FileEntry.of([TensorPart("", 0, len(content), tuple(written.digests))])


def test_a_committed_folder_verifies_and_is_private(tmp_path: Path) -> None:
    folder = _commit(tmp_path)
    assert folder == tmp_path / "step-00000003"
    assert verify(folder).files[MODEL].size == 6
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_a_draft_is_no_checkpoint(tmp_path: Path) -> None:
    draft = Draft(tmp_path, 3)
    _write(draft, MODEL, b"x")
    assert folders.checkpoints(tmp_path) == []
    draft.discard()
    assert list(tmp_path.iterdir()) == []


def test_folders_are_listed_newest_first_and_never_overwritten(tmp_path: Path) -> None:
    made = [_commit(tmp_path, step) for step in (5, 100_000_000, 5, 40)]
    assert made[2].name == "step-00000005-r2"
    assert folders.checkpoints(tmp_path) == [made[1], made[3], made[2], made[0]]
    (tmp_path / "step-00000099").symlink_to(made[0])
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-00000098").touch()
    assert len(folders.checkpoints(tmp_path)) == 4


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (MODEL, "truncate", r"model\.safetensors: 5 bytes found, 6 expected; it ends within"),
        (MODEL, "flip", r"model\.safetensors: .*: its content has changed: digest \w+ found, \w+ expected"),
        (MODEL, "delete", r"model\.safetensors: No such file"),
        (MODEL, "link", r"model\.safetensors: a link, expected a plain file"),
        (MODEL, "pipe", r"model\.safetensors: not a plain file"),
        ("rng.json", "flip", r"rng\.json: .*its content has changed"),
        (MANIFEST, "truncate", r"manifest\.json: not a valid manifest"),
        (MANIFEST, "flip", r"manifest\.json: not a valid manifest"),
        (MANIFEST, "delete", r"manifest\.json: No such file"),
        (MANIFEST, "link", r"manifest\.json: a link"),
        (MANIFEST, "huge", r"manifest\.json: larger than"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, damage: str, message: str) -> None:
    file = _commit(tmp_path) / name
    content = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(content[:-1] if name != MANIFEST else content[: len(content) // 2])
    elif damage == "flip":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "huge":
        with open(file, "ab") as out:
            out.truncate(2**27)
    else:
        file.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        file.symlink_to(tmp_path / "elsewhere")
    if damage == "pipe":
        os.mkfifo(file)
    with pytest.raises(lockstep.CheckpointCorrupt, match=message):
        verify(file.parent)
    assert len(find_damage(file.parent)) == 1


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/b", ".hidden", "..", "", MANIFEST, "a\n"])
def test_a_manifest_can_only_name_files_of_its_folder(name: str) -> None:
    entry = _entry(1)
    content = _manifest({MODEL: entry, name: entry}).to_json()
    with pytest.raises(lockstep.CheckpointCorrupt, match="is not a valid name for a file of a checkpoint"):
        Manifest.from_json(content, where="x")


@pytest.mark.parametrize("changes", [{"files": {}}, {"files": {MODEL: FileEntry(-1, "0" * 32, ())}}])
def test_a_manifest_must_make_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(lockstep.CheckpointCorrupt, match="not a valid manifest"):
        Manifest.from_json(_manifest(**{"files": {}, **changes}).to_json(), where="x")


def test_a_changed_number_in_the_manifest_is_noticed(tmp_path: Path) -> None:
    file = _commit(tmp_path) / MANIFEST
    body = json.loads(file.read_text())
    assert Manifest.from_json(json.dumps(body).encode(), where="x").step == 3
    body["step"] = 4
    with pytest.raises(lockstep.CheckpointCorrupt, match="its digest is"):
        Manifest.from_json(json.dumps(body).encode(), where="x")


def test_only_leftovers_of_dead_saves_are_swept(tmp_path: Path) -> None:
    whole = _commit(tmp_path)
    living = Draft(tmp_path, 4)
    dead = tmp_path / f"step-00000002.tmp-{'a' * 16}"
    dead.mkdir()
    (dead / MODEL).touch()
    foreign = [tmp_path / "step-00000002.tmp-mine", tmp_path / "notes.tmp-0123456789abcdef", tmp_path / "data"]
    for folder in foreign:
        folder.mkdir()
    folders.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([whole, living.path, *foreign])
    living.discard()
    remove_one(whole)
    assert sorted(tmp_path.iterdir()) == sorted(foreign)


def test_a_living_draft_is_locked(tmp_path: Path) -> None:
    draft = Draft(tmp_path, 1)
    fd = os.open(draft.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
    draft.discard()


def test_a_root_that_cannot_be_written_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(OSError):
            folders.prepare_root(root)
    folders.prepare_root(tmp_path / "new" / "runs")
    assert list((tmp_path / "new" / "runs").iterdir()) == []
